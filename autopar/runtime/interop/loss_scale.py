"""The scale of a loss by torch.amp.GradScaler, which is given to `train_step` since that runs backward itself."""

import inspect
from typing import Any

import torch
from torch import nn


def take_loss_scale(module: nn.Module, kwargs: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    """Take the GradScaler called `scaler` out of the arguments of a step: the factor of the loss in backward, on every
    rank; None if there is none, or if it is an argument of the model's own.
    """
    scaler = kwargs.get("scaler")
    if not isinstance(scaler, torch.amp.GradScaler) or "scaler" in inspect.signature(module.forward).parameters:
        return None
    del kwargs["scaler"]
    return scaler.scale(torch.ones((), device=device))
