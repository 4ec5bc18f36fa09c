"""`check_repeats`: a forward that computes otherwise in each call, by something of Python's that it changes itself."""

from collections import Counter
from typing import Any

from torch import nn
from torch.fx import Node

from autopar.errors import AutoparError, TraceError
from autopar.ir.function_ops import description
from autopar.ir.sizes.recording import RecordedForward, record_outline
from autopar.torch_compat import pytree

NUM_SHOWN = 8  # entries of a tensor that is made of numbers
_OTHERWISE = (
    "the forward computes {} in one call and {} in the next, though it is called alike: it goes by what it changes"
    " itself, which a program would not (an iterator, a random generator of its own, a counter outside of the module)."
    " Hand it in as an argument, or keep it in a buffer that the forward writes to"
)


def check_repeats(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TraceError if three calls of `model`, one after the other, compute three things, as far as they can be recorded.

    Once something is kept in a cache, further calls are alike.
    """
    first = _recorded(model, args, kwargs)
    second = first and _recorded(model, args, kwargs)
    if not first or not second or first == second:
        return
    third = _recorded(model, args, kwargs)
    if third and second != third:
        raise TraceError(_OTHERWISE.format(_first_of(second - third), _first_of(third - second)))


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counter[str]:
    try:
        program = record_outline(model, args, dict(sorted(kwargs.items()))).program
    except AutoparError:
        return Counter()
    assert isinstance(program, RecordedForward)
    made = (f"torch.tensor({x.reshape(-1)[:NUM_SHOWN].tolist()})" for x in program.constants.values())
    return Counter(_described(node) for node in program.graph.nodes if node.op == "call_function") + Counter(made)


def _described(node: Node) -> str:
    """An op with its numbers; tensors are those of any op."""
    given = pytree.tree_map_only(Node, lambda _: "...", (node.args, dict(node.kwargs)))
    named = [f"{name}={x}" for name, x in given[1].items()]
    return f"{description(str(node.target))}({', '.join([*map(str, given[0]), *named])})"


def _first_of(ops: Counter[str]) -> str:
    return next(iter(ops), "less")
