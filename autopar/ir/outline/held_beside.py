"""Parameters and buffers that a module holds beside its own: in a list or dict, or under another attribute.

`self.weights = [self.first, self.second]` keeps those of before where others are put in the place of the module's own,
as torch.export does while it traces and autopar.compile for good.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.ir.outline.replaced_forward import replaced_forward

_OF_ALL_MODULES = frozenset(nn.Module().__dict__)


@contextmanager
def moved_along(model: nn.Module) -> Iterator[None]:
    """A context after which what holds parameters and buffers of `model` beside it holds those in their place."""
    held = _HeldBeside(model)
    yield
    held.put()


@contextmanager
def read_as_registered(model: nn.Module) -> Iterator[None]:
    """A context in which the forward of `model` finds its own parameters and buffers wherever it holds them, whatever
    torch.export has put in their place.
    """
    held = _HeldBeside(model)
    if not held.places:
        yield
        return
    forward = model.forward

    def reading(*args: Any, **kwargs: Any) -> Any:
        before = held.put()
        try:
            return forward(*args, **kwargs)
        finally:
            for container, key, own, now in before:
                if _is_there(container, key, now):
                    container[key] = own

    with replaced_forward(model, reading):
        yield


class _HeldBeside:
    """The places in lists, dicts and attributes of a model at which there are its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[int, tuple[dict[str, Any], str]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                self.owners |= {id(x): (table, name) for name, x in table.items() if x is not None}
        self.places: list[tuple[Any, Any, Any]] = []  # (list or dict, key, the tensor or tuple there)
        seen = set[int]()
        for module in model.modules():
            for name, x in module.__dict__.items():
                if name not in _OF_ALL_MODULES:
                    self._note(module.__dict__, name, x, seen)

    def _note(self, container: Any, key: Any, x: Any, seen: set[int]) -> None:
        if isinstance(x, list | dict):
            if id(x) not in seen:
                seen.add(id(x))
                for inner, item in x.items() if isinstance(x, dict) else enumerate(x):
                    self._note(x, inner, item, seen)
        elif self._holds(x):
            self.places.append((container, key, x))

    def _holds(self, x: Any) -> bool:
        return any(map(self._holds, x)) if isinstance(x, tuple) else id(x) in self.owners

    def put(self) -> list[tuple[Any, Any, Any, Any]]:
        """Put what is in the places of the model's own now into those beside: (container, key, what was there, what
        is).
        """
        moved = [(container, key, x, self._now(x)) for container, key, x in self.places]
        moved = [(container, key, x, now) for container, key, x, now in moved if now is not x]
        for container, key, x, now in moved:
            if _is_there(container, key, x):
                container[key] = now
        return moved

    def _now(self, x: Any) -> Any:
        if isinstance(x, tuple):
            items = [self._now(item) for item in x]
            if all(now is item for now, item in zip(items, x)):
                return x
            kind: Any = type(x)
            return kind(*items) if hasattr(x, "_fields") else kind(items)
        if (owner := self.owners.get(id(x))) is None:
            return x
        table, name = owner
        return x if (now := table.get(name)) is None else now


def _is_there(container: Any, key: Any, x: Any) -> bool:
    if isinstance(container, dict):
        return container.get(key) is x
    return key < len(container) and container[key] is x
