"""Files: what torch.save, safetensors and save_pretrained write is read back, and what one rank writes alone."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.journey.case import FORWARD, SETTINGS, Numbers, Run, case
from tests.journey.cases.checkpoints import adamw, folder, fresh, is_writer, resumed, trained, wait
from tests.journey.stack import Stack, batch

ON = SETTINGS
ANOTHER_RANKS = "parts that another rank saved"


def on_one_device(args: tuple, make: Any = Stack) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is not compiled after a step, and its optimizer."""
    torch.manual_seed(3)
    single = make()
    optimizer = adamw(single)
    single(*args).backward()
    optimizer.step()
    single.zero_grad()
    return single, optimizer


def whole_state(run: Run, model: nn.Module) -> dict[str, Any]:
    """On every rank."""
    return model.state_dict() if run.setting == "one device" else model.full_state_dict()


def whole_optimizer_state(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """On every rank."""
    if run.setting == "one device":
        return optimizer.state_dict()
    return model.full_optimizer_state_dict(optimizer)


def together(run: Run, load: Callable[[], Any]) -> None:
    """`load()` on all ranks; where it fails on some, all raise the error of the first of these."""
    error = None
    try:
        load()
    except Exception as raised:
        error = raised
    errors = [error]
    if run.setting != "one device":
        errors *= dist.get_world_size()
        dist.all_gather_object(errors, error)
    if failed := next((each for each in errors if each is not None), None):
        raise failed


def read(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


@case(on=ON, peers=False)
def whole_state_in_one_file(run: Run) -> Numbers:
    """model.full_state_dict(), written by torch.save on rank 0, read on all, into a model with other weights"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        state = whole_state(run, model)
        if is_writer(run):
            torch.save(state, path / "model.pt")
        wait(run)
        model, optimizer = fresh(run, args)
        model.load_state_dict(read(path / "model.pt"))
        return resumed(run, model, optimizer, args)


@case(on=ON, peers=False)
def read_from_mapped_memory(run: Run) -> Numbers:
    """torch.load(mmap=True) of such a file, read on one device too"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        state = whole_state(run, model)
        if is_writer(run):
            torch.save(state, path / "model.pt")
        wait(run)
        single = Stack()
        single.load_state_dict(read(path / "model.pt", mmap=True))
        model, optimizer = fresh(run, args)
        model.load_state_dict(read(path / "model.pt", mmap=True, map_location="cpu"))
        return {"single": single(*args)} | resumed(run, model, optimizer, args)


@case(on=ON)
def parts_in_a_file_of_each_rank(run: Run) -> Numbers:
    """torch.save of model.state_dict() and optimizer.state_dict(), a file for each rank, which reads its own"""
    args = batch()
    model, optimizer = trained(run, args)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    model, optimizer = fresh(run, args)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return resumed(run, model, optimizer, args)


@case(on=ON, refused=ANOTHER_RANKS)
def parts_in_a_file_of_the_first_rank(run: Run) -> Numbers:
    """if rank == 0: torch.save(model.state_dict(), path), as under DDP, and all ranks read it"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        if is_writer(run):
            torch.save(model.state_dict(), path / "model.pt")
        wait(run)
        model, optimizer = fresh(run, args)
        together(run, lambda: model.load_state_dict(read(path / "model.pt")))
        return resumed(run, model, optimizer, args)


@case(on=ON, refused=ANOTHER_RANKS)
def parts_of_the_optimizer_in_a_file_of_the_first_rank(run: Run) -> Numbers:
    """if rank == 0: torch.save(optimizer.state_dict(), path), as under DDP, and all ranks read it"""
    args = batch()
    with folder(run) as path:
        model, optimizer = trained(run, args)
        if is_writer(run):
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
        wait(run)
        optimizer = adamw(model)
        run.step(model, *args)
        together(run, lambda: (optimizer.load_state_dict(read(path / "optimizer.pt")), optimizer.step()))
        return resumed(run, model, optimizer, args)


@case(on=ON, peers=False)
def safetensors_of_the_whole_state(run: Run) -> Numbers:
    """safetensors.torch.save_file of model.full_state_dict() on rank 0, load_file on all"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        state = whole_state(run, model)
        if is_writer(run):
            save_file(state, path / "model.safetensors")
        wait(run)
        model, optimizer = fresh(run, args)
        model.load_state_dict(load_file(path / "model.safetensors"))
        return resumed(run, model, optimizer, args)


@case(on=ON, refused="storage.*full_state_dict")
def safetensors_of_parts(run: Run) -> Numbers:
    """safetensors.torch.save_file(model.state_dict()), whose tensors are in parts"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        name = path / f"{0 if run.setting == 'one device' else dist.get_rank()}.safetensors"
        save_file(model.state_dict(), name)
        model, optimizer = fresh(run, args)
        model.load_state_dict(load_file(name))
        return resumed(run, model, optimizer, args)


@case(on=ON, refused="storage.*full_state_dict")
def safetensors_of_the_model(run: Run) -> Numbers:
    """safetensors.torch.save_model(model), a file for each rank"""
    args = batch()
    with folder(run) as path:
        model, _ = trained(run, args)
        name = path / f"{0 if run.setting == 'one device' else dist.get_rank()}.safetensors"
        save_model(model, str(name))
        model, optimizer = fresh(run, args)
        load_model(model, str(name))
        return resumed(run, model, optimizer, args)


@case(on=ON, refused=r"storage.*model.load_state_dict\(load_file")
def safetensors_read_into_the_model(run: Run) -> Numbers:
    """safetensors.torch.load_model(model) of a file of one device"""
    args = batch()
    with folder(run) as path:
        if is_writer(run):
            save_model(on_one_device(args)[0], str(path / "model.safetensors"))
        wait(run)
        model, optimizer = fresh(run, args)
        together(run, lambda: load_model(model, str(path / "model.safetensors")))
        return resumed(run, model, optimizer, args)


def gpt2() -> GPT2LMHeadModel:
    zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **zero))


def words() -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (8, 8))
    return {"input_ids": ids, "labels": ids}


def pretrained_step(run: Run, model: nn.Module, words: dict[str, torch.Tensor]) -> Numbers:
    model.zero_grad()
    return {"loss": run.step(model, **words)} | run.gradients(model)


def stepped_gpt2(run: Run, example: dict[str, torch.Tensor]) -> nn.Module:
    """A compiled GPT-2 after a step."""
    model = run.compile(gpt2(), kwargs=example)
    optimizer = adamw(model)
    run.step(model, **example)
    optimizer.step()
    return model


@case(on=FORWARD)
def written_and_read_as_pretrained(run: Run) -> Numbers:
    """model.save_pretrained(folder) on every rank; from_pretrained(folder) and compile again"""
    example = words()
    with folder(run) as path:
        stepped_gpt2(run, example).save_pretrained(path)
        wait(run)
        model = run.compile(GPT2LMHeadModel.from_pretrained(path), kwargs=example)
        return pretrained_step(run, model, example)


@case(on=FORWARD)
def several_files_of_pretrained(run: Run) -> Numbers:
    """save_pretrained(max_shard_size=...), several files, read into a model that was not compiled"""
    example = words()
    with folder(run) as path:
        stepped_gpt2(run, example).save_pretrained(path, max_shard_size="10KB")
        wait(run)
        assert len(list(path.glob("*.safetensors"))) > 1
        single = GPT2LMHeadModel.from_pretrained(path)
        return {"loss": single(**example).loss}


@case(on=FORWARD)
def read_half_precision_as_pretrained(run: Run) -> Numbers:
    """from_pretrained(dtype=torch.bfloat16), compiled, and the dtype of what is saved"""
    example = words()
    with folder(run) as path:
        if is_writer(run):
            gpt2().save_pretrained(path)
        wait(run)
        model = run.compile(GPT2LMHeadModel.from_pretrained(path, dtype=torch.bfloat16), kwargs=example)
        model.save_pretrained(path / "again")
        wait(run)
        state = load_file(path / "again" / "model.safetensors")
        assert {x.dtype for x in state.values()} == {torch.bfloat16}
        return {name: x.float() for name, x in state.items()}


@case(on=ON)
def written_whole_before_compile(run: Run) -> Numbers:
    """torch.save of the whole module before compile, torch.load(weights_only=False), and compile"""
    args, file = batch(), io.BytesIO()
    torch.save(Stack(), file)
    file.seek(0)
    model = run.compile(torch.load(file, weights_only=False), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=ON, refused="cannot be pickled whole")
def model_in_a_checkpoint_dict(run: Run) -> Numbers:
    """torch.save({"model": model, "epoch": 1}) of the compiled module itself"""
    args, file = batch(), io.BytesIO()
    model = run.compile(Stack(), args=args)
    torch.save({"model": model, "epoch": 1}, file)
    file.seek(0)
    return {"loss": run.step(torch.load(file, weights_only=False)["model"], *args)}


@case(on=ON)
def written_by_a_hook_of_saving(run: Run) -> Numbers:
    """torch.save of {name: p.full_tensor()} of named_parameters() as FSDP2's users write it"""
    args, file = batch(), io.BytesIO()
    model, _ = trained(run, args)
    torch.save(run.parameters(model), file)
    file.seek(0)
    return torch.load(file)
