"""Local arguments of an op: the global sizes that tracing wrote into its arguments, replaced by local ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autopar.ir.functions.function_body import body_of
from autopar.ir.functions.function_passes import FunctionName, LocalFunction, ReducedValue
from autopar.ir.functions.function_passes import named as function_named
from autopar.ir.graph import Op, Value, arguments_of, resolve
from autopar.ir.loops.body import LoopBody, body_called, named
from autopar.ir.loops.scan_op import SCAN
from autopar.sbp.functions.function_splits import split_of
from autopar.sbp.local_ops import local_op
from autopar.sbp.placement import local_shape, num_parts
from autopar.sbp.rules import way_of_loop
from autopar.sbp.signature import FUNCTION_SPLIT, Signature, Strategy
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
    if op.target == SCAN:
        return (*op.args[:3], named(_local_body(op, strategy, mesh_shape)), *op.args[4:]), op.kwargs
    if any(one.inputs and one.inputs[0].sections for one in strategy.signatures) and op.target in _CUTS:
        return _local_cut(op, strategy, mesh_shape), op.kwargs
    if any(one.role.startswith(FUNCTION_SPLIT) for one in strategy.signatures):
        return op.args, (*op.kwargs, ("function", _local_function(op.nameless, strategy, mesh_shape)))
    local_arguments = LOCAL_ARGUMENTS.get(op.target)
    if local_arguments is None:
        return op.args, (*op.kwargs, *_parts_of_roles(op, strategy, mesh_shape))
    source = part_shape(op.inputs[0].shape, strategy.input_layout(0), mesh_shape) if op.inputs else ()
    changed = local_arguments(op, source, part_shape(op.outputs[0].shape, strategy.output_layout(0), mesh_shape))
    names = [argument.name for argument in resolve(op.target)._schema.arguments]
    args = tuple(changed.get(name, arg) for name, arg in zip(names, op.args))
    return args, tuple((name, changed.get(name, arg)) for name, arg in op.kwargs)


def _local_cut(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of a canonical cut of a dim of which each rank has a share of every section."""
    sizes_at, dim_at = _CUTS[op.target]
    parts = num_parts(strategy.input_layout(0), mesh_shape, op.args[dim_at])
    return tuple(
        (tuple(size // parts for size in arg) if isinstance(arg, tuple) else arg // parts) if at in sizes_at else arg
        for at, arg in enumerate(op.args)
    )


@lru_cache(maxsize=1024)
def _local_body(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> LoopBody:
    """The body of the loop `op` as one rank runs it on its parts."""
    body = body_called(op.args[3])
    ways = [way_of_loop(op, signature) for signature in strategy.signatures]
    split = [(size, way.of_ops) for size, way in zip(mesh_shape, ways) if way is not None]
    if not split:
        return body
    ops, values = _local_ops(body.ops, split)
    given = {value.name: value for value in (*body.inputs, *body.outputs)} | values
    inputs, outputs = (tuple(given[value.name] for value in side) for side in (body.inputs, body.outputs))
    return replace(body, inputs=inputs, ops=ops, outputs=outputs)


@lru_cache(maxsize=1024)
def _local_function(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> FunctionName:
    """The ops of the custom function `op` as one rank runs them on its parts."""
    body = body_of(op)
    assert body is not None, f"{op.target} has a role but is not known as ops"
    found = [(size, sig.role, split_of(op, sig)) for size, sig in zip(mesh_shape, strategy.signatures)]
    split = [(size, role, each) for size, role, each in found if each is not None]
    ops, values = _local_ops(body.ops, [(size, each.of_ops) for size, _, each in split])
    roles: dict[tuple[str, str], dict[str, None]] = {}
    for _, role, each in split:
        for reduced in each.reductions.items():
            roles.setdefault(reduced, {})[role] = None
    reductions = tuple(ReducedValue(*reduced, tuple(of)) for reduced, of in roles.items())
    local = replace(body, inputs=_known(values, body.inputs), ops=ops, outputs=_known(values, body.outputs))
    return function_named(LocalFunction(local, reductions))


def _known(values: Mapping[str, Value], given: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(values.get(value.name, value) for value in given)


def _local_ops(
    whole: Sequence[Op], split: Sequence[tuple[int, Mapping[str, Signature]]]
) -> tuple[tuple[Op, ...], dict[str, Value]]:
    """`whole` ops as one rank runs them, and their values by name; `split`: of each axis its size and the ops'
    signatures by name.
    """
    sizes = tuple(size for size, _ in split)
    values: dict[str, Value] = {}
    ops = []
    for inner in whole:
        own = Strategy(tuple(of_ops[inner.name] for _, of_ops in split))
        args, kwargs = localize(inner, own, sizes)
        for side, layout_of in ((inner.inputs, own.input_layout), (inner.outputs, own.output_layout)):
            for index, value in enumerate(side):
                values[value.name] = replace(value, shape=local_shape(value.shape, layout_of(index), sizes))
        inputs, outputs = (tuple(values[value.name] for value in side) for side in (inner.inputs, inner.outputs))
        ops.append(replace(inner, args=args, kwargs=kwargs, inputs=inputs, outputs=outputs))
    return tuple(ops), values


def _parts_of_roles(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    roles = {signature.role for signature in strategy.signatures} - {""}
    found = local_op(op.target) if roles else None
    for role in sorted(roles & found.uneven_roles) if found is not None else ():
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


# Ops that cut a dim -> positions of the sizes and bounds along it among their arguments, and that of the dim
_CUTS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "aten.split_with_sizes.default": ((1,), 2),
    "aten.slice.Tensor": ((2, 3), 1),
}
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
