"""Mixed precision: a model traced as if its parameters and inputs were of a lower dtype, in which it computes.

The semantics are those of `fully_shard` with `MixedPrecisionPolicy(param_dtype)` around the whole model: parameters and
floating inputs are cast, buffers are not, and every op computes in what it is given. Parameters stay as they are stored
(`Value.stored_dtype`), inputs get an op that casts them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Op, Slot, Value, short_dtype
from autopar.ir.guards.example_values import keep_value, stands_for
from autopar.ir.passes.rewire import rewire, with_values
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.torch_compat import pytree


def traced_in(
    dtype: torch.dtype | None,
    how: Callable[..., Any],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *asked: Any,
) -> Any:
    """`how(model, loss_fn, args, kwargs, *asked)`, a Graph or SizedTrace, of the `model` computing in `dtype`; None: in
    its own dtypes. The target of a loss function, last of `args`, is not cast.

    The parameters of `model`, which is on the meta device, are cast in place.
    """
    if dtype is None:
        return how(model, loss_fn, args, kwargs, *asked)
    stored = {fqn: p.dtype for fqn, p in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    given = partial(_cast, dtype, 0 if loss_fn is None else 1)
    leaves = pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
    dtypes = tuple(x.dtype if isinstance(x, torch.Tensor) else None for x in leaves)
    finish = partial(_with_casts, stored=stored, dtypes=dtypes)
    try:
        made = how(model, loss_fn, *given(args, kwargs), *asked)
    except TraceError as error:
        if "dtype" not in str(error):
            raise
        raise TraceError(
            f"{error} (param_dtype={dtype} casts parameters and floating inputs, not buffers and what forward makes:"
            " cast those where they meet, x.to(self.weight.dtype), or use torch.autocast around the call instead)"
        ) from error
    if isinstance(made, SizedTrace):
        return replace(made, given=given, finish=lambda graph: finish(made.finish(graph)))
    return finish(made) if isinstance(made, Graph) else made


def computed_in(dtype: torch.dtype | None, model: nn.Module) -> Callable[..., Any]:
    """The function that calls `model` with its parameters and floating arguments cast, on one device; for None `model`
    itself.
    """
    if dtype is None:
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: p.to(dtype) if p.is_floating_point() else p for name, p in model.named_parameters()}
        given = pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
        )
        return functional_call(model, parameters, *given)

    return call


def _cast(
    dtype: torch.dtype, num_left: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example arguments in `dtype`, but the last `num_left` positional ones."""

    def cast(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        made = x.detach().to(dtype).requires_grad_(x.requires_grad)
        return keep_value(made, stands_for(x).to(dtype))

    num = len(args) - num_left
    return (*pytree.tree_map(cast, args[:num]), *args[num:]), pytree.tree_map(cast, kwargs)


def _with_casts(graph: Graph, stored: Mapping[str, torch.dtype], dtypes: Sequence[torch.dtype | None]) -> Graph:
    """`graph` with parameters stored, and arguments given, in these dtypes: by FQN, and by leaf of the call."""
    given = {name: x for name, x in zip(graph.arguments, dtypes, strict=True) if isinstance(name, str) and x}
    known = {item.value.name: stored[item.fqn] for item in graph.of_kind("parameter")}
    names = {item.value.name for item in graph.inputs} | {x.name for op in graph.ops for x in op.outputs}
    casts, cast_of = [], dict[str, Value]()
    for item in graph.of_kind("argument"):
        value, dtype = item.value, given.get(item.value.name, item.value.dtype)
        if dtype != value.dtype:
            made = replace(value, name=_unused(f"{value.name}_{short_dtype(value.dtype)}", names))
            call = "aten.to.dtype", (Slot(0), value.dtype), (), (replace(value, dtype=dtype),), (made,)
            casts.append(Op(made.name, *call, is_no_grad=False, module="", line=""))
            cast_of[value.name] = made

    def changed(value: Value) -> Value:
        if value.name in cast_of:
            return replace(value, dtype=given[value.name])
        dtype = known.get(value.name, value.dtype)
        return value if dtype == value.dtype else replace(value, stored_dtype=dtype)

    for item in graph.of_kind("parameter"):
        if item.fqn in dict(graph.mutations) and stored[item.fqn] != item.value.dtype:
            raise TraceError(
                f"the forward writes parameter {item.fqn}, in {short_dtype(item.value.dtype)} by param_dtype=, and it"
                f" is stored in {short_dtype(stored[item.fqn])}: expected writes in the dtype that it is stored in."
                " Register it as a buffer, which param_dtype= does not cast, or write to it around the call"
            )
    graph = with_values(rewire(graph, graph.ops, cast_of), changed)
    read = graph.uses
    return replace(graph, ops=(*(op for op in casts if op.name in read), *graph.ops))


def _unused(name: str, names: set[str]) -> str:
    while name in names:
        name += "_"
    names.add(name)
    return name
