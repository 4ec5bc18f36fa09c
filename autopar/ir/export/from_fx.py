"""Conversion of an exported fx graph to functional ops: regions inlined, tuples unpacked, writes and views resolved."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.errors import TraceError
from autopar.ir.autocast import Autocast
from autopar.ir.call_args import map_leaves, take_slots
from autopar.ir.export import functionalise, inplace_ops
from autopar.ir.export.functionalise import Storage, View, read, whole
from autopar.ir.export.infer_metas import PLACEMENT_KWARGS, Meta
from autopar.ir.export.op_builder import OpBuilder, Origin, stem_of
from autopar.ir.export.source_lines import TRANSFORMS, line_of_stack, module_of, quote_stack
from autopar.ir.export.view_ops import part_steps, step_of
from autopar.ir.function_ops import known_target
from autopar.ir.gradients.gradient_op import FROZEN, GRADIENT, TRACKED
from autopar.ir.gradients.write_out import gradients_of, note_tracked, start_of
from autopar.ir.graph import Value
from autopar.ir.guards.add_guards import emit_sized, note_guard
from autopar.ir.guards.checked_numbers import SIZES, is_only_checked
from autopar.ir.guards.guard_ops import NOTE
from autopar.ir.outline.batched_calls import BATCHED
from autopar.ir.outline.export_once import INNER
from autopar.ir.outline.opaque_calls import TARGET as CALL
from autopar.torch_compat import HigherOrderOperator, OpOverload

# Ops that do nothing if they return their input itself.
_IDENTITIES = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default",
        "contiguous.default",
        "to.dtype",
        "to.dtype_layout",
        "to.device",
        "to.other",
        "type_as.default",
        "lift_fresh.default",
        "requires_grad_.default",
    )
)
# Ops whose results have sizes that follow from values, although torch has no tag that says so.
_SIZED_BY_VALUES = frozenset(
    f"aten.{name}" for name in ("nonzero_numpy.default", "repeat_interleave.self_Tensor", "where.default")
)
# Ops that return their input itself where they drop nothing: the fake tensors of a trace do not show that.
_DROPOUTS = frozenset(
    f"aten.{name}.default" for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
)
_GRAD_MODE, _AUTOCAST = "higher_order.wrap_with_set_grad_enabled", "higher_order.wrap_with_autocast"
_PARTS = tuple(
    f"aten.{name}."
    for name in (
        *("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split"),
        *("unsafe_split_with_sizes", "hsplit", "vsplit", "dsplit"),
    )
)


# (opaque call of a module, the region it is in, builder) -> the views of its results.
Expand = Callable[[Node, "ConvertedRegion", OpBuilder], tuple[Any, ...]]


@dataclass(frozen=True)
class ConvertedRegion:
    """An fx graph being converted, with the results of its nodes so far and its grad mode.

    `env`: node -> its result: a View, a tuple of Views or a constant. `expand`: converts opaque calls of modules. In
    the body of one, `inside` is the FQN of its module and `line` the line of the model that called it. `autocast`: the
    casts of inputs that ops here are given, as ops of their own. `number_of`: a symbolic size of the traced program ->
    its value in this graph; None if sizes are numbers already.
    """

    module: GraphModule
    env: dict[Node, Any]
    is_no_grad: bool
    expand: Expand | None = None
    inside: str = ""
    line: str = ""
    autocast: Autocast | None = None
    number_of: Callable[[Any], Any] | None = None


def convert_region(region: ConvertedRegion, builder: OpBuilder) -> tuple[Any, ...]:
    """Emit the ops of the region, whose `env` must hold its placeholders; returns the results of its outputs."""
    for node in region.module.graph.nodes:
        if node.op == "output":
            return tuple(map_leaves(node.args[0], lambda leaf: region.env[leaf] if isinstance(leaf, Node) else leaf))
        if node.op == "get_attr":
            region.env[node] = getattr(region.module, str(node.target))
        elif node.op == "call_function":
            region.env[node] = _convert_call(node, region, builder)
    raise AssertionError("an fx graph ends in an output node")


def _target_of(node: Node) -> str:
    """The path below torch.ops, e.g. "aten.add.Tensor"."""
    if isinstance(node.target, HigherOrderOperator):
        return f"higher_order.{node.target.name()}"
    return known_target(str(node.target))


def origin_of(node: Node, region: ConvertedRegion) -> Origin:
    """The name, module and line of a node, without the numbers that only
    make names unique: the builder adds its own.
    """
    module = module_of(node.meta.get("nn_module_stack"))
    if region.inside:
        module = region.inside + module.removeprefix(INNER)
    line = line_of_stack(node.meta.get("stack_trace") or "") or region.line
    return Origin(stem_of(node.name), module, line, node.meta.get("is_no_grad", region.is_no_grad))


def _convert_call(node: Node, region: ConvertedRegion, builder: OpBuilder) -> Any:
    if node.target is operator.getitem:
        made, index = _arguments(node)
        return region.env[made][index]
    target = _target_of(node)
    if is_only_checked(node) or _gives_no_tensor(node):
        return None
    if region.number_of is not None and isinstance(node.meta.get("val"), SIZES):
        _check_sizes(node, target, region)
        return region.number_of(node.meta["val"])
    if target == NOTE:
        return note_guard(node.args, region.env, builder, origin_of(node, region))
    if target == CALL and region.expand is not None:
        return region.expand(node, region, builder)
    at = origin_of(node, region)
    if target in (TRACKED, FROZEN):
        _note_requires_grad(region.env[_arguments(node)[0]], target == TRACKED, builder, at)
        return None
    if target == GRADIENT:
        return _write_out(node, region, builder, at)
    if not isinstance(node.target, OpOverload | HigherOrderOperator):
        raise TraceError(f"{_quote(node)}: {getattr(node.target, '__name__', target)} is no tensor op; {TRANSFORMS}")
    if target.startswith("higher_order."):
        return _inline(node, target, region, builder)
    _check_sizes(node, target, region)
    return _convert_op(node, target, region, builder, at)


def _note_requires_grad(view: View, is_tracked: bool, builder: OpBuilder, at: Origin) -> None:
    """Note that autograd follows a tensor or not; reads of a parameter change until it is set back."""
    if not view.storage.owner.startswith("parameter "):
        note_tracked(read(view, builder, at), builder)
    elif is_tracked:
        functionalise.thaw(view)
    else:
        functionalise.freeze(view, builder, at)


def _write_out(node: Node, region: ConvertedRegion, builder: OpBuilder, at: Origin) -> tuple[View, ...]:
    """The gradients that `torch.autograd.grad` takes, as ops."""
    ends, starts, directions, are_leaves = map_leaves(
        _arguments(node), lambda leaf: _bind(leaf, region.env, builder, at)
    )
    at = replace(at, name="gradient")

    def emit(backward: Any, values: Sequence[Value], at: Origin) -> Sequence[Value | None]:
        places = [each for each in backward.graph.nodes if each.op == "placeholder"]
        env = {place: whole(value) for place, value in zip(places, values)}
        inner = ConvertedRegion(backward, env, at.is_no_grad, inside=at.module, line=at.line)
        return [read(made, builder, at) if isinstance(made, View) else None for made in convert_region(inner, builder)]

    try:
        found = [start_of(value, is_leaf, builder) for value, is_leaf in zip(starts, are_leaves)]
        return tuple(map(whole, gradients_of(tuple(zip(ends, directions)), found, builder, at, emit)))
    except TraceError as error:
        raise TraceError(f"{_quote(node)}: {error}") from error


def _gives_no_tensor(node: Node) -> bool:
    """Whether the call gives dtypes or numbers alone, which tracing took as they are."""
    if not isinstance(node.target, OpOverload) or node.users:
        return False
    results = node.target._schema.returns
    return bool(results) and not any("Tensor" in str(result.type) for result in results)


def _check_sizes(node: Node, target: str, region: ConvertedRegion) -> None:
    for value in _values_of(node):
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, SIZES) and _number(size, region) is None for size in sizes):
            raise TraceError(
                f"{_quote(node)}: {target} gives a number or a shape that depends on the values of tensors; a plan"
                " needs fixed shapes: keep the computation in tensors, e.g. torch.where with a mask instead of item(),"
                " nonzero() or boolean indexing"
            )


def _number(size: Any, region: ConvertedRegion) -> Any:
    """A size as a number; None if it depends on the values of tensors."""
    if not isinstance(size, SIZES):
        return size
    return None if region.number_of is None else region.number_of(size)


def _values_of(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)


def _inline(node: Node, target: str, region: ConvertedRegion, builder: OpBuilder) -> tuple[Any, ...]:
    """Convert the body of a grad-mode or autocast region in place."""
    args = _arguments(node)
    autocast = region.autocast
    if target == _GRAD_MODE:
        is_no_grad, body, inputs = not args[0], args[1], args[2:]
    elif target == _AUTOCAST:
        is_no_grad, body, inputs = region.is_no_grad, args[4], args[5:]
        autocast = Autocast(args[0], args[1]) if args[2] else None
    else:
        raise TraceError(
            f"{_quote(node)}: {target} is control flow or an opaque region; only plain tensor ops can be laid out on a"
            " mesh"
        )
    module = region.env[body]
    placeholders = [item for item in module.graph.nodes if item.op == "placeholder"]
    env = {inner: region.env[outer] if isinstance(outer, Node) else outer for inner, outer in zip(placeholders, inputs)}
    inner = replace(region, module=module, env=env, is_no_grad=is_no_grad, autocast=autocast)
    return convert_region(inner, builder)


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _quote(node: Node) -> str:
    return quote_stack(node.meta.get("stack_trace") or "") or node.name


def _check_dense(node: Node, target: str) -> None:
    for value in _values_of(node):
        if isinstance(value, torch.Tensor) and value.layout not in (torch.strided, torch.jagged):
            raise TraceError(
                f"{_quote(node)}: {target} gives a tensor of layout {value.layout}, of which no rule says how it"
                " splits: write it by dense tensors, e.g. torch.zeros(shape).index_put((rows, columns), values)"
            )


def _convert_op(node: Node, target: str, region: ConvertedRegion, builder: OpBuilder, at: Origin) -> Any:
    _check_dense(node, target)
    written = inplace_ops.written_arguments(node.target)
    aliased, args = _aliased_input(node), _arguments(node)
    if _returns_input(node, target, aliased, region):
        return region.env[args[0]]
    bound = map_leaves(args, lambda leaf: _bind(leaf, region.env, builder, at))
    named = {
        name: map_leaves(value, lambda leaf: _bind(leaf, region.env, builder, at))
        for name, value in node.kwargs.items()
    }
    if inplace_ops.is_out_variant(node.target):
        given: dict[str, Any] = node.kwargs
        views = {name: region.env[given[name]] for name in written}
        return inplace_ops.convert_out(node.target, views, bound, named, builder, at)
    if written and not isinstance(node.args[0], Node):
        raise TraceError(
            f"{_quote(node)}: {target} writes to a list of tensors, which is not supported; write to each by itself"
        )
    if written:
        return inplace_ops.convert_write(target, region.env[args[0]], bound, named, builder, at)
    if inplace_ops.updates_statistics(target, bound):
        return inplace_ops.convert_batch_norm(
            target, [region.env.get(arg) if isinstance(arg, Node) else arg for arg in node.args], bound, builder, at
        )
    if region.autocast is not None:
        if node.meta.get(BATCHED):
            raise TraceError(
                f"{_quote(node)}: torch.vmap is called under autocast to {region.autocast.dtype}, which casts what its"
                " ops are made of; take the call out of autocast (with torch.autocast(device_type, enabled=False))"
            )
        bound, named = _cast(target, bound, named, region.autocast, builder, at, _quote(node))
    known = {"made": node.meta["made"]} if "made" in node.meta else {"fallback": _fallback(node, region)}
    if _has_size_by_values(node, bound):
        metas = _fallback(node, region)
        outputs = emit_sized(builder, target, bound, named, metas=metas, at=at, line=_quote(node))
    else:
        outputs = builder.emit(target, bound, named, at=at, **known)
    if aliased is None and (shared := _shared_storages(node, region.env)):
        for storage in shared:
            storage.make_read_only(f"a tensor that {target} gave a view of")
        read_only = tuple(whole(value, shared[0].owner) for value in outputs)
        return read_only if builder.ops[-1].is_tuple else read_only[0]
    views = _views(target, bound, outputs, region.env[aliased] if aliased is not None else None)
    return views if builder.ops[-1].is_tuple else views[0]


def _has_size_by_values(node: Node, args: Any) -> bool:
    """Whether the sizes of the results depend on the values of the inputs."""
    assert isinstance(node.target, OpOverload), "an op is called"
    if str(node.target) == "aten.one_hot.default" and (*args, -1)[1] >= 0:
        return False  # the number of classes is given
    if torch.Tag.dynamic_output_shape not in node.target.tags:
        return str(node.target) in _SIZED_BY_VALUES
    indices = args[1] if str(node.target) == "aten.index.Tensor" else ()
    is_masked = any(isinstance(x, Value) and x.dtype in (torch.bool, torch.uint8) for x in indices)
    return is_masked or str(node.target) != "aten.index.Tensor"


def _returns_input(node: Node, target: str, aliased: Node | None, region: ConvertedRegion) -> bool:
    """Whether the call returns its first input itself, so that a write to either is one to both."""
    if target in _DROPOUTS:
        given = dict(zip(("input", "p", "train"), node.args)) | dict(node.kwargs)
        return isinstance(node.args[0], Node) and not (given["train"] and given["p"])
    is_same = aliased is not None or target.endswith("_.default")
    return target in _IDENTITIES and is_same and _is_as_traced(node, region)


def _is_as_traced(node: Node, region: ConvertedRegion) -> bool:
    """Whether the first input has the dtype that it was traced in: autocast of another device than the CPU has not."""
    view, traced = region.env.get(_arguments(node)[0]), node.meta.get("val")
    return not (isinstance(view, View) and isinstance(traced, torch.Tensor)) or view.value.dtype == traced.dtype


def _cast(
    target: str, args: Any, kwargs: dict[str, Any], autocast: Autocast, builder: OpBuilder, at: Origin, where: str
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call in an autocast region, with the inputs cast that autocast casts."""
    if not target.startswith("aten."):
        raise TraceError(
            f"{where}: {target} is run under autocast to {autocast.dtype}, which cannot be seen inside; take the call"
            " out of autocast and cast its inputs by hand"
        )
    kept = {name: value for name, value in kwargs.items() if name not in PLACEMENT_KWARGS}
    slotted, named, inputs = take_slots(args, kept, lambda leaf: isinstance(leaf, Value))
    if not inputs:
        return args, kwargs
    try:
        casts = builder.casts_of(target, slotted, named, inputs, autocast)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error
    made = {
        value.name: builder.emit("aten.to.dtype", (value, dtype), at=replace(at, name="to"))[0]
        for value, dtype in zip(inputs, casts.inputs)
        if dtype != value.dtype
    }
    args, kwargs = (
        map_leaves(x, lambda leaf: made.get(leaf.name, leaf) if isinstance(leaf, Value) else leaf)
        for x in (args, kwargs)
    )
    return args, kwargs if casts.result is None else kwargs | {"dtype": casts.result}


