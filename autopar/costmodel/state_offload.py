"""The cost of optimizer offload: memory of the device that it still takes, and time of the copies."""

import math
from collections.abc import Callable, Collection, Mapping

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph, Input
from autopar.sbp.placement import Layout

# The state is fetched before the update and sent back after it; the copies overlap neither with one another nor with
# the update.
_COPIES = 2


def optimizer_bytes(item: Input, layout: Layout, mesh_shape: tuple[int, ...], training: Training) -> int:
    """Bytes of the optimizer's state for an input stored in `layout`; 0 for an input that is not trained."""
    return input_bytes(item, layout, mesh_shape, training).get("optimizer", 0)


def moving_s(num_bytes: float, cluster: Cluster) -> float:
    """Seconds of a step for copying `num_bytes` of offloaded state; PlanError if the host's bandwidth is not known."""
    return _COPIES * num_bytes * cluster.host_s_per_byte if num_bytes else 0.0


def brought_shares(
    graph: Graph, on_host: Collection[str], num: Callable[[str], int] = lambda _: 1
) -> Mapping[str, float]:
    """Parameter with offloaded state -> the share of its state that counts as being on the device.

    State is fetched one bucket at a time, and a bucket is at most as large as the largest parameter
    (`runtime.offload_optimizer`). The parameters that are largest if nothing is split share the weight of one: so it is
    a sum over parameters, exact if they have equal layouts. `num`: the number of parameters that each one represents.
    """
    sizes = {item.value.name: math.prod(item.value.shape) for item in graph.inputs if item.value.name in on_host}
    largest = [name for name, size in sizes.items() if size == max(sizes.values())]
    return {name: (name in largest) / sum(map(num, largest)) for name in sizes}


def hostable(graph: Graph) -> tuple[Input, ...]:
    """The parameters for which an optimizer has state."""
    return tuple(item for item in graph.of_kind("parameter") if item.value.needs_grad)
