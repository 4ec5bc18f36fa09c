"""Small models whose projections are fused: one parameter, of which the columns are cut in sections."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.analysis.section_signatures import section_signatures
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import I, Layout, S
from autopar.sbp.signature import Strategy
from tests.zoo import Case

WIDTH, HEADS, KEY_HEADS, SIZE = 48, 24, 12, 2
BATCH, TOKENS = 4, 6


class Attention(nn.Module):
    """A block of attention and an MLP; subclasses make queries, keys and values in other ways."""

    def __init__(self, columns: int = 3 * WIDTH, *, has_bias: bool = True) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, columns, bias=has_bias)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[batch, heads, tokens, size] each; here as nanoGPT makes them."""
        return _heads(*self.qkv(x).split(WIDTH, dim=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def _heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in tensors)


class Conv1D(Attention):
    """As GPT-2 in transformers, with the weight as (inputs, outputs) and the batch flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv.weight = nn.Parameter(self.qkv.weight.detach().t().contiguous())

    def heads(self, x):
        flat = torch.addmm(self.qkv.bias, x.view(-1, WIDTH), self.qkv.weight)
        return _heads(*flat.view(*x.shape[:2], -1).split(WIDTH, dim=2))


class Unbound(Attention):
    """As ViT in timm."""

    def heads(self, x):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return qkv.unbind(0)


class Multihead(Attention):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        del self.qkv

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Sliced(Attention):
    """As Phi-3: fewer key heads than query heads, cut by slices."""

    def __init__(self) -> None:
        super().__init__((HEADS + 2 * KEY_HEADS) * SIZE, has_bias=False)

    def heads(self, x):
        qkv = self.qkv(x)
        q, k = HEADS * SIZE, KEY_HEADS * SIZE
        return _heads(qkv[..., :q], qkv[..., q : q + k], qkv[..., q + k :])


class HeadsFirst(Sliced):
    """Seen as heads before they are cut."""

    def heads(self, x):
        qkv = self.qkv(x).unflatten(-1, (-1, SIZE))
        q, k, v = qkv.split((HEADS, KEY_HEADS, KEY_HEADS), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class CutTwice(Attention):
    """Queries, and keys and values, which are cut again behind a bias of their own."""

    def __init__(self) -> None:
        super().__init__(has_bias=False)
        self.bias = nn.Parameter(torch.randn(2 * WIDTH))

    def heads(self, x):
        q, kv = self.qkv(x).split((WIDTH, 2 * WIDTH), dim=-1)
        return _heads(q, *(kv + self.bias).chunk(2, dim=-1))


class Adapted(Attention):
    """As peft's LoRA: the sum of two products is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 3 * WIDTH, bias=False)
        self.qkv.requires_grad_(False)

    def heads(self, x):
        return _heads(*(self.qkv(x) + 2.0 * self.b(self.a(x))).split(WIDTH, dim=2))


class Gated(nn.Module):
    """An MLP whose gate and up projections are one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 96, bias=False), nn.Linear(48, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))


class Model(nn.Module):
    """Two blocks, and the mean of their squared output: [batch, tokens, width] -> []."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    block.__name__: block
    for block in (Attention, Conv1D, Unbound, Multihead, Sliced, HeadsFirst, CutTwice, Adapted, Gated)
}


def model_of(block: str) -> nn.Module:
    """The model of such blocks, in float64; equal on all ranks."""
    torch.manual_seed(0)
    return Model(BLOCKS[block]).double()


def case_of(block: str) -> Case:
    """The model with a batch; its output is its loss."""
    return Case(model_of(block), (batch(),), {}, lambda loss: loss)


def batch() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def plan_in_sections(graph: Graph, mesh: Mesh, *, is_on_all: bool, is_stored_alike: bool) -> Plan:
    """A plan that splits fused projections in sections on the last axis, and on the first by samples, or on all axes.

    `is_stored_alike`: weights are stored in runs of the dim that is read in sections, not of the other one.
    """
    signatures, candidates = section_signatures(graph), annotate(graph, mesh)
    strategies, stored = dict[str, Strategy](), dict[str, Layout]()
    for op in (op for op in graph.ops if op.name in signatures):
        own = signatures[op.name][0]
        batch = [one for one in signatures_of_call(op) if one.outputs[0] == S(0) and not one.role]
        outer = own if is_on_all or not batch else batch[0]
        strategies[op.name] = Strategy((*[outer] * (mesh.ndim - 1), own))
        assert strategies[op.name] in candidates.strategies[op.name]
        for slot, value in enumerate(op.inputs):
            if value.name in candidates.layouts and own.inputs[slot].sections:
                dim = own.inputs[slot].dim if is_stored_alike or len(value.shape) == 1 else 1 - own.inputs[slot].dim
                layout = strategies[op.name].input_layout(slot)
                stored[value.name] = tuple(S(dim) if one.is_split else I for one in layout)
    chosen = fit_assignment(Assignment(strategies, stored, {}, {}), graph, mesh)
    assert all(chosen.strategies[name] == strategy for name, strategy in strategies.items())
    assert all(chosen.layouts[name] == layout for name, layout in stored.items())
    return plan_of(graph, chosen, mesh, load_cluster("free-links"))
