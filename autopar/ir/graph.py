"""The IR: a flat, functional, forward graph over whole (unsharded) tensors."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph with its unique name; shapes are global.

    `sum_dtype`: dtype in which its gradient is summed over ranks; None: its own. `stored_dtype`: of a parameter, the
    dtype of the tensor that the optimizer updates and of its gradient, of which this is a cast; None: its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    sum_dtype: torch.dtype | None = None
    stored_dtype: torch.dtype | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Its own, that of sums of its gradient and that in which it is stored."""
        return self.dtype, self.sum_dtype, self.stored_dtype

    @property
    def stored_itemsize(self) -> int:
        """Bytes of an element as it is stored."""
        return (self.stored_dtype or self.dtype).itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole tensor as it is stored."""
        return torch.Size(self.shape).numel() * self.stored_itemsize

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of its gradient while that is summed over ranks."""
        return (self.sum_dtype or self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        stored = "" if self.stored_dtype is None else f" of {short_dtype(self.stored_dtype)}"
        return f"%{self.name}: {short_dtype(self.dtype)}{list(self.shape)}{stored}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder in an op's args for the op's `index`-th tensor input."""

    index: int


@dataclass(frozen=True)
class _Unchanging:
    """A dataclass whose fields never change, with what is computed from them."""

    def once(self, function: Callable[[Self], Result]) -> Result:
        """`function` of this: computed at the first call, and kept as long as this."""
        known = self.__dict__.setdefault("_known", {})
        if function not in known:
            known[function] = function(self)
        return known[function]

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is computed from them, as a hash, may be another in another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Op(_Unchanging):
    """One call of a torch op; `args` and `kwargs` are nested tuples of constants with `Slot(i)` for `inputs[i]`."""

    name: str
    target: str  # "aten.linear.default": the path below torch.ops
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    is_no_grad: bool  # runs under torch.no_grad()
    module: str  # FQN of the module that called it
    line: str  # "model.py:41" of the model's source
    is_tuple: bool = False  # the call returns a tuple or list, even of one
    is_kept_whole: bool = False  # if it has no rule, none is discovered by running it

    @cached_property
    def nameless(self) -> "Op":
        """The op without names, module and line; equal for equal calls, so usable as a cache key."""
        inputs, outputs = (
            tuple([(value.shape, value.dtype, value.needs_grad) for value in values])
            for values in (self.inputs, self.outputs)
        )
        how = self.is_no_grad, self.is_tuple, self.is_kept_whole
        return _nameless(self.target, self.args, self.kwargs, inputs, outputs, how)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:  # of an op that keys caches it is asked for again and again
        return self._hash


@lru_cache(maxsize=4096)
def _nameless(
    target: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    inputs: tuple[tuple[Any, ...], ...],
    outputs: tuple[tuple[Any, ...], ...],
    how: tuple[bool, bool, bool],
) -> Op:
    """One op for equal calls: caches find what is the same object sooner than what equals it; `inputs` and `outputs`:
    the first fields of each value but its name, `how`: the last fields of the op.
    """
    read, made = (tuple(Value("", *each) for each in values) for values in (inputs, outputs))
    is_no_grad, is_tuple, is_kept_whole = how
    return Op("", target, args, kwargs, read, made, is_no_grad, "", "", is_tuple, is_kept_whole)


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph; kind is "parameter", "buffer", "constant" or "argument"."""

    kind: str
    value: Value
    fqn: str  # FQN of a parameter or buffer; name of a constant; path of an argument
    aliases: tuple[str, ...] = ()  # further FQNs of a tied parameter or buffer
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a value: slot `slot` of op `user`, a graph output (user "output") or a write-back ("buffer")."""

    user: str
    slot: int


@dataclass(frozen=True)
class Graph(_Unchanging):
    """The forward of a model. Invariants: ops in topological order; each value has one producer; no op mutates.

    A producer is an op or an input. `constant_ops` depend on no input: they run once at load, on the device in use, and
    yield the "constant" inputs (`constants` holds those that are tensors of the model). `outputs` are the flat outputs,
    each a Value or a Python constant. `mutations` pairs the FQN of a buffer, or of a frozen parameter, with the
    value to write back after the call.
    `argument_spec` and `output_spec` are pytree specs of (args, kwargs) and of the result; `arguments` gives for each
    flat leaf of the call the name of its Input, or the constant that the graph has in its place. `batch_extents`: of a
    stage, whose arguments do not tell, the sizes of dims that the batch is a part of (`uneven_extents.batch_extents`).
    `carried`: of inference, pairs of an output's number and the argument in whose place the next call is given it, as a
    key-value cache (`inference.carried`); it lies as that argument does.
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[str, Value], ...]
    constant_ops: tuple[Op, ...]
    constants: Mapping[str, torch.Tensor]
    arguments: tuple[Any, ...]
    argument_spec: Any
    output_spec: Any
    batch_extents: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    carried: tuple[tuple[int, str], ...] = ()

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Name of each op -> its number."""
        return {op.name: number for number, op in enumerate(self.ops)}

    def of_kind(self, kind: str) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.kind == kind)

    @cached_property
    def placed_outputs(self) -> tuple[Value, ...]:
        """The values of the outputs whose layouts a plan chooses, in order: all but those that are carried."""
        carried = dict(self.carried)
        values = (x for i, x in enumerate(self.outputs) if isinstance(x, Value) and i not in carried)
        return tuple({value.name: value for value in values}.values())

    @cached_property
    def uses(self) -> Mapping[str, tuple[Use, ...]]:
        """Name of each value that is read -> all of its uses, in graph order."""
        uses: dict[str, list[Use]] = defaultdict(list)
        for op in self.ops:
            for slot, value in enumerate(op.inputs):
                uses[value.name].append(Use(op.name, slot))
        for index, value in enumerate(self.outputs):
            if isinstance(value, Value):
                uses[value.name].append(Use("output", index))
        for index, (_, value) in enumerate(self.mutations):
            uses[value.name].append(Use("buffer", index))
        return {name: tuple(of_value) for name, of_value in uses.items()}


def call_key(op: Op) -> Hashable:
    """Target, constants and tensors of the call without any names: equal for ops that cost the same in one layout."""
    tensors = (
        tuple((value.shape, value.dtype, value.needs_grad) for value in values) for values in (op.inputs, op.outputs)
    )
    return op.target, op.args, op.kwargs, *tensors, op.is_no_grad


_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.bool: "b8"}


def short_dtype(dtype: torch.dtype) -> str:
    """The short name of a dtype: f32, bf16, i64, b8, ..."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.").replace("uint", "u").replace("int", "i")


@lru_cache(maxsize=4096)
def resolve(target: str) -> Any:
    """The torch op that `target`, an `Op.target`, names."""
    item: Any = torch.ops
    for part in target.split("."):
        item = getattr(item, part)
    return item


def arguments_of(op: Op) -> dict[str, Any]:
    """All arguments of `op` by their names in its schema, with defaults; tensors stay `Slot`s."""
    schema = resolve(op.target)._schema
    bound = {arg.name: arg.default_value for arg in schema.arguments if arg.has_default_value()}
    bound.update(zip((arg.name for arg in schema.arguments), op.args))
    bound.update(op.kwargs)
    return bound
