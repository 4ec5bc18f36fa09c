"""Steps of models on one device beside their price, once the device was calibrated: `python -m bench.one_device`.

    python -m bench.one_device [--device cuda|cpu] [--rows gpt2] [--resume]

First this device is calibrated, in full. Then each model trains: as it is, and under `autopar.compile` on a mesh of
this device alone, whose plan has nothing to choose. Measured are forward, backward and AdamW, and the peak of memory;
predicted is the plan's step. The table goes to `bench/results/one_device_NAME.md`.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.calibrate.call_time import block_s
from autopar.calibrate.run_calibration import calibrate, world
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.models.catalogue import Example, build_model
from autopar.peak_memory.predict import rank_peaks
from autopar.plans.plan import Plan
from bench.gpu_check import PHASES, device_name, peak_bytes, phases_s
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

ROUNDS = 10
LEARNING_RATE = 1e-4
_TEXT = """Plain PyTorch on one device ("alone") and the same model under `autopar.compile` on a mesh of that device
("compiled"), eager, AdamW on parameters of the dtype named. Predicted: the step of the plan, priced by a calibration of
the device made in the same run; error: beside the step alone. Steps are those of a loop that waits for the device at
its end alone. Phases, each waited for: predicted / alone / compiled, in ms, medians; peaks alike, in GiB."""
_HEADER = ("model", "predicted, ms", "alone, ms", "error", "compiled, ms", "forward", "backward", "AdamW", "peak, GiB")


@dataclass(frozen=True)
class Setting:
    """A model of the catalogue, or a function of this file, with its sizes and the dtype of parameters."""

    model: str
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Such as "gpt2 bfloat16, layers 2, batch 2"."""
        sizes = ", ".join(f"{key} {size}" for key, size in self.sizes.items())
        return f"{self.model} {str(self.dtype).removeprefix('torch.')}, {sizes}"


_ON = {
    "cuda": (
        Setting("gpt2", {"batch": 16, "sequence": 1024}),
        Setting("gpt2", {"batch": 8, "sequence": 1024}, torch.float32),
        Setting("llama-1b", {"layers": 16, "batch": 4, "sequence": 2048}),
        Setting("llama3-8b", {"layers": 4, "batch": 1, "sequence": 8192}),
        Setting("bert-large", {"batch": 32, "sequence": 512}),
        Setting("vit-l", {"batch": 64}),
        Setting("resnet50", {"batch": 128}),
    ),
    "cpu": (
        Setting("gpt2", {"layers": 2, "batch": 2, "sequence": 256}, torch.float32),
        Setting("llama-1b", {"layers": 2, "batch": 1, "sequence": 256}, torch.float32),
        Setting("bert-large", {"layers": 2, "batch": 2, "sequence": 256}, torch.float32),
        Setting("vit-l", {"layers": 2, "batch": 4}, torch.float32),
        Setting("resnet50", {"batch": 4}, torch.float32),
    ),
}


