"""Numbers of programs as functions of a size."""

from dataclasses import dataclass

import pytest
import torch

from autopar.ir.sizes.size import NAME, Different, Size, at, fit


@dataclass(frozen=True)
class Step:
    name: str
    numbers: tuple
    flag: bool = True


def step(size: int) -> Step:
    return Step("a", (4, size, (3 * size - 2, 0.5, torch.float32)))


def test_affine_numbers() -> None:
    found = fit([5, 6, 9], [step(5), step(6), step(9)])
    assert found == step(9) and found.numbers[0] == 4 and not isinstance(found.numbers[0], Size)
    assert isinstance(found.numbers[1], Size) and found.numbers[1].text == f"({NAME})"
    assert found.numbers[2][0].text == f"(3 * {NAME} + -2)"
    for size in (1, 5, 100):
        assert at(found, size) == step(size)
        assert eval(found.numbers[2][0].text, {NAME: size}) == 3 * size - 2


@pytest.mark.parametrize("number", [lambda n: n * n, lambda n: n // 2, lambda n: float(n), lambda n: str(n)])
def test_other_differences(number) -> None:
    with pytest.raises(Different):
        fit([5, 6, 9], [Step("a", (number(size),)) for size in (5, 6, 9)])


def test_other_structures() -> None:
    with pytest.raises(Different):
        fit([5, 6, 9], [Step("a", (1,) * size) for size in (5, 6, 9)])
    with pytest.raises(Different):
        fit([5, 6, 9], [Step("a", (size > 5,)) for size in (5, 6, 9)])
