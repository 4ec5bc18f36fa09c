"""How the values of a graph lie on the time axis: the microbatches of a step are ranks of a mesh axis that come one
after the other.

The rules are those of any mesh axis, but nothing moves between microbatches: each op must take a signature that fits
what its inputs are. A value is a slice of the whole batch's (S), a term of it (P), or the same in all microbatches, its
gradient then being a term (R; I where there is none). Only one conversion is possible without communication: of what is
the same in all to a term of it, by dividing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.sbp.candidates import signatures_of_call
from autopar.sbp.microbatch.expert_routing import routed_signatures
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.rules import RULES
from autopar.sbp.signature import Signature

# Means: of equal parts, or of tokens to be counted over the whole batch. Every other role needs other microbatches
# while it runs.
ALLOWED_ROLES = frozenset(("", "mean", "elements", "tokens"))
_REASONS = {
    "batch": (
        "its statistics are those of the whole batch; with a model in eval mode, or group norm in its place, they"
        " are not"
    )
}

Domains = dict[str, frozenset[Placement]]


@dataclass(frozen=True)
class BatchSplit:
    """`signatures`: of each op on the time axis. `placements`: of each value of inputs and ops, I where R is meant and
    no gradient flows.

    `granularity`: the numbers of microbatches that are possible are its divisors.
    """

    signatures: Mapping[str, Signature]
    placements: Mapping[str, Placement]
    granularity: int


def split_batch(graph: Graph) -> BatchSplit:
    """Split the arguments whose dim 0 is the batch, and with them all that follows.

    The batch is dim 0 of the first tensor argument that has one. Raises MicrobatchError naming the first op that needs
    the whole batch.
    """
    batch = batch_size(graph)
    domains: Domains = {item.value.name: _input_domain(item, batch) for item in graph.inputs}
    offered: dict[str, tuple[Signature, ...]] = {}
    routed = routed_signatures(graph)
    for op in graph.ops:  # forward first: the op that fails is then the one that is at fault
        offered[op.name] = tuple(found for found in _possible(op, routed.get(op.name, ())) if _fits(op, found, domains))
        if not offered[op.name]:
            raise MicrobatchError(_refusal(op, domains))
        for index, value in enumerate(op.outputs):
            domains[value.name] = frozenset(signature.outputs[index] for signature in offered[op.name])
    if graph.mutations:
        names = ", ".join(fqn for fqn, _ in graph.mutations)
        raise MicrobatchError(
            f"the forward writes buffers ({names}), which microbatches would do several times a step; use one"
            " microbatch"
        )
    chosen = _choose(graph, offered, domains)
    placements = {name: next(iter(domain)) for name, domain in domains.items()}
    return BatchSplit(chosen, placements, _granularity(graph, chosen, placements))


def batch_size(graph: Graph) -> int:
    """Dim 0 of the first tensor argument that has one. MicrobatchError if none has."""
    for item in graph.of_kind("argument"):
        if item.value.shape:
            return item.value.shape[0]
    raise MicrobatchError("no argument of the model has a dim 0 to split into microbatches; use one microbatch")


def is_share(op: Op, signature: Signature, slot: int, placements: Mapping[str, Placement]) -> bool:
    """Whether input `slot`, the same in all microbatches, is read as a term."""
    return signature.inputs[slot] == P and placements[op.inputs[slot].name] != P


def _whole(value: Value) -> Placement:
    return R if value.needs_grad else I


def _input_domain(item: Input, batch: int) -> frozenset[Placement]:
    value = item.value
    if item.kind == "argument":
        return frozenset((S(0) if value.shape[:1] == (batch,) else _whole(value),))
    dims = range(len(value.shape)) if item.kind == "constant" else ()
    return frozenset((_whole(value), *(S(dim) for dim in dims if value.shape[dim] > 1)))


def _possible(op: Op, routed: tuple[Signature, ...]) -> Iterator[Signature]:
    """Signatures without inner collectives, R written for what is the same in all microbatches and has a gradient.

    Where a gradient flows, I would mean that every microbatch finds the whole gradient: none does. An op of a `routed`
    region has its signatures there and those in which all is the same in all microbatches.
    """
    flows = any(value.needs_grad for value in op.outputs)
    for found in _offered(op, routed):
        placed = zip(found.inputs + found.outputs, op.inputs + op.outputs)
        if found.role in ALLOWED_ROLES and not (
            flows and any(placement == I and value.needs_grad for placement, value in placed)
        ):
            inputs = tuple(
                _whole(value) if placement == I else placement for placement, value in zip(found.inputs, op.inputs)
            )
            if len(set(zip(inputs, op.inputs))) == len(set(op.inputs)):  # a value that is read twice lies in one way
                yield Signature(inputs, found.outputs, found.role, found.num_units)


def _offered(op: Op, routed: tuple[Signature, ...]) -> tuple[Signature, ...]:
    found = signatures_of_call(op)
    return (
        (*(signature for signature in found if {*signature.inputs, *signature.outputs} <= {I, R}), *routed)
        if routed
        else found
    )


def _fits(op: Op, signature: Signature, domains: Domains) -> bool:
    """Whether each input can be what the signature wants; what is the same in all becomes a term only beside a term."""
    pairs = [(placement, domains[value.name], value) for placement, value in zip(signature.inputs, op.inputs)]
    has_term = any(placement == P and P in domain for placement, domain, _ in pairs)
    others = [(placement, domain, value) for placement, domain, value in pairs if placement not in domain]
    return all(
        p == P and has_term and value.dtype.is_floating_point and _whole(value) in domain for p, domain, value in others
    )


def _refusal(op: Op, domains: Domains) -> str:
    where = f"{op.target} at %{op.name} ({' '.join(filter(None, (op.module, op.line)))})"
    roles = {found.role for found in signatures_of_call(op)} - ALLOWED_ROLES
    terms = [value.name for value in op.inputs if domains[value.name] == {P}]
    reason = next((_REASONS[role] for role in sorted(roles) if role in _REASONS), "")
    if not reason and op.target not in RULES:
        reason = "there is no rule for splitting it"
    elif not reason and terms:
        reason = f"it needs the sum of %{terms[0]} over the whole batch"
    return (
        f"{where} cannot be run on microbatches: {reason or 'it reads samples of the whole batch together'}; use one"
        " microbatch"
    )


def _choose(graph: Graph, offered: dict[str, tuple[Signature, ...]], domains: Domains) -> dict[str, Signature]:
    """One signature an op, such that all agree: what needs not be split is the same in all microbatches."""
    neighbours: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for name in {value.name for value in (*op.inputs, *op.outputs)}:
            neighbours[name].append(op)
    domains.update(
        (item.value.name, frozenset((_whole(item.value),)))
        for item in graph.inputs
        if item.value.name not in neighbours
    )
    _agree(graph.ops, neighbours, offered, domains)
    for op in graph.ops:
        if len(offered[op.name]) > 1 or any(len(domains[value.name]) > 1 for value in op.inputs):
            offered[op.name] = (min(offered[op.name], key=lambda signature: _num_split(op, signature, domains)),)
            _agree((op,), neighbours, offered, domains)
    return {name: found[0] for name, found in offered.items()}


def _num_split(op: Op, signature: Signature, domains: Domains) -> tuple[int, int]:
    shares = sum(placement not in domains[value.name] for placement, value in zip(signature.inputs, op.inputs))
    return shares, sum(placement.is_split for placement in (*signature.inputs, *signature.outputs))


def _agree(
    start: Iterable[Op], neighbours: Mapping[str, list[Op]], offered: dict[str, tuple[Signature, ...]], domains: Domains
) -> None:
    """Drop from `offered` and `domains` what has no counterpart, from the ops in `start` on, until nothing changes."""
    pending = {op.name: op for op in start}
    while pending:
        _, op = pending.popitem()
        for name in _revise(op, offered, domains):
            pending.update((other.name, other) for other in neighbours[name])


def _revise(op: Op, offered: dict[str, tuple[Signature, ...]], domains: Domains) -> list[str]:
    """Make `op` agree with its values; names of those that lost placements."""
    kept = tuple(
        signature
        for signature in offered[op.name]
        if _fits(op, signature, domains) and all(p in domains[v.name] for p, v in zip(signature.outputs, op.outputs))
    )
    if not kept:
        raise MicrobatchError(_refusal(op, domains))
    offered[op.name] = kept
    left: dict[str, set[Placement]] = defaultdict(set)
    for signature in kept:
        for placement, value in zip(signature.inputs, op.inputs):
            left[value.name].update((placement, _whole(value)) if placement == P else (placement,))
        for placement, value in zip(signature.outputs, op.outputs):
            left[value.name].add(placement)
    changed = [name for name, found in left.items() if not domains[name] <= found]
    domains.update((name, domains[name] & left[name]) for name in changed)
    return changed


def _granularity(graph: Graph, chosen: Mapping[str, Signature], placements: Mapping[str, Placement]) -> int:
    """Greatest common divisor of all that is split."""
    extents = [
        item.value.shape[placements[item.value.name].dim]
        for item in graph.inputs
        if placements[item.value.name].is_split
    ]
    for op in graph.ops:
        signature = chosen[op.name]
        placed = zip(signature.inputs + signature.outputs, op.inputs + op.outputs)
        extents += [value.shape[placement.dim] for placement, value in placed if placement.is_split]
        extents += [signature.num_units] if signature.num_units else []
    return math.gcd(*extents) if extents else 1
