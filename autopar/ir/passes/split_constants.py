"""The passes that make numbers added to a loss constants, and move ops that depend on no input of the model out of the
graph, to be computed once at load.
"""

from dataclasses import replace

import torch

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Input, Op, Slot, Value, arguments_of
from autopar.ir.op_facts import is_random

_OFFSETS = {f"aten.{kind}.{form}" for kind in ("add", "sub", "rsub") for form in ("Tensor", "Scalar")}
_EXACT = (torch.float32, torch.float64)  # in which a number is added as it is as a tensor of this dtype


def offset_by_constants(graph: Graph) -> Graph:
    """`graph` in which what is added to a scalar with a gradient, as in `2 - 2 * similarity.mean()`, is a constant.

    A number beside a sum that is pending would be counted once for each of its terms; of a constant each has its part.
    """
    return replace(graph, ops=tuple(single for op in graph.ops for single in _offset(op)))


def _offset(op: Op) -> tuple[Op, ...]:
    if op.target not in _OFFSETS or len(op.inputs) > 1 or not op.outputs[0].needs_grad:
        return (op,)
    (output,), named = op.outputs, arguments_of(op)
    number, alpha = named["other"], named["alpha"]
    if output.shape or output.dtype not in _EXACT or op.inputs[0].dtype != output.dtype or not _is_real(number, alpha):
        return (op,)
    made = replace(output, name=f"{output.name}_offset", needs_grad=False)
    kwargs = (("dtype", output.dtype),)
    constant = replace(
        op, name=made.name, target="aten.full.default", args=((), number), kwargs=kwargs, inputs=(), outputs=(made,)
    )
    order = (Slot(1), Slot(0)) if op.target.startswith("aten.rsub") else (Slot(0), Slot(1))
    kind = "add" if op.target.startswith("aten.add") else "sub"
    scaled = () if alpha == 1 else (("alpha", alpha),)
    target = f"aten.{kind}.Tensor"
    return constant, replace(op, target=target, args=order, kwargs=scaled, inputs=(*op.inputs, made))


def _is_real(*numbers: object) -> bool:
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)


def split_constants(graph: Graph) -> Graph:
    """`graph` with all deterministic ops that depend on constants alone in `constant_ops`.

    Their values that other ops read become "constant" inputs. TraceError for a constant without contents.
    """
    known = {item.value.name: item.value for item in graph.of_kind("constant")}
    constant_ops, ops = [], []
    for op in graph.ops:
        is_constant = not is_random(op) and all(value.name in known for value in op.inputs)
        (constant_ops if is_constant else ops).append(op)
        if is_constant:
            known.update((value.name, value) for value in op.outputs)
    used = _used(graph, ops)
    frontier = [value for name, value in known.items() if name in used]
    _check_contents(graph, constant_ops, frontier)
    state = tuple(item for item in graph.inputs if item.kind != "constant")
    constants = tuple(Input("constant", value, value.name) for value in frontier)
    return replace(graph, inputs=(*state, *constants), ops=tuple(ops), constant_ops=tuple(constant_ops))


def _used(graph: Graph, ops: list[Op]) -> set[str]:
    used = {value.name for op in ops for value in op.inputs}
    used |= {item.name for item in graph.outputs if isinstance(item, Value)}
    return used | {value.name for _, value in graph.mutations}


def _check_contents(graph: Graph, constant_ops: list[Op], frontier: list[Value]) -> None:
    """TraceError for a tensor that the forward makes from numbers on the meta device, where the numbers are lost."""
    for name, tensor in graph.constants.items():
        if not tensor.is_meta or tensor.numel() == 0:
            continue
        reader = next(
            (op for op in (*constant_ops, *graph.ops) if any(value.name == name for value in op.inputs)), None
        )
        where = f"{reader.line}: " if reader else ""
        raise TraceError(
            f"{where}constant {name} was made on the meta device and has no contents; make it on the CPU, or register a"
            " buffer"
        )
