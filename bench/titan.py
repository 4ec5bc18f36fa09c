"""torchtitan's Llama 3 of the size of the others, split by torchtitan's own `parallelize_llama`.

Needs what requirements-torchtitan.txt names. Attention is torchtitan's ScaledDotProductAttention: flex_attention, which
its language models take, cannot train on a CPU.
"""

import tests.trainers.titan_on_cpu  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

WIDTH, INNER, LAYERS, HEADS, KEY_HEADS, WORDS, MOST_TOKENS = 256, 688, 4, 16, 4, 1024, 256


class Llama(nn.Module):
    """torchtitan's model and its cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _config().build()
        self.body.init_states()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.body(tokens).flatten(0, 1), labels.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss


def sharded(model: Llama, *, replicas: int = 1, shards: int = 1, tp: int = 1, reshards: str = "default") -> Llama:
    """`model` as torchtitan's trainer splits it, with sequence parallelism beside tensor parallelism.

    `replicas`, `shards`: ranks of data parallelism, and of FSDP within each. `reshards`: its policy after forward.
    """
    backend = "partial_dtensor"  # "spmd_types" wants inputs and loss as its trainer makes them
    set_spmd_backend(backend)
    sizes = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp, "cp": 1, "pp": 1, "ep": 1}
    dims = ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend=backend)
    dims.build_mesh()
    parallelize_llama(
        model.body,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=backend, fsdp_reshard_after_forward=reshards),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # its trainer divides the loss in place of gradients, by a sum gloo has not
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(replicas * shards))
    return model


def _config() -> llama3.Llama3Model.Config:
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=MOST_TOKENS, theta=10000, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=KEY_HEADS,
        hidden_dim=INNER,
        rope=rope,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    table = Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT)
    head = Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH))
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT)
    sizes = {"dim": WIDTH, "vocab_size": WORDS}
    made = llama3.Llama3Model.Config(**sizes, tok_embeddings=table, norm=norm, lm_head=head, layers=layers)
    set_llama3_sharding_config(made, enable_sp=True)
    return made
