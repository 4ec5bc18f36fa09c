"""Calls of other sizes: the numbers are those of one device, and the plan is kept."""

import copy
import warnings
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.module_runtime import Runtime
from autopar.runtime.sizes import call_kind, kept_plan
from tests.runtime.training import whole
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
VOCABULARY = 32


class Model(nn.Module):
    """A transformer that decides by sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.table(tokens) + self.positions.weight[:length]
        if length > 20:
            hidden = hidden * 2
        return self.head(self.layers(hidden)) * scale


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def made(**options: object) -> tuple[nn.Module, nn.Module, list[str]]:
    """(model on one device, the same made parallel, what is planned and traced from now on)."""
    torch.manual_seed(0)
    truth = Model().double()
    model = autopar.compile(copy.deepcopy(truth), device_mesh((2, 2), ("dp", "tp")), cluster="free-links", **options)
    done: list[str] = []
    runtime: Runtime = model._autopar
    runtime.plan = Noted(runtime.plan, done)
    return truth, model, done


class Noted:
    """A planner that notes its calls."""

    def __init__(self, planner: Callable, done: list[str]) -> None:
        self.planner, self.done = planner, done

    def __call__(self, *args):
        self.done.append("plan")
        return self.planner(*args)

    def peaks(self, plan):
        self.done.append("peak")
        return self.planner.peaks(plan)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(100 * batch + length))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {fqn: whole(p.grad) for fqn, p in model.named_parameters()}
    model.zero_grad()
    return found


def check(truth: nn.Module, model: nn.Module, x: torch.Tensor, **kwargs: object) -> None:
    expected, found = loss_of(truth(x, **kwargs), x), loss_of(model(x, **kwargs), x)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(model), gradients(truth), rtol=1e-7, atol=1e-10)


def lengths_and_batches() -> None:
    truth, model, done = made()
    exports = []
    for batch, length in [(4, 8), (4, 12), (4, 13), (4, 21), (6, 33), (3, 9)]:
        with patch.object(torch.export, "export", wraps=torch.export.export) as export:
            check(truth, model, tokens(batch, length))
        exports.append(export.call_count)
    assert done.count("plan") == 1, done
    (kind,) = {id(kind): kind for kind in model._autopar.kinds.values()}.values()
    assert kind.num_recorded == 3 and len(kind.traces) == 2, "longer ones, by which the model decides, are exported"
    assert exports[1] == exports[2] == exports[-1] == 0 and exports[3] > 0, exports


def test_one_plan_for_lengths_and_batches(ranks4: Ranks) -> None:
    ranks4.run(lengths_and_batches)


def split_lengths(outputs: str) -> None:
    """Positions, and rows of all tokens, are split: one program does for all lengths that divide."""
    truth, model, done = made(outputs=outputs)
    with patch.object(call_kind, "MOST_RECORDED", 2):
        for length in (24, 32, 28, 36, 40, 52, 41, 44):
            check(truth, model, tokens(4, length))
    (kind,) = {id(kind): kind for kind in model._autopar.kinds.values()}.values()
    assert len(kind.sized) == 1 and done.count("plan") == 1, done
    programs = {loaded.source for loaded in model._autopar.loaded.values()}
    assert len(programs) == 5, f"{len(programs)} instead of those of 24, 32, 28, 36 and 41"


def steps() -> None:
    """train_step with a loss function."""
    truth, model, done = made(loss_fn=loss_of)
    for batch, length in [(4, 8), (4, 11), (4, 16), (3, 30)]:
        x = tokens(batch, length)
        expected = loss_of(truth(x), x)
        expected.backward()
        torch.testing.assert_close(model.train_step(x, x), expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients(model), gradients(truth), rtol=1e-7, atol=1e-10)
    assert done.count("plan") == 1, done


@pytest.mark.parametrize("outputs", ["whole", "sharded"])
def test_one_program_for_all_lengths(ranks4: Ranks, outputs: str) -> None:
    ranks4.run(split_lengths, outputs)


def test_steps_of_other_sizes(ranks4: Ranks) -> None:
    ranks4.run(steps)


def local_batches() -> None:
    """Each rank gives its own rows."""
    truth, model, done = made(batch="local")
    rank = torch.distributed.get_rank() // 2
    for batch, length in [(2, 8), (2, 9), (3, 9), (1, 12)]:
        x = tokens(2 * batch, length)
        with torch.no_grad():
            own = slice(rank * batch, (rank + 1) * batch)
            torch.testing.assert_close(model(x[own]), truth(x)[own], rtol=1e-9, atol=1e-12)
    assert done.count("plan") == 1, done


def test_local_batches_of_other_sizes(ranks4: Ranks) -> None:
    ranks4.run(local_batches)


def planned_again() -> None:
    """A plan that was made for other sizes gives way once its calls have taken as long as planning."""
    truth, model, done = made()
    kept_plan.LEAST_PLANNING_S = 0.0
    try:
        check(truth, model, tokens(4, 8))
        (kept,) = next(iter(model._autopar.kinds.values())).plans
        with warnings.catch_warnings(record=True) as said:
            check(truth, model, tokens(4, 12))
            kept.planning_s = 2.5 * next(iter(t for t in model._autopar.trials.values() if t)).call_s
            for _ in range(5):
                check(truth, model, tokens(4, 12))
        assert done.count("plan") == 2, done
        times = [one for one in said if "no known plan is good for" in str(one.message)]
        assert len(times) == (torch.distributed.get_rank() == 0), "the first rank says it once"
        assert all(one.filename == __file__ for one in times)
        for length in (9, 10, 12, 11):
            check(truth, model, tokens(4, length))
        assert done.count("plan") == 2, "between the two lengths either plan is good"
    finally:
        kept_plan.LEAST_PLANNING_S = 1.0


def test_planned_anew_when_it_pays(ranks4: Ranks) -> None:
    ranks4.run(planned_again)


def long_traces() -> None:
    truth, model, done = made()
    call_kind.LONG_TRACE_S = 0.0
    try:
        check(truth, model, tokens(4, 8))
        with warnings.catch_warnings(record=True) as said:
            for length in (9, 10, 11):
                check(truth, model, tokens(4, length))
    finally:
        call_kind.LONG_TRACE_S = 2.0
    times = [one for one in said if "was traced again in" in str(one.message)]
    assert len(times) == (torch.distributed.get_rank() == 0), "the first rank says it once"
    assert all(one.filename == __file__ for one in times)
    assert done.count("plan") == 1, done


def test_long_traces_are_told_once(ranks4: Ranks) -> None:
    ranks4.run(long_traces)


def other_lengths_on_each_rank() -> None:
    truth, model, _ = made(check=False)
    for length in (8, 9, 10):
        check(truth, model, tokens(4, length))
    with pytest.raises(autopar.AutoparError, match="different arguments"):
        model(tokens(4, 11 + torch.distributed.get_rank()))


def test_lengths_that_differ_between_ranks(ranks4: Ranks) -> None:
    ranks4.run(other_lengths_on_each_rank)


class Cached(nn.Module):
    """Attention of one token over a cache that it lengthens, as in generating text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        ages = torch.arange(keys.shape[2], 0, -1, dtype=x.dtype)
        scores = query @ keys.transpose(-1, -2) / 2 - ages * 0.1
        mixed = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return self.out(mixed) + keys.shape[2], keys, values


