"""Cases on ranks of a device: the emulated one, whose process groups keep NCCL's rules, or a GPU that they share."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from tests.device.cases import CASES
from tests.device.emulated import NAME, content_of
from tests.device.nccl_rules import Transfer, traffic
from tests.journey.case import PP, Run
from tests.journey.runs import _SETTINGS, Outcome, _planned_by_hand, _Setting

PP_ONLY = "pp"
SETTINGS = {**_SETTINGS, PP_ONLY: _Setting((4,), ("pp",), num_microbatches=4)}
Launches = list[tuple[str, tuple[Transfer, ...]]]
_meshes: dict[tuple[str, str], Any] = {}


class OnDevice(Run):
    """Under autopar on a device, on this rank; `options` are added to those of `autopar.compile`."""

    def __init__(self, setting: str, options: dict[str, Any], device: str) -> None:
        self.setting, self.options, self._how = setting, options, SETTINGS[setting]
        if (device, setting) not in _meshes:
            made = init_device_mesh(device, self._how.shape, mesh_dim_names=self._how.axis_names)
            _meshes[device, setting] = made
        self.mesh = _meshes[device, setting]

    def compile(self, model: nn.Module, **options: Any) -> nn.Module:
        options = {"cluster": "free-links", "num_microbatches": self._how.num_microbatches} | options | self.options
        return autopar.compile(model, self.mesh, **options)

    def step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.setting in (PP, PP_ONLY):
            return model.train_step(*args, **kwargs)
        return super().step(model, *args, **kwargs)

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Those of this rank's stages."""
        return [(fqn, p) for fqn, p in super().named(model) if not isinstance(p, ParameterElsewhere)]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x


def outcome(name: str, setting: str, options: dict[str, Any], device: str = NAME) -> tuple[Outcome, Launches]:
    """What this rank saw of a case of `CASES`, and what it sent and received point to point."""
    run, how = OnDevice(setting, options, device), SETTINGS[setting]
    torch.manual_seed(0)
    traffic.launches.clear()
    with warnings.catch_warnings(), _planned_by_hand(how.by_hand) if how.by_hand else nullcontext():
        warnings.simplefilter("ignore")
        numbers = CASES[name](run)
    found = {key: content_of(x.detach()).clone().cpu() for key, x in numbers.items()}
    dist.barrier()
    return Outcome(found), list(traffic.launches)
