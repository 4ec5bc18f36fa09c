"""What a case of `cases.py` works with, on one device and on the ranks of a mesh."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar

WORDS, LENGTH, BATCH, STEPS = 64, 16, 8, 20
Numbers = dict[str, Any]
SETTINGS: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp=4": ((4,), ("dp",)),
    "dp=2,tp=2": ((2, 2), ("dp", "tp")),
    "pp=2,dp=2": ((2, 2), ("pp", "dp")),
}


@dataclass
class Work:
    """A case's surroundings: `autopar` and a mesh, or on one device a stand-in that leaves the model as it is."""

    autopar: Any
    mesh: Any
    folder: str  # the same on all ranks

    def path(self, name: str) -> str:
        return str(Path(self.folder) / name)

    @property
    def num_ranks(self) -> int:
        return self.mesh.size()

    @property
    def rank_of_rows(self) -> int:
        """The rank among those that have other rows."""
        return 0 if self.num_ranks == 1 else self.mesh["dp"].get_local_rank()

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks with other rows, and ranks that share their rows."""
        if self.num_ranks == 1:
            return 1, 1
        dp = self.mesh["dp"].size()
        return dp, self.num_ranks // dp


class OneRank:
    """A mesh of one device, without a process group."""

    mesh_dim_names = ()

    @staticmethod
    def size() -> int:
        return 1


class OneDevice:
    """`autopar` for the run that the others are compared with."""

    @staticmethod
    def compile(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
        model.full_state_dict = lambda rank0_only=False: model.state_dict()
        model.full_optimizer_state_dict = lambda optimizer, rank0_only=False: optimizer.state_dict()
        return model


class AllSplit:
    """autopar that plans as if communication cost nothing, so that parameters are split."""

    @staticmethod
    def compile(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        return autopar.compile(model, mesh, cluster="free-links", **options)


OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # by which trainers know of several


def run_case(name: str, setting: str, folder: str) -> Numbers | str:
    """What the case called `name` returns on this rank, or the error that it raised."""
    from tests.trainers import runs

    torch.manual_seed(0)
    mesh: Any = OneRank()
    for variable in OF_RANKS:  # a library that is imported by the tests may have set some
        os.environ.pop(variable, None)
    if setting:
        shape, axes = SETTINGS[setting]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        os.environ.update(told_by_torchrun())
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    forget()
    return runs.case(name)(Work(AllSplit if setting else OneDevice, mesh, folder))


def told_by_torchrun() -> dict[str, str]:
    """The variables by which trainers know which rank this process is."""
    ranks = {f"{prefix}RANK": str(dist.get_rank()) for prefix in ("", "LOCAL_")}
    ranks |= {f"{prefix}WORLD_SIZE": str(dist.get_world_size()) for prefix in ("", "LOCAL_")}
    elastic = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    return ranks | elastic | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def forget() -> None:
    """Drop what accelerate keeps for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama(**options: Any) -> nn.Module:
    """A Llama of two layers, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4 * LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, bos_token_id=1, eos_token_id=2, **options))


def rows(count: int = 64, seed: int = 2) -> list[dict[str, torch.Tensor]]:
    """Sequences of words, each the one before times three: something to learn."""
    starts = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    ids = (starts * 3 ** torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def stacked(items: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as a batch."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
