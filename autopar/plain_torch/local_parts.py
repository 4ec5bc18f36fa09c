"""`follow_parts`: what a model's own code does with the parts that split products give it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.analysis.megatron_pairs import Structure, product_slots
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.signature import Signature


@dataclass(frozen=True)
class LocalParts:
    """`dims`: value -> the dim along which each rank has a part of it. `wrong`: the products whose parts the code
    cannot compute with. `met`: FQN of a parameter -> the products whose parts it meets: ranks' gradients are terms.
    """

    dims: Mapping[str, int]
    wrong: frozenset[str]
    met: Mapping[str, frozenset[str]]


def follow_parts(graph: Graph, structure: Structure, columns: Iterable[str]) -> LocalParts:
    """The parts of the outputs of the products `columns` on their way to other products.

    An op computes with parts as it is if its outputs are parts then. Of what else it reads each rank has a term of the
    gradient: a parameter's terms can be summed, but those of an activation have gone on.
    """
    dims: dict[str, int] = {}
    feeds: dict[str, frozenset[str]] = {}
    wrong, met = set[str](), dict[str, frozenset[str]]()
    sources, columns = _parameters_of(graph, structure), frozenset(columns)
    for op in graph.ops:
        if op.name in columns:
            dims[op.outputs[0].name] = len(op.outputs[0].shape) - 1
            feeds[op.outputs[0].name] = frozenset((op.name,))
        names = frozenset[str]().union(*(feeds.get(value.name, ()) for value in op.inputs))
        if not names or product_slots(op, structure.from_parameters) is not None:
            continue
        signature = _of_parts(op, dims)
        if signature is None:
            wrong |= names
            continue
        for value, placement in zip(op.outputs, signature.outputs):
            if placement.is_split:
                dims[value.name], feeds[value.name] = placement.dim, names
        for value in _whole(op, dims):
            if value.name not in sources:
                wrong |= names
            for fqn in sources.get(value.name, ()):
                met[fqn] = met.get(fqn, frozenset()) | names
    wrong |= {name for fqn, names in met.items() if not _is_met_alone(graph, fqn, dims, sources) for name in names}
    return LocalParts(dims, frozenset(wrong), met)


def _of_parts(op: Op, dims: Mapping[str, int]) -> Signature | None:
    """The signature of the op on parts, of which all outputs with a gradient are parts."""
    for signature in signatures_of_call(op):
        is_given = all(
            (placement.is_split and placement.dim == dims[value.name]) if value.name in dims else placement.kind in "IR"
            for value, placement in zip(op.inputs, signature.inputs)
        )
        is_part = all(p.is_split or not value.needs_grad for value, p in zip(op.outputs, signature.outputs))
        if is_given and is_part and not signature.role and any(p.is_split for p in signature.outputs):
            return signature
    return None


def _whole(op: Op, dims: Mapping[str, int]) -> Iterator[Value]:
    return (value for value in op.inputs if value.needs_grad and value.name not in dims)


def _parameters_of(graph: Graph, structure: Structure) -> dict[str, frozenset[str]]:
    """Value that is computed of parameters alone -> their FQNs."""
    found = {item.value.name: frozenset((item.fqn,)) for item in graph.of_kind("parameter")}
    for op in graph.ops:
        for value in op.outputs:
            if value.name in structure.from_parameters:
                found[value.name] = frozenset().union(*(found.get(x.name, ()) for x in op.inputs))
    return found


def _is_met_alone(graph: Graph, fqn: str, dims: Mapping[str, int], sources: Mapping[str, frozenset[str]]) -> bool:
    """Whether a parameter is read beside parts alone, and inside of the module that has it: there its gradients are
    summed.
    """
    owner = fqn.rpartition(".")[0]
    for op in graph.ops:
        reads = [value for value in op.inputs if fqn in sources.get(value.name, ())]
        is_on_way = all(value.name in sources for value in op.outputs)
        if reads and not is_on_way and not any(value.name in dims for value in op.inputs):
            return False
        if reads and owner and not f"{op.module}.".startswith(f"{owner}."):
            return False
    return True
