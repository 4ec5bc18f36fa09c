"""Models with `flex_attention` train on ranks as with the same mask written out on one device."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from autopar.ir.attention.flex_op import FLEX
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.verify.check_placements import check
from tests.runtime.as_priced import is_as_priced
from tests.runtime.training import forward_backward, issued, plan_called, planned, traced, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

BATCH, SEQUENCE, HIDDEN, HEADS, KEY_HEADS, SIZE, BLOCK = 4, 16, 32, 4, 2, 8, 4
MESHES = {(4,): ("dp",), (2, 2): ("dp", "tp")}


def documents() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, (BATCH, SEQUENCE)).sort(1).values


class Attention(nn.Module):
    """`is_dense`: the same attention by a tensor of scores, as the truth."""

    def __init__(self, is_dense: bool) -> None:
        super().__init__()
        self.is_dense = is_dense
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.out = nn.Linear(HIDDEN, HEADS * SIZE), nn.Linear(HEADS * SIZE, HIDDEN)
        self.key = nn.Linear(HIDDEN, KEY_HEADS * SIZE, bias=False)  # which softmax would not see
        self.value = nn.Linear(HIDDEN, KEY_HEADS * SIZE)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, HEADS))

    def forward(self, x: torch.Tensor, mask: BlockMask | None, ids: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query = self.query(normed).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        key = self.key(normed).unflatten(-1, (KEY_HEADS, SIZE)).transpose(1, 2)
        value = self.value(normed).unflatten(-1, (KEY_HEADS, SIZE)).transpose(1, 2)

        def sloped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score - self.slopes[h] * (q - k) * 0.5**h

        if self.is_dense:
            at = torch.arange(SEQUENCE)
            distance, head = at[:, None] - at, torch.arange(HEADS).view(-1, 1, 1)
            bias = -self.slopes[head] * distance * 0.5**head
            is_seen = (distance >= 0) & (ids[:, None, :, None] == ids[:, None, None, :])
            bias = bias.masked_fill(~is_seen, -torch.inf)
            attended = F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
        else:
            attended = flex_attention(query, key, value, sloped, mask, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """`how` the mask comes: "inside" the model it is made of the ids, else it is an argument."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(11, HIDDEN)
        self.blocks = nn.ModuleList(Attention(how == "dense") for _ in range(3))
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, mask: BlockMask | None = None) -> torch.Tensor:
        if self.how == "inside":
            mask = mask_of(ids)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def mask_of(ids: torch.Tensor) -> BlockMask:
    def in_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[b, q] == ids[b, k])

    return create_block_mask(in_document, len(ids), None, SEQUENCE, SEQUENCE, device="cpu", BLOCK_SIZE=BLOCK)


def built(how: str) -> Case:
    torch.manual_seed(0)
    model, tokens, ids = Decoder(how), torch.randint(11, (BATCH, SEQUENCE)), documents()
    return Case(model, (tokens, ids, *([mask_of(ids)] if how == "argument" else [])), {}, lambda loss: loss)


def train_under(how: str, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """On every rank: a step of the model under each plan beside the dense one on one device."""
    truth, reports = forward_backward(built("dense")), []
    for kind, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, built(how), mesh)
        found = worst(forward_backward(case), truth, 1e-6)
        reports.append({"kind": kind, "found": found, "issued": issued(case, mesh), "planned": Counter(planned(plan))})
        check(case.model._autopar.current().program, mesh)
    return reports


RING = ("megatron:cp=4", "megatron:cp=4,all_gather", "megatron:cp=4,a2a")
KINDS = {
    (4,): ("searched", "zero3", "random:0", "random:1", *RING),
    (2, 2): ("searched", "megatron:zero3", "random:2", "megatron:cp=2"),
}


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("how", ["inside", "argument"])
def test_trains_like_the_dense_scores_on_one_device(ranks4: Ranks, how: str, shape: tuple[int, ...]) -> None:
    graph = traced(built(how))
    assert sum(op.target == FLEX for op in graph.ops) == 3
    plans = {kind: plan_called(kind, graph, Mesh(shape, MESHES[shape])) for kind in KINDS[shape]}
    for rank, reports in enumerate(ranks4.run(train_under, how, plans)):
        for report in reports:
            assert report["found"][0] < 2e-4, report
            assert is_as_priced(report["issued"], report["planned"], is_exact=True, is_first=rank == 0), report