def llama(*, layers: int, batch: int, sequence: int) -> Example:
    """A Llama as wide as Llama-3.2 1B (16 layers of 2048), with 32,000 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    tokens = {name: torch.zeros(batch, sequence, dtype=torch.long) for name in ("input_ids", "labels")}
    return Example(LlamaForCausalLM(config).train(), (), tokens)


def example_of(setting: Setting, device: torch.device) -> Example:
    """The model on `device` with a batch; parameters and batch are drawn, as their values take no part in times."""
    with torch.device("meta"):
        made = llama(**setting.sizes) if setting.model == "llama-1b" else build_model(setting.model, **setting.sizes)
    torch.manual_seed(0)
    model = made.model.to(setting.dtype).to_empty(device=device)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=0.02) if x.ndim > 1 else x.fill_(1.0)
        for x in model.buffers():
            x.zero_()
    model.tie_weights() if hasattr(model, "tie_weights") else None
    kwargs = {name: _drawn(name, x, setting.dtype, device) for name, x in made.kwargs.items()}
    return Example(model, tuple(_drawn("", x, setting.dtype, device) for x in made.args), kwargs)


def _drawn(name: str, x: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=dtype, device=device)
    return torch.ones_like(x, device=device) if "mask" in name else torch.randint(1000, x.shape, device=device)


def stepper(model: nn.Module, example: Example) -> Callable[[], torch.Tensor]:
    """A function that returns the loss of the example."""

    def loss() -> torch.Tensor:
        found = model(*example.args, **example.kwargs)
        return found if isinstance(found, torch.Tensor) else found[0]

    return loss


def measured(setting: Setting, device: torch.device, cluster: Cluster) -> Row:
    """One row."""
    example = example_of(setting, device)
    found = {"row": setting.name, "alone": _trained(example.model, example, device)}
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    model = autopar.compile(example.model, mesh, args=example.args, kwargs=example.kwargs, cluster=cluster)
    plan: Plan = model.plan
    example = Example(model, example.args, example.kwargs)
    costs = plan.costs
    predicted = {
        "step": plan.step_s,
        "forward": costs.microbatch_s("forward"),
        "backward": costs.microbatch_s("backward"),
        "optimizer": costs.optimizer_s,
        "peak_bytes": rank_peaks(plan)[0],
    }
    return found | {"compiled": _trained(model, example, device), "predicted": predicted}


def _trained(model: nn.Module, example: Example, device: torch.device) -> dict[str, float]:
    """Seconds of each phase of a step, and the most bytes that one has allocated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loss = stepper(model, example)
    times = phases_s(loss, optimizer, device.type, ROUNDS) | {"step": _step_s(loss, optimizer, device)}
    tensors = [x for x in (*example.args, *example.kwargs.values()) if isinstance(x, torch.Tensor)]
    return times | {"peak_bytes": peak_bytes(loss, model, optimizer, tensors)}


def _step_s(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Seconds of each of the steps of a loop that waits for the device at its end alone."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return block_s(step, ROUNDS, device)


def cells(row: Row) -> Iterable[Cells]:
    """The line of a row."""
    predicted, alone, ours = row["predicted"], row["alone"], row["compiled"]
    phases = [f"{predicted[key] * 1e3:.4g} / {alone[key] * 1e3:.4g} / {ours[key] * 1e3:.4g}" for key in PHASES]
    yield (
        row["row"],
        f"{predicted['step'] * 1e3:.4g}",
        f"{alone['step'] * 1e3:.4g}",
        f"{predicted['step'] / alone['step'] - 1:+.1%}",
        f"{ours['step'] * 1e3:.4g} ({ours['step'] / alone['step']:.3f})",
        *phases,
        " / ".join(f"{of['peak_bytes'] / 2**30:.4g}" for of in (predicted, alone, ours)),
    )


def table_of(device: str) -> Table:
    """The table of a kind of device."""
    names = tuple(setting.name for setting in _ON[device])
    return Table(f"1 x {device_name(device)}", _TEXT, _HEADER, names, cells)


def main() -> None:
    """Calibrate, measure, write and print."""
    has_gpu = torch.cuda.is_available()
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    given: argparse.Namespace = made.parse_args()
    table = table_of(given.device)
    name = "one_device_" + re.sub(r"\W+", "_", device_name(given.device).lower())
    wanted = selected([table], given, name)[table.title]
    device = torch.device(given.device)
    with world():
        fitted = calibrate(links=load_cluster("free-links"), tell=print)
        for setting in _ON[given.device]:
            if setting.name not in wanted:
                continue
            try:
                row = measured(setting, device, fitted.cluster)
            except Exception as error:  # the other rows go on
                row = {"row": setting.name, "error": f"{type(error).__name__}: {error}"}
            add(name, [table], {table.title: [row]}, {"device": device_name(given.device), "rounds": ROUNDS})
            print(" | ".join([row["row"], row["error"]] if "error" in row else next(iter(cells(row)))), flush=True)


if __name__ == "__main__":
    main()
