"""`refuse_hooks`: outputs of a model that are copies of what its loss is computed of, and get no gradient of that."""

from collections.abc import Sequence
from typing import Any

import torch

from autopar.codegen.program import AnyStep, Call, Program, Release, Variable, flat, reads, writes
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Value
from autopar.torch_compat import local_of_caller, module_of_caller

# Lightning's Fabric sets a hook on each output that asks whether Fabric runs backward, and reads no gradient.
_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def copied_outputs(graph: Graph, program: Program) -> frozenset[int]:
    """Positions of the outputs that other ops of the graph read too, but as another tensor than the one returned."""
    steps = [step for step in flat(program.steps) if not isinstance(step, Release)]
    outputs = enumerate(zip(graph.outputs, program.outputs))
    return frozenset(
        number
        for number, (value, (given, layout)) in outputs
        if isinstance(value, Value) and isinstance(given, Variable) and value.needs_grad
        if _is_read_otherwise(steps, value.name, "" if any(one.is_split for one in layout) else given.name)
    )


def _is_read_otherwise(steps: Sequence[AnyStep], name: str, given: str) -> bool:
    """Whether a call reads the value called `name` by a variable that is not made of the one `given`."""
    same, of_given = {name}, {given}
    for step in steps:
        sources = reads(step)
        if isinstance(step, Call):
            if sources & (same - of_given):
                return True
            continue
        for known in (same, of_given):
            if sources & known:
                known |= writes(step)
    return False


def refuse_hooks(x: Any) -> None:
    """From now on hooks on the gradient of `x`, an output of a compiled model, raise AutoparError."""
    if isinstance(x, torch.Tensor) and x.requires_grad:
        for name in ("register_hook", "retain_grad"):
            vars(x)[name] = _refuse


def _refuse(*given: Any) -> Any:
    if module_of_caller() in _FABRIC:
        return torch.Tensor.register_hook(local_of_caller("tensor"), *given)
    raise AutoparError(
        "register_hook or retain_grad of an output of the compiled model, of which the model itself computes other"
        " outputs: a rank computes them of its part, and what is returned is gathered from the parts, so that its"
        " gradient is not that of all. Register a full backward hook on the module that makes the tensor, before"
        " autopar.compile, or return it and compute the loss of it outside of the model"
    )
