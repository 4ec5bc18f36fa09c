"""Calls with other numbers: those of one device, and no trace and plan for numbers that only scale."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from tests.runtime.sizes.test_other_sizes import Noted
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


class Model(nn.Module):
    """A model that is given numbers; `use`: what it does with them."""

    def __init__(self, use: Callable) -> None:
        super().__init__()
        self.up, self.down, self.use = nn.Linear(8, 16), nn.Linear(16, 8), use

    def forward(self, x: torch.Tensor, number: object = 1.0, other: object = 2) -> torch.Tensor:
        return self.down(self.use(self.up(x), number, other))


def made(use: Callable) -> tuple[nn.Module, nn.Module, list[str]]:
    torch.manual_seed(0)
    truth = Model(use).double()
    model = autopar.compile(copy.deepcopy(truth), device_mesh((2, 2), ("dp", "tp")), cluster="free-links")
    done: list[str] = []
    model._autopar.plan = Noted(model._autopar.plan, done)
    return truth, model, done


def check(truth: nn.Module, model: nn.Module, *numbers: object) -> None:
    """Outputs and gradients are those of one device, to the bit of their signs and infinities."""
    results = []
    for each in (truth, model):
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8).requires_grad_()
        y = each(x, *numbers)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12, equal_nan=True)


def plans_for(use: Callable, calls: list[tuple]) -> int:
    truth, model, done = made(use)
    for numbers in calls:
        check(truth, model, *numbers)
    assert len(model._autopar.loaded) <= 2 * (len(calls) + 1)
    return done.count("plan")


def scaled(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return number * torch.relu(h * number + other) / number - other


def branched(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h * number if number > 1.5 else torch.relu(h) - number


def computed(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h * math.sqrt(abs(number)) + (1 - number)


def zeroed(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h + number * 0.0


def typed(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h * number if isinstance(number, float) and number != 1.0 else h


def typed_in_secret(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    if type(number) is float and number != 1.0:
        h = h * number
    return h


def caught(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    try:
        is_large = number > 5
    except Exception:
        is_large = False
    return h * number * 2 if is_large else h * number


def as_size(h: torch.Tensor, number: float, other: int) -> torch.Tensor:
    return h.unflatten(-1, (other, -1)).flatten(-2) * number + torch.ones(other, 1, 1, dtype=h.dtype).sum(0)


def sliced(h: torch.Tensor, number: float, other: int) -> torch.Tensor:
    return torch.cat((h[:, :other] * number, h[:, other:]), dim=1)


def as_tensor(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h * torch.tensor(number, dtype=h.dtype) + torch.full((16,), other, dtype=h.dtype)


def of_constants(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h + torch.arange(16, dtype=h.dtype) * number


def raised(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return (h**2 + 1) ** number


def unused(h: torch.Tensor, number: float, other: float) -> torch.Tensor:
    return h * 2


def optional(h: torch.Tensor, number: float | None, other: bool) -> torch.Tensor:
    h = h if number is None else h * number
    return -h if other else h


FLOATS = [(2.0, 1), (0.5, 1), (3.0, 1), (-1.0, 1), (7.0, 1)]
EXTREME = [(2.0, 1), (0.5, 1), (0.0, 1), (-0.0, 1), (math.inf, 1), (-math.inf, 1), (math.nan, 1), (math.nan, 1)]


@pytest.mark.parametrize(
    ("use", "calls", "most"),
    [
        (scaled, FLOATS + [(5.0, 2), (6.0, 3), (6.0, 2.0), (5.0, 2.5)], 2),  # another type is another kind
        (scaled, EXTREME, 1),
        (branched, FLOATS, 5),
        (computed, FLOATS, 5),
        (zeroed, EXTREME, 7),
        (typed, [(1.0,), (2.0,), (3.0,)], 3),
        (typed_in_secret, [(1.0,), (2.0,), (3.0,)], 3),
        (caught, FLOATS, 5),
        (as_size, [(2.0, 2), (3.0, 2), (4.0, 2), (4.0, 4), (5.0, 4), (6.0, 4), (7.0, 2)], 2),
        (sliced, [(2.0, 2), (3.0, 4), (4.0, 4), (5.0, 4), (6.0, 2)], 2),
        (as_tensor, FLOATS, 5),
        (of_constants, FLOATS, 5),
        (raised, FLOATS, 5),
        (unused, FLOATS, 1),
        (optional, [(2.0, True), (None, True), (3.0, False), (4.0, False), (1, False), (True, False)], 6),
    ],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_numbers(ranks4: Ranks, use: Callable, calls: list[tuple], most: int) -> None:
    (plans, *others) = ranks4.run(plans_for, use, calls)
    assert plans <= most and all(other == plans for other in others)


def many_numbers() -> None:
    """Of many numbers only the programs of the last ones are kept; without gradients, and from train_step, as well."""
    truth, model, done = made(scaled)
    for step in range(80):
        check(truth, model, 1.0 + step / 7, 1)
    assert done.count("plan") == 1 and len(model._autopar.loaded) < 50 and len(model._autopar.trials) < 50
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.no_grad():
        for number in (1.0, 2.5, 3.5):
            torch.testing.assert_close(model(x, number, 1), truth(x, number, 1), rtol=1e-9, atol=1e-12)
    assert done.count("plan") == 1, done


def test_many_numbers(ranks4: Ranks) -> None:
    ranks4.run(many_numbers)


def loss_of(y: torch.Tensor, weight: float) -> torch.Tensor:
    return (y**2).mean() * weight


def weights_of_a_loss() -> None:
    """The weight of a loss is the target's place, and changes with each step."""
    torch.manual_seed(0)
    truth = Model(scaled).double()
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = autopar.compile(copy.deepcopy(truth), mesh, cluster="free-links", loss_fn=loss_of)
    done: list[str] = []
    model._autopar.plan = Noted(model._autopar.plan, done)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)
    for step in range(5):
        expected = loss_of(truth(x, 1.0 + step, 2), 0.5**step)
        torch.testing.assert_close(model.train_step(x, 1.0 + step, 2, 0.5**step), expected.detach(), rtol=1e-9, atol=0)
    assert done.count("plan") == 1, done


def test_weights_of_a_loss(ranks4: Ranks) -> None:
    ranks4.run(weights_of_a_loss)


def different_numbers() -> None:
    truth, model, _ = made(scaled)
    for number in (1.0, 2.0, 3.0):
        check(truth, model, number, 1)
    with pytest.raises(autopar.AutoparError, match="different arguments"):
        model(torch.ones(4, 8, dtype=torch.float64), 4.0 + torch.distributed.get_rank(), 1)


def test_numbers_that_differ_between_ranks(ranks4: Ranks) -> None:
    ranks4.run(different_numbers)
