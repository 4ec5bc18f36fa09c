"""The state of a run: what a checkpoint holds, taken from the model, its optimizers and all else, and put back."""

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from autopar.elastic.checkpoints import Manifest
from autopar.errors import AutoparError, warn
from autopar.shares.stateful_sampler import StatefulSampler
from autopar.torch_compat import pytree

# By name and not by number, so that stages and other orders of the parameters load it.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
_OTHERS, _VALUES = "others.pt", "values.pt"


@dataclass(frozen=True)
class RunState:
    """The state that is saved and restored. `others`: by name, modules (a moving average) and objects with `state_dict`
    and `load_state_dict`, which are the same on all ranks (a sampler, a learning rate schedule).
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    others: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, item in self.others.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise AutoparError(
                    f"{name}= is saved with the run and expects an object with state_dict() and load_state_dict(...),"
                    f" found {type(item).__name__}"
                )
            if name in ("model", "optimizer"):
                raise AutoparError(f"{name!r} names another part of a checkpoint; call it otherwise")

    @property
    def global_batch(self) -> int | None:
        """Samples of a step by the run's sampler; None if it has none, or several."""
        found = [sum(item.shares) for item in self.others.values() if isinstance(item, StatefulSampler)]
        return found[0] if len(found) == 1 else None

    def tensors(self) -> dict[str, Any]:
        """All tensors, as `torch.distributed.checkpoint` saves and loads them, parts of each on each rank."""
        model, optimizer = get_state_dict(self.model, self.optimizers, options=_BY_NAME)
        modules = {name: get_model_state_dict(item) for name, item in self._modules().items()}
        return {"model": model, "optimizer": optimizer, **modules}

    def shapes(self) -> dict[str, list]:
        """Name -> [shape, dtype] of the model's state, those of other ranks' stages left out."""
        state = get_model_state_dict(self.model)
        return {name: [list(x.shape), str(x.dtype)] for name, x in state.items() if isinstance(x, torch.Tensor)}

    def put_tensors(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Read this rank's parts of all tensors of a checkpoint, and the optimizer's other values."""
        state = self.tensors()
        values = without_values(state)
        dcp.load(state, checkpoint_id=path, process_group=group)
        saved = torch.load(path / _VALUES, weights_only=False)
        if missing := [name for name in values if name not in saved]:
            raise AutoparError(
                f"the checkpoint {path} has no {missing[0]} of the optimizer, nor {len(missing) - 1} more: make the"
                " optimizer as it was, or give another folder"
            )
        state["optimizer"] |= {name: saved[name] for name in values}
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_BY_NAME,
        )
        for name, item in self._modules().items():
            set_model_state_dict(item, state[name])

    def write_others(self, group: dist.ProcessGroup | None) -> bytes | None:
        """All other state, as it is now: the content of the file that the first rank writes; None on all others.

        AutoparError on all ranks if an object's state differs between them.
        """
        states = {name: item.state_dict() for name, item in self.others.items() if not isinstance(item, nn.Module)}
        packed = {name: _packed(state) for name, state in states.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (packed, _random_states()), group=group)
        for name in packed:
            if differ := [rank for rank, (theirs, _) in enumerate(ranks) if not _same(theirs[name], ranks[0][0][name])]:
                raise AutoparError(
                    f"the state of {name} on ranks {differ} differs from that on rank 0: what a run saves is to be the"
                    " same on all ranks, for their number may change (a sampler's position in the whole epoch, not a"
                    " rank's own)"
                )
        if dist.get_rank():
            return None
        file = io.BytesIO()
        states_of_ranks = [states for _, states in ranks]
        is_same = all(_same(_packed(each), _packed(states_of_ranks[0])) for each in states_of_ranks)
        torch.save({"others": packed, "random": states_of_ranks[:1] if is_same else states_of_ranks}, file)
        return file.getvalue()

    def put_others(self, path: Path) -> None:
        """Read the file of `write_others`."""
        saved = torch.load(path / _OTHERS, weights_only=True)
        for name, packed in saved["others"].items():
            if name not in self.others:
                raise AutoparError(
                    f"the checkpoint {path} has the state of {name!r}, this run has only"
                    f" {', '.join(self.others) or 'model and optimizer'}: give all that were saved"
                )
            self.others[name].load_state_dict(torch.load(io.BytesIO(packed), weights_only=False))
        for name in set(self.others) - set(saved["others"]) - set(self._modules()):
            warn(f"the checkpoint {path} has no state of {name!r}: it begins anew")
        random_states = saved["random"]
        if len(random_states) == 1 or dist.get_rank() < len(random_states):
            _put_random_states(random_states[dist.get_rank() % len(random_states)])

    def _modules(self) -> dict[str, nn.Module]:
        return {name: item for name, item in self.others.items() if isinstance(item, nn.Module)}


def without_values(state: dict[str, Any]) -> dict[str, Any]:
    """Take what is no tensor out of the optimizer's state, by name: learning rates and the like of each parameter.

    As items of a checkpoint each would be written as a file of its own within a file, which takes longer than all
    tensors and holds Python's lock, so that training waits.
    """
    values = {name: x for name, x in state["optimizer"].items() if not isinstance(x, torch.Tensor)}
    state["optimizer"] = {name: x for name, x in state["optimizer"].items() if name not in values}
    return values


def save_others(content: bytes, values: dict[str, Any], path: Path) -> None:
    """Write the content that `write_others` gave, and the `values` of all ranks, into the folder of a checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    (path / _OTHERS).write_bytes(content)
    torch.save(values, path / _VALUES)


def check_same_model(path: Path, manifest: Manifest, shapes: Mapping[str, Any], global_batch: int | None) -> None:
    """AutoparError if the checkpoint is of another model, or of another global batch; `shapes`: of all ranks."""
    saved = manifest.tensors
    differ = [
        f"{name}: {_described(saved.get(name))} in the checkpoint, {_described(shapes.get(name))} in the model"
        for name in sorted(set(saved) | set(shapes))
        if saved.get(name) != shapes.get(name)
    ]
    if differ:
        more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise AutoparError(
            f"{path} is a checkpoint of another model ({'; '.join(differ[:3])}{more}): give another folder, or the"
            " model that was trained there"
        )
    if None not in (manifest.global_batch, global_batch) and manifest.global_batch != global_batch:
        raise AutoparError(
            f"{path} was trained with {manifest.global_batch} samples a step, the sampler of this run gives"
            f" {global_batch}: the batch of all ranks together stays, whatever their number; give the sampler shares"
            f" whose sum is {manifest.global_batch}"
        )


def _described(tensor: Any) -> str:
    return "missing" if tensor is None else f"{tensor[1].removeprefix('torch.')}{tensor[0]}"


def _same(one: bytes, other: bytes) -> bool:
    """Whether two packed states have equal content; equal content may be packed in different bytes."""
    if one == other:
        return True
    (left, here), (right, there) = (
        pytree.tree_flatten(torch.load(io.BytesIO(each), weights_only=False)) for each in (one, other)
    )
    return here == there and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else bool(x == y)
        for x, y in zip(left, right)
    )


def _packed(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = cast(tuple, numpy.random.get_state(legacy=True))
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _put_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
