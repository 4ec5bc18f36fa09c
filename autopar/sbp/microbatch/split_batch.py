"""Placements of a graph's values on the time axis: the microbatches of a step as the ranks of one more mesh axis.

The op rules are those of any mesh axis, but there is no communication between microbatches: each op must take a
signature that matches the placements of its inputs. A value is a slice of the whole batch's value (S), a term of it
(P), or the same in all microbatches, in which case its gradient is a term (R; I without a gradient). One conversion
only needs no communication: from a value that is the same in all to a term of it, by division.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from autopar.errors import MicrobatchError
from autopar.ir.function_ops import is_function
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.sbp.analysis.expert_routing import INVERSE, routed_signatures
from autopar.sbp.functions.function_signatures import function_signatures
from autopar.sbp.microbatch.own_checks import own_checks
from autopar.sbp.microbatch.pair_batches import in_sections, share_of_sections
from autopar.sbp.microbatch.token_count import known_ops
from autopar.sbp.op_signatures import discovery_of, signatures_of_call
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.rules import rule_of
from autopar.sbp.rules.reduce import KEPT as REDUCTIONS
from autopar.sbp.signature import Signature

KNOWN = "known"  # of an op whose result, of the whole batch, is computed before the microbatches
KNOWN_REDUCTION = "known reduction"  # the same of a result that no parts add up to, as the largest number
KNOWN_ROWS = "known rows"  # the same of a result that a part of the batch does not give, as `x[order]`
# Roles of means: of equal parts, or of tokens counted over the whole batch; and of ops that read a part of a constant.
# Every other role needs values of other microbatches.
ALLOWED_ROLES = frozenset(("", "mean", "elements", "tokens", INVERSE, KNOWN_REDUCTION))
_MOST_RESULTS = 2  # of an op that is known, of which each may be whole or in slices
_MICROBATCH_ROLES = ALLOWED_ROLES | {KNOWN_ROWS}
BATCH_STATISTICS = "batch"
_REASONS = {
    BATCH_STATISTICS: (
        "its statistics are those of the whole batch; with a model in eval mode, or group norm in its place, they"
        " are not"
    )
}

_MOST_OTHERS = 6  # of each kind, ways to say which arguments are the batch

Domains = dict[str, frozenset[Placement]]


@dataclass(frozen=True)
class BatchSplit:
    """The signatures of ops and the placements of values on the time axis; a value without gradient has I for R.

    `granularity`: the possible numbers of microbatches are its divisors.
    """

    signatures: Mapping[str, Signature]
    placements: Mapping[str, Placement]
    granularity: int


def split_batch(graph: Graph, roles: frozenset[str] = ALLOWED_ROLES) -> BatchSplit:
    """The split of `graph` that follows from splitting the arguments as long as the first one that has a dim 0.

    MicrobatchError names the first op that needs the whole batch. `roles` that ops may have: with BATCH_STATISTICS,
    batch norm has its own, and writes buffers.
    """
    return _split_of(graph, _batches(graph)[0], roles)


def split_samples(graph: Graph) -> BatchSplit:
    """The split of `graph` in microbatches: `split_batch` with what is known before them, or, where that is refused,
    that of arguments of another length, or without one that all samples share. MicrobatchError is that of the first.
    """
    first, *others = _batches(graph)
    try:
        return _split_of(graph, first, _MICROBATCH_ROLES)
    except MicrobatchError:
        for batch in others if not graph.mutations else ():
            with suppress(MicrobatchError):
                split = _split_of(graph, batch, _MICROBATCH_ROLES)
                if _is_mostly_split(graph, split):
                    return split
        raise


def _batches(graph: Graph) -> list[frozenset[str]]:
    """The arguments that may be the rows of the batch, most likely first: those as long as the first, the same without
    one of them, those of another length.
    """
    lengths: dict[int, list[str]] = {batch_size(graph): []}
    for item in graph.of_kind("argument"):
        if item.value.shape:
            lengths.setdefault(item.value.shape[0], []).append(item.value.name)
    alike = [frozenset(names) for names in lengths.values()]
    without = [alike[0] - {name} for name in sorted(alike[0])] if len(alike[0]) > 1 else []
    return [alike[0], *without[:_MOST_OTHERS], *alike[1:][:_MOST_OTHERS]]


def _is_mostly_split(graph: Graph, split: BatchSplit) -> bool:
    """Whether microbatches compute parts or terms of most that has a gradient, rather than each the whole."""
    made = [value for op in graph.ops for value in op.outputs if value.needs_grad]
    parts = [value for value in made if split.placements[value.name] != R]
    return sum(math.prod(value.shape) for value in made) <= 2 * sum(math.prod(value.shape) for value in parts)


def _split_of(graph: Graph, batch: frozenset[str], roles: frozenset[str]) -> BatchSplit:
    """The split of `graph` where the arguments `batch` are the rows of the batch."""
    domains: Domains = {item.value.name: _input_domain(item, batch) for item in graph.inputs}
    offered: dict[str, tuple[Signature, ...]] = {}
    routed, known, checks, fitting = routed_signatures(graph), known_ops(graph), own_checks(graph), cache(_fitting)
    constants = {item.value.name for item in graph.of_kind("constant")}
    for op in graph.ops:  # in graph order first, so that the first op that fails is the one to name
        reads = tuple(map(op.inputs.index, op.inputs))
        present = {one.sections for value in op.inputs for one in domains[value.name] if one.sections}
        for value in op.inputs if present else ():
            if value.name in constants:
                domains[value.name] |= {s for one in present for s in _sections_of(value, one)}
        of_inputs = tuple(domains[value.name] for value in op.inputs)
        whole = "" if op.name in checks else KNOWN if op.name in known else None
        found = fitting(op.nameless, reads, routed.get(op.name, ()), of_inputs, whole, roles)
        if not found.signatures:
            raise MicrobatchError(_refusal(op, domains))
        offered[op.name] = found.signatures
        domains.update((value.name, domain) for value, domain in zip(op.outputs, found.outputs))
    if graph.mutations and BATCH_STATISTICS not in roles:
        names = ", ".join(fqn for fqn, _ in graph.mutations)
        buffers = {item.fqn for item in graph.of_kind("buffer")}
        kind = "buffers" if all(fqn in buffers for fqn, _ in graph.mutations) else "parameters"
        raise MicrobatchError(
            f"the forward writes {kind} ({names}), which microbatches would do several times a step; use one microbatch"
        )
    chosen = _choose(graph, offered, domains)
    placements = {name: next(iter(domain)) for name, domain in domains.items()}
    _check_outputs(graph, placements)
    return BatchSplit(chosen, placements, _granularity(graph, chosen, placements))


def _check_outputs(graph: Graph, placements: Mapping[str, Placement]) -> None:
    """MicrobatchError for an output whose rows the microbatches would give in another order."""
    for value in (value for value in graph.outputs if isinstance(value, Value) and placements[value.name].sections):
        raise MicrobatchError(
            f"the output %{value.name} of shape {list(value.shape)} has the rows of several arguments, one after the"
            " other, of which each microbatch has some; return them apart (chunk), or use one microbatch"
        )


def batch_size(graph: Graph) -> int:
    """The global batch size: dim 0 of the first tensor argument that has one; MicrobatchError if none has."""
    for item in graph.of_kind("argument"):
        if item.value.shape:
            return item.value.shape[0]
    raise MicrobatchError("no argument of the model has a dim 0 to split into microbatches; use one microbatch")


def num_samples(graph: Graph) -> int:
    """The size of the batch that microbatches split, or else could not."""
    try:
        placements = graph.once(split_samples).placements
    except MicrobatchError:
        return batch_size(graph)
    arguments = [item.value for item in graph.of_kind("argument")]
    return next((x.shape[0] for x in arguments if placements[x.name].is_split), 0) or batch_size(graph)


def is_share(op: Op, signature: Signature, slot: int, placements: Mapping[str, Placement]) -> bool:
    """Whether `op` reads its input `slot`, which is the same in all microbatches, as a term."""
    return signature.inputs[slot] == P and placements[op.inputs[slot].name] != P


def _whole(value: Value) -> Placement:
    return R if value.needs_grad else I


def _sections_of(value: Value, sections: tuple[int, ...]) -> Iterator[Placement]:
    """The placements in which a constant has its dims in `sections`."""
    units = sum(sections)
    yield from (S(dim, sections=sections) for dim, size in enumerate(value.shape) if size > units and size % units == 0)


def _input_domain(item: Input, batch: frozenset[str]) -> frozenset[Placement]:
    value = item.value
    if item.kind == "argument":
        return frozenset((S(0) if value.name in batch else _whole(value),))
    return frozenset((_whole(value), *(_splits(value) if item.kind == "constant" else ())))


def _splits(value: Value) -> tuple[Placement, ...]:
    """The placements in which microbatches take slices of a `value` that is there before them."""
    return tuple(S(dim) for dim, size in enumerate(value.shape) if size > 1)


def _possible(
    op: Op, reads: tuple[int, ...], routed: tuple[Signature, ...], roles: frozenset[str]
) -> tuple[Signature, ...]:
    """The signatures of `op`, without names, that have no inner collectives.

    Inputs that are the same in all microbatches and have a gradient get R: with I, every microbatch would have to
    compute the whole gradient, and none can. An op of a routed region has the signatures `routed` and those in which
    all values are the same in all microbatches. `reads`: of each input, the first that is the same value.
    """
    signatures = []
    flows = any(value.needs_grad for value in op.outputs)
    for candidate in _listed(op, routed):
        placed = zip(candidate.inputs + candidate.outputs, op.inputs + op.outputs)
        if candidate.role in roles and not (
            flows and any(placement == I and value.needs_grad for placement, value in placed)
        ):
            inputs = tuple(
                _whole(value) if placement == I else placement for placement, value in zip(candidate.inputs, op.inputs)
            )
            if len(set(zip(inputs, reads))) == len(set(reads)):  # a value read twice has one placement
                signatures.append(Signature(inputs, candidate.outputs, candidate.role, candidate.num_units))
    return tuple(signatures)


def _listed(op: Op, routed: tuple[Signature, ...]) -> tuple[Signature, ...]:
    signatures = signatures_of_call(op)
    if not routed:
        return signatures
    return (*(whole for whole in signatures if {*whole.inputs, *whole.outputs} <= {I, R}), *routed)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The signatures that fit the placements of an op's inputs, and the placements that each output has by them."""

    signatures: tuple[Signature, ...]
    outputs: tuple[frozenset[Placement], ...]


