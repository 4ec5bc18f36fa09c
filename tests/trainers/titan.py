"""torchtitan as on a machine without a GPU, which it asks for as it is imported, with data and a Llama 3 of this file.

Imported by the case alone, when torchtitan is there.
"""

import tests.trainers.titan_on_cpu  # noqa: F401

# isort: split
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as distributed
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from tests.trainers.case import LENGTH, WORDS, rows

distributed.set_pg_timeouts = lambda **_: None
WIDTH, HEADS = 32, 4


class NoTokenizer(BaseTokenizer):
    """The data is of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Rows(BaseDataLoader):
    """Each rank's rows, two documents in each."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any
    ) -> None:
        self.num_given, self.parts, self.part, self.size = 0, dp_world_size, dp_rank, local_batch_size
        ends = torch.arange(seq_len // 2 + 2), torch.arange(seq_len - seq_len // 2 - 2)
        self.positions = torch.cat(ends).repeat(local_batch_size, 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        ids = torch.stack([row["input_ids"] for row in rows(256)])
        while True:
            start = (self.num_given * self.parts + self.part) * self.size
            self.num_given += 1
            own = ids[start : start + self.size]
            yield {"input": own, "positions": self.positions}, own.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_given = state_dict["num_given"]


def model_config() -> Any:
    """torchtitan's Llama 3 of two layers, with flex attention."""
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=4 * LENGTH, theta=10000, scaling="none")
    sizes: dict[str, Any] = {"n_layers": 2, "dim": WIDTH, "n_heads": HEADS, "hidden_dim": 2 * WIDTH}
    table = Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT)
    head = Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH))
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=table,
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=head,
        layers=llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex"),
    )


def dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Attention with the mask written out, in place of flex_attention, which torch cannot train with on a CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def _parallelism(num_ranks: int, batch: int, *, in_stages: bool) -> ParallelismConfig:
    if not in_stages:
        return ParallelismConfig(data_parallel_shard_degree=num_ranks)
    return ParallelismConfig(
        data_parallel_shard_degree=num_ranks // 2,
        pipeline_parallel_degree=2,
        pipeline_parallel_microbatch_size=batch // 2,
    )


def trainer(
    parallelize: Callable[..., Any],
    plan: Callable[..., None],
    folder: str,
    *,
    num_ranks: int,
    batch: int,
    steps: int,
    pipeline: Callable[..., Any] | None = None,
) -> Any:
    """torchtitan's own `Trainer`, with a checkpoint each half of the steps, and `losses` beside it.

    `batch`: rows of a rank in a step. `pipeline`: makes the schedule of two stages and two microbatches.
    """
    if num_ranks == 1:
        FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    spec = ModelSpec(
        name="llama3",
        flavor="small",
        model=model_config(),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=plan,
        state_dict_adapter=None,
    )
    training: dict[str, Any] = {"disable_cuda_graphs": True, "mixed_precision_param": "float32"}
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=batch, seq_len=LENGTH, steps=steps, **training),
        parallelism=_parallelism(num_ranks, batch, in_stages=pipeline is not None),
        metrics=MetricsProcessor.Config(log_freq=1),
        compile=CompileConfig(enable=False),
        checkpoint=CheckpointManager.Config(enable=True, interval=steps // 2, last_save_model_only=False),
        debug=DebugConfig(seed=1),
    )
    made = Trainer(config)
    made.losses, made.norms = [], []

    def log(step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        made.losses.append(loss)
        made.norms.append(norm)

    made.metrics_processor.log = log
    return made
