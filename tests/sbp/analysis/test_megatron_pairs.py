import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.trace import trace
from autopar.sbp.analysis.megatron_pairs import base_name, structure_of
from tests.planner.cases import traced


def kinds_by_module(name):
    graph = traced(name)
    kinds = structure_of(graph).kinds
    return {op.module: kinds[op.name] for op in graph.ops if op.name in kinds}


def test_products_pair_up():
    assert kinds_by_module("mlp") == {
        "blocks.0.0": "column",
        "blocks.0.2": "row",
        "blocks.1.0": "column",
        "blocks.1.2": "row",
        "head": "column",
    }


def test_patches_and_heads_stay_out_of_the_pairs():
    kinds = kinds_by_module("vit")
    assert [kind for module, kind in kinds.items() if "patch" in module] == ["whole"]
    assert kinds["classifier"] == "column"
    assert sum(kind == "row" for kind in kinds.values()) == 4  # two blocks: attention output and second product


def test_convolutions_pair_up():
    kinds = [kind for module, kind in kinds_by_module("vgg13").items() if module.startswith("features")]
    assert kinds == ["column", "row"] * 5


def test_region_is_between_the_products():
    graph = traced("gpt2")
    structure = structure_of(graph)
    inside = {base_name(op) for op in graph.ops if op.name in structure.region}
    assert {"scaled_dot_product_attention", "tanh"} <= inside
    assert not inside & {"layer_norm", "addmm", "linear", "cross_entropy_loss"}


def test_vocabulary_is_the_token_lookup():
    graph = traced("gpt2")
    lookups = [op.module for op in graph.ops if op.name in structure_of(graph).vocabulary]
    assert lookups == ["transformer.wte"]
    assert not structure_of(traced("mlp")).vocabulary


class LatentAttention(nn.Module):
    """As DeepSeek's: queries, keys and values from small latents, which are normalised, and part of the keys beside."""

    def __init__(self) -> None:
        super().__init__()
        self.query_down, self.query_up = nn.Linear(32, 16), nn.Linear(16, 64)
        self.latent_down, self.latent_up = nn.Linear(32, 24), nn.Linear(16, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query_up(_normalised(self.query_down(x))).unflatten(-1, (4, 16)).transpose(1, 2)
        latent, place = self.latent_down(x).split((16, 8), -1)
        key, value = self.latent_up(_normalised(latent)).unflatten(-1, (4, 24)).transpose(1, 2).split((16, 8), -1)
        key = torch.cat((key[..., :8], place[:, None].expand(-1, 4, -1, -1)), -1)
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_latents_stay_whole_and_heads_are_split():
    graph = trace(LatentAttention(), (torch.randn(2, 8, 32),), {})
    structure = structure_of(graph)
    assert {op.module: structure.kinds[op.name] for op in graph.ops if op.name in structure.kinds} == {
        "query_down": "whole",
        "query_up": "column",
        "latent_down": "whole",
        "latent_up": "column",
        "out": "row",
    }
    (attention,) = (op.name for op in graph.ops if base_name(op) == "scaled_dot_product_attention")
    assert attention in structure.region


def test_products_around_a_norm_pair_up_where_no_other_pair_takes_them():
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 8))
    model[1].forward = _normalised
    kinds = structure_of(graph := trace(model, (torch.randn(4, 8),), {})).kinds
    assert [kinds[op.name] for op in graph.ops if op.name in kinds] == ["column", "row"]
