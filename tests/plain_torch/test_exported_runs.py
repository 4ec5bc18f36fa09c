"""Exported files on real ranks that cannot import autopar, beside one device."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.training import PARAM_DTYPES, Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace import trace
from autopar.ir.trace_with_loss import trace_loss
from autopar.mesh import Mesh, parse_mesh
from autopar.plain_torch.export_plan import AnyPlan, export
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from autopar.plans.staged_plan import StagedPlan
from tests.plain_torch.models import build
from tests.planner.cases import CPU

ROOT = Path(__file__).parents[2]
# model, mesh, hand plan that is exported
FEW = (
    ("gpt2", "tp=4", "megatron"),
    ("llama", "dp=2,tp=2", "megatron:dp=2,tp=2,zero3"),
    ("Qwen3", "dp=2,tp=2", "megatron:dp=2,tp=2,zero3"),  # norms of heads meet parts
)
MANY = tuple(
    (name, mesh, plan)
    for name in ("gpt2", "llama", "bert", "vit", "vgg13")
    for mesh, plan in (
        ("dp=4", "ddp"),
        ("dp=4", "zero3"),
        ("tp=4", "megatron"),
        ("dp=2,tp=2", "megatron:dp=2,tp=2"),
        ("dp=2,tp=2", "megatron:dp=2,tp=2,zero3"),
        ("a=2,b=2", "zero2"),
    )
)


# model, mesh, hand plan in stages, schedule, microbatches
STAGES = (
    ("gpt2", "pp=2,dp=2", "pp=2", "1f1b", 4),  # a tied parameter on two stages
    ("llama", "pp=2,tp=2", "megatron:pp=2,tp=2", "gpipe", 2),
    ("llama", "pp=2,dp=2", "zero3,pp=2", "1f1b", 2),
    ("bert", "pp=2,tp=2", "megatron:pp=2,tp=2", "zero-bubble", 2),
    ("llama", "pp=2,dp=2", "zero3,pp=2", "zero-bubble", 2),  # with freed parameters torch loses gradients
    ("vgg13", "pp=2,dp=2", "pp=2", "1f1b", 2),  # DistributedDataParallel fails at the second step
)
MANY_STAGES = tuple(
    (name, mesh, plan, "1f1b", 2)
    for name in ("gpt2", "llama", "bert", "vit", "vgg13")
    for mesh, plan in (
        ("pp=2,dp=2", "pp=2"),
        ("pp=2,dp=2", "zero2,pp=2"),
        ("pp=2,dp=2", "zero3,pp=2"),
        ("pp=2,tp=2", "megatron:pp=2,tp=2"),
    )
)


# Models of other kinds: one table for words and positions, heads fused, blocks in parallel, two stacks, no products.
OTHERS = tuple(
    (name, *rest)
    for name in ("Phi", "OPT", "GPTNeoX", "Gemma2", "T5", "lstm")
    for rest in (
        ("dp=4", "ddp"),
        ("tp=4", "megatron"),
        ("dp=2,tp=2", "megatron:dp=2,tp=2,zero3"),
        ("pp=2,dp=2", "pp=2", "1f1b", 2),
        ("pp=2,tp=2", "megatron:pp=2,tp=2", "1f1b", 2),
    )
)


# What is between a split product and the next one: parameters of norms, a gate, a mean over parts.
BETWEEN = tuple((name, "tp=4", "megatron") for name in ("Qwen3", "Olmo2", "gate", "scale", "norm", "own sizes")) + (
    ("scale", "dp=2,tp=2", "megatron:dp=2,tp=2"),
)


# Files for transformers, which says itself how it splits modules.
OF_TRANSFORMERS = (("Qwen3", "dp=2,tp=2", "megatron:dp=2,tp=2,zero3", "hf"),)
MANY_OF_TRANSFORMERS = tuple(
    (name, mesh, plan, "hf")
    for name in ("gpt2", "llama", "Mistral", "Qwen2", "Qwen3", "Olmo2", "bert", "vit")
    for mesh, plan in (("tp=4", "megatron"), ("dp=2,tp=2", "megatron:dp=2,tp=2,zero2"), ("a=2,b=2", "zero3"))
)


# Plans that compute in bfloat16.
IN_BFLOAT16 = (
    ("llama", "dp=4", "zero3", "bfloat16"),
    ("llama", "dp=2,tp=2", "megatron:dp=2,tp=2,zero2", "bfloat16"),
    ("gpt2", "dp=4", "zero2", "bfloat16"),
    ("llama", "pp=2,dp=2", "zero3,pp=2", "1f1b", 2, "bfloat16"),
)
ROUNDED = {"": 2e-6, "bfloat16": 2e-3}  # relative distance of losses


@functools.cache
def traced(name: str, dtype: str = "") -> Graph:
    case = build(name)

    def how(model: nn.Module, loss_fn: None, args: tuple, kwargs: dict[str, Any]) -> Graph:
        return trace(model, args, kwargs)

    return traced_in(PARAM_DTYPES.get(dtype), how, skeleton(case.model), None, case.args, case.kwargs)


def in_stages(name: str, mesh: Mesh, plan: str, schedule: str, num: int, dtype: str = "") -> StagedPlan:
    case, request = build(name), PlanRequest(num_microbatches=num, schedule=schedule, training=training_in(dtype))
    if not case.loss.__closure__:
        return hand_plan_in_stages(plan, traced(name, dtype), mesh, CPU, request)
    labels = case.loss.__closure__[0].cell_contents
    graph = trace_loss(skeleton(case.model), F.cross_entropy, (*case.args, labels), case.kwargs)
    return hand_plan_in_stages(plan, graph, mesh, CPU, request)


def training_in(dtype: str) -> Training:
    return Training(param_dtype=dtype, reduce_dtype="float32") if dtype else Training()


def exported(name: str, mesh: Mesh, plan: str, path: Path, *schedule: Any) -> dict[str, Any]:
    case = build(name)
    to = "hf" if schedule == ("hf",) else "torch"
    dtype = schedule[-1] if schedule and schedule[-1] in PARAM_DTYPES else ""
    if len(schedule) > 1:
        found: AnyPlan = in_stages(name, mesh, plan, *schedule)
    else:
        request = replace(ANYTHING, training=training_in(dtype))
        found = named_plan(plan, case.model, traced(name, dtype), mesh, CPU, request)
    made = export(found, case.model, path, case.args, case.kwargs, to=to)
    case_name = f"{name} {mesh} {plan} {schedule}"
    return {
        "name": case_name,
        "file": str(path),
        "model": name,
        "shape": mesh.shape,
        "summary": made.summary,
        "dtype": dtype,
    }


def run(cases: list[dict[str, Any]], folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """The losses of each case, of one run of all ranks."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
    command += ["tests.plain_torch.run_exported", str(folder / "cases.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(cases: Sequence[tuple[Any, ...]], folder: Path, num_ranks: int = 4) -> None:
    made = [
        exported(name, parse_mesh(mesh), plan, folder / f"case_{number}.py", *schedule)
        for number, (name, mesh, plan, *schedule) in enumerate(cases)
    ]
    found = run(made, folder, num_ranks)
    assert len(found) == len(cases)
    wrong = [
        one
        for one in found
        if "error" in one
        or max(abs(a - b) / abs(b) for a, b in zip(one["found"], one["expected"], strict=True)) > ROUNDED[one["dtype"]]
        or one["expected"][0] == one["expected"][-1]
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.multirank
def test_files_train_as_one_device_without_autopar(tmp_path):
    check(FEW, tmp_path)


@pytest.mark.multirank
def test_files_compute_in_bfloat16_as_one_device_does(tmp_path):
    check(IN_BFLOAT16, tmp_path)
    assert "mp_policy=PRECISION" in (tmp_path / "case_0.py").read_text()


@pytest.mark.multirank
def test_files_train_as_one_device_with_parameters_between_split_products(tmp_path):
    check(BETWEEN, tmp_path)


@pytest.mark.multirank
def test_plans_of_transformers_train_as_one_device(tmp_path):
    check(OF_TRANSFORMERS, tmp_path)


@pytest.mark.multirank
def test_plans_of_transformers_of_all_models_train_as_one_device(tmp_path):
    check(MANY_OF_TRANSFORMERS, tmp_path)


@pytest.mark.multirank
def test_files_in_stages_train_as_one_device_without_autopar(tmp_path):
    check(STAGES, tmp_path)


@pytest.mark.multirank
def test_files_in_stages_of_all_models_train_as_one_device_without_autopar(tmp_path):
    check(MANY_STAGES, tmp_path)


@pytest.mark.multirank
def test_files_of_all_models_train_as_one_device_without_autopar(tmp_path):
    check(MANY, tmp_path)


@pytest.mark.multirank
def test_files_of_other_models_train_as_one_device_without_autopar(tmp_path):
    check(OTHERS, tmp_path)
