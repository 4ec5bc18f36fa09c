"""Habits from DDP and FSDP2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.journey.case import DP, DP_TP, FORWARD, PP, SETTINGS, Numbers, Run, case
from tests.journey.stack import WIDTH, Stack, batch

NUM_PARTS = {DP: 4, DP_TP: 2, "free links": 4, PP: 2}


def part(run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's rows, as a DistributedSampler over the data axes gives them."""
    if run.setting == "one device":
        return tensors
    number = run.mesh.get_local_rank("dp") if "dp" in run.mesh.mesh_dim_names else dist.get_rank()
    return tuple(x.chunk(NUM_PARTS[run.setting])[number] for x in tensors)


def mean_of_ranks(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """As people log a loss that each rank computed of its rows."""
    loss = loss.detach().clone()
    if run.setting == "one device":
        return loss
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


class Logits(Stack):
    """Returns what the blocks make of the input; the loss is the caller's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def local(run: Run) -> dict:
    return {} if run.setting == "one device" else {"batch": "local"}


@case(peers=False)
def local_batch(run: Run) -> Numbers:
    """Each rank passes its own part of the batch, with batch="local" """
    x, y = batch()
    model = run.compile(Stack(), args=part(run, x, y), **local(run))
    return {"loss": run.step(model, *part(run, x, y))} | run.gradients(model)


@case(peers=False)
def local_batch_planned_at_the_first_call(run: Run) -> Numbers:
    """batch="local" without example arguments, three steps"""
    model, found = run.compile(Stack(), **local(run)), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for number, args in enumerate([batch() for _ in range(3)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *part(run, *args))
        optimizer.step()
    return found | run.parameters(model)


@case(on=FORWARD, peers=False)
def local_batch_and_an_own_loss(run: Run) -> Numbers:
    """batch="local", the loss computed outside the model on the rank's rows"""
    x, y = batch()
    model = run.compile(Logits(), args=part(run, x), **local(run))
    own_x, own_y = part(run, x, y)
    output = model(own_x)
    assert output.shape == own_y.shape
    loss = F.mse_loss(output, own_y)
    loss.backward()
    return {"loss": mean_of_ranks(run, loss)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def local_batch_with_gradients_of_inputs(run: Run) -> Numbers:
    """batch="local", gradients with respect to the rank's own input"""
    x, y = batch()
    model = run.compile(Stack(), **local(run))
    own_x, own_y = part(run, x, y)
    own_x = own_x.clone().requires_grad_()
    model(own_x, own_y).backward()
    if run.setting == "one device":
        return {"gradient": own_x.grad.square().sum()} | run.gradients(model)
    total = own_x.grad.square().sum()
    dist.all_reduce(total)
    return {"gradient": total * NUM_PARTS[run.setting] / dist.get_world_size()} | run.gradients(model)


@case(peers=False)
def local_batch_in_eval(run: Run) -> Numbers:
    """batch="local", the loss of an evaluation under no_grad"""
    x, y = batch()
    model = run.compile(Stack(), **local(run)).eval()
    with torch.no_grad():
        own = part(run, x, y)
        return {"loss": model.train_step(*own) if run.setting == PP else model(*own)}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)).relu())


@case(on=FORWARD, peers=False)
def local_batch_and_batch_norm(run: Run) -> Numbers:
    """batch="local" with batch norm: the statistics are those of the whole batch, as of SyncBatchNorm"""
    x, y = batch()
    model = run.compile(Normed(), args=part(run, x), **local(run))
    own_x, own_y = part(run, x, y)
    loss = F.mse_loss(model(own_x), own_y)
    loss.backward()
    return {"loss": mean_of_ranks(run, loss)} | run.gradients(model) | run.buffers(model)


@case(on=FORWARD, peers=False)
def local_batch_with_unequal_numbers_of_labels(run: Run) -> Numbers:
    """batch="local" of token labels of which each rank ignores another number, the loss in the model"""

    class Tokens(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.body(x), labels, ignore_index=-100)

    x, labels = torch.randn(8, WIDTH), torch.tensor([1, -100, -100, -100, 2, 3, 4, -100])
    model = run.compile(Tokens(), args=part(run, x, labels), **local(run))
    return {"loss": run.step(model, *part(run, x, labels))} | run.gradients(model)


@case(
    refused=dict.fromkeys(SETTINGS, r"argument .* differs from rank 0's at call 1: .*batch='local'.*check=False"),
    peers=False,
)
def other_rows_on_each_rank(run: Run) -> Numbers:
    """Each rank passes its own part of the batch without saying so"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y))
    torch.manual_seed(0 if run.setting == "one device" else dist.get_rank())
    return {"loss": run.step(model, *batch())}


@case(refused=dict.fromkeys(SETTINGS, r"argument .* differs from rank 0's at call 4"), peers=False)
def other_rows_after_some_steps(run: Run) -> Numbers:
    """The ranks' data loaders come apart in the fourth step"""
    model = run.compile(Stack())
    for number in range(4):
        x, y = batch()
        if number == 3 and run.setting != "one device" and dist.get_rank() == 3:
            y[0, 0] += 1
        run.step(model, x, y)
    return run.gradients(model)


