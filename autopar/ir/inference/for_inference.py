"""`for_inference`: a graph of which nothing is trained, as a call without gradients runs it."""

from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.inference.carried import carried_outputs, with_appends
from autopar.ir.passes.rewire import with_values

_DETACH = "aten.detach.default"


def for_inference(graph: Graph) -> Graph:
    """`graph` with no value that needs a gradient, so that no op saves anything, and no conversion goes back; what the
    next call is given in place of an argument is `carried`, and what grows by it is appended to.
    """
    graph = with_appends(replace(graph, carried=carried_outputs(graph)))
    return with_values(graph, lambda value: replace(value, needs_grad=False) if value.needs_grad else value)


def tracked(graph: Graph) -> frozenset[str]:
    """Names of the values that need a gradient; of inference, those that would if the parameters were trained.

    They tell activations from masks, positions and other constants.
    """
    values = [item.value for item in graph.inputs] + [value for op in graph.ops for value in op.outputs]
    if names := frozenset(value.name for value in values if value.needs_grad):
        return names
    would = {item.value.name for item in graph.of_kind("parameter") if item.value.dtype.is_floating_point}
    for op in graph.ops:
        if not op.is_no_grad and op.target != _DETACH and any(value.name in would for value in op.inputs):
            would.update(value.name for value in op.outputs if value.dtype.is_floating_point)
    return frozenset(would)
