"""`ModuleWatch`: the state of a module that its program was made from, so that the next call notices changes.

A `ModuleWatch` compares objects by identity, at every call; only if one differs, two results of `describe` are
compared.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError

FORWARD = "_forward_before_autopar"  # where a forward that was set on the instance waits to be traced
# The attributes that every module has, and those that say how a module is called, which a program does not depend on.
_COMMON = frozenset(nn.Module().__dict__) | {"_autopar", "_compiled_call_impl", FORWARD}
_CONTENTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

MOST_STATES = 16  # of a module whose programs are kept
MANY = 4  # changes after which a user is told that each costs a trace

ModuleState = Mapping[str, Any]  # "blocks.0.dropout.p" -> something that compares
_mode_of = itemgetter("training")


@dataclass
class Changes:
    """The states of a module that programs were made for, of which `generation` is the present one."""

    watch: "ModuleWatch | None" = None
    states: dict[int, ModuleState] = field(default_factory=dict)
    generation: int = 0
    num_changes: int = 0
    last: tuple[str, ...] = ()  # names of what changed last

    def take(self, module: nn.Module) -> None:
        """A program was made of the module as it is now."""
        self.watch = ModuleWatch(module)
        self.states[self.generation] = describe(module)

    def of(self, module: nn.Module | None) -> "Changes":
        """The watch of a copy, which has state of its own; None if nothing is planned yet."""
        made = Changes(generation=self.generation)
        if module is not None and self.watch is not None:
            made.take(module)
        return made

    def modes(self, module: nn.Module) -> tuple[bool, ...]:
        """Which modules are in training."""
        return tuple(m.training for m in module.modules()) if self.watch is None else self.watch.modes()

    def is_due(self) -> bool:
        """Whether something is another object than it was."""
        return self.watch is not None and self.watch.has_changed()

    def notice(self, module: nn.Module, *, is_cut: bool) -> bool:
        """Whether the module is no longer what programs were made of; the program of another state may be known.

        AutoparError for assigned `.data` and, if the module `is_cut` into stages, for a module or tensor that is
        another: ranks that do not hold it know nothing of that.
        """
        if not self.is_due():
            return False
        watch, before = self.watch, self.states[self.generation]
        now, current = describe(module), ModuleWatch(module)
        self.watch = current
        assert watch is not None, "a change that is due was watched for"
        watch.check_data()
        changed = differences(before, now)
        if not changed:
            return False
        self.last = tuple(changed)
        held = {*watch.tensors, *current.tensors, *dict(module.named_modules())}
        if is_cut and (refused := [name for name in changed if name in held]):
            raise AutoparError(
                f"{', '.join(refused[:3])} changed (replaced, requires_grad, dtype or layout) after the model was"
                " cut into stages; do it before autopar.compile, or compile for a mesh without a pipeline axis"
            )
        known = next((number for number, state in self.states.items() if not differences(state, now)), None)
        if known is None:
            known = max(self.states) + 1
            self._warn(changed)
            modules = [name for name in changed if isinstance(now.get(name, before.get(name)), Same)]
            if modules or len(self.states) >= MOST_STATES:
                self.states.clear()
        self.generation = known
        self.states.setdefault(known, now)
        return True

    def _warn(self, changed: list[str]) -> None:
        self.num_changes += 1
        if self.num_changes == MANY:
            warnings.warn(
                f"{', '.join(changed[:3])} changed since the last call, and the module is traced anew for the {MANY}th"
                " time; what changes in each step is better an argument, a buffer or no attribute of the module",
                stacklevel=6,
            )


class ModuleWatch:
    """The module as it was: `has_changed()` says whether anything that a program depends on differs, but the mode."""

    @torch.no_grad()
    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_modules()]
        dicts = [each.__dict__ for _, each in named]
        self._dicts = dicts
        self._lengths = list(map(len, dicts))
        names = [[name for name in found if name not in _COMMON] for found in dicts]
        self._read = [(itemgetter(*found), d) for found, d in zip(names, dicts) if found]
        self._values = [read(d) for read, d in self._read]
        changeable = {id(d[name]): d[name] for found, d in zip(names, dicts) for name in found}.values()
        held = [d[name] for d in dicts for name in _CONTENTS]
        hooks = [d[name] for d in dicts[1:] for name in _HOOKS]  # the root's own run at every call
        self._filled = [found for found in (*held, *hooks) if found]
        self._empty = [found for found in (*held, *hooks) if not found]
        self._contents = [tuple(found.values()) for found in self._filled]
        self._mutable = [(x, _copied(x)) for x in changeable if not isinstance(x, (*_PLAIN, tuple)) and _copied(x)]
        self.tensors = dict(_tensors(module))
        self._parameters = [x for x in self.tensors.values() if isinstance(x, nn.Parameter)]
        self._needs_grad = [x.requires_grad for x in self._parameters]
        self._storages = [_storage(x) for x in self._parameters]
        self._memory = list(map(_memory, self._parameters))

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training."""
        return tuple(map(_mode_of, self._dicts))

    def has_changed(self) -> bool:
        """Whether an attribute, a hook below the root, a module, a tensor or what needs a gradient is another now."""
        return (
            any(self._empty)
            or list(map(len, self._dicts)) != self._lengths
            or not _same([read(d) for read, d in self._read], self._values)
            or not _same([tuple(found.values()) for found in self._filled], self._contents)
            or any(_copied(x) != before for x, before in self._mutable)
            or [x.requires_grad for x in self._parameters] != self._needs_grad
            or list(map(_storage, self._parameters)) != self._storages
        )

    @torch.no_grad()
    def check_data(self) -> None:
        """AutoparError for a parameter whose `.data` was assigned: of a DTensor that changes nothing."""
        for (fqn, x), storage, memory in zip(self._named_parameters(), self._storages, self._memory):
            if isinstance(x, DTensor) and _storage(x) != storage and _memory(x) == memory:
                raise AutoparError(
                    f"the .data of parameter {fqn} was assigned; it is a DTensor, whose content stays as it was. Write"
                    f" into it under torch.no_grad() with a DTensor of its layout (x.copy_(distribute_tensor(new,"
                    " x.device_mesh, x.placements))), or give the whole tensor to model.load_state_dict"
                )

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((fqn, x) for fqn, x in self.tensors.items() if isinstance(x, nn.Parameter))


