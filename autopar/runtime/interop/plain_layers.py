"""Layers outside of a compiled model whose ranks have other rows each: nothing but the model adds up their gradients.

With batch="local" such a layer would be trained on each rank's own rows, and go another way on each rank. It is found
by its gradients, which differ between the ranks; DistributedDataParallel around it makes them equal.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.interop.local_step import is_on_parts
from autopar.runtime.rank_agreement import check_weights

_NONE = -1  # no plain parameters, so that there is nothing to compare


@dataclass
class _ComparedGradients:
    """The state of the comparison.

    `mesh`: of the model through whose rows a gradient last went. `compared`: optimizer -> how many gradients of plain
    parameters it had when these were compared, or _NONE.
    """

    mesh: DeviceMesh | None = None
    compared: "WeakKeyDictionary[torch.optim.Optimizer, int]" = field(default_factory=WeakKeyDictionary)


@functools.cache
def _seen() -> _ComparedGradients:
    return _ComparedGradients()


def note_backward(rows: Iterable[Any], mesh: DeviceMesh) -> None:
    """Remember `mesh` when `rows`, outputs of a model on it or arguments that were computed, get a gradient."""

    def note(_: torch.Tensor) -> None:
        _seen().mesh = mesh

    for x in rows:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x.register_hook(note)


def check_plain_layers(optimizer: torch.optim.Optimizer) -> None:
    """RankMismatch if gradients of the optimizer's plain parameters differ between the ranks, after a backward of a
    model of which each rank has other rows. Every rank calls this; compared at first, and whenever there are more.
    """
    mesh, compared = _seen().mesh, _seen().compared
    if mesh is None or compared.get(optimizer) == _NONE or is_on_parts(optimizer):
        return
    plain = [
        (group, number, x)
        for group in optimizer.param_groups
        for number, x in enumerate(group["params"])
        if not isinstance(x, DTensor)
    ]
    given = [each for each in plain if each[-1].grad is not None]
    if not plain or len(given) <= compared.get(optimizer, 0):
        compared[optimizer] = len(given) if plain else _NONE
        return
    compared[optimizer] = len(given)
    gradients = {f"the gradient of {_name(*each)}": each[-1].grad.to_dense() for each in given}
    remedy = (
        "it is of a layer outside of the compiled model, of which each rank has other rows, and which would be trained"
        ' on these alone: compile the module that has both, give every rank the whole batch (batch="global"), or wrap'
        " the layer in DistributedDataParallel"
    )
    check_weights(mesh, gradients, remedy)


def _name(group: dict[str, Any], number: int, x: torch.Tensor) -> str:
    names = group.get("param_names", ())
    name = names[number] if number < len(names) else f"the optimizer's parameter {number}"
    return f"{name}, of shape {tuple(x.shape)},"
