"""Models compiled for inference: tokens of one device, and a key-value cache that stays where the plan has it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import AutoparError
from autopar.verify.count_collectives import count_collectives
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
WORDS, ROWS = 64, 8


def slow_devices() -> Cluster:
    """A cluster on which whatever can be split is, but nothing is moved for nothing."""
    return replace(load_cluster("free-links"), name="slow devices", levels=(LinkLevel(0, 1e-7, 1e11),))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def words(length: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(length))


def generates_the_tokens_of_one_device(shape: tuple[int, ...], axes: tuple[str, ...]) -> int:
    truth, mesh = llama(), device_mesh(shape, axes)
    model = autopar.compile(copy.deepcopy(truth), mesh, cluster=slow_devices(), trains=False)
    for length in (5, 9):
        found, expected = (x.generate(words(length), max_new_tokens=24, do_sample=False) for x in (model, truth))
        assert torch.equal(found, expected)
    runtime = model._autopar
    return sum(len(kind.plans) for kind in {id(kind): kind for kind in runtime.kinds.values()}.values())


@pytest.mark.parametrize(("shape", "axes"), [((2, 2), ("dp", "tp")), ((4,), ("tp",))], ids=["2x2", "4"])
def test_it_generates_the_tokens_of_one_device(ranks4: Ranks, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    plans = ranks4.run(generates_the_tokens_of_one_device, shape, axes)
    assert plans == [2] * 4  # one of prefill, one of decode at all lengths


def keeps_its_cache_where_it_is() -> None:
    truth, mesh = llama(), device_mesh((4,), ("tp",))
    model = autopar.compile(copy.deepcopy(truth), mesh, cluster=slow_devices(), trains=False)
    ids = words(6)
    made, expected = model(ids, use_cache=True), truth(ids, use_cache=True)
    token, places = ids[:, -1:], []
    for step in range(6):
        with count_collectives(mesh) as issued:
            made = model(token, past_key_values=made.past_key_values, use_cache=True)
        expected = truth(token, past_key_values=expected.past_key_values, use_cache=True)
        assert type(made.logits) is torch.Tensor and not made.logits.requires_grad
        torch.testing.assert_close(made.logits, expected.logits.detach())
        for own, whole in zip(made.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert isinstance(own.keys, DTensor) and own.keys.shape == whole.keys.shape
            assert own.keys.to_local().numel() * 4 == whole.keys.numel()
            places.append(own.keys.to_local().data_ptr())
            torch.testing.assert_close(own.keys.full_tensor(), whole.keys.detach())
        cache_bytes = made.past_key_values.layers[0].keys.to_local().numel() * 4
        assert step == 0 or max((each.num_bytes for each in issued), default=0) < 4 * cache_bytes / 2
        token = made.logits[:, -1:].argmax(-1)
    assert len(set(places[2:])) == 2  # of both layers, from the second token on


def test_a_cache_stays_where_it_is(ranks4: Ranks) -> None:
    ranks4.run(keeps_its_cache_where_it_is)


def has_no_step() -> None:
    model = autopar.compile(nn.Linear(4, 4), device_mesh((4,), ("dp",)), cluster="free-links", trains=False)
    assert not model(torch.ones(4, 4)).requires_grad
    with pytest.raises(AutoparError, match="compiled for inference"):
        model.train_step(torch.ones(4, 4))


def test_a_model_for_inference_has_no_step(ranks4: Ranks) -> None:
    ranks4.run(has_no_step)


class Attends(nn.Module):
    """Attention with a cache of its own: a pair of tensors, given and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]) -> Any:
        query, *own = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        keys, values = (torch.cat(pair, 2) for pair in zip(past, own))
        found = nn.functional.scaled_dot_product_attention(query, keys, values)
        return self.out(found.transpose(1, 2).flatten(2)), (keys, values)


def refuses_lengths_that_differ() -> list[str]:
    torch.manual_seed(0)
    truth, mesh = Attends(), device_mesh((4,), ("tp",))
    model = autopar.compile(copy.deepcopy(truth), mesh, cluster=slow_devices(), trains=False)
    past = expected = (torch.zeros(ROWS, 4, 2, 16), torch.zeros(ROWS, 4, 2, 16))
    for step in range(16):  # until one program runs all lengths
        x = torch.randn(ROWS, 1, 64, generator=torch.Generator().manual_seed(step))
        found, past = model(x, past)
        result, expected = truth(x, expected)
        torch.testing.assert_close(found, result.detach())
        assert isinstance(past[0], DTensor)
    num_met = model._autopar.num_met
    found, past = model(x, past)
    assert model._autopar.num_met == num_met  # a call that goes on asks nobody
    told = []
    for length in (30, 31 + torch.distributed.get_rank() % 2):
        try:
            model(x, (torch.zeros(ROWS, 4, length, 16), torch.zeros(ROWS, 4, length, 16)))
        except AutoparError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_lengths_that_differ_between_ranks_are_refused_on_all(ranks4: Ranks) -> None:
    for (told,) in ranks4.run(refuses_lengths_that_differ):
        assert "RankMismatch: rank 1 and rank 0 of the mesh were given different arguments" in told
