"""Optimizer state that waits in the host's memory: what it takes of the device still, and how long the step waits for
it.
"""

import math
from collections.abc import Callable, Collection, Mapping

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph, Input
from autopar.sbp.placement import Layout

# The state comes before the update and goes after it; the copies do not overlap with one another, nor with the update.
_COPIES = 2


def optimizer_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], training: Training) -> int:
    """Bytes of the optimizer's state of an input stored in `layout`; 0 of what is not trained."""
    return input_bytes(item, layout, mesh_shape, training).get("optimizer", 0)


def moving_s(num_bytes: float, cluster: Cluster) -> float:
    """Seconds a step that `num_bytes` of state on the host are waited for; PlanError if no way to the host is known."""
    return _COPIES * num_bytes * cluster.host_s_per_byte if num_bytes else 0.0


def brought_shares(
    graph: Graph, on_host: Collection[str], num: Callable[[str], int] = lambda _: 1
) -> Mapping[str, float]:
    """Parameter whose state waits on the host -> what part of it counts as being on the device.

    State is brought a bucket at a time, and a bucket takes no more than the largest parameter does
    (`runtime.offload_optimizer`). Those that are largest when nothing is split share the count of one: so it is a sum
    over parameters, exact where they are laid out alike. num: how many parameters each stands for.
    """
    sizes = {item.value.name: math.prod(item.value.shape) for item in graph.inputs if item.value.name in on_host}
    largest = [name for name, size in sizes.items() if size == max(sizes.values())]
    return {name: (name in largest) / sum(map(num, largest)) for name in sizes}


def hostable(graph: Graph) -> tuple[Input, ...]:
    """The parameters that an optimizer has state of."""
    return tuple(item for item in graph.of_kind("parameter") if item.value.needs_grad)
