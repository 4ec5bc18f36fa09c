"""Models as people write them, in forms the zoo does not have: each trains a step like one device under the plan that
splits most.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from tests.runtime.training import EPS, LEARNING_RATE, whole, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import BATCH, HEADS, HIDDEN, SEQUENCE, VOCABULARY

Built = tuple[nn.Module, tuple, dict]
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": HIDDEN}


def _tokens(model: nn.Module, **more: torch.Tensor) -> Built:
    tokens = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    return model, (), {"labels": tokens.clone(), "input_ids": tokens, **more}


def returns_a_cache() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _tokens(Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=8)))


def takes_a_mask() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=2, n_head=HEADS, **drops)
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[0, 5:] = 0
    return _tokens(GPT2LMHeadModel(config), attention_mask=mask)


def encodes_and_decodes() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS}
    return _tokens(
        T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
    )


def mixes_experts() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _tokens(
        MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, num_local_experts=4))
    )


class Recurrent(nn.Module):
    """embedding, two LSTM layers, linear"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).square().mean()


def recurs() -> Built:
    return Recurrent(), (torch.randint(VOCABULARY, (BATCH, SEQUENCE)),), {}


BUILDERS = (returns_a_cache, takes_a_mask, encodes_and_decodes, mixes_experts, recurs)


def step(model: nn.Module, args: tuple, kwargs: dict) -> dict[str, dict[str, torch.Tensor]]:
    output = model(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    first = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS).step()
    return {
        "first": {"loss": loss.detach()} | first,
        "last": {name: whole(x).detach() for name, x in model.state_dict().items()},
    }


def differences(build: Callable[[], Built]) -> tuple[float, int]:
    """Largest difference to one device, and how many parameters are split."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    mesh, truth_model = device_mesh((2, 2), ("dp", "tp")), copy.deepcopy(model)
    sharded = autopar.compile(model, mesh, args=args, kwargs=kwargs, cluster="free-links")
    found, truth = step(sharded, args, kwargs), step(truth_model, args, kwargs)
    split = sum(isinstance(p, DTensor) and any(x.is_shard() for x in p.placements) for p in sharded.parameters())
    return max(worst(found[when], truth[when], 1e-2)[0] for when in truth), split


@pytest.mark.multirank
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_trains_like_one_device(ranks4: Ranks, build: Callable[[], Built]) -> None:
    for difference, split in ranks4.run(differences, build):
        assert difference < 1e-4  # float32
        assert split > 0


def keywords_in_any_order() -> None:
    torch.manual_seed(0)
    model, _, kwargs = takes_a_mask()
    plan = autopar.plan(model, "dp=2,tp=2", cluster="cpu", kwargs=kwargs)
    autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), kwargs=dict(reversed(kwargs.items())), plan=plan)


@pytest.mark.multirank
def test_plan_fits_whatever_the_order_of_keywords(ranks4: Ranks) -> None:
    ranks4.run(keywords_in_any_order)


def late_recurrent() -> float:
    model, (x,) = Recurrent(), recurs()[1]
    truth = copy.deepcopy(model)
    model = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), cluster="cpu")
    return float((whole(model(x)) - truth(x)).abs().max())


@pytest.mark.multirank
def test_recurrent_parameters_are_sharded_at_the_first_call(ranks4: Ranks) -> None:
    torch.manual_seed(0)
    assert max(ranks4.run(late_recurrent)) < 1e-6
