"""Seeded scopes of random ops: ranks draw the same numbers for a whole value and different ones for a split value."""

from types import TracebackType

import torch

from autopar.sbp.axis import Axis


def draw_seed() -> int:
    """The seed of a forward, drawn from the default CPU generator, which has the same state on every rank.

    torch's activation checkpointing restores that generator, so that a recomputed forward draws the same seed.
    """
    return int(torch.randint(2**62, (), device="cpu"))  # whatever torch.set_default_device says


def peek_seed() -> int:
    """The seed that `draw_seed` will draw next."""
    with torch.random.fork_rng(devices=()):
        return draw_seed()


class seeded:
    """A context for one random op, with generators seeded by (seed,
    number of the op, this rank's part) and restored.
    """

    def __init__(self, seed: int, number: int, *axes: Axis) -> None:
        self.seed = hash((seed, number, *(axis.index for axis in axes))) & (2**63 - 1)

    def __enter__(self) -> None:
        self.generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # no tensor of the op is on a GPU before
            self.generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self.states = [generator.get_state() for generator in self.generators]
        for generator in self.generators:
            generator.manual_seed(self.seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)
