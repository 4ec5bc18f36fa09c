"""Signatures (one mesh axis), strategies (all axes) and the candidates the search chooses from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.sbp.placement import Layout, Placement

# Roles of ops on rows: those sent to their experts first, those there already, and those sent back afterwards.
DISPATCH, BETWEEN, COMBINE = "dispatch", "between", "combine"
EXCHANGES = frozenset((DISPATCH, BETWEEN, COMBINE))
# Roles of attention: of causal queries with all keys, of queries and keys whose parts go around the ranks, and of query
# heads with all key heads.
QUERIES, RING, KEY_HEADS = "queries", "ring", "key_heads"
# Of custom functions that are run as their ops; the number of the split follows.
FUNCTION_SPLIT = "split_"


@dataclass(frozen=True, slots=True)
class Signature:
    """Valid placements of an op's tensor inputs (in `Op.inputs` order) and outputs on one mesh axis.

    `role` names how the op must be run when running it on the shards as it is would be wrong: the local implementation
    in `autopar.sbp.local_ops` for the op's target is then called with the axes of each role. `num_units`, if positive,
    is the number of parts that cannot be split further (channel groups): the axes that take the role together must
    divide it.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    role: str = ""
    num_units: int = field(default=0, compare=False)

    def __str__(self) -> str:
        left, right = " ".join(map(str, self.inputs)), " ".join(map(str, self.outputs))
        return f"{left} -> {right}" + (f" [{self.role}]" if self.role else "")

    @property
    def saves_as_op(self) -> bool:
        """Whether autograd saves the parameters for backward that it saves of the op itself, and no others; of most
        local ops it may save others.
        """
        return not self.role or self.role in EXCHANGES or self.role.startswith(FUNCTION_SPLIT)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One signature per mesh axis, outermost first."""

    signatures: tuple[Signature, ...]

    def input_layout(self, index: int) -> Layout:
        return tuple(signature.inputs[index] for signature in self.signatures)

    def output_layout(self, index: int) -> Layout:
        return tuple(signature.outputs[index] for signature in self.signatures)

    def __str__(self) -> str:
        return " | ".join(map(str, self.signatures))


@dataclass(frozen=True, slots=True)
class Discovery:
    """The splitting signatures of an op on one mesh axis, found by running it; if there are none, `why` is the reason,
    a clause.
    """

    signatures: tuple[Signature, ...]
    why: str = ""


@dataclass(frozen=True)
class Candidates:
    """Everything that may be chosen, on one mesh.

    strategies: op name -> its valid strategies. layouts: input value name -> the layouts it may be stored in
    (parameters, buffers) or handed in (arguments, constants). outputs: name of an output value -> the layouts it may
    leave in. without_rule: ops that have no rule; discovered: what running them on samples says of them, of ops of
    which it was asked; all others are replicated.
    """

    strategies: Mapping[str, tuple[Strategy, ...]]
    layouts: Mapping[str, tuple[Layout, ...]]
    outputs: Mapping[str, tuple[Layout, ...]]
    without_rule: tuple[str, ...]
    discovered: Mapping[str, Discovery] = field(default_factory=dict)
