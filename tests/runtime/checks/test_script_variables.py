"""Which variables outside of a model its code reads."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from autopar.runtime.checks.module_changes import ModuleWatch
from autopar.runtime.checks.script_variables import script_variables

SCALE, FACTORS, UNREAD, DEEP = 1.0, {"a": 2.0}, 3.0, 4.0
TENSOR, ARRAY, MANY, ALL, TABLE = (torch.ones(3), numpy.ones(3), list(range(5000)), set(range(5000)), {"a": [1]})
FEW, LETTERS, RUN = [1.0] * 500, dict.fromkeys(range(5000), 1.0), SimpleNamespace(scale=1.0, step=0, log=print)
SETTINGS = ModuleType("settings")
SETTINGS.__file__ = __file__
vars(SETTINGS).update(scale=1.0, seen=0, scaled=lambda x: x)


def _deep(x: torch.Tensor) -> torch.Tensor:
    return x * DEEP


class Reading(nn.Module):
    """Reads in forward, in a comprehension, in a property and in a function that it calls."""

    @property
    def factor(self) -> float:
        return sum([FACTORS[name] for name in ("a",)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        UNREAD = x * SCALE  # a local of the same name
        return _deep(UNREAD) * self.factor


def test_names_that_are_read() -> None:
    names = {name for name, variables in script_variables(nn.Sequential(Reading())) if variables is globals()}
    assert names == {"SCALE", "FACTORS", "DEEP"}


def test_variables_of_the_function_around() -> None:
    scale, factors, unset = 1.0, {"a": 2.0}, 3.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    class Inside(nn.Module):
        def __init__(self, around: float) -> None:
            super().__init__()
            self.shift = lambda x: x + around

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shift(scaled(x) * factors["a"])

    first, second = Inside(1.0), Inside(2.0)
    names = [name for name, _ in script_variables(nn.Sequential(first, second))]
    assert sorted(set(names) - {"__class__", "scaled"}) == ["around", "factors", "scale"]
    assert names.count("around") == 2 and unset == 3.0
    watch = ModuleWatch(first)
    assert not watch.has_changed()
    scale = 2.0
    assert watch.has_changed()
    scale = 1.0
    assert not watch.has_changed()
    factors["a"] = 1.0
    assert watch.has_changed()
    factors["a"] = 2.0
    assert not watch.has_changed()


def test_a_change_is_noticed_and_so_is_a_variable_that_is_gone() -> None:
    watch, variables = ModuleWatch(Reading()), globals()
    assert not watch.has_changed()
    variables["UNREAD"] = 5.0
    assert not watch.has_changed()
    for name, new in (("SCALE", 2.0), ("DEEP", 1.0)):
        before = variables[name]
        variables[name] = new
        assert watch.has_changed()
        del variables[name]
        assert watch.has_changed()
        variables[name] = before
        assert not watch.has_changed()
    FACTORS["a"] = 1.0
    assert watch.has_changed()
    FACTORS["a"] = 2.0


class ReadingMore(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * TENSOR + ARRAY[0] + MANY[0] + len(ALL) + TABLE["a"][0] + FEW[0] + LETTERS[0]
        return SETTINGS.scaled(x) * SETTINGS.scale * RUN.scale


WRITES: dict[str, Callable[[], object]] = {
    "tensor in place": lambda: TENSOR.mul_(2),
    "item of an array": lambda: ARRAY.__setitem__(1, ARRAY[1] + 1),
    "list with thousands of items grows": lambda: MANY.append(1),
    "its first item": lambda: MANY.__setitem__(0, MANY[0] + 1),
    "set with thousands of items": lambda: ALL.add(-len(ALL)),
    "list in a dict": lambda: TABLE["a"].append(1),
    "any item of a list of hundreds": lambda: FEW.__setitem__(333, FEW[333] + 1),
    "any item of a dict of thousands": lambda: LETTERS.__setitem__(3333, LETTERS[3333] + 1),
    "variable of a module of the user's": lambda: setattr(SETTINGS, "scale", SETTINGS.scale + 1),
    "attribute of an object that has other things too": lambda: setattr(RUN, "scale", RUN.scale + 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_noticed_of_a_script(name: str) -> None:
    watch = ModuleWatch(ReadingMore())
    assert not watch.has_changed()
    WRITES[name]()
    assert watch.has_changed() and not ModuleWatch(ReadingMore()).has_changed()


def test_another_tensor_is_noticed_and_what_the_code_does_not_name_is_not() -> None:
    global TENSOR
    watch = ModuleWatch(ReadingMore())
    RUN.step, SETTINGS.seen = 1, 1
    assert not watch.has_changed()
    before, TENSOR = TENSOR, TENSOR.clone()
    assert watch.has_changed()
    TENSOR = before
    assert not watch.has_changed()
