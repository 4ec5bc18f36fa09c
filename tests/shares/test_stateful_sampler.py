"""Each sample of an epoch once, whatever happens to shares, ranks and runs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from autopar.errors import AutoparError
from autopar.shares.stateful_sampler import StatefulSampler

SHARES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def ranks_of(num_samples: int, shares: list[int], state: dict[str, Any] | None = None) -> list[StatefulSampler]:
    samplers = [StatefulSampler(num_samples, shares, rank, seed=3) for rank in range(len(shares))]
    for sampler in samplers if state else ():
        sampler.load_state_dict(state)
    return samplers


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    SHARES,
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("split", "later", "restart")), SHARES), max_size=4),
)
def test_an_epoch_has_each_sample_once(num_samples: int, first: list[int], events: list[tuple]) -> None:
    """Across new shares at once and from a later position on, and restarts on another number of ranks."""
    samplers, seen = ranks_of(num_samples, first), list[int]()
    for num_steps, event, shares in [*events, (10**6, "end", [1])]:
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(num_steps):
            if samplers[0].epoch:
                break
            batches = [next(iterator, None) for iterator in iterators]
            assert len({sampler._position for sampler in samplers}) == 1
            seen += [index for batch in batches if batch is not None for index in batch]
        if samplers[0].epoch or event == "end":
            break
        state = samplers[-1].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
        if event == "restart":
            samplers = ranks_of(num_samples, shares, state)
        else:
            resized = (shares * 5)[: len(samplers)]
            for sampler in samplers:
                sampler.set_shares(resized, position=None if event == "split" else state["position"] + 7)
    assert sorted(seen) == list(range(num_samples))


def test_ranks_have_their_shares_and_epochs_their_orders() -> None:
    samplers = ranks_of(20, [3, 1])
    epochs = [[list(sampler) for sampler in samplers] for _ in range(2)]
    assert [len(batch) for batch in epochs[0][0]] == [3] * 5 and [len(batch) for batch in epochs[0][1]] == [1] * 5
    assert epochs[0] != epochs[1] and epochs[0] == [list(sampler) for sampler in ranks_of(20, [3, 1])]
    given_out = [index for batches in epochs[1] for batch in batches for index in batch]
    assert sorted(given_out) == list(range(20))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), SHARES, SHARES)
def test_only_full_steps_without_the_last(num_samples: int, first: list[int], then: list[int]) -> None:
    """Each rank has its share in each step, no sample is in two, and what is left is less than a step."""
    samplers = [StatefulSampler(num_samples, first, rank, drop_last=True) for rank in range(len(first))]
    iterators, seen, shares = [iter(sampler) for sampler in samplers], list[int](), first
    assert len(samplers[0]) == num_samples // sum(first)
    for number in range(num_samples + 1):
        if number == 2:
            shares = (then * 5)[: len(first)]
            for sampler in samplers:
                sampler.set_shares(shares)
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            break
        assert [len(batch or ()) for batch in batches] == shares
        seen += [index for batch in batches for index in batch or ()]
    assert batches == [None] * len(first) and all(sampler.epoch == 1 for sampler in samplers)
    assert len({*seen}) == len(seen) and num_samples - len(seen) < sum(shares)


def test_a_data_loader_fetches_its_batches() -> None:
    sampler = StatefulSampler(10, [2, 3], 1, shuffle=False)
    assert [batch.tolist() for batch in DataLoader(range(10), batch_sampler=sampler)] == [[2, 3, 4], [7, 8, 9]]


def test_shares_behind_what_was_fetched_are_refused() -> None:
    sampler = StatefulSampler(20, [2, 2], 0)
    batches = iter(sampler)
    next(batches), next(batches)
    with pytest.raises(AutoparError, match="up to sample 8"):
        sampler.set_shares([3, 1], position=4)
    sampler.set_shares([3, 1], position=12)
    assert [len(batch) for batch in batches] == [2, 3, 3]


def test_bad_shares_and_states_are_refused() -> None:
    for shares, rank, words in (([2, 0], 0, "left out of the mesh"), ([], 0, "positive"), ([2], 1, "0 to 0")):
        with pytest.raises(AutoparError, match=words):
            StatefulSampler(8, shares, rank)
    sampler = StatefulSampler(8, [2], 0)
    with pytest.raises(AutoparError, match="num_samples=9"):
        sampler.load_state_dict(StatefulSampler(9, [2], 0).state_dict())
    with pytest.raises(AutoparError, match="lacks"):
        sampler.load_state_dict({"epoch": 1})
