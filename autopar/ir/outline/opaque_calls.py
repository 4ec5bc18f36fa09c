"""Opaque calls: while a model is exported, each call of an isomorphic module is one opaque op, and it is recorded.

The code around the modules runs in full, once for each module, and may treat each in its own way. The assumption is
that a module is a function of its arguments, parameters and buffers. Any evidence against it raises Unsure: then the
model is exported as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.ir.export.fake_device import fake_like, replaced_tensors
from autopar.ir.export.pytree_types import register_types
from autopar.ir.outline.chains import CallChain, Chaining, Settling, Unsure, described
from autopar.ir.outline.identical_modules import Alike
from autopar.ir.outline.replaced_forward import replaced_forward
from autopar.torch_compat import (
    FakeTensor,
    below_autograd,
    disable_proxy_modes_tracing,
    function_modes,
    pytree,
    without_function_modes,
)

TARGET = "autopar.block.default"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Body:
    """A module called with one signature.

    `outputs`: the leaves of its result: a constant, ("given", position of a tensor argument), or ("made", position of a
    tensor that the op returns); `made` describes the latter tensors.
    """

    number: int
    fqn: str
    alike: Alike
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    made: str
    spec: Any


@dataclass(frozen=True)
class Record:
    """The record of an export's last run of the model; `calls`: for each opaque op the calls that it is.

    `in_chains`: whether an op may be several calls. `ambient`: the modes in which the model itself is called.
    """

    in_chains: bool = True
    bodies: dict[Any, Body] = field(default_factory=dict)
    calls: list[CallChain] = field(default_factory=list)
    ambient: list[Any] = field(default_factory=list)
    chaining: list[Chaining] = field(default_factory=list)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record another run of the model's `forward`, with the bodies that are known."""
        self.calls.clear()
        self.chaining[:] = [Chaining(self._op)]
        with Settling(*self.chaining) if self.in_chains else nullcontext():
            self.ambient[:] = [_ambient()]
            result = forward(*args, **kwargs)
            register_types(result)
            return self.chaining[0].settle(result)

    def results(self, fqn: str, body: Body, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of module `fqn` for these tensors."""
        made = self.chaining[0].call(fqn, body, tensors)
        return made if self.in_chains else self.chaining[0].settle(made)

    def _op(self, tensors: Sequence[torch.Tensor], chain: CallChain, made: str) -> list[torch.Tensor]:
        results = torch.ops.autopar.block(list(tensors), len(self.calls), made)
        self.calls.append(chain)
        return results


class Index:
    """A placeholder of an integer that numbers modules: it can be passed
    around, but reading its value raises Unsure.
    """

    def _refuse(self, *args: Any) -> Any:
        raise Unsure("the module's forward depends on a number that is another one in each module of its kind")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = (
        __rfloordiv__
    ) = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __invert__ = __and__ = __or__ = __xor__ = (
        __lshift__
    ) = _refuse
    # type: ignore
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = __hash__ = (
        _refuse
    )
    __str__ = __format__ = __round__ = __getattr__ = _refuse  # type: ignore[assignment]


# The op is defined for tracing only. `made` describes its results, so that no other state is needed.
_LIBRARY = torch.library.Library("autopar", "DEF")
_LIBRARY.define("block(Tensor[] inputs, int number, str made) -> Tensor[]")


def _make(inputs: list[torch.Tensor], number: int, made: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype, device, _ in described(made)
    ]


class _Opaque(torch.autograd.Function):
    """The op under autograd, with gradients for the outputs that need them by `made`.

    `anchor`: an input with a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, inputs: list[torch.Tensor], number: int, made: str
    ) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            outputs = torch.ops.autopar.block(inputs, number, made)
        ctx.mark_non_differentiable(*(x for x, (*_, needs_grad) in zip(outputs, described(made)) if not needs_grad))
        return tuple(outputs)


def _make_with_gradient(inputs: list[torch.Tensor], number: int, made: str) -> list[torch.Tensor]:
    with without_function_modes():
        return list(_Opaque.apply(torch.empty(0, requires_grad=True), inputs, number, made))


