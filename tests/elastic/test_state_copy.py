"""A copy of a state holds while training goes on, and its memory is used again."""

import torch

from autopar.elastic.state_copy import StateCopy


def state(value: float, size: int = 3) -> dict:
    return {
        "model": {"w": torch.full((size, 2), value)},
        "optimizer": {"state.w.step": torch.tensor(value)},
        "n": [value],
    }


def test_a_copy_holds_until_the_next_one_and_takes_its_memory() -> None:
    made, live = StateCopy(), state(1.0)
    kept = made.take(live)
    live["model"]["w"].fill_(7.0)
    live["n"][0] = 7.0
    torch.testing.assert_close(kept, state(1.0))
    place = kept["model"]["w"].data_ptr()
    again = made.take(state(2.0))
    torch.testing.assert_close(again, state(2.0))
    assert again["model"]["w"].data_ptr() == place


def test_what_has_other_shapes_or_names_is_copied_anew() -> None:
    made = StateCopy()
    made.take(state(1.0))
    torch.testing.assert_close(made.take(state(2.0, size=5)), state(2.0, size=5))
    more = state(3.0) | {"average": {"w": torch.ones(2, dtype=torch.float16, requires_grad=True)}}
    found = made.take(more)
    torch.testing.assert_close(found, more)
    assert not found["average"]["w"].requires_grad
