"""Parameters by their number, position and count, which must be those of one device on a rank that has some."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.journey.case import DP, PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

ON = (DP, PP)
OF_ANOTHER_STAGE = "is a parameter of another stage"


def trained(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """Losses of two steps, and the weights after them."""
    args, losses = batch(), {}
    for number in range(2):
        optimizer.zero_grad()
        losses[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return losses | run.parameters(model)


def compiled(run: Run) -> nn.Module:
    return run.compile(Stack(), args=batch())


@case(on=ON)
def rate_of_each_by_number(run: Run) -> Numbers:
    """A group for each parameter: lr * 0.8 ** i of enumerate(model.parameters())"""
    model = compiled(run)
    groups = [{"params": [p], "lr": 0.5 * 0.8**i} for i, p in enumerate(model.parameters())]
    return trained(run, model, torch.optim.SGD(groups))


@case(on=ON)
def rate_of_each_from_the_end(run: Run) -> Numbers:
    """Layer-wise decay of the learning rate from the last parameter, over reversed(list(model.named_parameters()))"""
    model = compiled(run)
    named = reversed(list(model.named_parameters()))
    groups = [{"params": [p], "lr": 0.01 * 0.9**i, "weight_decay": 0.1 * i} for i, (_, p) in enumerate(named)]
    return trained(run, model, torch.optim.AdamW(groups))


@case(on=ON)
def two_groups_by_position(run: Run) -> Numbers:
    """parameters[:5] and parameters[5:] as two groups"""
    model = compiled(run)
    own = list(model.parameters())
    return trained(run, model, torch.optim.SGD([{"params": own[:5], "lr": 0.1}, {"params": own[5:], "lr": 0.5}]))


@case(on=ON)
def last_ones_trained(run: Run) -> Numbers:
    """An optimizer of list(model.parameters())[-2:]"""
    model = compiled(run)
    return trained(run, model, torch.optim.SGD(list(model.parameters())[-2:], lr=0.5))


@case(on=ON)
def all_but_the_first_trained(run: Run) -> Numbers:
    """An optimizer of list(model.parameters())[10:], with names"""
    model = compiled(run)
    return trained(run, model, torch.optim.AdamW(list(model.named_parameters())[10:], lr=0.1, fused=True))


@case(on=ON)
def numbered_below_the_model(run: Run) -> Numbers:
    """enumerate(model.blocks.parameters()): of a module inside"""
    model = compiled(run)
    groups = [{"params": [p], "lr": 0.05 * (i + 1)} for i, p in enumerate(run.inner(model).blocks.parameters())]
    return trained(run, model, torch.optim.SGD(groups, momentum=0.9))


@case(on=ON)
def average_beside_by_zip(run: Run) -> Numbers:
    """A list of clones that follows by zip(averages, model.parameters()), then copied into the model"""
    model = compiled(run)
    averages = [p.detach().clone() for p in model.parameters()]
    found = trained(run, model, torch.optim.SGD(model.parameters(), lr=0.5))
    with torch.no_grad():
        for average, p in zip(averages, model.parameters()):
            average.mul_(0.9).add_(p, alpha=0.1)
            p.copy_(average)
    return {name: x for name, x in found.items() if "loss" in name} | run.parameters(model)


@case(on=ON)
def updated_by_hand_by_number(run: Run) -> Numbers:
    """p -= 0.1 / (i + 1) * p.grad of each, without an optimizer, and foreach of all"""
    model, args = compiled(run), batch()
    loss = run.step(model, *args)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p -= 0.1 / (number + 1) * p.grad
        torch._foreach_mul_([p.detach() for p in model.parameters()], [1 - 0.01 * i for i in range(12)])
    return {"loss": loss} | run.parameters(model)


@case(on=ON)
def counted(run: Run) -> Numbers:
    """sum(p.numel()), how many need a gradient, names and shapes, dtype and device of the first"""
    model = compiled(run)
    first = next(model.parameters())
    assert first.dtype == torch.float32 and first.device.type == "cpu"
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in Stack().parameters()]
    counts = [sum(p.numel() for p in model.parameters()), sum(p.requires_grad for p in model.parameters())]
    return {"counts": torch.tensor(counts), "loss": run.step(model, *batch())}


@case(on=ON, refused={PP: OF_ANOTHER_STAGE})
def all_in_one_vector(run: Run) -> Numbers:
    """torch.nn.utils.parameters_to_vector(model.parameters()), and its norm"""
    model = compiled(run)
    vector = run.whole(nn.utils.parameters_to_vector([p.detach() for p in model.parameters()]))
    return {"norm": torch.tensor(float(vector.norm()))}


@case(on=ON, refused={PP: OF_ANOTHER_STAGE})
def weights_read_one_by_one(run: Run) -> Numbers:
    """float(p.norm()) of each weight, for a log"""
    model = compiled(run)
    read = {fqn: torch.tensor(float(run.whole(p.detach().norm()))) for fqn, p in model.named_parameters()}
    return {fqn.removeprefix("module."): x for fqn, x in read.items()}


@case(on=ON, peers=False)
def state_with_a_group_for_each(run: Run) -> Numbers:
    """The whole state of an optimizer with a group for each parameter, from model.full_optimizer_state_dict"""
    model = compiled(run)
    groups = [{"params": [p], "lr": 0.5 * 0.8**i} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    found = trained(run, model, optimizer)
    gives = getattr(model, "full_optimizer_state_dict", lambda one: one.state_dict())
    state = gives(optimizer)
    assert [group["lr"] for group in state["param_groups"]] == [0.5 * 0.8**i for i in range(12)]
    return found | {f"momentum {number}": x["momentum_buffer"] for number, x in state["state"].items()}


@case(on=ON)
def clipped_by_value_together(run: Run) -> Numbers:
    """clip_grad_value_(model.parameters(), 0.01, foreach=True), and each module's weight by its shape"""
    model, args = compiled(run), batch()
    run.step(model, *args)
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True)
    shapes = [m.weight.shape for m in run.inner(model).modules() if isinstance(m, nn.Linear)]
    assert shapes == [m.weight.shape for m in Stack().modules() if isinstance(m, nn.Linear)]
    return run.gradients(model)


@case(on=ON, peers=False)
def averaged_by_torch(run: Run) -> Numbers:
    """AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), updated after each step, its weights afterwards"""
    model, args = compiled(run), batch()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        average.update_parameters(model)
    return run.parameters(average.module)


class Tied(nn.Module):
    """Its head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


@case(on=ON)
def rates_by_number_of_tied_weights(run: Run) -> Numbers:
    """lr * 0.9 ** i of enumerate(model.parameters()) where the first and the last stage have one weight"""
    args = torch.arange(BATCH), torch.arange(BATCH) + 1
    model, losses = run.compile(Tied(), args=args), {}
    groups = [{"params": [p], "lr": 0.5 * 0.8**i} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        losses[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return losses | run.parameters(model)
