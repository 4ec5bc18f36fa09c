"""`fitted`: a layout of which the model's own code runs on a rank's part of the heads, tried without ranks."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import PlanError
from autopar.ir.op_facts import ATTENTION, family
from autopar.plain_torch.module_calls import ExampleRun, Shape, fake_call
from autopar.plain_torch.torch_layout import COLUMNS, GATHERED, TABLE, TorchLayout
from autopar.plain_torch.write_torch import write_torch
from autopar.planner.handwritten.fake_ranks import fake_ranks

# (the module that is running, function, numbers)
NumberUse = tuple[str, str, tuple[float, ...]]
_WITH_NUMBERS = """add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv truediv rtruediv itruediv
    true_divide divide floordiv rfloordiv floor_divide mod remainder fmod pow rpow float_power clamp arange linspace
    logspace full full_like scalar_tensor masked_fill baddbmm addmm lerp"""


def namespace_of(text: str) -> dict[str, Any]:
    """The names that a file of this text defines."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "parallelize.py", "exec"), names)
    return names


def fitted(layout: TorchLayout, example: ExampleRun, *, may_divide: bool = True) -> tuple[TorchLayout, str]:
    """(the layout with the attributes that count what is split, "") if attention has a rank's heads then, else the
    layout without that attention, and why: the model's own code would compute something else. `may_divide`: attributes.
    """
    if not layout.tensor_axes:
        return layout, ""
    reason = ""
    for divided in _divisions(layout, example) if may_divide else ({},):
        tried = replace(layout, divided=divided)
        reason = _differs(tried, example)
        if not reason:
            return tried, ""
    left = {name: style for name, style in layout.styles.items() if style in (GATHERED, TABLE)}
    owners = set(_attention_modules(example))
    styles = left | {n: s for n, s in layout.styles.items() if not any(_is_under(n, owner) for owner in owners)}
    without = replace(layout, styles=styles)
    if not styles or len(styles) == len(layout.styles) or _differs(without, example):
        raise PlanError(f"the model's own code does not run on parts of tensors: {reason}")
    return without, f"attention stays whole on {', '.join(layout.names(layout.tensor_axes))}: {reason}"


def _attention_modules(example: ExampleRun) -> Iterator[str]:
    """The modules that compute attention."""
    for graph in example.graphs:
        yield from (op.module for op in graph.ops if _is_attention(op.target))


def _is_under(name: str, owner: str) -> bool:
    """Whether a module is inside of the one that computes attention; of a whole model only its direct members are."""
    return name.startswith(f"{owner}.") if owner else "." not in name


def _is_attention(target: str) -> bool:
    return family(target) == ATTENTION or target.split(".")[1] in ("softmax", "_softmax")


def _divisions(layout: TorchLayout, example: ExampleRun) -> Iterator[dict[str, tuple[str, ...]]]:
    """The attributes to divide: none; the numbers of heads; those and the numbers of features of all heads."""
    yield {}
    heads, features = {}, {}
    for op in (op for graph in example.graphs for op in graph.ops if _is_attention(op.target)):
        shapes = [value.shape for value in op.inputs if len(value.shape) > 3]
        owner = op.module
        if not any(_is_under(name, owner) and style == COLUMNS for name, style in layout.styles.items()):
            continue
        num = {shape[-3] for shape in shapes if shape[-3] > 1}
        total = {shape[-3] * shape[-1] for shape in shapes if shape[-3] > 1}
        numbers = {n: x for n, x in vars(example.model.get_submodule(owner)).items() if type(x) is int}
        fits = {n: x for n, x in numbers.items() if x % layout.num_tensor == 0}
        heads[owner] = tuple(
            n for n, x in fits.items() if x in num and "head" in n and "dim" not in n and "size" not in n
        )
        features[owner] = heads[owner] + tuple(n for n, x in fits.items() if x in total and n not in heads[owner])
    for found in (heads, features):
        if any(found.values()):
            yield {name: attributes for name, attributes in found.items() if attributes}


def _differs(layout: TorchLayout, example: ExampleRun) -> str:
    """How a rank's attention differs in shape from its part of the whole; "" if in nothing."""
    only = replace(layout, data_axes=(), shard_axes=(), recomputed=())
    parallelize = namespace_of(write_torch(only, example.model))["parallelize"]
    whole_run = _seen(example, None)
    if isinstance(whole_run, str):
        return whole_run
    part_run = _seen(example, (parallelize, layout))
    if isinstance(part_run, str):
        return part_run
    expected, found = whole_run.attention, part_run.attention
    split = {name for name, style in layout.styles.items() if style == COLUMNS}
    for (owner, whole), (_, part) in zip(expected, found):
        wanted = whole
        if any(_is_under(name, owner) for name in split) and len(whole) > 3:
            wanted = (*whole[:-3], whole[-3] // layout.num_tensor, *whole[-2:])
        if part != wanted:
            return f"attention of {owner} has {list(part)} on a rank, expected {list(wanted)}"
    if len(expected) != len(found):
        return f"the model calls attention {len(found)} times on a rank, {len(expected)} times on one device"
    for whole, part in zip_longest(whole_run.numbers, part_run.numbers):
        if whole != part:
            return (
                f"{_told(whole)} on one device, {_told(part)} on a rank: numbers of features or heads are a rank's own"
            )
    return ""


def _told(use: NumberUse | None) -> str:
    if use is None:
        return "nothing more is computed with numbers"
    owner, name, numbers = use
    return f"{owner or 'the model itself'} calls {name} with {', '.join(f'{x:.6g}' for x in numbers)}"


class WatchedCalls(TorchFunctionMode):
    """Records the shapes of what attention and softmax read, as (the module that is running, shape), and the numbers
    with which tensors are computed, that may be made of shapes, as (module, function, numbers).
    """

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.attention: list[tuple[str, Shape]] = []
        self.numbers: list[NumberUse] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, F.softmax, torch.softmax, torch.Tensor.softmax):
            query = args[0] if args else kwargs.get("query", kwargs.get("input"))
            self.attention.append((self.running[-1], tuple(query.shape)))
        name = getattr(func, "__name__", "").strip("_").removesuffix("_")
        if name in _WITH_NUMBERS.split():
            numbers = tuple(float(x) for x in (*args, *kwargs.values()) if type(x) in (int, float))
            if numbers:
                self.numbers.append((self.running[-1], name, numbers))
        return func(*args, **kwargs)


def _seen(example: ExampleRun, parallel: Any) -> WatchedCalls | str:
    """The calls of one device, or of a rank under (`parallelize`, layout); the error of a run that fails."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs the errors of fake tensors, which are expected here
    try:
        if parallel is None:
            return _run(example)
        parallelize, layout = parallel
        with fake_ranks(layout.mesh) as devices:
            return _run(example, lambda made: parallelize(made, devices))
    except PlanError:
        raise
    except Exception as error:  # whatever the model's code raises on parts
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        logging.disable(disabled)


def _run(example: ExampleRun, change: Any = lambda made: made) -> WatchedCalls:
    running: list[str] = [""]

    def watched(model: nn.Module) -> nn.Module:
        model = change(model)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(lambda *_: running.pop() and None)
        return model

    with WatchedCalls(running) as seen:
        fake_call(example, watched)
    return seen
