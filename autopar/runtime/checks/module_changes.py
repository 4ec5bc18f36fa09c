"""`ModuleWatch`: the state of a module that its program was made from, so that the next call notices changes.

A `ModuleWatch` looks at every call for writes and compares objects by identity; only if one differs, two results of
`describe` are compared.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, warn
from autopar.ir.export.refused_state import is_of_torch
from autopar.runtime.checks.count_settings import settings_counted
from autopar.runtime.checks.dict_versions import versions_of
from autopar.runtime.checks.held_values import PLAIN, copied, dict_of, is_small, nested_in, reader_of, settings_inside
from autopar.runtime.checks.script_variables import is_of_user, script_variables
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.torch_compat import hooks_of_all_modules, without_function_modes

FORWARD = "_forward_before_autopar"  # where a forward that was set on the instance waits to be traced
# The attributes that every module has, and those that say how a module is called, which a program does not depend on.
_COMMON = frozenset(nn.Module().__dict__) | {"_autopar", "_compiled_call_impl"}
_CONTENTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

MOST_STATES = 16  # of a module whose programs are kept
MANY = 4  # changes after which a user is told that each costs a trace

ModuleState = Mapping[str, Any]  # "blocks.0.dropout.p" -> something that compares
_FUNCTIONS = FunctionType, BuiltinFunctionType
_METHODS = (FunctionType, property, staticmethod)
_mode_of = itemgetter("training")
_needs_grad = attrgetter("requires_grad")


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
        if self.watch is not None and self.generation in self.states and not self.watch.has_changed():
            return
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
        now = {**now, **_stand_ins(module, before, now)}
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
            warn(
                f"{', '.join(changed[:3])} changed since the last call, and the module is traced anew for the {MANY}th"
                " time; what changes in each step is better an argument, a buffer or no attribute of the module"
            )


class ModuleWatch:
    """The module as it was: `has_changed()` says whether anything that a program depends on differs, but the mode.

    Python counts the writes to each dict and `settings_counted` those to DTensors' settings, so that attributes, hooks,
    parameters and what a plain object or dict in an attribute holds are compared only after a write. Parameters that
    are no DTensors, and all other containers in attributes, are compared at every call.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_modules()]
        dicts = [each.__dict__ for _, each in named]
        self._dicts = dicts
        self._lengths = list(map(len, dicts))
        names = [[name for name in attributes if name not in _COMMON] for attributes in dicts]
        self._read = [(itemgetter(*own), d) for own, d in zip(names, dicts) if own]
        self._values = [read(d) for read, d in self._read]
        outside = _outside(module)
        held = [*(d[name] for own, d in zip(names, dicts) for name in own), *(d[name] for name, d in outside)]
        changeable = {id(x): x for each in held for x in (each, *settings_inside(each))}.values()
        contents = [(d, name) for d in dicts for name in _CONTENTS]
        hooks = [(d, name) for d in dicts[1:] for name in _HOOKS]  # the root's own run at every call
        of_all = [({kind: table}, kind) for kind, table in _hooks_of_all().items()]
        self._tables = [(d, name, d[name], tuple(d[name].values())) for d, name in (*contents, *hooks, *of_all)]
        mutable = [(x, y) for x in changeable if not isinstance(x, (*PLAIN, tuple)) and (y := copied(x))]
        self._objects = [(x, y) for x, y in mutable if dict_of(x) is not None]
        inside = [dict_of(x) or {} for x, _ in self._objects]
        uncounted = [*(x for x, _ in mutable if dict_of(x) is None), *nested_in(inside)]
        self._reads, self._contents = map(list, zip(*map(reader_of, uncounted))) if uncounted else ([], [])
        self._object_versions_of = versions_of(inside)
        self._object_versions = self._object_versions_of()
        self.tensors = dict(_tensors(module))
        self._parameters = [x for x in self.tensors.values() if isinstance(x, nn.Parameter)]
        self._memory = [weakref.ref(_memory(x)) for x in self._parameters]
        self._needs_grad, self._storages = _settings(self._parameters)  # kept, so that no other has their addresses
        self._are_counted = all(isinstance(x, (DTensor, ParameterElsewhere)) for x in self._parameters)
        of_classes: list[tuple[Any, Any]] = [(attrgetter(*own), kind) for kind, own in _read_of_classes(module).items()]
        self._of_classes = [*of_classes, *((itemgetter(name), d) for name, d in outside)]
        self._class_values = [read(kind) for read, kind in self._of_classes]
        self._versions_of = versions_of([*dicts, *(table for _, _, table, _ in self._tables)])
        self._see()

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training, as of the last `has_changed()`."""
        return self._modes

    def has_changed(self) -> bool:
        """Whether an attribute, a hook below the root, a module, a tensor or what needs a gradient is another now."""
        if self._objects_differ() or self._classes_differ():
            return True
        is_unwritten = self._versions_of() == self._versions
        if is_unwritten and self._are_counted and self._settings == settings_counted()[0]:
            return False
        if self._tensors_differ() or (not is_unwritten and self._attributes_differ()):
            return True
        self._see()
        return False

    def _objects_differ(self) -> bool:
        """Whether a container or an object that is an attribute holds something else."""
        if not _same([read() for read in self._reads], self._contents):
            return True
        versions = self._object_versions_of()
        if versions != self._object_versions:
            if any(copied(x) != before for x, before in self._objects):
                return True
            self._object_versions = versions
        return False

    def _classes_differ(self) -> bool:
        """Whether a class or a variable outside has another value, or none."""
        return not _read_the_same(self._of_classes, self._class_values)

    def _see(self) -> None:
        self._versions, self._settings = self._versions_of(), settings_counted()[0]
        self._modes = tuple(map(_mode_of, self._dicts))

    def _tensors_differ(self) -> bool:
        return _settings(self._parameters) != (self._needs_grad, self._storages)

    def _attributes_differ(self) -> bool:
        return (
            list(map(len, self._dicts)) != self._lengths
            or not _read_the_same(self._read, self._values)
            or any(d[name] is not table for d, name, table, _ in self._tables)
            or not _same(
                [tuple(table.values()) for _, _, table, _ in self._tables], [held for *_, held in self._tables]
            )
        )

    @torch.no_grad()
    def check_data(self) -> None:
        """AutoparError for a parameter whose `.data` was assigned: of a DTensor that changes nothing."""
        for (fqn, x), storage, memory in zip(self._named_parameters(), self._storages, self._memory):
            if isinstance(x, DTensor) and x.untyped_storage()._cdata != storage._cdata and _memory(x) is memory():
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
    state: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        state[path or "the module"] = Same(each)
        read = {name: x for name, x in each.__dict__.items() if name not in _COMMON}
        if each is module:
            read = {name: x for name, x in read.items() if not _is_around(name, x, module)}
        state |= {f"{prefix}{name}": _value(x) for name, x in read.items()}
        hooks = {f"{prefix}{name}": tuple(map(Same, each.__dict__[name].values())) for name in _HOOKS if path}
        state |= {name: x for name, x in hooks.items() if x}
    for kind, names in _read_of_classes(module).items():
        state |= {f"{kind.__qualname__}.{name}": _value(getattr(kind, name)) for name in names}
    own = {kind: [x for x in hooks.values() if not is_of_torch(x)] for kind, hooks in _hooks_of_all().items()}
    state |= {kind: tuple(map(Same, hooks)) for kind, hooks in own.items() if hooks}
    for name, d in _outside(module):  # of several functions, whose variables may have one name
        state.setdefault(f"the variable {name}", []).append(_value(d[name]))
    first: dict[int, str] = {}  # what is tied lies under its first name
    return state | {fqn: (first.setdefault(id(x), fqn), *_tensor(x)) for fqn, x in _tensors(module)}


def _hooks_of_all() -> dict[str, dict[int, Any]]:
    ways = ("forward", "backward")
    kinds = [f"the {way} {part}hooks of all modules" for way in ways for part in ("", "pre-")]
    return dict(zip(kinds, [hooks for way in ways for hooks in hooks_of_all_modules(way)]))


def _is_around(name: str, x: Any, module: nn.Module) -> bool:
    """Whether an attribute of `module` is what trainers put around its forward, or that forward under another name."""
    is_own = getattr(x, "__self__", None) is module and getattr(x, "__func__", None) is type(module).forward
    return name == "forward" or is_own


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


def _read_the_same(of: list[tuple[Any, Any]], before: list[Any]) -> bool:
    """Whether all that was read of objects is there and the same."""
    try:
        return _same([read(x) for read, x in of], before)
    except (AttributeError, KeyError):
        return False


def _settings(parameters: list[nn.Parameter]) -> tuple[list[bool], list[Any]]:
    """Whether each needs a gradient, and its storage."""
    with without_function_modes():  # asking for them takes longer than the attributes themselves
        return list(map(_needs_grad, parameters)), list(map(torch.Tensor.untyped_storage, parameters))


def _stand_ins(module: nn.Module, before: ModuleState, now: ModuleState) -> ModuleState:
    """The state `before` of parameters in whose place DTensors like them are, put there by torch.func.functional_call:
    programs read these, whether or not they need a gradient.

    AutoparError for a tensor that is otherwise than the parameter was.
    """
    stand_ins = {}
    for prefix, owner in module.named_modules():
        for name, x in owner._parameters.items():
            if x is None or isinstance(x, nn.Parameter):
                continue
            fqn = f"{prefix}.{name}".removeprefix(".")
            tied, _, shape, dtype, _, layout = now[fqn]
            was = before.get(fqn)
            if layout is None or was is None or [tied, shape, dtype, layout] != [was[i] for i in (0, 2, 3, 5)]:
                raise AutoparError(
                    f"a tensor is in the place of parameter {fqn} (torch.func.functional_call?) that is not like it:"
                    f" expected a DTensor of the parameter's shape, dtype and placements, such as p.detach() * 0.5 of"
                    f" the model's own, found {'a plain tensor' if layout is None else layout[0]} of shape {shape} in"
                    f" {dtype}. Cut it by torch.distributed.tensor.distribute_tensor(x, p.device_mesh, p.placements)"
                )
            stand_ins[fqn] = was
    return stand_ins


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _memory(x: torch.Tensor) -> torch.UntypedStorage:
    """The memory of this rank's part; its address may be that of memory which was given back before."""
    return (x.to_local() if isinstance(x, (DTensor, ParameterElsewhere)) else x).untyped_storage()