def _fitting(
    op: Op,
    reads: tuple[int, ...],
    routed: tuple[Signature, ...],
    domains: tuple[frozenset[Placement], ...],
    whole: str | None,
    roles: frozenset[str],
) -> _Fitting:
    """The signatures that fit `op`, whose inputs have `domains`; otherwise as `_possible`. The result may be that of
    the whole batch where it would be a term, or is a reduction that no parts add up to, if `whole` is the role of that.
    """
    possible = _possible(op, reads, routed, roles)
    present = sorted({one.sections for domain in domains for one in domain if one.sections})
    possible += tuple(one for one in in_sections(op, possible, present) if not routed)
    signatures = tuple(found for found in possible if _fits(op, found, domains))
    if whole is not None:
        terms = [found for found in signatures if found.outputs == (P,)]
        if not signatures:
            signatures = tuple(_of_all(op, domains, whole, roles))
        signatures += tuple(Signature(found.inputs, (I,), whole, found.num_units) for found in terms)
    outputs = zip(*(signature.outputs for signature in signatures))
    return _Fitting(signatures, tuple(map(frozenset, outputs)))


def _of_all(
    op: Op, domains: tuple[frozenset[Placement], ...], whole: str, roles: frozenset[str]
) -> Iterator[Signature]:
    """The signatures of an `op` for the result of the whole batch, which its parts do not give; as `_fitting`."""
    if whole == KNOWN and KNOWN_ROWS in roles:
        are_few = len(op.outputs) <= _MOST_RESULTS
        role, choices = KNOWN_ROWS, [(I, *(_splits(value) if are_few else ())) for value in op.outputs]
    elif op.target in REDUCTIONS and (whole != KNOWN or KNOWN_REDUCTION in roles):
        role, choices = whole and KNOWN_REDUCTION, [(I,)]
    else:
        return
    for inputs in itertools.product(*domains):
        yield from (Signature(inputs, outputs, role) for outputs in itertools.product(*choices))


