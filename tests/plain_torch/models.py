"""Models whose parameters or activations meet parts of tensors between a split product and the next one."""

import torch
import torch.nn.functional as F
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


class Recurrent(nn.Module):
    """An LSTM, whose output is not contiguous, between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(self.table(ids))
        return F.cross_entropy(self.head(output).flatten(0, 1), ids.flatten())


class OwnSizes(nn.Module):
    """Code between split products that divides by the number of features it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).relu()
        return (self.down(y / y.shape[-1] * 4) - 1).square().mean()


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
    own = {
        "Qwen3": {"head_dim": HIDDEN // HEADS},
        "Qwen2": {"tie_word_embeddings": True},
        "Gemma2": {"head_dim": HIDDEN // HEADS, "sliding_window": SEQUENCE // 2},
        "OPT": {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1, "dropout": 0.0},
        "Phi": {"resid_pdrop": 0.0},
        "T5": {
            "d_model": HIDDEN,
            "d_kv": HIDDEN // HEADS,
            "d_ff": 2 * HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | own.get(kind, {}))
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    model = getattr(transformers, f"{kind}For{'ConditionalGeneration' if kind == 'T5' else 'CausalLM'}")(config)
    return Case(model, (), {"input_ids": ids, "labels": ids}, lambda output: output.loss)


LANGUAGE = ("Qwen2", "Qwen3", "Olmo2", "Mistral", "Phi", "OPT", "GPTNeoX", "Gemma2", "T5")
OWN = {"lstm": Recurrent, "own sizes": OwnSizes}


def build(name: str) -> Case:
    """A model of this file, by its class or what gates it, or one of the zoo; float64, the same at each call."""
    if name not in (*LANGUAGE, *OWN, "gate", "scale", "norm"):
        return build_of_zoo(name)
    torch.manual_seed(0)
    if name in OWN:
        x = torch.randint(VOCABULARY, (BATCH, SEQUENCE)) if name == "lstm" else torch.randn(BATCH, HIDDEN).double()
        case = Case(OWN[name](), (x,), {}, lambda loss: loss)
    elif name[0].islower():
        case = Case(GatedStack(name), (torch.randn(BATCH, SEQUENCE, HIDDEN).double(),), {}, lambda loss: loss)
    else:
        case = _language(name)
    for parameter in case.model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))  # norms are no ones
    return case._replace(model=case.model.double().train())
