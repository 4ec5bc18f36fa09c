"""`GeneratedSelf`: the protocol of the first argument of emitted functions, `self`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from autopar.sbp.axis import Axis


class GatherSelf(Protocol):
    """The `self` of the emitted `gather`."""

    @property
    def axes(self) -> Sequence[Axis | tuple[Axis, ...]]:
        """The mesh's axes, then each of `Program.joint_axes`; the conversions of the namespace take them."""
        ...

    def local(self, fqn: str) -> torch.Tensor:
        """This rank's part of a parameter or buffer."""
        ...

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        """`local` of several parameters, each of which is read by their conversion together alone."""
        ...


class GeneratedSelf(GatherSelf, Protocol):
    """The `self` of the emitted `forward`: this rank's tensors and axes."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The constants of the program, by variable."""
        ...

    @property
    def used(self) -> Mapping[str, torch.Tensor]:
        """The results of a split program's `gather` that a microbatch reads, by variable."""
        ...

    @property
    def step_seed(self) -> int:
        """The seed of random ops that draw the same numbers in all microbatches of a step."""
        ...

    def draw_seed(self) -> int:
        """The seed of all other random ops of one call, the same on every rank."""
        ...

    def local_copy(self, fqn: str) -> torch.Tensor:
        """A copy of `local` for a buffer that is written back: autograd may save it, so that it must not change."""
        ...

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Store the new content of this rank's part of a buffer."""
        ...


class Forward(Protocol):
    """The emitted `forward(self, *arguments)`."""

    def __call__(self, generated_self: GeneratedSelf, /, *arguments: Any) -> tuple[Any, ...]:
        """This rank's parts of the graph's outputs."""
        ...


# the emitted `gather(self)`: variable -> tensor
Gather = Callable[[GatherSelf], dict[str, torch.Tensor]]
