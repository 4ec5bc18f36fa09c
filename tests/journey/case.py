"""What a journey case is: a plain function of a `Run`, and what is expected of it in each setting.

A case is written once and runs on one device, on ranks under autopar in several settings, and under DDP and FSDP2.
It returns numbers by name (loss, gradients, parameters), which must equal those of one device, or it is refused.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

THEMES = (
    "loop",
    "training",
    "by_hand",
    "optimizers",
    "effects",
    "state",
    "state_dicts",
    "checkpoints",
    "files",
    "resumes",
    "weights",
    "edits",
    "inputs",
    "calls",
    "modules",
    "layers",
    "functions",
    "losses",
    "writes",
    "autograd",
    "gradients",
    "hf",
    "compile",
    "habits",
    "daily",
    "around",
    "amp",
    "batches",
    "forms",
    "recipes",
    "tricks",
    "derived",
    "late",
    "numbered",
    "further",
    "texts",
    "rounds",
    "owned",
    "modes",
)

DP, DP_TP, FREE, PP = "dp", "dp x tp", "free links", "pp x dp"
SETTINGS = (DP, DP_TP, FREE, PP)
FORWARD = (DP, DP_TP, FREE)  # those without stages: for cases that call model(...) themselves
DDP, FSDP2 = "DDP", "FSDP2"
PEERS = (DDP, FSDP2)

Numbers = dict[str, torch.Tensor]
TOLERANCE = 1e-4  # relative to the largest entry, in float32


class Run:
    """What a case runs with; this one is one device. `tests/journey/runs.py` has the others."""

    setting = "one device"

    def compile(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model, made parallel: `autopar.compile(model, mesh, **options)`."""
        return model

    def step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a model that returns its loss; with stages that is `train_step`."""
        loss = model(*args, **kwargs)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        return loss.detach()

    def gradients(self, model: nn.Module) -> Numbers:
        """All gradients there are, whole, by FQN."""
        return {f"gradient of {fqn}": self.whole(p.grad) for fqn, p in self.named(model) if p.grad is not None}

    def parameters(self, model: nn.Module) -> Numbers:
        """All parameters, whole, by FQN."""
        return {fqn: self.whole(p.detach()).clone() for fqn, p in self.named(model)}

    def buffers(self, model: nn.Module) -> Numbers:
        """All buffers, whole, by FQN."""
        return {fqn: self.whole(b.detach()).clone() for fqn, b in model.named_buffers()}

    def inner(self, model: nn.Module) -> nn.Module:
        """The user's own module, whatever was put around it."""
        return model

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Parameters under the names that they have on one device."""
        return list(model.named_parameters())

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that may be in parts."""
        return x


@dataclass(frozen=True)
class Case:
    """`title` says in a line what people do. `refused`: setting -> pattern of the error; in all others of `on` the
    numbers are those of one device, up to `tolerance` of the largest entry. `wrong`: setting -> pattern of how the case
    is known to fail there. `peers`: whether it is tried under DDP and FSDP2 too.
    """

    function: Callable[[Run], Numbers]
    theme: str
    title: str
    on: tuple[str, ...] = SETTINGS
    refused: Mapping[str, str] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    peers: bool = True
    tolerance: float = TOLERANCE

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.__name__


def case(
    *,
    on: tuple[str, ...] = SETTINGS,
    refused: str | Mapping[str, str] = "",
    wrong: str | Mapping[str, str] = "",
    peers: bool = True,
    tolerance: float = TOLERANCE,
) -> Callable[[Callable[[Run], Numbers]], Case]:
    """Make a function a case; its docstring is the title. `refused`, `wrong`: a text for all settings, or for some."""

    def by_setting(text: str | Mapping[str, str]) -> Mapping[str, str]:
        return text if isinstance(text, Mapping) else dict.fromkeys(on if text else (), text)

    def made(function: Callable[[Run], Numbers]) -> Case:
        title = " ".join((function.__doc__ or function.__name__).split())
        theme = function.__module__.rpartition(".")[2]
        return Case(function, theme, title, on, by_setting(refused), by_setting(wrong), peers, tolerance)

    return made


def module_of(theme: str) -> ModuleType:
    """The file of a theme."""
    return importlib.import_module(f"tests.journey.cases.{theme}")


def cases_of(theme: str) -> dict[str, Case]:
    """The cases of a theme by name, in order."""
    return {item.name: item for item in vars(module_of(theme)).values() if isinstance(item, Case)}
