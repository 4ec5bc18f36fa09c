"""Local arguments of an op: the global sizes that tracing wrote into its arguments, replaced by local ones."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autopar.ir.graph import Op, arguments_of, resolve
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.signature import Strategy
from autopar.sbp.uneven.parts import PartSize, part_shape, part_size

Shape = tuple[int, ...]
# (op, local shape of input 0, of output 0) -> arguments that change
LocalArguments = Callable[[Op, Shape, Shape], Mapping[str, Any]]


def localize(
    op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """(args, kwargs) of `op` as one rank calls it on its parts under `strategy`; `Slot`s are kept.

    Sizes that the ranks have different ones of are `PartSize`s. A local op is told of such parts by `ROLE_part`: the
    size of the dim that the axes of the role split, the unit of its parts, and whether they are in shares.
    """
    local_arguments = LOCAL_ARGUMENTS.get(op.target)
    if local_arguments is None:
        return op.args, (*op.kwargs, *_parts_of_roles(op, strategy, mesh_shape))
    source = part_shape(op.inputs[0].shape, strategy.input_layout(0), mesh_shape) if op.inputs else ()
    changed = local_arguments(op, source, part_shape(op.outputs[0].shape, strategy.output_layout(0), mesh_shape))
    names = [argument.name for argument in resolve(op.target)._schema.arguments]
    args = tuple(changed.get(name, arg) for name, arg in zip(names, op.args))
    return args, tuple((name, changed.get(name, arg)) for name, arg in op.kwargs)


def _parts_of_roles(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    roles = {signature.role for signature in strategy.signatures} - {""}
    for role in sorted(roles & LOCAL_OPS[op.target].uneven_roles) if roles else ():
        signature = next(one for one in strategy.signatures if one.role == role)
        slot, dim = next((slot, placed.dim) for slot, placed in enumerate(signature.inputs) if placed.is_split)
        extent, layout = op.inputs[slot].shape[dim], strategy.input_layout(slot)
        if isinstance(part_size(extent, dim, layout, mesh_shape), PartSize):
            splits = [placed for placed in layout if placed.dim == dim]
            yield f"{role}_part", (extent, max(one.unit for one in splits), any(one.shares for one in splits))


def _output_size(name: str) -> LocalArguments:
    """The local arguments of an op whose argument `name` is the shape of its output."""
    return lambda op, source, output: {name: output}


def _unflatten(op: Op, source: Shape, output: Shape) -> dict[str, Any]:
    bound = arguments_of(op)
    start = bound["dim"] % len(source)
    return {"sizes": output[start : start + len(bound["sizes"])]}


def _repeat(op: Op, source: Shape, output: Shape) -> dict[str, Any]:
    padded = (1,) * (len(output) - len(source)) + source
    return {"repeats": tuple((out if own == 1 else out // own) if own else 1 for own, out in zip(padded, output))}


def _repeat_interleave(op: Op, source: Shape, output: Shape) -> dict[str, Any]:
    bound = arguments_of(op)
    if bound["output_size"] is None:
        return {}
    return {"output_size": output[0 if bound["dim"] is None else bound["dim"]]}


LOCAL_ARGUMENTS: Mapping[str, LocalArguments] = {
    "aten.reshape.default": _output_size("shape"),
    "aten.view.default": _output_size("size"),
    "aten._unsafe_view.default": _output_size("size"),
    "aten.expand.default": _output_size("size"),
    "aten.broadcast_to.default": _output_size("size"),
    "aten.unflatten.int": _unflatten,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    **{f"aten.{name}.default": _output_size("size") for name in ("full", "zeros", "ones", "rand", "randn")},
    "aten.empty.memory_format": _output_size("size"),
    **{f"aten.new_{name}.default": _output_size("size") for name in ("full", "zeros", "ones", "empty")},
}
