"""Parameters and buffers that share memory without being one tensor are named, others are left alone."""

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.checks.own_memory import check_own_memory


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4, 4))


def joined(model: Model) -> None:
    both = torch.zeros(8, 4)
    model.first.weight, model.last.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def interleaved(model: Model) -> None:
    both = torch.zeros(4, 8)
    model.first.weight, model.last.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


def tied(model: Model) -> None:
    model.last.weight = model.first.weight


def same(model: Model) -> None:
    model.last.weight = nn.Parameter(model.first.weight.data)


def turned(model: Model) -> None:
    model.last.weight = nn.Parameter(model.first.weight.data.t())


def row(model: Model) -> None:
    model.last.bias = nn.Parameter(model.first.weight.data[2])


def seen(model: Model) -> None:
    model.state = model.first.weight.data[1:]


def seen_state(model: Model) -> None:
    model.register_buffer("part", model.state[0])


@pytest.mark.parametrize("change", [joined, interleaved, tied, seen_state])
def test_memory_of_its_own(change) -> None:
    model = Model()
    change(model)
    check_own_memory(model, ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (same, "first.weight and last.weight are two parameters in the same memory"),
        (turned, "first.weight and last.weight are two parameters"),
        (row, "first.weight and last.bias are two parameters"),
        (seen, "first.weight and state are a parameter and a buffer"),
        (seen_state, "state and part are two buffers"),
    ],
)
def test_memory_of_two(change, words: str) -> None:
    model = Model()
    change(model)
    with pytest.raises(AutoparError, match=f"{words}.*clone"):
        check_own_memory(model, {"state"})
