"""Optimizer steps on each rank's parts of parameters, gradients and state, as plain tensors.

An update that goes element by element is the same on parts, and a DTensor takes many times as long to dispatch as a
small part to update. Between two steps the optimizer has the DTensors it was given, its state included.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.torch_compat import has_step_hooks

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
OWN_STEP = "_autopar_local_step"  # marks a step that is autopar's
# Of parameters that a GPU updates together, if none is larger: launches of fewer bytes take longer than their work.
TOGETHER_BYTES = 64 * 2**20


def step_on_parts(optimizer: torch.optim.Optimizer, before: Callable[[torch.optim.Optimizer], None]) -> None:
    """From its next step on, `optimizer` updates parts, if it is one of torch's that go element by element.

    `before` is called first, with the DTensors in their place. One whose `step` was replaced by `offload_optimizer`,
    which knows parameters by their identity, stays as it is.
    """
    if type(optimizer) not in _ELEMENTWISE or hasattr(optimizer, "_autopar_step") or hasattr(optimizer.step, OWN_STEP):
        return
    if not _has_dtensors(optimizer):
        return
    optimizer.step = MethodType(_on_parts(optimizer.step, before), optimizer)


def is_on_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is within a step on parts, which it has in place of its DTensors."""
    return hasattr(optimizer.step, OWN_STEP) and not _has_dtensors(optimizer)


def _has_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(x, DTensor) for group in optimizer.param_groups for x in group["params"])


def _on_parts(step: Callable[..., Any], before: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Any]:
    known: dict[DTensor, _Parts] = {}

    @torch.compiler.disable(reason="an update has parts of this rank in place of DTensors")
    @wraps(step)
    def on_parts(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        # a closure computes gradients of the parameters, and hooks may ask for their norms
        is_whole = (
            closure is not None or has_step_hooks(self) or any(g.get("differentiable") for g in self.param_groups)
        )
        if is_whole:
            return step() if closure is None else step(closure)
        before(self)
        with _on_known_parts(self, known):
            return step()

    setattr(on_parts, OWN_STEP, True)
    return on_parts


class _Parts:
    """This rank's part of a parameter and of its state, in the optimizer's `whole` and `own` state for both."""

    def __init__(self, x: DTensor, whole: dict[str, Any]) -> None:
        self.base = x._local_tensor  # to_local gives another tensor each time
        self.part = x.to_local().detach()
        self.whole, self.values = whole, dict(whole)
        self.own = {name: _local(value) for name, value in whole.items()}
        self.parts = dict(self.own)

    def are_of(self, x: DTensor, state: dict[str, Any]) -> bool:
        """Whether they are those of the parameter as it is now."""
        if x._local_tensor is not self.base or state is not self.whole or not _are_same(state, self.values):
            return False
        gradient = x.grad
        return isinstance(gradient, DTensor) and gradient.placements == x.placements

    def take_back(self, x: DTensor, state: dict[str, Any], made: dict[str, Any]) -> None:
        """Take what a step made of the part's state into that of the parameter."""
        if not _are_same(made, self.parts):
            _take_back(state, made, x, self.part)
            self.whole, self.values, self.own, self.parts = state, dict(state), made, dict(made)


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dicts have the same objects in the same order."""
    return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))


@contextmanager
def _on_known_parts(optimizer: torch.optim.Optimizer, known: dict[DTensor, _Parts]) -> Iterator[None]:
    """A context in which the optimizer has parts in place of DTensors; `known`: those of the last step, and then of
    this one.
    """
    groups, part_of, state = optimizer.param_groups, dict[DTensor, _Parts](), optimizer.state
    with torch.no_grad():
        for group in groups:
            for x in _with_parts(group, state, known):
                part_of[x] = known.get(x) or _Parts(x, state.get(x, {}))
                part_of[x].part.grad = _local(x.grad)
    known.clear()
    try:
        optimizer.param_groups = [small for group in groups for small in _on_parts_of(group, part_of)]
        for x, parts in part_of.items():
            if x in state:
                state[parts.part] = parts.own
        yield
    finally:
        optimizer.param_groups = groups
        with torch.no_grad():
            for x, parts in part_of.items():
                if parts.part in state:
                    parts.take_back(x, state[x], state.pop(parts.part))
                parts.part.grad = None
        known.update(part_of)


def _on_parts_of(group: dict[str, Any], part_of: Mapping[DTensor, _Parts]) -> Iterator[dict[str, Any]]:
    """The group with parts in place of DTensors, cut so that its update needs little memory at a time.

    Where torch may choose, it updates the parts of a GPU together (`foreach`), with temporary tensors as large as all
    of them: here as `in_chunks` cuts them.
    """
    tensors = [part_of[x].part if x in part_of else x for x in group["params"]]
    is_free = (
        group.get("foreach", False) is None and not group.get("fused") and any(x in part_of for x in group["params"])
    )
    if not is_free or not all(x.device.type == "cuda" for x in tensors):
        yield group | {"params": tensors} | ({"foreach": False} if is_free else {})
        return
    for some in in_chunks(tensors):
        yield group | {"params": some}


def together_bytes(sizes: Iterable[int]) -> int:
    """The most bytes of parameters that are updated together, of parameters of these sizes on a GPU."""
    known = [*sizes]
    return max(max(known, default=0), min(TOGETHER_BYTES, sum(known)))


def in_chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in order, in lists of at most `together_bytes`."""
    most = together_bytes(x.nbytes for x in tensors)
    chunks: list[list[torch.Tensor]] = [[]]
    num_bytes = 0
    for x in tensors:
        if num_bytes + x.nbytes > most:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(x)
        num_bytes += x.nbytes
    return chunks


def _with_parts(
    group: dict[str, Any], state: Mapping[torch.Tensor, dict[str, Any]], known: dict[DTensor, _Parts]
) -> list[DTensor]:
    """The parameters of a group whose parts are updated; none if one update of all has others in it too.

    Of `known` parts those are dropped that are of a parameter as it was.
    """
    updated = [x for x in group["params"] if x.grad is not None]
    found = [x for x in updated if _is_known(x, state, known) or _lies_alike(x, state.get(x, {}))]
    is_together = group.get("foreach") or group.get("fused")
    return [] if is_together and len(found) < len(updated) else found


def _is_known(x: torch.Tensor, state: Mapping[torch.Tensor, dict[str, Any]], known: dict[DTensor, _Parts]) -> bool:
    if not isinstance(x, DTensor) or x not in known:
        return False
    if known[x].are_of(x, state.get(x, {})):
        return True
    del known[x]
    return False


def _lies_alike(x: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether a parameter has parts, and its gradient and state lie as it does.

    One of no dims stays whole: state of no dims may be its own or a number, such as the count of steps.
    """
    if not isinstance(x, DTensor) or not x.dim() or not all(type(one) in (Shard, Replicate) for one in x.placements):
        return False
    others = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return x.grad is not None and all(
        isinstance(other, DTensor) and other.placements == x.placements for other in (x.grad, *others)
    )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _take_back(state: dict[str, Any], made: dict[str, Any], x: DTensor, part: torch.Tensor) -> None:
    """Take what a step made of the state of a part into that of its parameter."""
    for name, value in made.items():
        if _local(state.get(name)) is value:
            continue
        is_part = isinstance(value, torch.Tensor) and value.shape == part.shape
        state[name] = (
            DTensor.from_local(value, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
            if is_part
            else value
        )
