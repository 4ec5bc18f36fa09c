"""Attributes that the forward sets: refused by name where the next call would read what this one has left in them.

A generated program calls no modules: what a forward leaves in an attribute is there in no later call.
"""

import copy
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import TraceError, warn
from autopar.torch_compat import pytree

_OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_HOOKS = tuple(name for name in sorted(_OF_ALL_MODULES) if name.startswith("_forward_") and "hooks" in name)
# An attribute of a model: (name, object) of each that its forward calls and that is no submodule of it.
BESIDE = "called_beside"
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict)
_HOLDING = (*_PLAIN, *_CONTAINERS, tuple, torch.Tensor)

Export = Callable[[], ExportedProgram]


@dataclass
class _Reads:
    """The places of attributes that a forward reads: before it sets them, and at any time."""

    before: set[str] = field(default_factory=set)
    all: set[str] = field(default_factory=set)
    is_over: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute whose `value` is another after a forward; `tensors`: those it holds now and did not before.

    `was_there`: also before; `had_value`: and not None.
    """

    owner: Any
    fqn: str
    name: str
    value: Any
    tensors: tuple[torch.Tensor, ...]
    was_there: bool
    had_value: bool

    @property
    def place(self) -> str:
        """Its name from the model on."""
        return f"{self.fqn}.{self.name}".removeprefix(".")


class Snapshot:
    """The attributes of all modules of a model before a forward, and of what it calls besides, containers and plain
    objects with their items, and hooks: transformers installs some in forward, and an attribute says that it has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: list[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, list[Any]]]] = []
        self._items: list[tuple[Any, Any]] = []
        self._of_kinds: dict[type, dict[str, Any]] = {}
        for fqn, owner in (*model.named_modules(), *getattr(model, BESIDE, ())):
            if isinstance(owner, nn.Module):
                self._items += [(owner.__dict__[name], owner.__dict__[name].copy()) for name in _HOOKS]
            own = {name: x for name, x in owner.__dict__.items() if name not in _OF_ALL_MODULES}
            all_there = self._of_kind(type(owner)) | own
            held = {name: items for name, x in all_there.items() if (items := _items(x)) is not None}
            contents = {name: _leaves(held.get(name, x)) for name, x in all_there.items()}
            self._before.append((fqn, owner, own, all_there, contents))
            self._items += [(items, items.copy()) for items in held.values()]

    def changed(self) -> Iterator[Attribute]:
        """The attributes that hold other tensors or numbers now."""
        for fqn, owner, _, before, contents in self._before:
            for name, x in (self._of_kind(type(owner)) | owner.__dict__).items():
                if name in _OF_ALL_MODULES or name == "forward":
                    continue
                given = contents.get(name, [None])
                items = _items(x)
                now = _leaves(x if items is None else items)
                tensors = tuple(y for y in now if isinstance(y, torch.Tensor) and not any(y is z for z in given))
                if tensors or (name in before and _numbers(now) != _numbers(given)):
                    value = x if items is None else copy.copy(x)
                    yield Attribute(owner, fqn, name, value, tensors, name in before, before.get(name) is not None)

    def _of_kind(self, kind: type) -> dict[str, Any]:
        """The attributes that the user's classes give all their instances: `calls = 0`, or a list."""
        if kind not in self._of_kinds:
            users = [each for each in reversed(kind.__mro__) if each not in nn.Module.__mro__]
            named = [(name, x) for each in users for name, x in vars(each).items() if not name.startswith("__")]
            self._of_kinds[kind] = {name: x for name, x in named if isinstance(x, _HOLDING)}
        return self._of_kinds[kind]

    def restore(self) -> None:
        """Give everything the attributes that it had."""
        for _, owner, own, _, _ in self._before:
            for name in [name for name in owner.__dict__ if name not in _OF_ALL_MODULES and name not in own]:
                del owner.__dict__[name]
            owner.__dict__.update(own)
        for container, items in self._items:
            if not _same_items(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)


