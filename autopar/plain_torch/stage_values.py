"""`check_stages`: the stages of an exported file compute what the model does, whatever its forward keeps in attributes.

All run on fake tensors, and a value is known by the ops that made it (`Histories`), down to parameters and arguments.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.kept_attributes import Snapshot
from autopar.plain_torch.module_calls import ExampleRun, fake_batch
from autopar.plain_torch.run_layout import namespace_of
from autopar.torch_compat import (
    EagerDispatchMode,
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    pytree,
    without_dispatch_modes,
)

# Names in an error.
_MOST_NAMES = 3


class Histories(EagerDispatchMode):
    """Knows how the contents of each storage were made: those of one digest were made by the same ops of the same."""

    def __init__(self) -> None:
        super().__init__()
        self._contents: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage takes the place of another

    def keep(self, x: torch.Tensor, contents: str) -> None:
        """Let `x` hold `contents`, a name or a digest."""
        self._contents[_storage(x)] = contents
        self._alive.append(x)

    def of(self, x: torch.Tensor) -> str:
        """The digest of a tensor: its storage's, and which part of it the tensor is."""
        if _storage(x) not in self._contents:
            self.keep(x, _constant(x))
        place = (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg())
        return _digest(self._contents[_storage(x)], *place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        made = _digest(func, *(self.of(x) if isinstance(x, torch.Tensor) else x for x in given))
        known = {_storage(x) for x in tensors}
        output = func(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        fresh = [x for x in results if _storage(x) not in known]
        for number, x in enumerate((*_written(func, args, kwargs), *fresh)):
            self.keep(x, _digest(made, number))
        return output


@dataclass(frozen=True)
class _StageCall:
    """A call of the model or of a stage: the first tensor of its output, (module, digest of its first tensor) of each
    call of a module, and the attributes that hold something else now.
    """

    output: torch.Tensor
    results: tuple[tuple[str, str], ...]
    attributes: frozenset[str]


def check_stages(text: str, example: ExampleRun) -> None:
    """PlanError if the stages of the file `text`, one after the other, compute something else than the model does.

    One call is enough: a model whose next call reads what this one leaves in an attribute has no plan.
    """
    names, histories = namespace_of(text), Histories()
    models = [skeleton(example.model) for _ in range(1 + names["NUM_STAGES"])]
    for stage, part in enumerate(models[1:]):
        names["keep_stage"](part, stage)
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = _batch(example, histories)
        for model in models:
            _give_names(model.to_empty(device="cpu"), example, histories)
        for stage in range(1, names["NUM_STAGES"]):
            first = models[0].get_submodule(names["first_module"](stage))
            first.register_forward_pre_hook(_as_sent, with_kwargs=True)
        whole = _called(models[0], args, kwargs, histories)
        sent, batch = [], dict(zip(names["ARGUMENTS"], args)) | kwargs
        for stage, part in enumerate(models[1:]):
            try:
                found = _called(part, sent, batch, histories)
            except Exception as error:  # whatever the model's code raises without what others keep for it
                told = f"{type(error).__name__}: {error}".splitlines()[0]
                raise _refusal(f"stage {stage} does not run by itself ({told})", whole.attributes) from error
            own = [name for name, (owner, _) in names["MODULES"].items() if owner == stage]
            _check_modules(stage, own, found, whole)
            sent = [found.output]
    if histories.of(sent[0]) != histories.of(whole.output):
        raise _refusal("the last stage would return something else than the model", whole.attributes)


def _as_sent(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a stage's first module, whose first tensor is sent, and so is contiguous."""
    if args:
        return (args[0].contiguous(), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: kwargs[name].contiguous()}


def _check_modules(stage: int, own: Sequence[str], found: _StageCall, whole: _StageCall) -> None:
    """PlanError if a module of the stage returns what none of the model returns."""
    expected = {digest for _, digest in whole.results}
    for name, digest in found.results:
        if digest not in expected and any(name == one or name.startswith(f"{one}.") for one in own):
            missing = whole.attributes - found.attributes or whole.attributes
            raise _refusal(f"{name} would return something else on stage {stage} than in the model", missing)


def _refusal(what: str, attributes: Iterable[str]) -> PlanError:
    places = sorted(attributes)
    named = ", ".join(places[:_MOST_NAMES]) + (f" and {len(places) - _MOST_NAMES} more" if places[_MOST_NAMES:] else "")
    why = f": forward changes {named}, which modules of another stage would not see" if places else ""
    return PlanError(
        f"{what}{why}; hand it from module to module as an argument, or set it in the model's own forward, which each"
        " stage runs, or take a plan without stages"
    )


def _called(model: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], histories: Histories) -> _StageCall:
    attributes, results = Snapshot(model), list[tuple[str, str]]()
    for name, module in model.named_modules():

        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            first = next((x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)), None)
            if first is not None:
                results.append((name, histories.of(first)))

        module.register_forward_hook(note)
    with histories:
        output = model(*args, **kwargs)
    first = output if isinstance(output, torch.Tensor) else output[0]
    return _StageCall(first, tuple(results), frozenset(attribute.place for attribute in attributes.changed()))


def _batch(example: ExampleRun, histories: Histories) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = fake_batch(example)
    for number, x in enumerate(pytree.tree_leaves(batch)):
        if isinstance(x, torch.Tensor):
            histories.keep(x, f"argument {number}")
    return batch


def _give_names(model: nn.Module, example: ExampleRun, histories: Histories) -> None:
    """Let parameters and buffers be known by their names."""
    first: dict[int, str] = {}  # of those with several names
    for name, x in _tensors(example.model):
        first.setdefault(id(x), name)
    names = {name: first[id(x)] for name, x in _tensors(example.model)}
    for name, x in _tensors(model):
        histories.keep(x, names[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor))


def _constant(x: torch.Tensor) -> str:
    """The contents of a tensor that no op has made: a constant of the model's code, or one without contents."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return f"without contents {tuple(x.shape)} {x.dtype}"
    with without_dispatch_modes():
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        return hashlib.blake2b(whole.cpu().numpy().tobytes()).hexdigest()


def _storage(x: torch.Tensor) -> int:
    return StorageWeakRef(x.untyped_storage()).cdata


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
