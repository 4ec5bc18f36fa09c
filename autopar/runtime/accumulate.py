"""One training step of a split program: parameters are made ready once, and once the gradients of all its microbatches
go back.
"""

from typing import Protocol

import torch

from autopar.codegen.generated_self import Gather, GeneratedSelf
from autopar.codegen.program import Program

# variable of the generated functions -> what `gather` made, in the graph of autograd
Results = dict[str, torch.Tensor]


class SplitSelf(GeneratedSelf, Protocol):
    """The `self` of a split program, with its `gather` and the leaves that are made of its results."""

    @property
    def program(self) -> Program:
        """What was loaded; it has a `gather`."""
        ...

    @property
    def gather(self) -> Gather | None:
        """The function of the same name."""
        ...

    @property
    def used(self) -> Results:
        """The leaves, by variable."""
        ...


def open_step(loaded: SplitSelf) -> Results:
    """Run `gather` and put leaves in `loaded.used`, which share its results' memory and gather gradients from call to
    call of `function`.

    The results are for `close_step`. The leaves are plain tensors in the order of the results; whoever differentiates
    with respect to named tensors finds them there.
    """
    assert loaded.gather is not None, "the program is not split: it has nothing to do once a step"
    results = loaded.gather(loaded)
    loaded.used.clear()
    loaded.used.update((name, result.detach().requires_grad_(result.requires_grad)) for name, result in results.items())
    return results


def close_step(loaded: SplitSelf, results: Results) -> None:
    """Lead the gradients of the leaves through the conversions into those of the parameters, where they are added to
    what is there.

    One group of `Gather.results` after the other, the same on every rank: each holds its copies and gradients until its
    turn is over. `loaded.used` and `results` are empty afterwards.
    """
    assert loaded.program.gather is not None
    for group in loaded.program.gather.results:
        pairs = [(results.pop(one.name), loaded.used.pop(one.name)) for one in group]
        found = [(result, leaf.grad) for result, leaf in pairs if leaf.grad is not None]
        del pairs
        if found:
            torch.autograd.backward(*zip(*found))
        del found
