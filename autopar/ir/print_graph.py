"""A Graph as readable text, and its fingerprint, by which a plan recognises its graph."""

import hashlib
from typing import Any

import torch

from autopar.ir.call_args import fill
from autopar.ir.graph import Graph, Input, Op, Value, short_dtype


def format_graph(graph: Graph) -> str:
    """The text of `graph`: one line for each input, op and mutation, in order, and one for the outputs."""
    return "\n".join(
        (
            *(_format_input(item) for item in graph.inputs),
            *(f"once {format_op(op)}" for op in graph.constant_ops),
            *(format_op(op) for op in graph.ops),
            *(f"{fqn} <- %{value.name}" for fqn, value in graph.mutations),
            f"return ({', '.join(_format_leaf(item) for item in graph.outputs)})",
        )
    )


def format_op(op: Op) -> str:
    """The line of one op, such as `%add: f32[4] = aten.add.Tensor(%x, 1)  # block.0 model.py:41`."""
    args = [_format_leaf(item) for item in fill(op.args, op.inputs)]
    args += [f"{name}={_format_leaf(fill(value, op.inputs))}" for name, value in op.kwargs]
    outputs = ", ".join(str(value) for value in op.outputs)
    where = " ".join(part for part in (op.module, op.line, "no_grad" if op.is_no_grad else "") if part)
    return f"{outputs} = {op.target}({', '.join(args)})" + (f"  # {where}" if where else "")


def _format_input(item: Input) -> str:
    traits = [
        item.kind,
        item.fqn,
        *(f"= {alias}" for alias in item.aliases),
        *([] if item.is_persistent else ["not persistent"]),
    ]
    return f"{item.value}  # {' '.join(traits)}"


def _format_leaf(leaf: Any) -> str:
    if isinstance(leaf, Value):
        return f"%{leaf.name}"
    if isinstance(leaf, tuple):
        return f"[{', '.join(_format_leaf(item) for item in leaf)}]"
    return short_dtype(leaf) if isinstance(leaf, torch.dtype) else repr(leaf)


def printable(text: str, most: int = 0) -> str:
    r"""`text` on one line without control characters, which are escaped; only the first `most` characters if not 0.

    >>> printable("a\x1b[2J\nb")
    'a\\x1b[2J\\nb'
    """
    if most and len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in text
    )


def fingerprint(graph: Graph) -> str:
    """sha256 of all that a plan depends on: targets, arguments, shapes, dtypes, dataflow, FQNs and outputs.

    Model lines and value names do not enter.
    """
    index: dict[str, int] = {}
    digest = hashlib.sha256()

    def define(values: tuple[Value, ...]) -> list[Any]:
        for value in values:
            index[value.name] = len(index)
        return [
            (x.shape, str(x.dtype), x.needs_grad, *([] if x.stored_dtype is None else [str(x.stored_dtype)]))
            for x in values
        ]

    def feed(*parts: Any) -> None:
        digest.update(repr(parts).encode() + b"\n")

    given = {item.value.name for item in graph.inputs}
    read_once = {value.name for op in graph.constant_ops for value in op.inputs}
    for name, tensor in graph.constants.items():
        if name not in given or name in read_once:
            index[name] = len(index)
            feed("tensor", tuple(tensor.shape), str(tensor.dtype))
    for op in graph.constant_ops:
        feed("once", op.target, op.args, op.kwargs, [index[value.name] for value in op.inputs], define(op.outputs))
    for item in graph.inputs:
        names = [] if item.kind == "constant" else [item.fqn, item.aliases, item.is_persistent]
        known = index.get(item.value.name)
        feed(item.kind, names, known, define((item.value,)) if known is None else [])
    texts: dict[Any, str] = {}  # of calls with the same objects, as copies of a block mostly are
    for op in graph.ops:
        key = op.target, id(op.args), id(op.kwargs), op.is_no_grad, op.is_tuple
        if key not in texts:
            texts[key] = repr((op.target, op.args, op.kwargs, op.is_no_grad, op.is_tuple)).removesuffix(")")
        dataflow = f"{[index[v.name] for v in op.inputs]}, {define(op.outputs)}"
        digest.update(f"{texts[key]}, {dataflow})\n".encode())
    feed("mutations", [(fqn, index[value.name]) for fqn, value in graph.mutations])
    feed("outputs", [index[item.name] if isinstance(item, Value) else ("constant", item) for item in graph.outputs])
    return digest.hexdigest()