def _bind(leaf: Any, env: Mapping[Node, Any], builder: OpBuilder, at: Origin) -> Any:
    if not isinstance(leaf, Node):
        return leaf
    view = env[leaf]
    return read(view, builder, replace(at, name=stem_of(leaf.name))) if isinstance(view, View) else view


def _fallback(node: Node, region: ConvertedRegion) -> tuple[Meta, ...]:
    tensors = (value for value in _values_of(node) if isinstance(value, torch.Tensor))
    return tuple(Meta(tuple(_number(size, region) for size in x.shape), x.dtype, False) for x in tensors)


def _aliased_input(node: Node) -> Node | None:
    """The input whose memory the (first) output shares, by the storages of the traced fake tensors."""
    outputs = [value for value in _values_of(node) if isinstance(value, torch.Tensor)]
    if not outputs:
        return None
    storage = outputs[0].untyped_storage()._cdata
    inputs = [arg for arg in node.args[:1] if isinstance(arg, Node) and isinstance(arg.meta.get("val"), torch.Tensor)]
    return next((arg for arg in inputs if arg.meta["val"].untyped_storage()._cdata == storage), None)


def _shared_storages(node: Node, env: Mapping[Node, Any]) -> list[Storage]:
    """The storages of inputs of which an op on several tensors returns views, as broadcast_tensors.

    They are read-only.
    """
    memory = {value.untyped_storage()._cdata for value in _values_of(node) if isinstance(value, torch.Tensor)}
    inputs = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), torch.Tensor)]
    return [env[item].storage for item in inputs if item.meta["val"].untyped_storage()._cdata in memory]


def _views(target: str, args: tuple[Any, ...], outputs: tuple[Value, ...], base: View | None) -> tuple[View, ...]:
    if base is None:
        return tuple(whole(value) for value in outputs)
    is_cut = target.startswith(_PARTS)
    steps = part_steps(target, args, outputs) if is_cut else (step_of(target, args, args[0], outputs[0]),)
    version = base.storage.version
    return tuple(
        functionalise.View(base.storage, (*base.steps, step), value, version) for step, value in zip(steps, outputs)
    )
