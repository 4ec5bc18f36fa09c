"""Initialisation of a model on the meta device, module by module, so that
only one module's tensors are whole at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError
from autopar.torch_compat import pytree

Fetch = Callable[[torch.Tensor], torch.Tensor | None]  # meta tensor -> its whole content, None if not yet initialised
Store = Callable[[torch.Tensor, torch.Tensor], None]  # (meta tensor, its new whole content)

# Attributes that need no content. `device` is not among them: an initialisation may make tensors on it.
_SHAPES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad")) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
}


def initialise(model: nn.Module, device: str, fetch: Fetch, store: Store) -> None:
    """Run the initialisation of each module, children before parents as `nn.Module.apply` does, and `store` its
    tensors.

    A model with `_init_weights(module)`, as those of Hugging Face, is initialised by it; tensors that it leaves out,
    and other models, by each module's `reset_parameters()`. The modules keep their meta tensors. AutoparError names a
    tensor that nothing initialises.
    """
    missing = {id(x): (fqn, x) for fqn, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta}
    known = frozenset(missing)
    for owner, top in _children_first(model, model, set()):
        for meta, whole in _written(owner, top, _Real(known, device, fetch)):
            store(meta, whole)
            missing.pop(id(meta), None)
    if missing:
        fqn = next(iter(missing.values()))[0]
        raise AutoparError(
            f"{fqn} is on the meta device and nothing initialises it; expected that its module, a"
            f" {_owner_type(model, fqn)}, has a reset_parameters(); give it one, or build the model on a real device"
        )


def _owner_type(model: nn.Module, fqn: str) -> str:
    return type(model.get_submodule(fqn.rpartition(".")[0])).__name__


def _children_first(module: nn.Module, top: nn.Module, seen: set[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module once, with the innermost module around it that has `_init_weights`."""
    if id(module) in seen:
        return
    seen.add(id(module))
    top = module if hasattr(module, "_init_weights") else top
    for child in module.children():
        yield from _children_first(child, top, seen)
    yield module, top


def _written(owner: nn.Module, top: nn.Module, real: "_Real") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(meta tensor, whole content) of all tensors that the initialisation of `owner` wrote."""
    own = [x for x in (*owner._parameters.values(), *owner._buffers.values()) if x is not None and x.is_meta]
    below = [*owner.parameters(), *owner.buffers()]
    if not own and not (below and all(x.is_meta for x in below)):
        return []  # it would overwrite initialised tensors
    before = owner._parameters.copy(), owner._buffers.copy()
    try:
        with torch.no_grad(), real:
            _initialise(owner, top, real, own)
        return [*real.wholes.values(), *_replaced(before[0], owner._parameters), *_replaced(before[1], owner._buffers)]
    finally:
        owner._parameters, owner._buffers = before


def _initialise(owner: nn.Module, top: nn.Module, real: "_Real", own: list[torch.Tensor]) -> None:
    initialise_one: Any = getattr(top, "_init_weights", None)
    if initialise_one is not None:
        initialise_one(owner)
        if all(id(x) in real.wholes for x in own):
            return
    # torch's MultiheadAttention and Transformer have the private name only
    reset = getattr(owner, "reset_parameters", None) or (getattr(owner, "_reset_parameters", None) if own else None)
    if reset is not None:
        reset()


def _replaced(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(meta tensor, new tensor) of attributes that the initialisation replaced instead of writing to the tensor."""
    for name, old in before.items():
        new = after.get(name)
        if old is not None and old.is_meta and new is not None and not new.is_meta:
            yield old, new.detach()


class _Real(TorchFunctionMode):
    """A mode in which calls get a whole, real tensor for each known meta tensor.

    `wholes`: id of a meta tensor -> it.
    """

    def __init__(self, known: frozenset[int], device: str, fetch: Fetch) -> None:
        super().__init__()
        self.known, self.device, self.fetch = known, device, fetch
        self.wholes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in _SHAPES:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._whole, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self.known:
            return x
        if id(x) not in self.wholes:
            content = self.fetch(x)
            self.wholes[id(x)] = (
                x,
                (torch.empty(x.shape, dtype=x.dtype, device=self.device) if content is None else content),
            )
        return self.wholes[id(x)][1]
