"""What custom `torch.autograd.Function`s do, as ops."""
