"""Rules of loops over steps: the ways to place all values of a step so that no two ops of it disagree.

What holds for a step holds for all: a step reads what the step before carried on in the placement in which it was
computed, and the gradients go the same way back. So a step needs no communication within; where its ops can only be
split with some, the loop is whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir.graph import Op, Value, arguments_of
from autopar.ir.loops.body import LoopBody, body_called
from autopar.sbp.placement import I, Placement, R, S
from autopar.sbp.signature import Signature

_MOST = 64  # ways of a loop

Signatures = Callable[[Op], tuple[Signature, ...]]
Domains = dict[str, frozenset[Placement]]


@dataclass(frozen=True)
class LoopSplit:
    """A `signature` of a loop, and that of each op of its body, by name."""

    signature: Signature
    of_ops: Mapping[str, Signature]


def loop_splits(op: Op, signatures: Signatures) -> tuple[LoopSplit, ...]:
    """The ways to split the loop `op`, the ops of whose body have these `signatures`."""
    arguments = arguments_of(op)
    return _ways(arguments["body"], arguments["dims"], signatures)


def way_of(op: Op, signature: Signature, signatures: Signatures) -> LoopSplit | None:
    """The way of the loop in which its tensors are split as by `signature`; None if nothing is."""
    if not any(placement.is_split for placement in (*signature.inputs, *signature.outputs)):
        return None
    wanted = _kinds(signature)
    return next(way for way in loop_splits(op, signatures) if _kinds(way.signature) == wanted)


def _kinds(signature: Signature) -> tuple[Placement, ...]:
    return tuple(I if placement == R else placement for placement in (*signature.inputs, *signature.outputs))


@lru_cache(maxsize=256)
def _ways(name: str, dims: tuple[int, ...], signatures: Signatures) -> tuple[LoopSplit, ...]:
    body = body_called(name)
    found: dict[Signature, LoopSplit] = {}
    for placed, of_ops in _Placing(body, signatures).all():
        signature = _of_loop(body, dims, placed)
        if any(placement.is_split for placement in (*signature.inputs, *signature.outputs)):
            found.setdefault(signature, LoopSplit(signature, of_ops))
        if len(found) == _MOST:
            break
    return tuple(found.values())


def _of_loop(body: LoopBody, dims: Sequence[int], placed: Callable[[Value], Placement]) -> Signature:
    """The placements of a loop's tensors: slices have one more dim in `dims`, what all steps give out has it first."""
    carried, sliced = body.inputs[: body.num_carried], body.sliced
    same = body.inputs[body.num_carried + body.num_sliced :]
    whole = (_behind(placed(value), dim) for value, dim in zip(sliced, dims))
    given_out = (_behind(placed(value), 0) for value in body.given_out)
    inputs = (*map(placed, carried), *whole, *map(placed, same))
    return Signature(inputs, (*map(placed, body.outputs[: body.num_carried]), *given_out))


def _behind(placement: Placement, dim: int) -> Placement:
    """The placement with a further dim at `dim`, which is whole."""
    return S(placement.dim + (placement.dim >= dim)) if placement.is_split else placement


class _Placing:
    """The search for placements of a body's values under which each op has a signature without a role.

    What is carried on is one variable with what the next step reads. Arc consistency (AC-3), then depth first: values
    that the loop reads and gives out are decided first, the others only once for each way to place those.
    """

    def __init__(self, body: LoopBody, signatures: Signatures) -> None:
        self.body = body
        self.same: dict[str, str] = {}
        for one, other in body.carried:
            self.same[self.variable(other)] = self.variable(one)
        self.offered = {
            op.name: tuple(found for found in signatures(op) if not found.role and self._agrees(op, found))
            for op in body.ops
        }
        self.readers: dict[str, list[Op]] = defaultdict(list)
        for op in body.ops:
            for name in {self.variable(value) for value in (*op.inputs, *op.outputs)}:
                self.readers[name].append(op)
        self.outer = list(dict.fromkeys(self.variable(value) for value in (*body.inputs, *body.outputs)))

    def variable(self, value: Value) -> str:
        """The name of the values that have one placement with this one."""
        name = value.name
        while name in self.same and self.same[name] != name:
            name = self.same[name]
        return name

    def _agrees(self, op: Op, signature: Signature) -> bool:
        placed: dict[str, Placement] = {}
        both = zip((*op.inputs, *op.outputs), (*signature.inputs, *signature.outputs))
        return all(placed.setdefault(self.variable(value), one) == one for value, one in both)

    def all(self) -> Iterator[tuple[Callable[[Value], Placement], Mapping[str, Signature]]]:
        """(the placement of each value, the signature of each op) of all ways."""
        start = self._narrowed(self.offered, {}, self.body.ops)
        for offered, domains in self._decided(start, self.outer):
            inner = [name for name in domains if len(domains[name]) > 1]
            for last, placed in self._decided((offered, domains), inner):
                yield self._placement(placed), {name: found[0] for name, found in last.items()}
                break

    def _placement(self, domains: Domains) -> Callable[[Value], Placement]:
        def placed(value: Value) -> Placement:
            return next(iter(domains.get(self.variable(value), (R if value.needs_grad else I,))))

        return placed

    def _decided(
        self, state: tuple[dict[str, tuple[Signature, ...]], Domains] | None, names: Sequence[str]
    ) -> Iterator[tuple[dict[str, tuple[Signature, ...]], Domains]]:
        """The states in which each of `names` has one placement."""
        if state is None:
            return
        offered, domains = state
        name = next((name for name in names if len(domains.get(name, ())) > 1), None)
        if name is None:
            yield state
            return
        for placement in sorted(domains[name]):
            narrowed = self._narrowed(offered, domains | {name: frozenset((placement,))}, self.readers[name])
            yield from self._decided(narrowed, names)

    def _narrowed(
        self, offered: dict[str, tuple[Signature, ...]], domains: Domains, start: Iterable[Op]
    ) -> tuple[dict[str, tuple[Signature, ...]], Domains] | None:
        """Without the signatures and placements that others rule out; None if an op has none left."""
        offered, domains = dict(offered), dict(domains)
        pending = {op.name: op for op in start}
        while pending:
            _, op = pending.popitem()
            names = [self.variable(value) for value in (*op.inputs, *op.outputs)]
            left = [
                found
                for found in offered[op.name]
                if all(
                    name not in domains or one in domains[name]
                    for name, one in zip(names, (*found.inputs, *found.outputs))
                )
            ]
            if not left:
                return None
            offered[op.name] = tuple(left)
            for number, name in enumerate(names):
                possible = frozenset((*found.inputs, *found.outputs)[number] for found in left)
                if domains.get(name) != possible and not (name in domains and domains[name] <= possible):
                    domains[name] = domains.get(name, possible) & possible
                    pending.update((other.name, other) for other in self.readers[name])
        return offered, domains