@case(
    refused={DP_TP: "not the same on ranks that share their rows.*batch=", PP: "not the same on ranks that share"},
    on=(DP_TP, PP),
    peers=False,
)
def other_rows_within_a_tensor_parallel_group(run: Run) -> Numbers:
    """batch="local", and ranks that differ on the tensor-parallel or pipeline axis only pass other rows"""
    x, y = batch()
    model = run.compile(Stack(), args=part(run, x, y), **local(run))
    torch.manual_seed(0 if run.setting == "one device" else dist.get_rank())
    return {"loss": run.step(model, *part(run, *batch()))}


@case(refused=dict.fromkeys(SETTINGS, "batch= expects 'global'"), peers=False)
def batch_on_an_axis_that_is_not_there(run: Run) -> Numbers:
    """batch= names an axis that the mesh has not"""
    if run.setting == "one device":
        return {}
    return {"loss": run.step(run.compile(Stack(), batch=("data",)), *batch())}


@case(peers=False)
def check_off_with_inputs_that_differ_in_the_last_bit(run: Run) -> Numbers:
    """check=False: rows that differ by rounding are not compared"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y), **({} if run.setting == "one device" else {"check": False}))
    if run.setting != "one device":
        x = x * (1 + 1e-6 * dist.get_rank())
    return {"loss": run.step(model, x, y)}


@case(refused=dict.fromkeys(SETTINGS, "blocks.0.up.weight on rank 1 differs.*load the same"))
def load_other_tensors_on_each_rank(run: Run) -> Numbers:
    """load_state_dict of tensors that differ between ranks"""
    state = Stack().state_dict()
    model = run.compile(Stack(), args=batch())
    state["blocks.0.up.weight"] = state["blocks.0.up.weight"] + (0 if run.setting == "one device" else dist.get_rank())
    model.load_state_dict(state)
    return run.parameters(model)


@case(refused=dict.fromkeys(SETTINGS, "this tensor was parameter .* until autopar.compile"))
def optimizer_made_before(run: Run) -> Numbers:
    """An optimizer made of the model before it is compiled"""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    args = batch()
    model = run.compile(model, args=args)
    run.step(model, *args)
    optimizer.step()
    return run.parameters(model)


@case(refused=dict.fromkeys(SETTINGS, "this tensor was parameter .* until autopar.compile"))
def parameter_held_from_before(run: Run) -> Numbers:
    """A parameter that somebody took out of the model before it was compiled"""
    model = Stack()
    held = model.blocks[0].up.weight
    args = batch()
    model = run.compile(model, args=args)
    run.step(model, *args)
    return {"norm": held.detach().norm()} | run.gradients(model)


@case(on=FORWARD, refused=dict.fromkeys(FORWARD, "this tensor was buffer 'norm.running_mean' until"), peers=False)
def statistics_held_from_before(run: Run) -> Numbers:
    """A buffer that forward writes, taken out of the model before it was compiled"""
    model, (x, _) = Normed(), batch()
    held = model.norm.running_mean
    model = run.compile(model, args=(x,))
    model(x).sum().backward()
    return {"mean": held.clone()}


class Masked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) * self.mask


@case(on=FORWARD, refused=dict.fromkeys(FORWARD, "was written to that was buffer 'mask' until"), peers=False)
def buffer_written_that_was_held_from_before(run: Run) -> Numbers:
    """A buffer, taken out of the model before it was compiled, is written to after a step"""
    model, args = Masked(), batch()
    held = model.mask
    model = run.compile(model, args=args)
    run.step(model, *args)
    held[0] = 0.0
    return {"loss": run.step(model, *args)}


@case(peers=False)
def constant_buffer_held_from_before(run: Run) -> Numbers:
    """A buffer that nobody writes, taken out of the model before it was compiled, is read after a step"""
    model, args = Masked(), batch()
    held = model.mask
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args), "mask": held * 2} | run.gradients(model)


@case()
def original_kept_under_another_name(run: Run) -> Numbers:
    """A trainer that keeps the model it was given, and reads it after training"""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    trainer = Trainer(Stack())
    args = batch()
    model = run.compile(trainer.model, args=args)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    found = {"loss": run.step(model, *args)}
    optimizer.step()
    return found | run.parameters(trainer.model)


@case()
def submodule_held_from_before(run: Run) -> Numbers:
    """A submodule that somebody holds is the model's own after training"""
    model, args = Stack(), batch()
    block = model.blocks[2]
    model = run.compile(model, args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.step(model, *args)
    optimizer.step()
    return {f"block {name}": run.whole(p.detach()) for name, p in run.named(block)}


@case()
def a_copy_keeps_the_model(run: Run) -> Numbers:
    """A deep copy is compiled, and the model itself stays as it was"""
    import copy

    model, args = Stack(), batch()
    compiled = run.compile(copy.deepcopy(model), args=args)
    loss = run.step(compiled, *args)
    return {"loss": loss, "of the model": model(*args).detach()} | {n: p.detach() for n, p in model.named_parameters()}
