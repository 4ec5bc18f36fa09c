"""The start and the end of a training step of a split program: parameters are converted once, and so are gradients."""

from typing import Protocol

import torch

from autopar.codegen.generated_self import Gather, GeneratedSelf
from autopar.codegen.program import Program

# variable of the generated functions -> result of `gather`, in autograd's graph
Results = dict[str, torch.Tensor]


class SplitSelf(GeneratedSelf, Protocol):
    """The `self` of a split program, with its `gather` and the leaves that stand for its results."""

    @property
    def program(self) -> Program:
        """The loaded program, which has a `gather`."""
        ...

    @property
    def gather(self) -> Gather | None:
        """The generated function `gather`."""
        ...

    @property
    def used(self) -> Results:
        """The leaves by variable."""
        ...


def open_step(loaded: SplitSelf) -> Results:
    """Run `gather` and set `loaded.used` to leaves that share its results' memory and accumulate gradients.

    Returns the results, for `close_step`. The leaves are plain tensors in the order of the results.
    """
    assert loaded.gather is not None, "the program is not split: it has no part that runs once a step"
    results = loaded.gather(loaded)
    loaded.used.clear()
    loaded.used.update((name, result.detach().requires_grad_(result.requires_grad)) for name, result in results.items())
    return results


def close_step(loaded: SplitSelf, results: Results) -> None:
    """Propagate the gradients of the leaves back through the conversions and add them to those of the parameters.

    The groups of `Gather.results` come one after the other, in the same order on every rank; the copies and gradients
    of a group are freed after its turn. `loaded.used` and `results` are empty afterwards.
    """
    assert loaded.program.gather is not None
    for group in loaded.program.gather.results:
        pairs = [(results.pop(one.name), loaded.used.pop(one.name)) for one in group]
        with_gradient = [(result, leaf.grad) for result, leaf in pairs if leaf.grad is not None]
        del pairs
        if with_gradient:
            differentiated, gradients = zip(*with_gradient)
            torch.autograd.backward(differentiated, gradients)
            del differentiated, gradients
        del with_gradient
