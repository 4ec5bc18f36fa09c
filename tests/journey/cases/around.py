"""Around the call: wrappers, vectors as gradients, loops over time, generated text."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from tests.journey.case import FORWARD, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

ALONE = FORWARD


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


@case(on=ALONE)
def synchronised_batch_norm(run: Run) -> Numbers:
    """nn.SyncBatchNorm.convert_sync_batchnorm(model) before compile, a habit of DDP"""
    args = batch()
    model = Stack(Normed)
    model = model if run.setting == "one device" else nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=ALONE)
def wrapped_for_several_devices(run: Run) -> Numbers:
    """nn.DataParallel(model) before compile"""
    args = batch()
    model = run.compile(nn.DataParallel(Stack()), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=ALONE)
def recomputed_as_a_whole(run: Run) -> Numbers:
    """torch.utils.checkpoint.checkpoint(model, x): the compiled model itself is run again in backward"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    loss = F.mse_loss(run.whole(checkpoint(model, x, use_reentrant=False)), y)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def forward_called_by_name(run: Run) -> Numbers:
    """model.forward(x, y) in place of model(x, y)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = run.inner(model).forward(*args)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def backward_of_a_vector(run: Run) -> Numbers:
    """out.backward(gradient), and torch.autograd.backward of two outputs"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    run.whole(model(x)).backward(y)
    first = run.gradients(model)
    model.zero_grad()
    out = run.whole(model(x))
    torch.autograd.backward([out.square().mean(), (out * y).sum()])
    return {f"first {key}": value for key, value in first.items()} | run.gradients(model)


@case(on=ALONE)
def backward_into_some_weights(run: Run) -> Numbers:
    """loss.backward(inputs=list(model.blocks[2].parameters())): the others get no gradient"""
    args = batch()
    model = run.compile(Stack(), args=args)
    model(*args).backward(inputs=list(run.inner(model).blocks[2].parameters()))
    return run.gradients(model)


class Recurrent(nn.Module):
    """Returns what it makes of `x` and its next state."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = (self.read(x) + self.keep(state)).tanh()
        return state * x, state


def through_time(run: Run, is_cut: bool) -> Numbers:
    x, y = batch()
    state = torch.zeros(BATCH, WIDTH)
    model, total = run.compile(Recurrent(), args=(x, state)), torch.zeros(())
    for _ in range(3):
        out, state = map(run.whole, model(x, state))
        state = state.detach() if is_cut else state
        total = total + F.mse_loss(out, y)
    total.backward()
    return {"loss": total.detach()} | run.gradients(model)


@case(on=ALONE)
def state_carried_and_cut(run: Run) -> Numbers:
    """out, state = model(x, state.detach()) in a loop (truncated backpropagation through time)"""
    return through_time(run, is_cut=True)


@case(on=ALONE)
def state_carried_with_its_gradient(run: Run) -> Numbers:
    """out, state = model(x, state) in a loop, differentiated through all calls"""
    return through_time(run, is_cut=False)


@case(on=ALONE)
def policy_gradient(run: Run) -> Numbers:
    """torch.distributions.Categorical(logits=model(x)): sample, log_prob times a reward, entropy"""
    x, _ = batch()
    model = run.compile(Outputs(), args=(x,))
    torch.manual_seed(3)
    policy = torch.distributions.Categorical(logits=run.whole(model(x)))
    actions = policy.sample()
    loss = -(policy.log_prob(actions) * actions.float()).mean() - 0.1 * policy.entropy().mean()
    loss.backward()
    return {"actions": actions.float(), "loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def mixed_batches(run: Run) -> Numbers:
    """Mixup: rows mixed by a permutation, the loss a mixture by a number that differs in each step"""
    x, y = batch()
    model, found = run.compile(Outputs(), args=(x,)), {}
    for number in range(2):
        share, order = 0.3 + 0.1 * number, torch.randperm(BATCH)
        out = run.whole(model(share * x + (1 - share) * x[order]))
        loss = share * F.mse_loss(out, y) + (1 - share) * F.mse_loss(out, y[order])
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    return found | run.gradients(model)


class Queued(Stack):
    """A queue of keys in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 2 * BATCH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        loss = F.cross_entropy(torch.cat([(out * y).sum(-1, keepdim=True), out @ self.queue.clone()], 1),
                               torch.zeros(len(x), dtype=torch.long))  # fmt: skip
        self.queue.copy_(torch.cat([self.queue[:, len(x) :], y.t()], 1))
        return loss


@case(on=ALONE)
def queue_of_keys(run: Run) -> Numbers:
    """A queue of earlier keys as a buffer that forward moves on (MoCo), three steps"""
    args = batch()
    model = run.compile(Queued(), args=args)
    found = {f"loss {number}": run.step(model, *args) for number in range(3)}
    return found | run.gradients(model) | run.buffers(model)


@case(on=ALONE)
def converted_by_type(run: Run) -> Numbers:
    """model.type(torch.float64), and all frozen and thawed again"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    model.type(torch.float64)
    model.requires_grad_(False)
    model.requires_grad_(True)
    return {"loss": run.step(model, *(x.double() for x in args))} | run.gradients(model)


def gpt2() -> GPT2LMHeadModel:
    zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, **zero))


@case(on=ALONE)
def text_generated(run: Run) -> Numbers:
    """model.generate(input_ids, max_new_tokens=4, do_sample=False) of a compiled GPT-2, with and without a cache"""
    ids = torch.randint(1, 32, (4, 8))
    model = run.compile(gpt2(), kwargs={"input_ids": ids, "labels": ids}).eval()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, use_cache=False, attention_mask=torch.ones_like(ids), **options)
    cached = model.generate(ids, use_cache=True, attention_mask=torch.ones_like(ids), **options)
    return {"plain": plain.float(), "cached": cached.float()}


@case(on=ALONE)
def properties_of_transformers(run: Run) -> Numbers:
    """model.num_parameters(), model.dtype, get_input_embeddings().weight.shape, and perplexity"""
    ids = torch.randint(32, (8, 8))
    model = run.compile(gpt2(), kwargs={"input_ids": ids, "labels": ids})
    with torch.no_grad():
        perplexity = math.exp(model(input_ids=ids, labels=ids).loss.item())
    assert model.dtype == torch.float32
    rows, _ = model.get_input_embeddings().weight.shape
    return {"numbers": torch.tensor([perplexity, model.num_parameters(), rows])}
