"""Custom `torch.autograd.Function`s as the ops that they run, and methods of tensors that a script replaced."""
