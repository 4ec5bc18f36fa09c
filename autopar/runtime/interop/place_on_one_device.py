"""`place_on_one_device`: where a parameter of some stages is among those of the whole model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

_PLACE = "_place_on_one_device"  # attribute of the parameters of a rank that holds some of the model's


@dataclass(frozen=True)
class Place:
    """A parameter among those of the whole model: its FQN, and its number in an optimizer of all parameters, or of all
    that are trained, by how many these are.
    """

    fqn: str
    number: Mapping[int, int]


def place_on_one_device(x: torch.Tensor) -> Place | None:
    """The place of a parameter of a model with stages; None of any other tensor."""
    return getattr(x, _PLACE, None)


def mark_places(module: nn.Module) -> None:
    """Note on each parameter of a module that still has all of them where it is on one device."""
    named = list(module.named_parameters())
    kinds = ([fqn for fqn, x in named if x.requires_grad], [fqn for fqn, _ in named])
    numbers = [(len(kind), {fqn: number for number, fqn in enumerate(kind)}) for kind in kinds]
    for fqn, x in named:
        setattr(x, _PLACE, Place(fqn, {count: kind[fqn] for count, kind in numbers if fqn in kind}))
