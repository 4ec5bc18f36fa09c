"""The pass that reduces the outputs of a graph to its loss, for training."""

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Value
from autopar.torch_compat import pytree


def loss_only(graph: Graph) -> Graph:
    """`graph` with its loss as only output: of the outputs that are a single number and have a gradient the one that is
    named "loss", or else the first; the same graph if it has no other.

    AutoparError if there is none, or several with names of which none is "loss".
    """
    losses = {
        at: value
        for at, value in enumerate(graph.outputs)
        if isinstance(value, Value) and value.needs_grad and value.shape == ()
    }
    if not losses:
        raise AutoparError(
            "the model returns no loss, a single number with a gradient, that train_step could differentiate; give the"
            " labels to the model if it takes them, or loss_fn= to autopar.compile"
        )
    loss = losses[_position(graph, losses)]
    spec = pytree.tree_flatten(0)[1]
    is_alone = graph.outputs == (loss,) and graph.output_spec == spec
    return graph if is_alone else replace(graph, outputs=(loss,), output_spec=spec)


def _position(graph: Graph, losses: dict[int, Value]) -> int:
    """Which of the `losses` is the loss, by their names; of those that are nested least, as the rest are its parts."""
    if len({value.name for value in losses.values()}) == 1:
        return next(iter(losses))
    outputs = pytree.tree_unflatten(range(len(graph.outputs)), graph.output_spec)
    paths = {at: path for path, at in pytree.tree_flatten_with_path(outputs)[0] if at in losses}
    depth = min(map(len, paths.values()))
    names = {at: _name(path[-1]) for at, path in paths.items() if len(path) == depth}
    if "loss" in names.values():
        return next(at for at, name in names.items() if name == "loss")
    if len(names) > 1 and all(names.values()):
        raise AutoparError(
            f"the model returns several numbers with a gradient by name, {', '.join(names.values())}: expected one that"
            " is named loss, which train_step would differentiate; add them up as it, or give loss_fn= to"
            " autopar.compile"
        )
    return next(iter(names))


def _name(key: object) -> str:
    """The name by which an output is given, "" for a position."""
    return str(getattr(key, "name", getattr(key, "key", "")))
