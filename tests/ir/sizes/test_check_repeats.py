"""A forward that goes by state of Python's that it changes itself is refused, whatever holds it; caches are none."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.sizes.check_repeats import check_repeats


class Model(nn.Module):
    count = 0

    def __init__(self, scale: Callable[["Model"], float | torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4, device="meta"), scale
        self.cycle, self.order, self.known = itertools.cycle([1.0, 2.0]), deque([1.0, 2.0, 3.0]), {}
        self.random, self.numpy = random.Random(0), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale(self)


def numbers() -> Iterator[float]:
    yield from map(float, range(100))


NUMBERS, COUNTED, LISTED = numbers(), {"calls": 0}, [1]


def rotated(model: Model) -> float:
    model.order.rotate(1)
    return model.order[0]


def counted(model: Model) -> float:
    COUNTED["calls"] += 1
    return 1 / COUNTED["calls"]


def listed(model: Model) -> torch.Tensor:
    LISTED.append(1)
    return torch.tensor([len(LISTED)] * 4)


def of_class(model: Model) -> int:
    type(model).count += 1
    return type(model).count


def other_ops(model: Model) -> torch.Tensor:
    return torch.ones(4).exp() if int(next(NUMBERS)) % 2 else torch.ones(4)


CHANGES: dict[str, Callable[[Model], float | torch.Tensor]] = {
    "iterator": lambda model: next(model.cycle),
    "generator of the script": lambda model: next(NUMBERS),
    "random generator": lambda model: model.random.random(),
    "numpy's": lambda model: float(model.numpy.uniform()),
    "deque": rotated,
    "dict of the script": counted,
    "list of the script, in a tensor": listed,
    "class": of_class,
    "other ops": other_ops,
}


@lru_cache
def cached() -> float:
    return random.Random(1).random()


def remembered(model: Model) -> float:
    return model.known.setdefault("scale", random.Random(1).random())


def of_own_class(model: Model) -> torch.Tensor:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float, words: Callable[[], str]) -> torch.Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return 2 * grad, None, None

    return Twice.apply(model.linear.weight.sum(), 2.0, lambda: "")


STAYS: dict[str, Callable[[Model], float | torch.Tensor]] = {
    "number": lambda model: 2.0,
    "cache": lambda model: cached(),
    "cache of the model": remembered,
    "order of a set": lambda model: sum(torch.ones(4) * x for x in {object(): 1, object(): 2}.values()),
    "class made in each call": of_own_class,
    "seeded anew": lambda model: random.Random(3).random(),
}


@pytest.mark.parametrize("scale", CHANGES.values(), ids=CHANGES)
def test_what_changes_from_call_to_call_is_refused(scale: Callable[[Model], float]) -> None:
    with pytest.raises(TraceError, match=r"in one call and .* in the next, though it is called alike"):
        check_repeats(Model(scale), (torch.ones(2, 4, device="meta"),), {})


@pytest.mark.parametrize("scale", STAYS.values(), ids=STAYS)
def test_what_is_the_same_in_each_call_is_not(scale: Callable[[Model], float]) -> None:
    check_repeats(Model(scale), (torch.ones(2, 4, device="meta"),), {})
