"""Evaluation of a graph's constant inputs."""

from collections.abc import Iterable

import torch

from autopar.ir.call_args import call, takes_device
from autopar.ir.graph import Graph, Op


def run_constants(graph: Graph, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Value name of each "constant" input -> its tensor on `device`, moved there from the model or computed there."""
    env = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    with torch.no_grad():
        for op in graph.constant_ops:
            extra = {"device": device} if takes_device(op) else {}
            results = call(op, [env[value.name] for value in op.inputs], **extra)
            env.update((value.name, result) for value, result in zip(op.outputs, results))
    return {item.value.name: env[item.value.name] for item in graph.of_kind("constant")}


def constants_for(graph: Graph, names: Iterable[str]) -> tuple[tuple[Op, ...], dict[str, torch.Tensor]]:
    """The `constant_ops` and `constants` that the constant inputs called `names` depend on."""
    wanted, kept = set(names), []
    for op in reversed(graph.constant_ops):
        if any(value.name in wanted for value in op.outputs):
            kept.append(op)
            wanted.update(value.name for value in op.inputs)
    return tuple(reversed(kept)), {name: tensor for name, tensor in graph.constants.items() if name in wanted}
