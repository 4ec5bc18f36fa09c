"""`FullState`: the state of a sharded module as whole plain tensors, and `save_pretrained` made of it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RankMismatch
from autopar.mesh import PIPELINE
from autopar.runtime.checks.lone_call import next_gathering
from autopar.runtime.dtensor_state import gathered, whole_state
from autopar.runtime.module_runtime import LATER_WAIT_S, Runtime
from autopar.runtime.rank_agreement import is_first, meet, on_every_rank


class FullState(nn.Module):
    """The part of a sharded module's class that gives out and takes whole state."""

    _autopar: Runtime

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The state dict that the model would have on one device: whole plain tensors on the CPU, on every rank.

        Every rank calls this; RankMismatch after five minutes without all of them. One tensor at a time is whole on
        the device. `rank0_only`: the first rank of the mesh has the state, all others an empty dict, which saves host
        memory where one rank writes the file: `state = model.full_state_dict(rank0_only=True)`, then
        `if dist.get_rank() == 0: torch.save(state, path)`. `model.load_state_dict` takes the state back.
        """
        runtime = self._autopar
        runtime.current()
        all_called(runtime, "full_state_dict() or model.save_pretrained")
        own = super().state_dict(keep_vars=True)
        if runtime.elsewhere:
            names = [name for name, _ in self.named_modules(remove_duplicate=False)]
            own = whole_state(own, names, runtime.mesh.get_group(PIPELINE))
        return _whole(own, is_kept=not rank0_only or is_first(runtime.mesh))


def _whole(state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """`state` with `plain_copy` of its tensors; nothing where it is not kept."""
    tensors = {id(x): x for x in state.values() if isinstance(x, torch.Tensor)}  # what is tied stays one tensor
    made = {key: plain_copy(x, is_kept=is_kept) for key, x in tensors.items()}
    if not is_kept:
        return {}
    return {name: made[id(x)] if isinstance(x, torch.Tensor) else x for name, x in state.items()}


def plain_copy(x: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor | None:
    """All of `x` on the CPU, in memory of its own; None where it is not kept. All ranks of its mesh take part."""
    whole = gathered(x) if isinstance(x, DTensor) else x
    if not is_kept:
        return None
    return whole.detach().clone() if whole.device.type == "cpu" else whole.detach().cpu()


def saving_pretrained(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The `save_pretrained` of the sharded class, by that name, if `original` has one that takes a state dict.

    Such methods (transformers, peft) write plain tensors. Every rank calls it: the state is gathered, the first rank
    writes it, and all return once it is written.
    """
    save: Any = getattr(original, "save_pretrained", None)
    if save is None or not {"state_dict", "kwargs"} & set(inspect.signature(save).parameters):
        return {}

    signature = inspect.signature(save)

    def save_pretrained(self: FullState, *args: Any, **kwargs: Any) -> Any:
        mesh = self._autopar.mesh
        state = kwargs.get("state_dict")
        if state is None:
            kwargs["state_dict"] = self.full_state_dict(rank0_only=True)
        elif not self._autopar.elsewhere and any(isinstance(x, DTensor) for x in state.values()):
            all_called(self._autopar, "save_pretrained")
            kwargs["state_dict"] = _whole(state, is_kept=is_first(mesh))
        if "is_main_process" in signature.parameters:
            call = signature.bind(self, *args, **kwargs)
            call.arguments["is_main_process"] = call.arguments.get("is_main_process", True) and is_first(mesh)
            args, kwargs = call.args[1:], call.kwargs
        return on_every_rank(mesh, "save_pretrained", lambda: save(self, *args, **kwargs))

    save_pretrained.__doc__ = save.__doc__
    save_pretrained.__signature__ = signature  # type: ignore[attr-defined]
    return {"save_pretrained": save_pretrained}


def all_called(runtime: Runtime, method: str) -> None:
    """Return once every rank called this `method` of the module; RankMismatch once another one went on without, or
    after a while without all of them.
    """
    place = next_gathering(runtime)
    runtime.calls.begin_gathering()
    try:
        meet(runtime.mesh, place, LATER_WAIT_S, None if runtime.check is None else runtime.calls)
    except RankMismatch as error:
        raise RankMismatch(
            f"rank {dist.get_rank()} called model.{method}(), and not all other ranks did before their next call of the"
            f" model, or within {LATER_WAIT_S:g} s; each holds a part of the tensors: call it on every rank, outside of"
            " `if rank == 0`, and let one rank write the file"
        ) from error