torch.library.register_fake("autopar::block", _make, lib=_LIBRARY)
_LIBRARY.impl("block", _make_with_gradient, "Autograd")


@contextmanager
def stand_ins(model: nn.Module, groups: tuple[Alike, ...], *, in_chains: bool = True) -> Iterator[Record]:
    """A context in which calls of the members of `groups` are opaque ops; `in_chains`: as of a `Record`.

    Reading the inside of a member raises Unsure.
    """
    record = Record(in_chains)
    members = {fqn: (model.get_submodule(fqn), alike) for alike in groups for fqn in alike.members}
    insides = _insides(model, [module for module, _ in members.values()])
    with ExitStack() as stack:
        for (fqn, (module, alike)), inside in zip(members.items(), insides):
            stack.enter_context(_kept(inside))
            module.__dict__["forward"] = partial(_call, record, fqn, alike, partial(_original, inside))
        everything = [item for inside in insides for item in inside]
        _show(everything, "empty")
        stack.enter_context(_recorded(model, record, everything))
        stack.callback(model.register_forward_pre_hook(lambda *_: _show(everything, "watched")).remove)
        stack.callback(model.register_forward_hook(lambda *_: _show(everything, "empty")).remove)
        yield record


def _recorded(model: nn.Module, record: Record, everything: "list[_Hidden]") -> AbstractContextManager[None]:
    """A context in which the model's forward is recorded; torch.export finds the modules `empty` after an error too."""
    forward = model.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            return record.run(forward, *args, **kwargs)
        except BaseException:
            _show(everything, "empty")
            raise

    return replaced_forward(model, recorded)


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A hidden module: all its attributes, and its tables while the model runs (`watched`) and otherwise (`empty`)."""

    module: nn.Module
    attributes: Mapping[str, Any]
    watched: Mapping[str, Any]
    empty: Mapping[str, Any]


def _insides(model: nn.Module, members: list[nn.Module]) -> list[list[_Hidden]]:
    """For each member, the module and all modules inside it that the rest of the model does not share."""
    seen = {id(module) for module in members}
    rest = [model]
    for module in rest:
        fresh = [child for child in module.children() if id(child) not in seen]
        seen.update(map(id, fresh))
        rest += fresh
    outside = set(map(id, rest))
    return [[_hide(inner) for inner in module.modules() if id(inner) not in outside] for module in members]


def _hide(module: nn.Module) -> _Hidden:
    attributes = dict(module.__dict__)
    watched = {"_modules": _WatchedModules(module._modules)}
    watched |= {name: _Watched(attributes[name]) for name in ("_parameters", "_buffers")}
    return _Hidden(module, attributes, watched, {name: {} for name in watched})


def _show(hidden: list[_Hidden], tables: str) -> None:
    for item in hidden:
        item.module.__dict__.update(getattr(item, tables))


@contextmanager
def _kept(hidden: list[_Hidden]) -> Iterator[None]:
    """A context that restores the modules' present attributes at its end."""
    now = [(item.module, dict(item.module.__dict__)) for item in hidden]
    try:
        yield
    finally:
        for module, attributes in now:
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextmanager
def _original(hidden: list[_Hidden]) -> Iterator[nn.Module]:
    """A context in which the first of the modules, and all inside it, are as they were before hiding."""
    with _kept(hidden):
        for item in hidden:
            item.module.__dict__.clear()
            item.module.__dict__.update(item.attributes)
        yield hidden[0].module


class _Watched(dict):
    """A table of parameters or buffers that raises Unsure if it is read."""

    def _refuse(self, *args: Any) -> Any:
        raise Unsure("the model reads the inside of a module that it also calls")

    # type: ignore[assignment]
    __getitem__ = __setitem__ = __delitem__ = __iter__ = items = keys = values = get = pop = update = _refuse

    def __contains__(self, name: object) -> bool:
        return self._refuse() if super().__contains__(name) else False


class _WatchedModules(_Watched):
    """A table of submodules that allows look-ups, for their plain attributes, but not listing."""

    __getitem__, __contains__ = dict.__getitem__, dict.__contains__  # type: ignore[assignment]


