"""Which variables outside of a model its code reads."""

import torch
from torch import nn

from autopar.runtime.checks.module_changes import ModuleWatch
from autopar.runtime.checks.script_variables import script_variables

SCALE, FACTORS, UNREAD, DEEP = 1.0, {"a": 2.0}, 3.0, 4.0


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