def keeping_no_state(model: nn.Module, export: Export) -> ExportedProgram:
    """`export()`, which runs the forward of `model` once; TraceError for an attribute that holds state.

    State is a tensor that depends on parameters, buffers or arguments and is read by the next call, not only asked
    whether it is there, or a number with which the next call runs other ops. Such a tensor in place of another value,
    which the forward itself does not read, is for a reader outside, and refused too. Of what else a program does not
    set, a user is told if it was there.
    """
    program, changed = _exported(model, export)
    with_tensors = tuple(attribute for attribute in changed if attribute.tensors)
    if with_tensors:
        reads = _Reads()
        returning = _exported(model, export, reads, returned=with_tensors)[0]
        dependent, changing = _dependent(returning, _is_given), _dependent(returning, _may_change)
        caches = [x for x in with_tensors if x.place not in changing and _is_emptied_by_train(x)]
        changed = [x for x in changed if x not in caches]
        with_tensors = tuple(x for x in with_tensors if x not in caches)
        for attribute in with_tensors:
            if attribute.place in reads.before & dependent and _matters(model, export, with_tensors, program):
                raise _refusal(attribute)
            if attribute.had_value and attribute.place in dependent - reads.all:
                raise TraceError(
                    f"{_line_of(attribute)}the forward leaves a result in attribute {attribute.place}, which a compiled"
                    " model would not set, so that who reads it finds an old value: return it, or have it None in"
                    " __init__ if nobody reads it"
                )
        changed = [x for x in changed if not x.tensors or x.place in dependent]
    numbers = tuple(attribute for attribute in changed if not attribute.tensors)
    if numbers and _exported(model, export, starting=numbers)[0].graph_module.code != program.graph_module.code:
        raise _refusal(numbers[0])
    # not of the settings inside a config, which models write for themselves
    if told := [x for x in changed if x.was_there and (x.tensors or isinstance(x.value, _PLAIN))]:
        warn(
            f"{_line_of(told[0])}the forward sets attribute {', '.join(x.place for x in told[:3])}; a compiled model"
            " leaves it as it is: return what you read later, or register it as a buffer"
        )
    return program


def _matters(model: nn.Module, export: Export, left: tuple[Attribute, ...], program: ExportedProgram) -> bool:
    """Whether a call that begins with tensors in these attributes does otherwise than `program`, or reads a tensor."""
    shapes = [x.value.shape for x in left if isinstance(x.value, torch.Tensor) and not x.had_value]
    if len(shapes) < len(left) or not all(type(n) is int for shape in shapes for n in shape):
        return True
    without_values = (torch.empty(x.value.shape, dtype=x.value.dtype, device="meta") for x in left)
    starting = tuple(replace(x, value=value) for x, value in zip(left, without_values))
    try:
        return _exported(model, export, starting=starting)[0].graph_module.code != program.graph_module.code
    except TraceError:
        return True


def _refusal(attribute: Attribute) -> TraceError:
    if attribute.tensors and type(attribute.value) in _CONTAINERS:
        kind = type(attribute.value).__name__
        return TraceError(
            f"{_line_of(attribute)}the forward keeps state in attribute {attribute.place}: it puts tensors into this"
            f" {kind}, which would still be there at the next call, whether that reads them or not, and a plan would"
            " not keep them: return them from the forward and collect them outside, or register a buffer of a fixed"
            " shape if the forward itself reads them"
        )
    return TraceError(
        f"{_line_of(attribute)}the forward keeps state in attribute {attribute.place}, which the next call reads, and a"
        " plan would not keep it: register it as a buffer with the shape and dtype that it has later, or hand it in as"
        " an argument and return it"
    )


def _exported(
    model: nn.Module,
    export: Export,
    reads: _Reads | None = None,
    *,
    returned: tuple[Attribute, ...] = (),
    starting: tuple[Attribute, ...] = (),
) -> tuple[ExportedProgram, list[Attribute]]:
    """The program and the attributes that the forward changed, which are restored.

    `returned`: attributes whose tensors the program returns besides; those that the forward reads are added to `reads`.
    `starting`: attributes that begin as the forward has left them before.
    """
    snapshot, changed, reads = Snapshot(model), list[Attribute](), reads or _Reads()

    def note(module: nn.Module, args: Any, output: Any) -> Any:
        reads.is_over = True
        changed.extend(snapshot.changed())
        places = {attribute.place for attribute in returned}
        return (output, {x.place: list(x.tensors) for x in changed if x.place in places}) if returned else None

    with ExitStack() as stack:
        stack.callback(snapshot.restore)
        for owner in {id(attribute.owner): attribute.owner for attribute in returned}.values():
            names = {x.name: x.place for x in returned if x.owner is owner}
            stack.enter_context(_reads_noted(owner, names, reads))
        for attribute in starting:
            attribute.owner.__dict__[attribute.name] = attribute.value
        stack.callback(model.register_forward_hook(note).remove)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="The tensor attribute")  # torch's own, of which this file tells more
        return export(), changed


