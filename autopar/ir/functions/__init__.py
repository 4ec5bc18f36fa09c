"""Custom `torch.autograd.Function`s as the ops that they run."""
