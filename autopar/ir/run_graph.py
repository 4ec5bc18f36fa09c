"""Reference interpreter: a Graph run on one device, whose results every sharded program must equal."""

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.call_args import call, takes_device
from autopar.ir.graph import Graph, Value
from autopar.ir.interpret import run_constants


def run(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(flat outputs, FQN of each mutated buffer -> its new value) of `graph`, recorded by autograd like the model.

    `inputs`: value name of each parameter, buffer and argument -> tensor, all on one device; missing constants are
    computed.
    """
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    env = run_constants(graph, device) | dict(inputs)
    for op in graph.ops:
        extra = {"device": device} if takes_device(op) else {}
        results = call(op, [env[value.name] for value in op.inputs], **extra)
        env.update((value.name, result) for value, result in zip(op.outputs, results))
    outputs = [env[item.name] if isinstance(item, Value) else item for item in graph.outputs]
    return outputs, {fqn: env[value.name] for fqn, value in graph.mutations}
