"""The body of a loop: the ops of one step, known to the process by a name made of its text."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.graph import Op, Slot, Value, resolve


@dataclass(frozen=True)
class LoopBody:
    """`ops` compute `outputs` from `inputs`.

    The first `num_carried` outputs are the first inputs of the next step, the others are what each step gives out.
    Behind the carried inputs are `num_sliced` that each step has its own of, then those that are the same in all.
    """

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    num_carried: int
    num_sliced: int

    @property
    def carried(self) -> tuple[tuple[Value, Value], ...]:
        """(a carried input, the output that it is in the next step)."""
        return tuple(zip(self.inputs[: self.num_carried], self.outputs))

    @property
    def sliced(self) -> tuple[Value, ...]:
        return self.inputs[self.num_carried : self.num_carried + self.num_sliced]

    @property
    def given_out(self) -> tuple[Value, ...]:
        return self.outputs[self.num_carried :]


class BodyName(str):
    """The name of a body. It takes the body along to another process."""

    def __reduce__(self) -> Any:
        return named, (body_called(self),)


_BODIES: dict[str, LoopBody] = {}


def named(body: LoopBody) -> BodyName:
    """The name by which `body_called` knows `body`; equal bodies of all layers and ranks have one."""
    name = BodyName(hashlib.sha256(repr(body).encode()).hexdigest()[:12])
    _BODIES.setdefault(name, body)
    return name


def body_called(name: str) -> LoopBody:
    """The body that `named` gave this name."""
    return _BODIES[name]


@lru_cache(maxsize=1024)
def function_of(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The body as a function of its inputs, which returns its outputs."""
    body, known = body_called(name), dict[str, Any]()

    def written(leaf: Any, op: Op) -> str:
        if isinstance(leaf, tuple):
            return "[" + ", ".join(written(item, op) for item in leaf) + "]"
        if isinstance(leaf, Slot):
            return op.inputs[leaf.index].name
        known[constant := f"constant_{len(known)}"] = leaf
        return constant

    lines = []
    for op in body.ops:
        known[function := f"op_{len(known)}"] = resolve(op.target)
        given = [written(arg, op) for arg in op.args] + [f"{key}={written(arg, op)}" for key, arg in op.kwargs]
        results = ", ".join(value.name for value in op.outputs) + ("," if op.is_tuple else "")
        lines.append(f"{results} = {function}({', '.join(given)})")
    returned = "".join(f"{value.name}, " for value in body.outputs)
    source = f"def body({_names(body.inputs)}):\n    " + "\n    ".join((*lines, f"return ({returned})"))
    exec(compile(source, f"<loop {name}>", "exec"), known)
    return known["body"]


def _names(values: Sequence[Value]) -> str:
    return ", ".join(value.name for value in values)
