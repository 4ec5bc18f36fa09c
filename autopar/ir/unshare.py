"""`unshare`: the checkpoint of a model whose layers share parameters, converted for the model without sharing."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.ir.trace import to_graph


def unshare(
    state: Mapping[str, torch.Tensor],
    shared: nn.Module,
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """The state dict of `model`, whose layers have parameters of their own, from `state`, the state dict of `shared`.

    Both models are traced for the call `args`, `kwargs` and matched op by op, whatever the names of their parameters;
    they may be on the meta device. Each tensor is copied to all parameters of `model` that are used in its places; a
    tensor that no op reads keeps its name. AutoparError if the models differ in more than their parameters or `state`
    lacks a tensor.
    """
    graphs = [to_graph(skeleton(each), tuple(args), dict(sorted((kwargs or {}).items()))) for each in (shared, model)]
    sources = _sources(*graphs)
    unshared: dict[str, torch.Tensor] = {}
    given: set[int] = set()
    for item in (*graphs[1].of_kind("parameter"), *graphs[1].of_kind("buffer")):
        names = sources.get(item.value.name, _names(item))
        tensor = next((state[name] for name in names if name in state), None)
        if tensor is None and item.is_persistent:
            raise AutoparError(
                f"the state has no tensor for {item.kind} {item.fqn}: expected one called {' or '.join(names)}"
            )
        if tensor is not None and item.is_persistent:
            own = tensor.detach().clone() if id(tensor) in given else tensor
            given.add(id(tensor))
            unshared.update(dict.fromkeys(_names(item), own))
    return unshared


def _names(item: Input) -> tuple[str, ...]:
    return item.fqn, *item.aliases


def _sources(shared: Graph, model: Graph) -> dict[str, tuple[str, ...]]:
    """Value name of each parameter and buffer that `model` reads ->
    names of that which `shared` reads in its places.
    """
    items = {item.value.name: item for item in shared.inputs if item.kind in ("parameter", "buffer")}
    inputs = {item.value.name: item for item in model.inputs if item.kind in ("parameter", "buffer")}
    names: dict[str, tuple[str, ...]] = {}
    for theirs, ours in _read_alike(shared, model):
        if ours.name not in inputs:
            continue
        if theirs.name not in items or names.setdefault(ours.name, _names(items[theirs.name])) != _names(
            items[theirs.name]
        ):
            raise AutoparError(
                f"{inputs[ours.name].fqn} is used where the model that shares uses %{theirs.name} and"
                f" {' '.join(names.get(ours.name, ()))}: expected one parameter in all its places"
            )
    return names


def _read_alike(shared: Graph, model: Graph) -> Iterator[tuple[Value, Value]]:
    """Pairs of values that the two graphs read in the same places.

    AutoparError at the first op in which they differ.
    """
    for theirs, ours in zip_longest(shared.ops, model.ops):
        if theirs is None or ours is None or _call(theirs) != _call(ours):
            raise AutoparError(
                f"the models compute different things: {_where(theirs)} in the one that shares, {_where(ours)} in the"
                " other; expected the same ops on the same shapes, with other parameters"
            )
        yield from zip(theirs.inputs, ours.inputs)


def _call(op: Op) -> tuple:
    # repr tells 1, 1.0 and True apart, which comparison does not.
    return op.target, repr(op.args), repr(op.kwargs), tuple((value.shape, value.dtype) for value in op.inputs)


def _where(op: Op | None) -> str:
    return "nothing" if op is None else f"{op.target} at %{op.name} ({' '.join(filter(None, (op.module, op.line)))})"
