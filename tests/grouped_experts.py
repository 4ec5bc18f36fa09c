"""Mixtures of experts with grouped products, in the ways in which torchtitan and others sort and restore tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.expert_loops import CHOSEN, EXPERTS, HIDDEN, INNER, Experts, Layers
from tests.zoo import BATCH, SEQUENCE, VOCABULARY, Case


def _computed(self: Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    import transformers.integrations.moe  # noqa: F401 defines the product in float32

    product, ends = torch.ops.transformers.grouped_mm_fallback, counts.cumsum(0, dtype=torch.int32)
    gate, up = product(rows, self.w_in.transpose(1, 2), ends).split(INNER, -1)
    return product(F.silu(gate) * up, self.w_out.transpose(1, 2), ends)


def _seen(self: Experts, counts: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.seen.add_(counts)  # by which torchtitan balances experts
    return counts


def gathered(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """torchtitan's first form: rows are gathered, and added to their tokens by scatter_add."""
    counts = _seen(self, torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS))
    order = torch.argsort(ids.view(-1), stable=True)
    wide = (order // CHOSEN).reshape(-1, 1).expand(-1, HIDDEN)
    rows = torch.gather(x, 0, wide) * weights.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, wide, _computed(self, rows, counts))


def written(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """torchtitan's second form: rows are written to their places, and multiplied by their tokens' scores."""
    counts = _seen(self, torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS))
    order = torch.argsort(ids.view(-1), stable=True)
    placed = torch.zeros(len(order), HIDDEN)
    placed[order] = _computed(self, x[order // CHOSEN], counts)
    return torch.bmm(weights.reshape(-1, 1, CHOSEN), placed.reshape(-1, CHOSEN, HIDDEN)).squeeze(1)


def marked(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """torchtitan's third form: experts are counted by a mask in which those of each token are True."""
    mask = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter_(-1, ids, True)
    counts, order = _seen(self, mask.sum(dim=0)), torch.argsort(ids.view(-1), stable=True)
    tokens = order // CHOSEN
    return torch.zeros_like(x).index_add(
        0, tokens, _computed(self, x[tokens], counts) * weights.view(-1)[order].reshape(-1, 1)
    )


def counted(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts are counted by bincount, rows selected and added in place."""
    flat = ids.flatten()
    order, out = flat.argsort(), torch.zeros_like(x)
    tokens = order // CHOSEN
    rows = _computed(self, x.index_select(0, tokens), _seen(self, torch.bincount(flat, minlength=EXPERTS)))
    out.index_put_((tokens,), rows * weights.flatten()[order, None], accumulate=True)
    return out


GROUPED: dict[str, Callable] = {form.__name__: form for form in (gathered, written, marked, counted)}


def grouped_case(name: str, num_layers: int) -> Case:
    """The case of a form, with the parameters that it reads."""
    torch.manual_seed(0)
    model = Layers(GROUPED[name], num_layers, chosen=CHOSEN, bias=False)
    for layer in model.layers:
        delattr(layer, "experts")
        layer.register_buffer("seen", torch.zeros(EXPERTS))
    tokens, labels = (torch.randint(VOCABULARY, (BATCH, SEQUENCE)) for _ in range(2))
    return Case(model, (), {"input_ids": tokens, "labels": labels}, lambda output: output)
