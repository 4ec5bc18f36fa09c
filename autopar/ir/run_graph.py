"""Runs a Graph on one device: what every sharded program must equal."""

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.call_args import call, takes_device
from autopar.ir.graph import Graph, Value
from autopar.ir.interpret import run_constants


def run(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(flat outputs, new value of each mutated buffer by FQN). `inputs` holds a tensor for each parameter, buffer and
    argument by value name, all on one device; constants that are missing are computed. Autograd records it as it would
    the model.
    """
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    env = run_constants(graph, device) | dict(inputs)
    for op in graph.ops:
        extra = {"device": device} if takes_device(op) else {}
        results = call(op, [env[value.name] for value in op.inputs], **extra)
        env.update((value.name, result) for value, result in zip(op.outputs, results))
    outputs = [env[item.name] if isinstance(item, Value) else item for item in graph.outputs]
    return outputs, {fqn: env[value.name] for fqn, value in graph.mutations}