def _ambient() -> Any:
    modes = [type(mode) for mode in function_modes()]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        torch.get_default_dtype(),
        modes,
    )


def _call(record: Record, fqn: str, alike: Alike, original: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a hidden module: an opaque call."""
    if record.ambient != [_ambient()]:
        raise Unsure("a module is called in another grad mode, autocast, default dtype or device than the model")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with without_function_modes():
        _check_apart(tensors)
        same = tuple(next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves)
        key = (id(alike), str(spec), same, tuple(_describe(leaf) for leaf in leaves))
    if key not in record.bodies:
        record.bodies[key] = _run_once(len(record.bodies), fqn, alike, original, args, kwargs)
    body = record.bodies[key]
    made = record.results(fqn, body, tensors)
    return pytree.tree_unflatten([_output(item, tensors, made) for item in body.outputs], body.spec)


def _output(item: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    return {"given": given, "made": made}[item[0]][item[1]] if isinstance(item, tuple) else item


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, FakeTensor):
        return "tensor", tuple(leaf.shape), leaf.stride(), str(leaf.dtype), str(leaf.device), leaf.requires_grad
    if type(leaf) not in _PLAIN:
        raise Unsure(f"a module is called with a {type(leaf).__name__}")
    return type(leaf), repr(leaf)


def _check_apart(tensors: list[torch.Tensor]) -> None:
    if len({x.untyped_storage()._cdata for x in tensors}) < len({id(x) for x in tensors}):
        raise Unsure("tensors that go into or come out of a module share memory")


def _run_once(number: int, fqn: str, alike: Alike, original: Callable[[], Any], args: Any, kwargs: Any) -> Body:
    """Run the module on tensors like the given ones, invisibly to the trace, to learn its results."""
    with _unseen(original, alike) as module:
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake_like, (args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        before = _attributes(module)
        result, output_spec = pytree.tree_flatten(module.forward(*args, **kwargs))
        if _attributes(module) != before or pytree.tree_flatten((args, kwargs))[1] != spec:
            raise Unsure("the module changes its attributes or its arguments")
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(x._version for x in given):
        raise Unsure("the module writes to its arguments")
    made = [x for x in result if isinstance(x, torch.Tensor) and not any(x is y for y in given)]
    _check_apart([*given, *made])
    outputs = tuple(_place(item, given, made) for item in result)
    text = repr(
        [
            (tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), str(x.device), x.requires_grad)
            for x in made
        ]
    )
    return Body(number, fqn, alike, args, kwargs, outputs, text, output_spec)


@contextmanager
def _unseen(original: Callable[[], Any], alike: Alike) -> Iterator[nn.Module]:
    """A context in which the module is as before hiding, with tensors without contents, and is not traced."""
    with (
        disable_proxy_modes_tracing(),
        without_function_modes(),
        original() as module,
        unnumbered(module, alike),
        replaced_tensors(module, fake_like),
    ):
        yield module


def _place(item: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    for kind, tensors in (("given", given), ("made", made)):
        for index, x in enumerate(tensors):
            if item is x:
                return kind, index
    if type(item) not in _PLAIN:
        raise Unsure(f"the module returns a {type(item).__name__}")
    return item


@contextmanager
def unnumbered(module: nn.Module, alike: Alike) -> Iterator[None]:
    """A context in which each of the module's `alike.numbers` is an `Index`."""
    places = [(module.get_submodule(path).__dict__, name) for path, name in alike.numbers]
    values = [table[name] for table, name in places]
    try:
        for table, name in places:
            table[name] = Index()
        yield
    finally:
        for (table, name), value in zip(places, values):
            table[name] = value


def _attributes(module: nn.Module) -> list[Any]:
    """A snapshot that shows whether an attribute was set, or a list or table in one grew."""
    attributes = []
    for inner in module.modules():
        for name, value in inner.__dict__.items():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else ()
            attributes.append((name, id(value), [id(item) for item in inside]))
    return attributes
