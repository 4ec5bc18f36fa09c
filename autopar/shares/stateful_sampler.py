"""`StatefulSampler`: the samples of each rank under any shares, so that an epoch has each sample once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from autopar.errors import AutoparError
from autopar.shares.device_shares import proportional_shares

_KEYS = frozenset(("num_samples", "seed", "shuffle", "epoch", "position"))


class StatefulSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`: for each step the indices of the
    samples of this rank, `shares[rank]` of them, the ranks' parts one after the other as `batch="local"` expects.

    The order of an epoch's samples follows from the seed and the epoch alone, and the state is a position in it, the
    same on all ranks. So it may be loaded under other shares and on another number of ranks: no sample of an epoch is
    lost or repeated. The last step of an epoch has what is left, in proportion to the shares; a rank may have none of
    it, and then gives an empty list. With `drop_last` what is left is in no step, other samples in each epoch: a model
    with batch="local" takes full steps alone. `state_dict` and `load_state_dict` are those of torchdata's Stateful
    protocol: torchdata's StatefulDataLoader keeps the state of the batches that were taken, not of those fetched ahead.
    """

    def __init__(
        self,
        num_samples: int,
        shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if type(num_samples) is not int or num_samples < 1:
            raise AutoparError(f"num_samples= expects a positive number, found {num_samples!r}")
        self.num_samples, self.shuffle, self.seed, self.rank = num_samples, shuffle, seed, rank
        self.epoch, self.drop_last = 0, drop_last
        self._position = 0  # samples of the epoch that all ranks together were given
        self._shares = _checked(shares, rank)
        self._later: dict[int, tuple[int, ...]] = {}  # position -> shares from there on

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares of the next step."""
        return self._shares

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, each in an order of its own; all ranks call it between two epochs."""
        if epoch != self.epoch:
            self.epoch, self._position = epoch, 0
            self._shares = next(reversed(self._later.values()), self._shares)
            self._later.clear()

    def set_shares(self, shares: Sequence[int], *, position: int | None = None) -> None:
        """Split the batches behind `position`, a number of samples of the epoch, in these shares; None: the next batch.

        A data loader that fetches batches ahead has ranks at different steps: they are given the same `position`, one
        that none has reached. AutoparError if this rank has. All ranks must call this alike. The batch that crosses
        `position` is the last in the shares before.
        """
        shares = _checked(shares, self.rank)
        if position is None or position == self._position:
            self._shares = shares
            return self._later.clear()
        if position < self._position:
            raise AutoparError(
                f"shares from sample {position} on, but this rank was given the batches up to sample {self._position}:"
                " choose a position that no rank's data loader has fetched yet"
            )
        self._later = {at: known for at, known in sorted((self._later | {position: shares}).items()) if at <= position}

    def __iter__(self) -> Iterator[list[int]]:
        """The batches that are left of the epoch; at its end the next epoch begins."""
        order = self._order()
        while self._position < self.num_samples:
            self._take_effect()
            if self.drop_last and sum(self._shares) > self.num_samples - self._position:
                break
            sizes = _sizes(self._shares, self.num_samples - self._position)
            start = self._position + sum(sizes[: self.rank])
            self._position += sum(sizes)
            yield order[start : start + sizes[self.rank]]
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        """Batches that are left of the epoch under the present shares."""
        num_full, left = divmod(self.num_samples - self._position, sum(self._shares))
        return num_full + (left > 0 and not self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """The state, equal on all ranks that were given as many batches."""
        return {key: getattr(self, "_position" if key == "position" else key) for key in sorted(_KEYS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind `state`, in the shares of this sampler. AutoparError for the state of other data."""
        if missing := _KEYS - set(state):
            raise AutoparError(f"the state of a StatefulSampler has {sorted(_KEYS)}, this one lacks {sorted(missing)}")
        for key in ("num_samples", "seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise AutoparError(
                    f"the state is of a sampler with {key}={state[key]!r}, this one has {getattr(self, key)!r}: samples"
                    " would be lost or repeated; make the sampler as it was"
                )
        if not 0 <= state["position"] <= self.num_samples:
            raise AutoparError(f"the state's position {state['position']} is not within {self.num_samples} samples")
        self.epoch, self._position = state["epoch"], state["position"]
        self._later.clear()

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def _take_effect(self) -> None:
        for position in [each for each in self._later if each <= self._position]:
            self._shares = self._later.pop(position)


def _sizes(shares: tuple[int, ...], left: int) -> tuple[int, ...]:
    return shares if sum(shares) <= left else proportional_shares(left, shares)


def _checked(shares: Sequence[int], rank: int) -> tuple[int, ...]:
    found = tuple(shares)
    if not found or any(type(size) is not int or size < 1 for size in found):
        raise AutoparError(
            f"shares= expects a positive number of rows for each rank, found {found}: a rank without rows is left out"
            " of the mesh instead"
        )
    if not 0 <= rank < len(found):
        raise AutoparError(f"rank= expects a number of 0 to {len(found) - 1} for {len(found)} shares, found {rank}")
    return found
