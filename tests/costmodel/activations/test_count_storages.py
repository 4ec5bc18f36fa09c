"""Storages counted as they come and go."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.costmodel.activations.count_storages import count_storages

KIB = torch.float32.itemsize * 256


def test_views_and_writes_in_place_take_nothing_and_what_is_freed_is_given_back():
    held = torch.zeros(256)
    with count_storages([held, held[:3]]) as storages:
        assert storages.num_bytes == KIB
        x = torch.ones(256)
        y = x.view(16, 16).t()[1:].add_(1.0)
        assert storages.num_bytes == 2 * KIB
        z = x + held
        assert storages.num_bytes == storages.peak_bytes == 3 * KIB
        del x
        assert storages.num_bytes == 3 * KIB  # its view is there
        del y, z
        assert storages.num_bytes == KIB and storages.restart() == 3 * KIB and storages.peak_bytes == KIB


def test_what_autograd_keeps_and_makes_is_counted_also_without_data():
    for device in ("cpu", "meta"):
        x, weight = torch.ones(256, device=device), torch.ones(256, device=device, requires_grad=True)
        with count_storages([x, weight]) as storages:
            y = (x * weight).exp()
            # the product is gone, exp keeps its result
            assert storages.num_bytes == 3 * KIB and storages.restart() == 4 * KIB
            y.backward(x)
            del y
            assert storages.num_bytes == 3 * KIB and weight.grad is not None
            weight.grad = None
            assert storages.num_bytes == 2 * KIB


def test_fakes_count_as_what_they_stand_for():
    with FakeTensorMode(), count_storages() as storages:
        x = torch.empty(256)
        assert x.device.type == "cpu" and storages.num_bytes == KIB
        del x
        assert storages.num_bytes == 0