def _fits(op: Op, signature: Signature, domains: Iterable[frozenset[Placement]]) -> bool:
    """Whether each input can have the placement of `signature`; a whole value becomes a term only beside a term.

    `domains`: the placements that each input may have.
    """
    others, has_term = [], False
    for placement, domain, value in zip(signature.inputs, domains, op.inputs):
        if placement not in domain:
            others.append((placement, domain, value))
        elif placement == P:
            has_term = True
    return not others or all(
        p == P and has_term and value.dtype.is_floating_point and _whole(value) in domain for p, domain, value in others
    )


def _refusal(op: Op, domains: Domains) -> str:
    where = f"{op.target} at %{op.name} ({' '.join(filter(None, (op.module, op.line)))})"
    roles = {signature.role for signature in signatures_of_call(op)} - ALLOWED_ROLES
    terms = [value.name for value in op.inputs if domains[value.name] == {P}]
    reason = next((_REASONS[role] for role in sorted(roles) if role in _REASONS), "")
    if not reason and rule_of(op) is None and any(one.role for one in function_signatures(op)):
        reason = (
            "it reduces over the whole batch within, as its ops show (such as the largest magnitude, of which a scale"
            " of float8 is made); give each row a scale of its own, in backward too"
        )
    if not reason and rule_of(op) is None:
        reason = f"there is no rule for splitting it{_found(op)}"
        if is_function(op):
            reason += '; decorate the autograd.Function, for example with @autopar.splits("batch")'
    elif not reason and terms:
        reason = f"it needs the sum of %{terms[0]} over the whole batch"
    return (
        f"{where} cannot be run on microbatches: {reason or 'it reads samples of the whole batch together'}; use one"
        " microbatch"
    )


