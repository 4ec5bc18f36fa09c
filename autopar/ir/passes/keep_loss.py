"""The pass that reduces the outputs of a graph to its loss, for training."""

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Value
from autopar.torch_compat import pytree


def loss_only(graph: Graph) -> Graph:
    """`graph` with its loss as only output: the first output that is a single number and has a gradient; the same graph
    if it has no other.

    AutoparError if there is none.
    """
    losses = [value for value in graph.outputs if isinstance(value, Value) and value.needs_grad and value.shape == ()]
    if not losses:
        raise AutoparError(
            "the model returns no loss, a single number with a gradient, that train_step could differentiate; give the"
            " labels to the model if it takes them, or loss_fn= to autopar.compile"
        )
    spec = pytree.tree_flatten(0)[1]
    is_alone = graph.outputs == (losses[0],) and graph.output_spec == spec
    return graph if is_alone else replace(graph, outputs=(losses[0],), output_spec=spec)