def cache_that_grows(cluster: str) -> tuple[int, int]:
    """One program serves all lengths after a few; numbers are those of one device."""
    torch.manual_seed(0)
    truth = Cached().double()
    model = autopar.compile(copy.deepcopy(truth), device_mesh((2, 2), ("dp", "tp")), cluster=cluster)
    state = other = torch.zeros(2, 4, 3, 4, dtype=torch.float64), torch.zeros(2, 4, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(30):
            x = torch.randn(2, 1, 16, dtype=torch.float64)
            expected, *state = truth(x, *state)
            found, *other = model(x, *other)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(other, state, rtol=1e-9, atol=1e-12)
        jump = [torch.cat((each, each), dim=2) for each in state]
        torch.testing.assert_close(model(x, *jump), truth(x, *jump), rtol=1e-9, atol=1e-12)
    (kind,) = {id(kind): kind for kind in model._autopar.kinds.values()}.values()
    assert len(kind.plans) == 1
    return len({loaded.source for loaded in model._autopar.loaded.values()}), len(kind.sized)


def test_one_program_for_a_cache_that_grows(ranks4: Ranks) -> None:
    found = ranks4.run(cache_that_grows, "cpu")
    assert found[0][1] == 1 and found[0][0] <= call_kind.MOST_RECORDED + 3, found
    ranks4.run(cache_that_grows, "free-links")


def generated() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    truth = transformers.LlamaForCausalLM(config).eval()
    model = autopar.compile(copy.deepcopy(truth), device_mesh((1, 4), ("dp", "tp")))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    done: list[str] = []
    model._autopar.plan = Noted(model._autopar.plan, done)
    for length in (5, 7, 6):
        prompt = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(model.generate(prompt, **options), truth.generate(prompt, **options))
    assert done.count("plan") == 2, "one for prompts, one for further tokens"


def test_generate_makes_two_plans(ranks4: Ranks) -> None:
    ranks4.run(generated)
