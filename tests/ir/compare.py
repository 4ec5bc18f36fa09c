"""A traced graph beside the model it came from."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.export.placeholders import flat_arguments
from autopar.ir.graph import Graph, Value
from autopar.ir.run_graph import run


def bindings(graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A tensor for each input of the graph but the constants."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    env = {item.value.name: state[item.fqn] for item in (*graph.of_kind("parameter"), *graph.of_kind("buffer"))}
    leaves = flat_arguments(graph.argument_spec, args, kwargs)
    return env | {name: leaf for name, leaf in zip(graph.arguments, leaves) if isinstance(leaf, torch.Tensor)}


def results(
    tensors: list[Any], model: nn.Module
) -> tuple[list[Any], list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Constants, detached tensors, and every parameter's gradient of the sum of their floating parts."""
    constants = [x for x in tensors if not isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    floating = [x for x in tensors if x.is_floating_point() and x.requires_grad]
    model.zero_grad()
    if floating:
        sum(x.double().square().mean() for x in floating).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return constants, [x.detach() for x in tensors], grads


def assert_same_as_model(
    graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float = 1e-12
) -> None:
    """Outputs, gradients and buffers of one call of the graph and of the model; a random model is seeded."""
    reference = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = results(pytree.tree_leaves(reference(*args, **kwargs)), reference)
    buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    torch.manual_seed(7)
    outputs, mutations = run(graph, bindings(graph, model, args, kwargs))
    found = results(pytree.tree_leaves(pytree.tree_unflatten(outputs, graph.output_spec)), model)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1:], expected[1:], rtol=tolerance, atol=tolerance)
    after = {name: buffer.detach().clone() for name, buffer in model.named_buffers()} | mutations
    torch.testing.assert_close({name: after[name] for name in buffers}, buffers, rtol=tolerance, atol=tolerance)
    assert_needs_grad(graph, outputs)


def assert_needs_grad(graph: Graph, outputs: list[Any]) -> None:
    for item, tensor in zip(graph.outputs, outputs):
        if isinstance(item, Value):
            assert (item.shape, item.dtype, item.needs_grad) == (
                tuple(tensor.shape),
                tensor.dtype,
                tensor.requires_grad,
            ), item
