"""The values of a graph's constant inputs."""

import torch

from autopar.ir.graph import Graph
from autopar.ir.slots import call, takes_device


def run_constants(graph: Graph, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Name of each "constant" input -> its value on `device`: tensors of the model moved there, the rest computed there."""
    env = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    with torch.no_grad():
        for op in graph.constant_ops:
            extra = {"device": device} if takes_device(op) else {}
            results = call(op, [env[value.name] for value in op.inputs], **extra)
            env.update((value.name, result) for value, result in zip(op.outputs, results))
    return {item.value.name: env[item.value.name] for item in graph.of_kind("constant")}
