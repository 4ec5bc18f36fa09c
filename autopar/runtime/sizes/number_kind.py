"""`NumberKind`: one program for calls that differ in numbers that only scale or shift tensors."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.ir.autocast import without_autocast
from autopar.ir.numbers.free_number import has_numbers, is_number, name_of, with_numbers
from autopar.ir.print_graph import fingerprint
from autopar.ir.sizes.same_names import named_like
from autopar.ir.trace_with_loss import traced, traced_for_numbers
from autopar.runtime.call_key import Key, grad_mode_reads, own_autograd
from autopar.runtime.load_program import Loaded, code_of, function_of
from autopar.runtime.rank_agreement import digest_of, gather
from autopar.runtime.sizes.call_kind import Examples, leaves_of
from autopar.runtime.sizes.kept_plan import Trial

MOST_RECENT = 32  # numbers for which a program is kept ready

Numbers = dict[int, float]  # position in the flat call -> value
Trace = Callable[..., Any]  # (how, *what else `how` takes) -> what `how` gives for the model


@dataclass(frozen=True)
class MadeForNumbers:
    """A program for a call, which is on trial as that is whose plan it has."""

    trial: Trial | None
    loaded: Loaded


@dataclass
class Variant:
    """A program that was traced and planned for a call with these `numbers`.

    `code`: the program that reads the `free` ones of them by name.
    """

    like: MadeForNumbers
    numbers: Numbers
    free: frozenset[int] = frozenset()
    code: CodeType | None = None

    def changed(self, numbers: Numbers) -> frozenset[int]:
        """The positions of `numbers` that are others than those of the first call; -0.0 is another one than 0.0."""
        return frozenset(p for p, number in numbers.items() if repr(number) != repr(self.numbers[p]))


@dataclass
class NumberKind:
    """The programs of calls that differ in the values of ints and floats alone.

    At the second value of a number the model is traced with one of which nothing is known. If the model decides nothing
    by it and only hands it to ops that scale or shift tensors, and that graph with the numbers of either call is what
    these are traced to, one program reads it by name. Otherwise each value has a trace and a plan of its own.

    `refused`: sets of numbers that cannot be free together.
    """

    mesh: DeviceMesh
    refused: set[frozenset[int]] = field(default_factory=set)
    variants: list[Variant] = field(default_factory=list)
    recent: list[Key] = field(default_factory=list)

    def known(
        self, key: Key, examples: Examples, trace: Trace, kept: Sequence[MutableMapping[Key, Any]]
    ) -> MadeForNumbers | None:
        """The program for the numbers of a call; None if it needs a trace of its own. All ranks call it alike.

        `kept`: what is kept by key, from which the numbers are dropped that are not among the last ones.
        """
        numbers = numbers_of(examples)
        if not numbers or not self.variants:
            return None
        variant = min(self.variants, key=lambda each: self._distance(each, numbers))
        if not self._is_free(variant, examples, trace):
            return None
        self.recent.append(key)
        for mapping in kept:
            for old in self.recent[:-MOST_RECENT]:
                mapping.pop(old, None)
        self.recent = self.recent[-MOST_RECENT:]
        assert variant.code is not None, "a variant with free numbers has code"
        function = function_of(variant.code, {name_of(position): numbers[position] for position in variant.free})
        return replace(variant.like, loaded=replace(variant.like.loaded, function=function, used={}))

    def note(self, loaded: Any, trial: Trial | None, examples: Examples) -> None:
        """Remember a program that was traced and planned; one in microbatches reads no numbers by name."""
        if isinstance(loaded, Loaded) and loaded.gather is None and (numbers := numbers_of(examples)):
            self.variants = [*self.variants, Variant(MadeForNumbers(trial, loaded), numbers)][-MOST_RECENT:]

    def _is_free(self, variant: Variant, examples: Examples, trace: Trace) -> bool:
        """Whether one program of the variant does for these numbers; what does not is noted."""
        new = variant.changed(numbers_of(examples)) - variant.free
        if not new:
            return variant.code is not None
        if self._is_refused(new):
            return False
        is_free = self._find(variant, variant.free | new, examples, trace)
        if not is_free:
            self.refused.add(new)
        return is_free

    def _is_refused(self, positions: frozenset[int]) -> bool:
        return any(known <= positions for known in self.refused)

    def _distance(self, variant: Variant, numbers: Numbers) -> tuple[bool, int]:
        new = variant.changed(numbers) - variant.free
        return self._is_refused(new), len(new)

    def _find(self, variant: Variant, free: frozenset[int], examples: Examples, trace: Trace) -> bool:
        """Make the program that reads the `free` numbers, if there is one, which all ranks find alike."""
        source = self._source(variant, free, examples, trace)
        if len(set(gather(self.mesh, digest_of(source)))) > 1 or source is None:
            return False
        variant.free, variant.code = free, code_of(source)
        variant.like = replace(variant.like, loaded=replace(variant.like.loaded, source=source))
        return True

    def _source(self, variant: Variant, free: frozenset[int], examples: Examples, trace: Trace) -> str | None:
        """The program that reads the `free` numbers by name; None if the model does more with them."""
        first, numbers = variant.like.loaded, numbers_of(examples)
        try:
            with grad_mode_reads(), own_autograd(), without_autocast(but=self.mesh.device_type):
                present, plain = trace(traced_for_numbers, free), trace(traced)
        except Exception:  # what a model does to a symbol may end in any error: its numbers are no symbols then
            return None
        known = {p: variant.numbers[p] if p in free else number for p, number in numbers.items()}
        before = with_numbers(present, known)
        if fingerprint(before) != fingerprint(first.graph) or fingerprint(present) != fingerprint(plain):
            return None
        if any(has_numbers(op) for op in present.constant_ops):  # which run once
            return None
        graphs = [named_like(each, first.graph) for each in (before, present)]
        graphs = [first.plan.training.reduced(each) for each in graphs]
        sources = {emit(lower(each, first.plan.mesh, first.plan.assignment)) for each in graphs}
        return sources.pop() if len(sources) == 1 else None


def numbers_of(examples: Examples) -> Numbers:
    """The ints and floats of a call."""
    return {position: leaf for position, leaf in enumerate(leaves_of(examples)) if is_number(leaf)}