@torch.no_grad()
def describe(module: nn.Module) -> ModuleState:
    """The state that a program depends on, by name: modules, attributes, hooks, and all of tensors but contents."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found[path or "the module"] = Same(each)
        found |= {f"{prefix}{name}": _value(x) for name, x in each.__dict__.items() if name not in _COMMON}
        hooks = {f"{prefix}{name}": tuple(map(Same, each.__dict__[name].values())) for name in _HOOKS if path}
        found |= {name: x for name, x in hooks.items() if x}
    return found | {fqn: _tensor(x) for fqn, x in _tensors(module)}


def differences(before: ModuleState, now: ModuleState) -> list[str]:
    """Names of what differs."""
    return [name for name in {**before, **now} if name not in before or name not in now or before[name] != now[name]]


class Same:
    """Equal to what holds the very same object."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.item is other.item

    __hash__ = None


def _same(now: list[Any], before: list[Any]) -> bool:
    try:
        return now == before  # what is not the same object is compared as such, tensors raise
    except Exception:
        return False


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _memory(x: torch.Tensor) -> int:
    """Where the content of this rank's part is."""
    return x.to_local().data_ptr() if isinstance(x, DTensor) else x.data_ptr()


def _tensor(x: torch.Tensor) -> Any:
    layout = (tuple(x.placements), Same(x.device_mesh)) if isinstance(x, DTensor) else None
    return isinstance(x, nn.Parameter), tuple(x.shape), x.dtype, x.requires_grad, layout


def _value(x: Any) -> Any:
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, torch.Tensor):
        return Same(x), x._version
    copied = _copied(x)
    return (type(x), copied) if copied else Same(x)


def _copied(x: Any) -> Any:
    """The mutable parts of `x`: for containers and objects such as a config the items that compare simply."""
    if isinstance(x, (list, tuple)):
        return [_item(item) for item in x]
    if isinstance(x, (set, frozenset)):
        return sorted(map(repr, x))
    if isinstance(x, torch.Tensor):
        return [x._version] if not x.is_inference() else None
    inside = x if isinstance(x, Mapping) else getattr(x, "__dict__", None)
    if isinstance(x, (nn.Module, type)) or callable(x) or not isinstance(inside, Mapping):
        return None
    return {repr(key): _item(item) for key, item in inside.items()}


def _item(x: Any) -> Any:
    return x if isinstance(x, _PLAIN) else repr(x) if isinstance(x, (list, tuple, dict, set)) else id(x)
