"""Training resumed: rolled back, from one device's state, with a schedule, into a model on meta."""

import copy
import io

import torch
from torch import nn

from tests.journey.case import PP, SETTINGS, Numbers, Run, case
from tests.journey.cases.checkpoints import adamw, folder, fresh, is_writer, resumed, train, trained, wait
from tests.journey.cases.files import on_one_device, read, whole_optimizer_state, whole_state
from tests.journey.stack import Stack, batch

ON = SETTINGS


@case(on=ON)
def rolled_back(run: Run) -> Numbers:
    """Model and optimizer are copied (copy.deepcopy of both state dicts), and loaded again after further steps"""
    args = batch()
    model, optimizer = trained(run, args)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(run, model, optimizer, batch(), 2)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return resumed(run, model, optimizer, args)


@case(on=ON)
def rolled_back_to_memory_of_the_host(run: Run) -> Numbers:
    """The best weights are kept as {name: x.detach().cpu().clone()}, and loaded at the end"""
    args = batch()
    model, optimizer = trained(run, args)
    best = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
    train(run, model, optimizer, batch(), 2)
    model.load_state_dict(best)
    return resumed(run, model, optimizer, args)


@case(on=ON, peers=False)
def rolled_back_to_a_whole_state(run: Run) -> Numbers:
    """model.full_state_dict() and full_optimizer_state_dict(optimizer), and loaded again after further steps"""
    args = batch()
    model, optimizer = trained(run, args)
    state = copy.deepcopy((whole_state(run, model), whole_optimizer_state(run, model, optimizer)))
    train(run, model, optimizer, batch(), 2)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return resumed(run, model, optimizer, args)


@case(on=ON)
def rolled_back_to_clones_of_parameters(run: Run) -> Numbers:
    """[p.detach().clone() for p in model.parameters()], copied back by p.data.copy_"""
    args = batch()
    model, optimizer = trained(run, args)
    kept = [p.detach().clone() for p in model.parameters()]
    train(run, model, optimizer, batch(), 2)
    for p, old in zip(model.parameters(), kept):
        p.data.copy_(old)
    return resumed(run, model, optimizer, args)


@case(on=ON)
def state_of_one_device_read_before_a_step(run: Run) -> Numbers:
    """torch.load of model and AdamW of one device, loaded into a compiled model and its optimizer"""
    args = batch()
    with folder(run) as path:
        if is_writer(run):
            single, optimizer = on_one_device(args)
            torch.save({"model": single.state_dict(), "optimizer": optimizer.state_dict()}, path / "one.pt")
        wait(run)
        state = read(path / "one.pt")
        model, optimizer = fresh(run, args)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return resumed(run, model, optimizer, args)


@case(on=ON)
def state_of_one_device_read_after_steps(run: Run) -> Numbers:
    """The same into an optimizer that has made steps already, with SGD's momentum and another learning rate"""
    args = batch()
    torch.manual_seed(3)
    single = Stack()
    before = torch.optim.SGD(single.parameters(), lr=0.05, momentum=0.9)
    single(*args).backward()
    before.step()
    state = copy.deepcopy((single.state_dict(), before.state_dict()))
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    train(run, model, optimizer, args, 2)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    rate = torch.tensor(optimizer.param_groups[0]["lr"])
    return {"rate": rate} | resumed(run, model, optimizer, args)


@case(on=ON, refused={PP: "groups.*get_optimizer_state_dict"})
def groups_of_one_device_read(run: Run) -> Numbers:
    """The state of one device's AdamW with two groups, weights and biases"""

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.05, eps=1e-3)

    args = batch()
    torch.manual_seed(3)
    single = Stack()
    optimizer = grouped(single)
    single(*args).backward()
    optimizer.step()
    state = copy.deepcopy((single.state_dict(), optimizer.state_dict()))
    model = run.compile(Stack(), args=args)
    optimizer = grouped(model)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return resumed(run, model, optimizer, args)


@case(on=ON, peers=False)
def schedule_read_with_the_optimizer(run: Run) -> Numbers:
    """Model, optimizer, OneCycleLR and epoch of rank 0's torch.save of whole states; training goes on"""
    args = batch()
    with folder(run) as path:
        model, optimizer = trained(run, args)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        for _ in range(3):
            train(run, model, optimizer, args)
            schedule.step()
        state = {"model": whole_state(run, model), "optimizer": whole_optimizer_state(run, model, optimizer)}
        if is_writer(run):
            torch.save(state | {"schedule": schedule.state_dict(), "epoch": 3}, path / "all.pt")
        wait(run)
        state = read(path / "all.pt")
        model, optimizer = fresh(run, args)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        rates = []
        for _ in range(2):
            train(run, model, optimizer, args)
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return {"rates": torch.tensor(rates)} | resumed(run, model, optimizer, args)


@case(on=ON)
def assigned_from_a_file(run: Run) -> Numbers:
    """load_state_dict(torch.load(...), assign=True) of a whole state, and an optimizer made afterwards"""
    args, file = batch(), io.BytesIO()
    torch.save(on_one_device(args)[0].state_dict(), file)
    file.seek(0)
    model = run.compile(Stack(), args=args)
    model.load_state_dict(torch.load(file), assign=True)
    return resumed(run, model, adamw(model), args)


@case(on=ON)
def read_on_meta_by_assignment(run: Run) -> Numbers:
    """with torch.device("meta"): a model, load_state_dict(assign=True), then compile"""
    args = batch()
    with torch.device("meta"):
        model = Stack()
    torch.manual_seed(3)
    model.load_state_dict(Stack().state_dict(), assign=True)
    model = run.compile(model, args=args)
    return resumed(run, model, adamw(model), args)


@case(on=ON)
def compiled_on_meta_then_read(run: Run) -> Numbers:
    """A model on meta is compiled, and its weights are loaded from a file afterwards"""
    args = batch()
    with torch.device("cpu" if run.setting == "one device" else "meta"):
        model = Stack()
    model = run.compile(model, args=args)
    torch.manual_seed(3)
    model.load_state_dict(Stack().state_dict())
    return resumed(run, model, adamw(model), args)


@case(on=ON)
def state_read_before_the_first_call(run: Run) -> Numbers:
    """load_state_dict of a compiled model that was not planned yet, which is planned at its first call"""
    args = batch()
    model = run.compile(Stack())
    torch.manual_seed(3)
    model.load_state_dict(Stack().state_dict())
    return resumed(run, model, adamw(model), args)
