"""Models whose parameters or activations meet parts of tensors between a split product and the next one."""

import torch
from torch import nn

from tests.zoo import BATCH, HEADS, HIDDEN, LAYERS, SEQUENCE, VOCABULARY, Case
from tests.zoo import build as build_of_zoo


class Gated(nn.Module):
    """A product whose outputs are multiplied by what `kind` says, before the product that reads them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.gate, self.scale = nn.Linear(HIDDEN, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = {"gate": lambda: self.gate(x).sigmoid(), "scale": lambda: self.scale, "norm": lambda: 1.0}[self.kind]()
        y = self.up(x).relu() * by
        if self.kind == "norm":
            y = y / y.square().mean(-1, keepdim=True).add(1.0).sqrt()
        return x + self.down(y)


class GatedStack(nn.Module):
    """Such blocks, and a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(kind) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - 1).square().mean()


def _language(kind: str) -> Case:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
        "pad_token_id": None,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    own = {"Qwen3": {"head_dim": HIDDEN // HEADS}, "Qwen2": {"tie_word_embeddings": True}}
    config = getattr(transformers, f"{kind}Config")(**sizes, **own.get(kind, {}))
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return Case(model, (), {"input_ids": ids, "labels": ids}, lambda output: output.loss)


def build(name: str) -> Case:
    """A model of this file, by its class or what gates it, or one of the zoo; float64, the same at each call."""
    if name not in ("Qwen2", "Qwen3", "Olmo2", "Mistral", "gate", "scale", "norm"):
        return build_of_zoo(name)
    torch.manual_seed(0)
    if name[0].islower():
        case = Case(GatedStack(name), (torch.randn(BATCH, SEQUENCE, HIDDEN).double(),), {}, lambda loss: loss)
    else:
        case = _language(name)
    for parameter in case.model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))  # norms are no ones
    return case._replace(model=case.model.double().train())
