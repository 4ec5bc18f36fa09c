"""What trainers ask a compiled model before its first step, as they ask it; and one of them from start to end."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import autopar
from autopar.errors import AutoparError
from tests.trainers.case import forget, llama, rows, stacked, told_by_torchrun
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


def compiled() -> nn.Module:
    mesh = device_mesh((4,), ("dp",))
    return autopar.compile(nn.Linear(4, 4), mesh, batch=("dp",), cluster="cpu")


class Accelerator:
    def __init__(self, backend: str) -> None:
        self.mixed_precision, self.native_amp = "no", False
        self.state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend))


def read_in(module: str, body: str) -> Any:
    """A function of the body that reads attributes as one of `module` does."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def read(self, model, args=None):\n    return {body}", names)
    return names["read"]


def trainer(model: nn.Module, args: Any) -> bool:
    """Read what transformers' Trainer reads as it is made, from a frame that has its arguments."""
    read = read_in("transformers.trainer", "getattr(model, 'is_distributed_loading_by_transformers', False)")
    return read(None, model, args)


def prepare(accelerator: Accelerator, model: nn.Module) -> bool:
    """Read the attribute as a method of accelerate does, in its module."""
    return read_in("accelerate.accelerator", "getattr(model, '_is_accelerate_prepared', False)")(accelerator, model)


def torch_compile_is_refused() -> None:
    model = compiled()
    assert trainer(model, SimpleNamespace(torch_compile=False))
    with pytest.raises(AutoparError, match=r"torch_compile=True\).*expected none.*torch_compile=False"):
        trainer(model, SimpleNamespace(torch_compile=True))
    assert prepare(Accelerator("NO"), model)
    with pytest.raises(AutoparError, match=r"dynamo_backend='INDUCTOR'\).*expected none.*dynamo_backend='no'"):
        prepare(Accelerator("INDUCTOR"), model)


def test_a_trainer_that_would_compile_the_program_is_refused_as_it_is_made(ranks4: Ranks) -> None:
    ranks4.run(torch_compile_is_refused)


class Distributed(nn.Linear):
    """As transformers' models are: they have the attribute themselves."""

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        return False


def own_answer_does_not_hide_that_the_model_is_compiled() -> None:
    mesh = device_mesh((4,), ("dp",))
    with warnings.catch_warnings(action="error"):
        model = autopar.compile(Distributed(4, 4), mesh, batch=("dp",), cluster="cpu")
    assert trainer(model, SimpleNamespace(torch_compile=False))
    assert not model.is_distributed_loading_by_transformers  # as anybody else asks
    with pytest.raises(AutoparError, match=r"expected autopar.compile\(model, mesh, batch=\('dp',\)\)"):
        trainer(autopar.compile(Distributed(4, 4), mesh, cluster="cpu"), None)


def test_a_trainer_is_answered_for_the_compiled_model_not_by_the_models_own(ranks4: Ranks) -> None:
    """transformers' Trainer saved on the first rank alone, which waited for the others."""
    ranks4.run(own_answer_does_not_hide_that_the_model_is_compiled)


def join_is_refused() -> None:
    model = compiled()
    assert not hasattr(model, "join_hook")  # as anybody else asks
    with pytest.raises(AutoparError, match=r"Join\(\[model\]\).*same number of batches"):
        Join([model])


def test_join_of_ranks_with_more_and_fewer_batches_is_refused_by_name(ranks4: Ranks) -> None:
    """It ended in an AttributeError."""
    ranks4.run(join_is_refused)


def stages_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = autopar.compile(net, device_mesh((2, 2), ("pp", "dp")), batch=("pp", "dp"), cluster="cpu")
    with pytest.raises(AutoparError, match=r"transformers.Trainer calls model.*expected a mesh without the axis 'pp'"):
        trainer(model, SimpleNamespace(torch_compile=False))


def test_a_trainer_that_runs_forward_itself_is_told_of_stages_as_it_is_made(ranks4: Ranks) -> None:
    ranks4.run(stages_are_refused)


class WithLoss(nn.Module):
    """A loss, and what it is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.body(x)
        return nn.functional.cross_entropy(z, y), z


FABRIC = """
def forward(tensor, seen):
    tensor.register_hook(lambda gradient: seen.append(gradient.shape))
"""


def fabric_sets_hooks() -> None:
    names: dict[str, Any] = {"__name__": "lightning.fabric.wrappers"}
    exec(FABRIC, names)
    model = autopar.compile(WithLoss(), device_mesh((4,), ("dp",)), cluster="free-links")
    loss, z = model(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(AutoparError, match="register_hook or retain_grad of an output of the compiled model"):
        z.register_hook(print)
    seen: list[torch.Size] = []
    names["forward"](loss, seen), names["forward"](z, seen)
    loss.backward()
    assert loss.shape in seen


def test_fabric_may_ask_at_each_output_whether_it_runs_backward(ranks4: Ranks) -> None:
    """Refused before, where the loss was computed of the parts: Fabric's hook reads no gradient."""
    ranks4.run(fabric_sets_hooks)


def by_hand(batches: list[dict[str, torch.Tensor]], lr: float) -> tuple[list[float], nn.Module]:
    """Losses of SGD on one device, and the model then."""
    model, losses = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trained_and_saved(folder: str) -> None:
    with patch.dict(os.environ, told_by_torchrun() | {"ACCELERATE_USE_CPU": "true"}):
        forget()
        trains_and_saves(folder)
        forget()


def trains_and_saves(folder: str) -> None:
    from transformers import Trainer, TrainingArguments  # with accelerate, which takes seconds

    mesh, size, num_steps, lr = device_mesh((4,), ("dp",)), 2, 3, 0.1
    items = rows(mesh.size() * size * num_steps)
    losses, single = by_hand([stacked(items[i : i + 8]) for i in range(0, len(items), 8)], lr)
    kinds: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    kinds |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.0, "logging_steps": 1}
    kinds |= {"num_train_epochs": 1, "save_strategy": "epoch", "save_only_model": True}
    args = TrainingArguments(folder, per_device_train_batch_size=size, learning_rate=lr, **kinds)
    model = autopar.compile(llama(), mesh, batch=("dp",), cluster="free-links")
    made = Trainer(model, args, train_dataset=items)
    made.train()
    assert [entry["loss"] for entry in made.state.log_history if "loss" in entry] == pytest.approx(losses, rel=1e-3)
    made.save_model(folder)
    for path in (folder, f"{folder}/checkpoint-{num_steps}"):
        saved = type(single).from_pretrained(path).state_dict()
        assert all(torch.allclose(x, saved[name], atol=1e-5) for name, x in single.state_dict().items())
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.load_state_dict(saved)
        part = stacked(items[size * mesh.get_rank() :][:size])
        assert model(**part).loss.item() == pytest.approx(single(**stacked(items[:8])).loss.item(), rel=1e-4)


def test_a_trainer_trains_and_saves_from_start_to_end(ranks4: Ranks, tmp_path: Path) -> None:
    """transformers' Trainer hung while it saved, which the tests of what it asks did not see."""
    ranks4.run(trained_and_saved, str(tmp_path), timeout_s=120)
