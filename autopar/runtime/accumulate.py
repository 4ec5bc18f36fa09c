"""The start and the end of a training step of a split program: parameters are converted once, and so are gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from autopar.codegen.generated_self import Gather, GeneratedSelf
from autopar.codegen.program import Gathered, Program
from autopar.runtime.rank_agreement import peers_alive
from autopar.sbp.axis import Axis
from autopar.sbp.in_flight import InFlight, Receiver, arrived, is_in_turn, placeholder, wide_of

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


class _StoredPart(torch.autograd.Function):
    """A stored part of a parameter, of whose gradient sums and parts of sums may be in flight until the step ends."""

    @staticmethod
    def forward(ctx, x):
        ctx.in_flight, ctx.takes_scatters = list[InFlight](), True
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        with peers_alive():
            return arrived(ctx.in_flight, gradients[0])


@dataclass(frozen=True, eq=False)
class _Gathering:
    """The `self` of `gather`, whose stored parts wait for what is in flight to their gradients; `stored`: by FQN."""

    loaded: SplitSelf
    stored: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def axes(self) -> Sequence[Axis | tuple[Axis, ...]]:
        return self.loaded.axes

    def local(self, fqn: str) -> torch.Tensor:
        part = self.loaded.local(fqn)
        if part.requires_grad:
            part = self.stored[fqn] = _StoredPart.apply(part)
        return part

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.local(fqn).clone()


@dataclass(eq=False)
class OpenStep:
    """A step whose microbatches run: their gradients are added to those of the leaves, `loaded.used`.

    A group of `Gather.results` whose leaves have the gradients of all `num_microbatches` is reduced beside what is left
    of backward; `close` does the others, and all where `num_microbatches` is 0 or collectives are issued in turn.
    """

    loaded: SplitSelf
    results: Results
    stored: dict[str, torch.Tensor]
    num_microbatches: int
    _begun: list["_ReducedGroup"] = field(default_factory=list)
    _num_missing: dict[int, int] = field(default_factory=dict)  # group -> gradients

    def watch(self) -> None:
        """Begin each group's reduction with the last gradient of its leaves."""
        for number, group in enumerate(self._groups()):
            leaves = [leaf for one in group if (leaf := self.loaded.used[one.name]).requires_grad]
            self._num_missing[number] = self.num_microbatches * len(leaves)
            for leaf in leaves:
                leaf.register_post_accumulate_grad_hook(partial(self._count, number, group))

    def close(self) -> None:
        """Propagate the gradients of the leaves back through the conversions and add them to those of the parameters.

        The groups of `Gather.results` come one after the other, in the same order on every rank; the copies and
        gradients of a group are freed after its turn. `loaded.used` and `results` are empty afterwards.
        """
        while self._begun:
            self._begun.pop(0).end()
        for group in self._groups():
            if group[0].name in self.results:
                self._reduced(group).end()

    def _groups(self) -> tuple[tuple[Gathered, ...], ...]:
        assert self.loaded.program.gather is not None
        return self.loaded.program.gather.results

    def _count(self, number: int, group: Sequence[Gathered], _: torch.Tensor) -> None:
        self._num_missing[number] -= 1
        if not self._num_missing[number]:
            self._begun.append(self._reduced(group))

    def _reduced(self, group: Sequence[Gathered]) -> "_ReducedGroup":
        """The group, whose results and leaves are dropped, with its collectives under way."""
        pairs = [(self.results.pop(one.name), self.loaded.used.pop(one.name)) for one in group]
        ends = [(result, _given_to(result, leaf.grad)) for result, leaf in pairs if leaf.grad is not None]
        for _, leaf in pairs:
            leaf.grad = None
        del pairs
        fqns = {item.value.name: item.fqn for item, _ in self.loaded.program.inputs}
        of_group = dict.fromkeys(fqns[one.value.name] for one in group)
        stored = [self.stored[fqn] for fqn in of_group if fqn in self.stored]
        if not ends:
            return _ReducedGroup()
        results, gradients = map(list, zip(*ends))
        del ends
        return _ReducedGroup(stored, torch.autograd.grad(results, stored, gradients, allow_unused=True))


def _given_to(result: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of `result` as autograd is given it: one of a wider dtype is in flight to what made it."""
    if gradient.dtype == result.dtype:
        return gradient
    Receiver(result.grad_fn, result.output_nr).put(lambda: (gradient,), 0, gradient.dtype)
    return placeholder(gradient, gradient.shape, result.dtype)


@dataclass(frozen=True, eq=False)
class _ReducedGroup:
    """Stored parts, and their gradients or placeholders of those that are in flight, None for a part without one."""

    stored: Sequence[torch.Tensor] = ()
    gradients: Sequence[torch.Tensor | None] = ()

    def end(self) -> None:
        """Add the gradients to those of the parameters."""
        for part, gradient in zip(self.stored, self.gradients):
            if gradient is not None:
                part.backward(gradient)


def open_step(loaded: SplitSelf, num_microbatches: int = 0) -> OpenStep:
    """Run `gather` and set `loaded.used` to leaves that share its results' memory and accumulate gradients.

    The leaves are plain tensors in the order of the results.
    """
    assert loaded.gather is not None, "the program is not split: it has no part that runs once a step"
    gathering = _Gathering(loaded)
    results = loaded.gather(gathering)
    loaded.used.clear()
    loaded.used.update((name, result.detach().requires_grad_(result.requires_grad)) for name, result in results.items())
    step = OpenStep(loaded, results, gathering.stored, num_microbatches)
    for one in (one for group in step._groups() for one in group):
        if wide_of((result := results[one.name],)) is not None:  # what microbatches add is not rounded
            loaded.used[one.name].grad_dtype = one.value.sum_dtype or result.dtype
    if num_microbatches and not is_in_turn():
        step.watch()
    return step
