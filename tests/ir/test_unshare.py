"""A checkpoint of shared layers, loaded into a model whose layers are its own, computes the same."""

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from tests.runtime.test_sharing import Block, Called, build
from tests.zoo import HIDDEN


class Apart(nn.Module):
    """`Called` with a block for each call, under other names."""

    def __init__(self, num_uses):
        super().__init__()
        self.inside, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_uses))
        self.register_buffer("unread", torch.zeros(2), persistent=False)

    def forward(self, x):
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def untied():
    """The model of tied blocks with every parameter its own."""
    model = copy.deepcopy(build("tied").model)
    for block in model.blocks:
        block.up.weight, block.down.weight = (
            nn.Parameter(torch.randn_like(x)) for x in (block.up.weight, block.down.weight)
        )
    return model


@pytest.mark.parametrize("is_meta", [False, True])
def test_a_module_that_is_called_again(is_meta):
    case = build("called")
    model, args = Apart(4).double(), (torch.randn(3, HIDDEN).double(),)
    shared = skeleton(case.model) if is_meta else case.model
    state = autopar.unshare(case.model.state_dict(), shared, model, args)
    model.load_state_dict(state)
    assert torch.equal(model(*args), case.model(*args))
    assert len({x.data_ptr() for x in state.values()}) == len(state), (
        "each layer may go its own way, also where tensors are assigned"
    )


@pytest.mark.parametrize("keeps_all_names", [True, False])
def test_parameters_that_are_tied(keeps_all_names):
    case, model = build("tied"), untied()
    state = dict(case.model.state_dict())
    if not keeps_all_names:  # as in formats that hold a tensor once
        state = {
            name: x
            for name, x in state.items()
            if not (name.endswith(("up.weight", "down.weight")) and "blocks.2" not in name)
        }
    model.load_state_dict(autopar.unshare(state, case.model, model, case.args))
    assert torch.equal(model(*case.args), case.model(*case.args))
    assert len(set(map(id, model.parameters()))) > len(set(map(id, case.model.parameters())))


def test_models_that_differ():
    case = build("called")
    with pytest.raises(
        AutoparError, match=r"different things: .*layer_norm.* in the one that shares, .*linear.* \(out"
    ):
        autopar.unshare(case.model.state_dict(), case.model, Apart(3).double(), case.args)


def test_a_state_that_lacks_a_tensor():
    case = build("called")
    state = {name: x for name, x in case.model.state_dict().items() if name != "block.up.bias"}
    with pytest.raises(AutoparError, match=r"parameter layers\.0\.up\.bias: expected one called block\.up\.bias"):
        autopar.unshare(state, case.model, Apart(4).double(), case.args)


def test_the_other_way_is_refused():
    """One parameter in the places of several cannot hold all of them."""
    with pytest.raises(AutoparError, match="expected one parameter in all its places"):
        autopar.unshare(Apart(4).state_dict(), Apart(4), Called(4), (torch.randn(3, HIDDEN),))
