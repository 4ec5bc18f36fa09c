"""The structure of a graph for tensor parallelism: column- and row-parallel products, and the vocabulary lookup."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, arguments_of
from autopar.ir.inference.for_inference import tracked
from autopar.ir.op_facts import PERMUTATIONS, facts_of

_SECTIONS = ("aten.split_with_sizes.default", "aten.slice.Tensor")
_REDUCTIONS = ("mean", "sum", "var", "var_mean", "amax", "amin", "softmax", "log_softmax", "linalg_vector_norm")


@dataclass(frozen=True)
class Structure:
    """The structure of a graph for tensor parallelism; all fields hold names of ops or values.

    `kinds`: product -> "column", "row" or "whole".
    `region`: ops between a column-parallel product and its row-parallel product.
    `vocabulary`: the lookups in the embedding table whose rows are split.
    `from_parameters`: values computed from parameters alone.
    `positional`: values looked up in parameters by no argument, and values computed from them (positions, relative
        biases).
    `gathered`: results of column-parallel products that are gathered at once.
    """

    kinds: Mapping[str, str]
    region: frozenset[str]
    vocabulary: frozenset[str]
    from_parameters: frozenset[str]
    positional: frozenset[str]
    gathered: frozenset[str] = frozenset()


def structure_of(graph: Graph) -> Structure:
    """The structure of `graph` by Megatron's pairing (arXiv:1909.08053, section 3).

    A product whose activation derives from other products alone is row-parallel, those others are column-parallel. A
    product that no further product depends on (a language model's head) is column-parallel too; all others stay whole.
    Of three products in turn, as of latent attention, the two are paired between which nothing mixes the split dim.
    """
    from_parameters = values_from_parameters(graph)
    positional = _positional_values(graph, from_parameters)
    rows = _rows(graph, from_parameters, positional)
    columns = {name for row in rows.values() for name in row}
    _, feeding_any = _feeders(graph, set(rows), from_parameters)
    kinds = {}
    for op in graph.ops:
        if product_slots(op, from_parameters) is None:
            continue
        is_column = op.name in columns or (op.name not in rows and op.name not in feeding_any)
        kinds[op.name] = "row" if op.name in rows else "column" if is_column else "whole"
    structure = Structure(kinds, frozenset(), _vocabulary(graph), from_parameters, positional)
    return with_kinds(structure, graph, kinds)


def with_kinds(structure: Structure, graph: Graph, kinds: Mapping[str, str]) -> Structure:
    """`structure` with other `kinds` of products, and the region that these bound."""
    sources, _ = _pair(graph, structure.from_parameters, structure.positional, kinds)
    rows = {name for name, kind in kinds.items() if kind == "row"}
    feeding_row, _ = _feeders(graph, rows, structure.from_parameters)
    region = {
        op.name
        for op in graph.ops
        if op.name in feeding_row and op.name not in kinds and sources.get(op.outputs[0].name)
    }
    return replace(structure, kinds=kinds, region=frozenset(region))


def base_name(op: Op) -> str:
    """The name of an op without namespace and overload: 'linear' of 'aten.linear.default'."""
    return op.target.split(".")[1]


def values_from_parameters(graph: Graph) -> frozenset[str]:
    """Names of the parameters and of every value that is computed from parameters alone."""
    names, is_tracked = {item.value.name for item in graph.of_kind("parameter")}, graph.once(tracked)
    for op in graph.ops:
        read = {value.name for value in op.inputs}
        if read and read <= is_tracked and read <= names and not _lookup(op):
            names.update(value.name for value in op.outputs)
    return frozenset(names)


def product_slots(op: Op, from_parameters: frozenset[str]) -> tuple[int, int] | None:
    """(slot of the activation, slot of the weight) of a product with a parameter, else None."""
    product = facts_of(op.target).product
    if product is None or not product.weight:
        return None
    weights = [slot for slot, value in enumerate(op.inputs) if value.name in from_parameters and len(value.shape) > 1]
    others = [
        slot
        for slot, value in enumerate(op.inputs)
        if value.name not in from_parameters and value.dtype.is_floating_point
    ]
    return (others[0], weights[0]) if len(weights) == 1 and len(others) == 1 else None


def _lookup(op: Op) -> bool:
    return facts_of(op.target).is_lookup


def _from_arguments(graph: Graph) -> frozenset[str]:
    """Names of the arguments and of every value that depends on one."""
    names = {item.value.name for item in graph.of_kind("argument")}
    for op in graph.ops:
        if any(value.name in names for value in op.inputs):
            names.update(value.name for value in op.outputs)
    return frozenset(names)


def _positional_values(graph: Graph, from_parameters: frozenset[str]) -> frozenset[str]:
    derived, positional, is_tracked = _from_arguments(graph), set(), graph.once(tracked)
    for op in graph.ops:
        read = {value.name for value in op.inputs} & is_tracked
        if _lookup(op):
            is_positional = not any(value.name in derived for value in op.inputs)
        else:
            is_positional = (
                product_slots(op, from_parameters) is None
                and bool(read & positional)
                and read <= positional | from_parameters
            )
        if is_positional:
            positional.update(value.name for value in op.outputs)
    return frozenset(positional)


def _rows(graph: Graph, from_parameters: frozenset[str], positional: frozenset[str]) -> dict[str, frozenset[str]]:
    """Row product -> its column products: first the pairs between which nothing mixes the split dim, then others of the
    products that are left.

    A product before one of the columns is no column, though a part of its result goes around that one.
    """
    sources, others = _pair(graph, from_parameters, positional)
    _, rows = _pair(graph, from_parameters, positional, is_strict=True)
    before = {
        op.name: sources.get(op.inputs[slots[0]].name) or frozenset[str]()
        for op in graph.ops
        if (slots := product_slots(op, from_parameters))
    }
    rows = {row: columns - frozenset().union(*map(before.__getitem__, columns)) for row, columns in rows.items()}
    taken = rows.keys() | {name for columns in rows.values() for name in columns}
    return rows | {row: columns for row, columns in others.items() if row not in taken and not columns & taken}


def _pair(
    graph: Graph,
    from_parameters: frozenset[str],
    positional: frozenset[str],
    kinds: Mapping[str, str] | None = None,
    *,
    is_strict: bool = False,
) -> tuple[dict[str, frozenset[str] | None], dict[str, frozenset[str]]]:
    """(value -> the products that it derives from, None if from something else too; row product -> its column
    products), of `kinds` if they are given. `is_strict`: not through what mixes all of a product's result.
    """
    sources: dict[str, frozenset[str] | None] = {}
    rows: dict[str, frozenset[str]] = {}
    wide: set[str] = set()  # values whose last dim is the one that a product has made
    activations = graph.once(tracked) - from_parameters - positional
    for op in graph.ops:
        slots = product_slots(op, from_parameters)
        if slots is None:
            pair = None if is_strict and _mixes(op, wide) else _merge(op, sources, activations)
        elif kinds is not None:
            pair = None if kinds.get(op.name) == "row" else frozenset({op.name})
        elif paired := sources.get(op.inputs[slots[0]].name):
            rows[op.name], pair = paired, None
        else:
            pair = frozenset({op.name})
        sources.update((value.name, pair) for value in op.outputs)
        if slots is not None or _keeps_width(op, wide):
            wide.update(value.name for value in op.outputs)
    return sources, rows


def _keeps_width(op: Op, wide: Set[str]) -> bool:
    read = [value for value in op.inputs if value.name in wide]
    return any(
        value.shape[-1:] == made.shape[-1:] or op.target in _SECTIONS for value in read for made in op.outputs
    ) and (op.target not in PERMUTATIONS)


def _mixes(op: Op, wide: Set[str]) -> bool:
    """Whether an op reduces the last dim of a product's result."""
    if base_name(op) not in _REDUCTIONS or op.inputs[0].name not in wide:
        return False
    arguments, ndim = arguments_of(op), len(op.inputs[0].shape)
    dims = arguments.get("dim")
    return dims is None or ndim - 1 in {dim % ndim for dim in (dims if isinstance(dims, tuple) else (dims,))}


def _merge(op: Op, sources: Mapping[str, frozenset[str] | None], activations: frozenset[str]) -> frozenset[str] | None:
    read = [value for value in op.inputs if value.name in activations]
    known = [named for value in read if (named := sources.get(value.name)) is not None]
    if facts_of(op.target).ends_region or not known or len(known) < len(read):
        return None
    return frozenset().union(*known)


def _feeders(graph: Graph, rows: set[str], from_parameters: frozenset[str]) -> tuple[set[str], set[str]]:
    """(ops between a row product and the products before it, ops that any product depends on)."""
    near: set[str] = set()  # value names
    far: set[str] = set()
    feeding_row, feeding_any = set(), set()
    for op in reversed(graph.ops):
        slots = product_slots(op, from_parameters)
        names = {value.name for value in op.outputs}
        if names & far:
            feeding_any.add(op.name)
        if slots or names & far:
            far.update(value.name for value in op.inputs)
        if op.name in rows and slots:
            near.add(op.inputs[slots[0]].name)
        elif slots is None and names & near:
            feeding_row.add(op.name)
            near.update(value.name for value in op.inputs)
    return feeding_row, feeding_any


def _vocabulary(graph: Graph) -> frozenset[str]:
    """The lookups by arguments in the table with the most rows; positions are looked up by constants."""
    derived = _from_arguments(graph)
    lookups = [op for op in graph.ops if _lookup(op) and any(value.name in derived for value in op.inputs)]
    table = max((op.inputs[0] for op in lookups), key=lambda value: value.shape[0], default=None)
    return frozenset(op.name for op in lookups if op.inputs[0] == table)