def _tensor(x: torch.Tensor) -> tuple[Any, ...]:
    layout = (tuple(x.placements), Same(x.device_mesh)) if isinstance(x, DTensor) else None
    return isinstance(x, nn.Parameter), tuple(x.shape), x.dtype, x.requires_grad, layout


def _value(x: Any) -> Any:
    if isinstance(x, PLAIN):
        return type(x), x
    if isinstance(x, torch.Tensor):
        return Same(x), x._version, x.requires_grad
    parts = copied(x)
    return (type(x), parts, *map(copied, settings_inside(x))) if parts else Same(x)


def _read_of_classes(module: nn.Module) -> dict[type, tuple[str, ...]]:
    """The classes of the modules -> what a program depends on of each: its forward and other methods and properties
    of the user's, and plain values.
    """
    kinds = dict.fromkeys(type(each) for each in module.modules())
    return {kind: ("forward", *_names_of(kind)) for kind in kinds}


def _outside(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """The variables of the script that a program depends on: plain values, containers, tensors, configs, functions."""
    found = [(name, d) for name, d in script_variables(module) if name in d]
    return [(name, d) for name, d in found if isinstance(d[name], _FUNCTIONS) or is_small(d[name])]


def _names_of(kind: type) -> list[str]:
    if kind.__module__.startswith("torch."):
        return []
    own = [each for each in kind.__mro__ if each not in nn.Module.__mro__]
    named = dict.fromkeys(name for each in own for name, x in vars(each).items() if isinstance(x, PLAIN))
    methods = [vars(each) for each in own if is_of_user(each)]
    named |= dict.fromkeys(name for names in methods for name, x in names.items() if isinstance(x, _METHODS))
    return [name for name in named if not name.startswith("__")]
