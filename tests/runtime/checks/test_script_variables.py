"""Which variables outside of a model its code reads."""

import functools
import os
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import cos, nn

from autopar.runtime.checks.module_changes import ModuleWatch, describe, differences
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
    assert names == {"SCALE", "FACTORS", "DEEP", "_deep"}


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
    of_torch = {"torch", "torch.nn.functional", "torch.Tensor"}
    assert sorted(set(names) - {"__class__", *of_torch}) == ["around", "factors", "scale", "scaled"]
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


class Config:
    """Settings as attributes of a class, of which one is read by a method."""

    scale, table = 1.0, {"a": 1.0}

    @classmethod
    def get(cls, name: str) -> float:
        return cls.table[name]


class Slotted:
    __slots__ = ("scale",)


@dataclass(slots=True)
class Fields:
    scale: float = 1.0


class Counter:
    """An object whose bound method is read."""

    step, loaded = 0, object()  # which makes it no config

    def get(self) -> int:
        return self.step


SLOTTED, QUEUE, CONTEXT, COUNTER = Slotted(), deque([1.0]), ContextVar("context", default=1.0), Counter()
SLOTTED.scale, COUNTER.own, BOUND = 1.0, print, COUNTER.get
VALUES = {"a": 1.0}


@functools.lru_cache
def _cached() -> float:
    return VALUES["a"]


def _with_attribute(x: Any, kept: list[float] = [1.0]) -> Any:  # noqa: B006
    return x * _with_attribute.scale * kept[0]


_with_attribute.scale = 1.0


def _same(x: float) -> float:
    return x


def _named(first: float, second: float) -> list[Callable[[], float]]:
    """Two functions that read variables of the same name."""

    def of(scale: float) -> Callable[[], float]:
        def read(change: float = 0.0) -> float:
            nonlocal scale
            scale += change
            return scale

        return read

    return [of(first), of(second)]


FIRST, SECOND = _named(1.0, 2.0)


class ReadingAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fields = nn.Linear(3, 3), Fields()

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    @property
    def third(self) -> float:
        return 1 / 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.half(self.linear(x))) * Config.scale * Config.get("a") * SLOTTED.scale * QUEUE[-1] * self.third
        x = _with_attribute(x) * CONTEXT.get() * BOUND() * _cached() * float(os.environ.get("AUTOPAR_TEST", "1"))
        return _same(x).mul(self.fields.scale * FIRST()) * SECOND() + torch.sin(x) + cos(x)


def _set(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], object]:
    return lambda patch: patch.setattr(owner, name, value)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "attribute of a class": _set(Config, "scale", 2.0),
    "dict of a class that its method reads": lambda patch: patch.setitem(Config.table, "a", 2.0),
    "object with slots": _set(SLOTTED, "scale", 2.0),
    "deque": lambda _: QUEUE.append(QUEUE[-1] + 1),
    "attribute of a function": _set(_with_attribute, "scale", 2.0),
    "list that is a default": lambda _: _with_attribute.__defaults__[0].append(1.0),
    "context variable": lambda _: CONTEXT.set(CONTEXT.get() + 1),
    "object of a bound method": _set(COUNTER, "step", 3),
    "what a cached function reads": lambda patch: patch.setitem(VALUES, "a", 2.0),
    "variable of the environment": lambda patch: patch.setenv("AUTOPAR_TEST", "2"),
    "function of the script": lambda patch: patch.setitem(globals(), "_same", lambda x: 2 * x),
    "function of torch": _set(F, "gelu", F.relu),
    "builtin function of torch": _set(torch, "sin", torch.cos),
    "builtin function of torch under a name of the script": lambda patch: patch.setitem(globals(), "cos", torch.sin),
    "method of a tensor": _set(torch.Tensor, "mul", torch.Tensor.add),
    "function that a layer of torch calls": _set(F, "linear", lambda x, *_: x),
    "forward of a layer of torch": _set(nn.Linear, "forward", lambda self, x: x),
    "method of the class": _set(ReadingAll, "half", lambda self, x: x),
    "property of the class": _set(ReadingAll, "third", property(lambda self: 0.0)),
    "first of two of one name": lambda _: FIRST(1.0),
    "second of two of one name": lambda _: SECOND(1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_code_reads_is_one_of_the_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReadingAll()
    watch, before = ModuleWatch(model), describe(model)
    assert not watch.has_changed() and not differences(before, describe(model))
    CHANGES[name](monkeypatch)
    assert watch.has_changed() and differences(before, describe(model))


def test_a_field_of_an_object_with_slots_is_noticed() -> None:
    model = ReadingAll()
    watch, before = ModuleWatch(model), describe(model)
    model.fields.scale = 2.0
    assert watch.has_changed() and differences(before, describe(model))
