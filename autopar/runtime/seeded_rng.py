"""Random numbers that do not depend on the layout's whole axes: equal where a value is whole, different where it is
split.
"""

from types import TracebackType

import torch

from autopar.sbp.convert import Axis


def draw_seed() -> int:
    """One seed per forward from the default CPU generator, which every rank has seeded alike; activation checkpointing
    restores that generator, so a recomputed forward draws the same.
    """
    return int(torch.randint(2**62, ()))


def peek_seed() -> int:
    """What `draw_seed` will give next."""
    with torch.random.fork_rng(devices=()):
        return draw_seed()


class seeded:
    """Run one random op with a generator seeded by (seed, number of the op, this rank's part), then restore the
    generators.
    """

    def __init__(self, seed: int, number: int, *axes: Axis) -> None:
        self.seed = hash((seed, number, *(axis.index for axis in axes))) & (2**63 - 1)

    def __enter__(self) -> None:
        self.generators = [torch.default_generator]
        if torch.cuda.is_available():
            self.generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self.states = [generator.get_state() for generator in self.generators]
        for generator in self.generators:
            generator.manual_seed(self.seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)
