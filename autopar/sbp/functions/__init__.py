"""How custom `torch.autograd.Function`s split, by the ops that they run."""
