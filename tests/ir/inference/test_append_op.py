"""`autopar.append` beside `torch.cat`: the same values, and no result is changed by a later one."""

import pytest
import torch

import autopar  # noqa: F401, which defines the op
from autopar.ir.graph import resolve
from autopar.ir.inference.append_op import APPEND

append = resolve(APPEND)


def rows(seed: int, num: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, num, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [2, -2])
def test_it_gives_what_cat_gives_and_keeps_what_it_gave(dim: int) -> None:
    grown, whole, given = rows(0, 5), rows(0, 5), []
    for step in range(60):
        grown, whole = append(grown, rows(step), dim), torch.cat((whole, rows(step)), dim)
        given.append((grown, whole))
    assert all(torch.equal(found, expected) for found, expected in given)


def test_it_copies_once_in_many_calls() -> None:
    grown, places = append(rows(0, 256), rows(1), 2), set()
    for step in range(30):
        grown = append(grown, rows(step), 2)
        places.add(grown.data_ptr())
    assert len(places) == 1


def test_the_stride_of_a_dim_of_one_element_is_no_other_place() -> None:
    grown = append(torch.zeros(2, 1, 64, 4), torch.ones(2, 1, 1, 4), 2)
    alike = grown.as_strided(grown.shape, (grown.stride(0), 7, *grown.stride()[2:]))
    assert append(alike, torch.ones(2, 1, 1, 4), 2).data_ptr() == grown.data_ptr()


def test_two_branches_from_one_tensor_do_not_see_each_other() -> None:
    start = append(rows(0, 5), rows(1), 2)
    left, right = append(start, rows(2), 2), append(start, rows(3), 2)
    assert torch.equal(left, torch.cat((start, rows(2)), 2)) and torch.equal(right, torch.cat((start, rows(3)), 2))


def test_a_tensor_that_was_cropped_is_copied() -> None:
    whole = append(append(rows(0, 5), rows(1), 2), rows(2), 2)
    kept, cropped = whole.clone(), whole.narrow(2, 0, 6)
    assert torch.equal(append(cropped, rows(3), 2), torch.cat((cropped, rows(3)), 2))
    assert torch.equal(whole, kept)


def test_what_inference_mode_made_is_not_written_to_outside() -> None:
    with torch.inference_mode():
        made = append(rows(0, 5), rows(1), 2)
    assert torch.equal(append(made, rows(2), 2), torch.cat((made, rows(2)), 2))
