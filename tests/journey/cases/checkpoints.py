"""Checkpoints: what is saved is read back, under the same plan, another one and on one device."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import Block, Stack, batch

Args = tuple[torch.Tensor, ...]
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
GROUPED = "an optimizer has groups of this rank's parameters only.*flatten_optimizer_state_dict"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, args: Args, steps: int = 1) -> torch.Tensor:
    """The last loss of some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run.step(model, *args)
        optimizer.step()
    return loss


@contextmanager
def folder(run: Run) -> Iterator[Path]:
    """A folder that all ranks share."""
    if run.setting == "one device":
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box)
        yield Path(box[0])
        dist.barrier()


def is_writer(run: Run) -> bool:
    return run.setting == "one device" or dist.get_rank() == 0


def wait(run: Run) -> None:
    """Until all ranks are here."""
    if run.setting != "one device":
        dist.barrier()


def fresh(run: Run, args: Args, make: Any = Stack) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A compiled model with other weights, and its optimizer."""
    torch.manual_seed(11)
    model = run.compile(make(), args=args)
    return model, adamw(model)


def trained(run: Run, args: Args, make: Any = Stack) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A compiled model after two steps, and its optimizer."""
    model = run.compile(make(), args=args)
    optimizer = adamw(model)
    train(run, model, optimizer, args, 2)
    return model, optimizer


def resumed(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, args: Args) -> Numbers:
    """Two further steps."""
    return {"loss": train(run, model, optimizer, args, 2)} | run.parameters(model)


@case(refused={PP: GROUPED})
def saved_and_read_by_torch(run: Run) -> Numbers:
    """torch.distributed.checkpoint.save of get_state_dict(model, optimizer), and load into another compiled model"""
    args = batch()
    with folder(run) as path:
        model, optimizer = trained(run, args)
        parts, state = get_state_dict(model, optimizer)
        dcp.save({"model": parts, "optimizer": state}, checkpoint_id=path)
        model, optimizer = fresh(run, args)
        parts, state = get_state_dict(model, optimizer)
        content = {"model": parts, "optimizer": state}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        return resumed(run, model, optimizer, args)


@case()
def saved_and_read_by_name(run: Run) -> Numbers:
    """The same with StateDictOptions(flatten_optimizer_state_dict=True)"""
    args = batch()
    with folder(run) as path:
        dcp.save(by_name(*trained(run, args)), checkpoint_id=path)
        model, optimizer = fresh(run, args)
        read_by_name(model, optimizer, path)
        return resumed(run, model, optimizer, args)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    return {"model": get_model_state_dict(model), "optimizer": state}


def read_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    content = by_name(model, optimizer)
    dcp.load(content, checkpoint_id=path)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=BY_NAME)


class Application(Stateful):
    """Model and optimizer as torch's tutorial puts them together."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        return by_name(self.model, self.optimizer) | {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=BY_NAME)
        self.step = state["step"]


@case()
def application_of_torchs_tutorial(run: Run) -> Numbers:
    """A Stateful of model, optimizer and step number, saved and loaded by torch.distributed.checkpoint"""
    args = batch()
    with folder(run) as path:
        dcp.save({"app": Application(*trained(run, args), step=2)}, checkpoint_id=path)
        model, optimizer = fresh(run, args)
        application = Application(model, optimizer)
        dcp.load({"app": application}, checkpoint_id=path)
        return {"step": torch.tensor(application.step)} | resumed(run, model, optimizer, args)


NUMBERED = "state of the optimizer is numbered.*of its own stages.*flatten_optimizer_state_dict"


@contextmanager
def first_cause() -> Iterator[None]:
    """In place of torch's collection of the ranks' errors, which is no Exception, one of them."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@case(refused={PP: NUMBERED})
def numbered_state_of_the_optimizer(run: Run) -> Numbers:
    """torch.distributed.checkpoint.save of model.state_dict() and optimizer.state_dict(), which numbers parameters"""
    args = batch()
    with folder(run) as path, first_cause():
        model, optimizer = trained(run, args)
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
        model, optimizer = fresh(run, args)
        train(run, model, optimizer, args)  # so that there is a state to read into
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(content, checkpoint_id=path)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return resumed(run, model, optimizer, args)


@case(refused={PP: NUMBERED})
def optimizer_itself_saved(run: Run) -> Numbers:
    """torch.distributed.checkpoint.save({"optimizer": optimizer}) of the optimizer itself"""
    args = batch()
    with folder(run) as path, first_cause():
        model, optimizer = trained(run, args)
        kept = copy.deepcopy(model.state_dict())
        dcp.save({"optimizer": optimizer}, checkpoint_id=path)
        model, optimizer = fresh(run, args)
        train(run, model, optimizer, args)
        dcp.load({"optimizer": optimizer}, checkpoint_id=path)
        model.load_state_dict(kept)
        return resumed(run, model, optimizer, args)