def _found(op: Op) -> str:
    if own := function_signatures(op):
        return f", and as its ops it splits only as {'; '.join(map(str, own))}"
    discovery = discovery_of(op)
    if discovery is None:
        return ""
    return f", and {discovery.why or 'on samples it splits only as ' + '; '.join(map(str, discovery.signatures))}"


def _choose(graph: Graph, possible: dict[str, tuple[Signature, ...]], domains: Domains) -> dict[str, Signature]:
    """Op name -> its signature, all consistent; values that need not be split are the same in all microbatches."""
    neighbours: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for name in {value.name for value in (*op.inputs, *op.outputs)}:
            neighbours[name].append(op)
    domains.update(
        (item.value.name, frozenset((_whole(item.value),)))
        for item in graph.inputs
        if item.value.name not in neighbours
    )
    _make_consistent(graph.ops, neighbours, possible, domains)
    for op in graph.ops:
        if len(possible[op.name]) > 1 or any(len(domains[value.name]) > 1 for value in op.inputs):
            possible[op.name] = (min(possible[op.name], key=lambda signature: _num_split(op, signature, domains)),)
            _make_consistent((op,), neighbours, possible, domains)
    return {name: signatures[0] for name, signatures in possible.items()}


def _num_split(op: Op, signature: Signature, domains: Domains) -> tuple[int, int, bool]:
    shares = sum(placement not in domains[value.name] for placement, value in zip(signature.inputs, op.inputs))
    num_split = sum(placement.is_split for placement in (*signature.inputs, *signature.outputs))
    return shares, num_split, signature.role == KNOWN


def _make_consistent(
    start: Iterable[Op],
    neighbours: Mapping[str, list[Op]],
    possible: dict[str, tuple[Signature, ...]],
    domains: Domains,
) -> None:
    """Arc consistency (AC-3): drop signatures and placements without support, from the ops in `start` on."""
    pending = {op.name: op for op in start}
    while pending:
        _, op = pending.popitem()
        for name in _revise(op, possible, domains):
            pending.update((other.name, other) for other in neighbours[name])


def _revise(op: Op, possible: dict[str, tuple[Signature, ...]], domains: Domains) -> list[str]:
    """Drop the signatures of `op` that its values rule out, and vice versa; returns the values that lost placements."""
    of_inputs = [domains[value.name] for value in op.inputs]
    kept = tuple(
        signature
        for signature in possible[op.name]
        if _fits(op, signature, of_inputs) and all(p in domains[v.name] for p, v in zip(signature.outputs, op.outputs))
    )
    if not kept:
        raise MicrobatchError(_refusal(op, domains))
    possible[op.name] = kept
    left: dict[str, set[Placement]] = defaultdict(set)
    for signature in kept:
        for placement, value in zip(signature.inputs, op.inputs):
            left[value.name].update((placement, _whole(value)) if placement == P else (placement,))
        for placement, value in zip(signature.outputs, op.outputs):
            left[value.name].add(placement)
    changed = [name for name, placements in left.items() if not domains[name] <= placements]
    domains.update((name, domains[name] & left[name]) for name in changed)
    return changed


def _granularity(graph: Graph, chosen: Mapping[str, Signature], placements: Mapping[str, Placement]) -> int:
    """The greatest common divisor of the sizes of all split dims."""
    inputs = [(item.value, placements[item.value.name]) for item in graph.inputs]
    extents = [value.shape[one.dim] // share_of_sections(one) for value, one in inputs if one.is_split]
    for op in graph.ops:
        signature = chosen[op.name]
        placed = zip(signature.inputs + signature.outputs, op.inputs + op.outputs)
        extents += [value.shape[one.dim] // share_of_sections(one) for one, value in placed if one.is_split]
        extents += [signature.num_units] if signature.num_units else []
    return math.gcd(*extents) if extents else 1