class Unannounced:
    """A first base of a class made for an object that exists: `__init_subclass__` of the object's own class, which may
    want arguments and keep lists of classes, is not called.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@contextmanager
def _reads_noted(owner: Any, places: Mapping[str, str], reads: _Reads) -> Iterator[None]:
    """A context in which the attributes in `places` that are read are added to `reads`."""
    kind, is_set = type(owner), set[str]()

    class Noted(Unannounced, kind):
        def __getattribute__(self, name: str) -> Any:
            if name in places and not reads.is_over:
                reads.all.add(places[name])
                if name not in is_set:
                    reads.before.add(places[name])
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_set.add(name)
            super().__setattr__(name, value)

    Noted.__name__, Noted.__qualname__ = kind.__name__, kind.__qualname__
    owner.__class__ = Noted
    try:
        yield
    finally:
        owner.__class__ = kind


def _is_given(kind: InputKind, placeholder: torch.fx.Node) -> bool:
    return kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)


def _may_change(kind: InputKind, placeholder: torch.fx.Node) -> bool:
    """Whether it may be another in the next call in eval mode: an argument, or a buffer that holds no indices."""
    is_written = kind is InputKind.BUFFER and placeholder.meta["val"].is_floating_point()
    return is_written or kind is InputKind.USER_INPUT


def _is_emptied_by_train(attribute: Attribute) -> bool:
    """Whether it is a dict of a module in eval mode that is empty once the module's own `train()` is called, so that
    what is left in it is of these weights: LeViT's biases of attention.
    """
    owner, name = attribute.owner, attribute.name
    held = owner.__dict__.get(name)
    if type(held) is not dict or not isinstance(owner, nn.Module) or owner.training:
        return False
    if type(owner).train is nn.Module.train:
        return False
    modes, before = [(module, module.training) for module in owner.modules()], dict(held)
    try:
        held[name] = True
        owner.train()
        return not owner.__dict__.get(name)
    finally:
        owner.__dict__[name] = held
        held.clear()
        held.update(before)
        for module, mode in modes:
            module.training = mode


def _dependent(program: ExportedProgram, is_one: Callable[[InputKind, torch.fx.Node], bool]) -> set[str]:
    """The places of attributes, returned beside the output, that depend on an input that `is_one`."""
    nodes = {node.name: node for node in program.graph.nodes}
    specs = program.graph_signature.input_specs
    given = {spec.arg.name for spec in specs if spec.arg.name in nodes and is_one(spec.kind, nodes[spec.arg.name])}
    outputs = [x.arg for x in program.graph_signature.output_specs if x.kind == OutputKind.USER_OUTPUT]
    assert program.call_spec.out_spec is not None, "an exported program knows its outputs"
    _, attributes = pytree.tree_unflatten(outputs, program.call_spec.out_spec)
    return {place for place, own in attributes.items() if any(_reaches(nodes[x.name], given) for x in own)}


def _reaches(node: torch.fx.Node, names: set[str]) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node.name in names:
            return True
        new = [x for x in node.all_input_nodes if x not in seen]
        seen.update(new)
        waiting += new
    return False


def _same_items(a: Any, b: Any) -> bool:
    pairs = zip(a, b) if isinstance(a, list) else zip((*a, *a.values()), (*b, *b.values()))
    return len(a) == len(b) and all(x is y for x, y in pairs)


def _items(x: Any) -> Any:
    """The list or dict that holds the items of a container or of a plain object such as a config; None of all else."""
    if type(x) in _CONTAINERS:
        return x
    inside = getattr(x, "__dict__", None)
    is_plain = type(inside) is dict and not isinstance(x, (nn.Module, torch.Tensor, type)) and not callable(x)
    return inside if is_plain else None


def _numbers(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, _PLAIN)]


def _leaves(x: Any) -> list[Any]:
    """The items of a container of plain containers, or `x` alone."""
    if type(x) not in (*_CONTAINERS, tuple):
        return [x]
    return [leaf for item in (x.values() if isinstance(x, dict) else x) for leaf in _leaves(item)]


def _line_of(attribute: Attribute) -> str:
    """`model.py:41: ` of the last line that sets the attribute outside __init__, or ""."""
    writes = re.compile(rf"\b\w+\.{attribute.name}\b(\[.*\])?\s*([-+*/|]?=[^=]|\.(append|extend|insert|update)\()")
    for kind in type(attribute.owner).__mro__:
        try:
            lines, first = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        function, place = "", ""
        for number, line in enumerate(lines, first):
            if start := re.match(r"\s*(?:async )?def (\w+)", line):
                function = start[1]
            if function != "__init__" and writes.search(line):
                place = f"{os.path.basename(inspect.getfile(kind))}:{number}: "
        if place:
            return place
    return ""