@case(on=(PP,), refused=NUMBERED, peers=False)
def numbered_state_of_one_device_read_into_stages(run: Run) -> Numbers:
    """A checkpoint of one device's optimizer.state_dict(), loaded by number into each rank's optimizer"""
    args = batch()
    with folder(run) as path, first_cause():
        torch.manual_seed(3)
        single = Stack()
        optimizer = adamw(single)
        single(*args).backward()
        optimizer.step()
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
        model, optimizer = trained(run, args)
        content = {"optimizer": optimizer.state_dict()}
        dcp.load(content, checkpoint_id=path)
        optimizer.load_state_dict(content["optimizer"])
        return resumed(run, model, optimizer, args)


@case(on=FORWARD)
def read_on_one_device(run: Run) -> Numbers:
    """A checkpoint of torch.distributed.checkpoint is loaded into a model that is not compiled, and trained on"""
    args = batch()
    with folder(run) as path:
        dcp.save(by_name(*trained(run, args)), checkpoint_id=path)
        torch.manual_seed(11)
        single = Stack()
        optimizer = adamw(single)
        read_by_name(single, optimizer, path)
        single(*args).backward()
        optimizer.step()
        return {fqn: p.detach() for fqn, p in single.named_parameters()}


@case()
def written_on_one_device(run: Run) -> Numbers:
    """A checkpoint of one device, of model and optimizer by name, is loaded into a compiled model"""
    args = batch()
    with folder(run) as path:
        torch.manual_seed(3)
        single = Stack()
        optimizer = adamw(single)
        single(*args).backward()
        optimizer.step()
        dcp.save(by_name(single, optimizer), checkpoint_id=path)
        model, optimizer = fresh(run, args)
        read_by_name(model, optimizer, path)
        return resumed(run, model, optimizer, args)


@case()
def converted_to_one_file(run: Run) -> Numbers:
    """torch.distributed.checkpoint.format_utils.dcp_to_torch_save: one file that torch.load reads"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        if is_writer(run):
            dcp_to_torch_save(path, path / "whole.pt")
        wait(run)
        return dict(torch.load(path / "whole.pt", weights_only=False)["model"])


@case()
def part_of_a_checkpoint(run: Run) -> Numbers:
    """A model with one block more reads the others: DefaultLoadPlanner(allow_partial_load=True)"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        torch.manual_seed(11)
        larger = run.compile(Stack(depth=4), args=args)
        content = {"model": larger.state_dict()}
        dcp.load(content, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        larger.load_state_dict(content["model"])
        return {"loss": run.step(larger, *args)} | run.parameters(larger)


@case()
def saved_in_the_background(run: Run) -> Numbers:
    """torch.distributed.checkpoint.async_save, training goes on meanwhile"""
    args = batch()
    with folder(run) as path:
        model, optimizer = trained(run, args)
        group = dist.new_group(backend="gloo") if run.setting != "one device" else None
        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=path, process_group=group)
        train(run, model, optimizer, args)
        future.result()
        wait(run)
        model, optimizer = fresh(run, args)
        content = {"model": model.state_dict()}
        dcp.load(content, checkpoint_id=path)
        model.load_state_dict(content["model"])
        return {"loss": run.step(model, *args)} | run.parameters(model)


class Noisy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


@case(on=FORWARD)
def resumed_with_random_state(run: Run) -> Numbers:
    """Model, optimizer, schedule and random state saved and read: dropout goes on as it would have"""
    args = batch()
    with folder(run) as path:
        model, optimizer = trained(run, args, lambda: Stack(Noisy))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        schedule.step()
        extra = {"schedule": schedule.state_dict(), "random": torch.get_rng_state(), "epoch": 3}
        dcp.save(by_name(model, optimizer) | extra, checkpoint_id=path)
        first = train(run, model, optimizer, args, 2)
        model, optimizer = fresh(run, args, lambda: Stack(Noisy))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        read_by_name(model, optimizer, path)
        extra = {"schedule": schedule.state_dict(), "random": torch.get_rng_state(), "epoch": 0}
        dcp.load(extra, checkpoint_id=path)
        schedule.load_state_dict(extra["schedule"])
        torch.set_rng_state(extra["random"])
        again = train(run, model, optimizer, args, 2)
        rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
        return {"difference": again - first, "epoch": torch.tensor(extra["epoch"]), "rates": rates}
