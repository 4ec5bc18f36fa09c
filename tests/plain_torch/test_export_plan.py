"""The text of exported files, what it is priced at, and what is refused."""

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.costmodel.training import Training
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.plain_torch.export_plan import Exported, export_torch
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import ANYTHING
from autopar.plans.plan import Plan
from tests.planner.cases import CPU, MESH, traced
from tests.zoo import LAYERS, build


def exported(name: str, plan: str, mesh: Mesh = MESH) -> Exported:
    case = build(name)
    found = named_plan(plan, case.model, traced(name), mesh, CPU, ANYTHING)
    return export_torch(found, case.model, case.args, case.kwargs)


def of_module(model: nn.Module, x: torch.Tensor, plan: str = "megatron", mesh: Mesh = MESH) -> Exported:
    found: Plan = named_plan(plan, model, trace(skeleton(model), (x,), {}), mesh, CPU, ANYTHING)
    return export_torch(found, model, (x,), {})


@pytest.mark.parametrize("plan", ["zero3", "zero2", "ddp"])
def test_data_parallelism_is_priced_as_the_same_plan(plan):
    made = exported("llama", plan, Mesh((4,), ("dp",)))
    assert made.priced.step_s == pytest.approx(made.plan.step_s, rel=0.03)
    assert ("DistributedDataParallel(" in made.text) == (plan == "ddp")
    assert f"reshard_after_forward={plan == 'zero3'}" in made.text or plan == "ddp"
    assert "split_tensors" not in made.text


def test_blocks_are_a_loop_and_calls_are_torch_alone():
    text = exported("llama", "megatron:dp=2,tp=2,zero3").text
    assert text.count("self_attn.q_proj") == 1 and "for block in model.model.layers:" in text
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert modules and all(module.split(".")[0] == "torch" for module in modules)
    assert max(map(len, text.splitlines())) <= 120


def test_a_fused_projection_stays_whole():
    text = exported("gpt2", "megatron", Mesh((2,), ("tp",))).text
    assert "'mlp.c_fc': ColwiseConv1D()" in text and "'attn.c_attn'" not in text
    assert "model.lm_head.weight = model.transformer.wte.weight" in text


class Attends(nn.Module):
    """Attention that views the features of all heads by a number that it keeps."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.num_heads, self.is_last = 4, is_last
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (self.num_heads, -1) if self.is_last else (-1, self.num_heads, 8)
        q, k, v = (f(x).view(x.shape[0], x.shape[1], *size) if self.is_last else f(x).view(x.shape[0], *size)
                   for f in (self.q, self.k, self.v))  # fmt: skip
        y = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("is_last", [True, False])
def test_numbers_of_heads_are_divided_where_the_code_has_them(is_last):
    """`view(b, s, heads, -1)` of half the features would run, with half the size of each head."""
    made = of_module(Attends(is_last=is_last), torch.ones(8, 6, 32))
    assert "model.num_heads //= mesh.size()" in made.text
    assert "'q': ColwiseParallel()" in made.text and "'o': RowwiseParallel()" in made.text


class HiddenHeads(Attends):
    """Attention whose number of heads is no attribute that says so."""

    def __init__(self) -> None:
        super().__init__(is_last=True)
        self.parts = self.num_heads
        del self.num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(x.shape[0], x.shape[1], self.parts, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Hidden(nn.Module):
    """A block with such attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = HiddenHeads(), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x + self.down(self.up(x).relu())).square().mean()


def test_attention_whose_code_does_not_follow_stays_whole_and_the_file_says_so():
    made = of_module(Hidden(), torch.ones(8, 6, 32), "megatron", Mesh((2,), ("tp",)))
    assert "'up': ColwiseParallel()" in made.text and "'attention.q'" not in made.text
    assert any("attention stays whole on tp" in remark for remark in made.remarks)


class Named(nn.Module):
    """A module with a name that would be code."""

    NAME = "x'); raise SystemExit('\\n"

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(LAYERS)
        )
        self.add_module(self.NAME, blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.get_submodule(self.NAME):  # type: ignore[attr-defined]
            x = x + block["down"](block["up"](x).relu())
        return x.square().mean()


def test_names_of_a_model_are_never_code():
    text = of_module(Named(), torch.ones(8, 16)).text
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "SystemExit"]
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert any(str(text).startswith(Named.NAME) for text in texts)


def test_what_differs_is_said_with_its_price():
    made = exported("llama", "megatron:dp=2,tp=2")
    share = made.priced.step_s / made.plan.step_s - 1
    assert f"({share:+.1%})" in made.summary
    assert "cross_entropy_loss" in made.text and "a step" in made.text
    assert math.isfinite(share)


def test_no_file_where_nothing_is_near(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.ones(1, 3, 8, 8)
    plan = named_plan("ddp", model, trace(skeleton(model), (x,), {}), MESH, CPU, ANYTHING)
    with pytest.raises(PlanError, match=r"no calls of torch's libraries .* step is .*4 ranks do not divide the 1 rows"):
        autopar.export(plan, model, tmp_path / "a.py", (x,))
    assert not list(tmp_path.iterdir())


MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), (torch.ones(8, 32),), {}
"""


def test_the_command(tmp_path: Path, capsys: Any):
    (tmp_path / "net.py").write_text(MODEL)
    args = ["export", f"{tmp_path}/net.py:build", "--mesh", "dp=2,tp=2"]
    assert main([*args, "--cluster", "cpu", "--hand", "megatron", "--out", f"{tmp_path}/plain.py"]) == 0
    assert "Predicted step: of the plan" in capsys.readouterr().out
    hand = ["explain", *args[1:], "--cluster", "cpu", "--hand", f"{tmp_path}/plain.py:parallelize"]
    assert main(hand) == 0
    assert "plain.py:parallelize" in capsys.readouterr().out
    assert main([*args, "--out", f"{tmp_path}/plain.py"]) == 2
    assert "--cluster" in capsys.readouterr().err
    assert main([*args, "--cluster", "cpu", "--out", f"{tmp_path}/none/plain.py"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert parse_mesh("dp=2,tp=2") == MESH


@pytest.mark.parametrize(("plan", "mesh"), [("ddp", "dp=4"), ("megatron", "tp=4")])
def test_whole_parameters_are_not_cast_by_torch(plan: str, mesh: str) -> None:
    """The file splits them instead, and says why."""
    case, request = build("llama"), replace(ANYTHING, training=Training(param_dtype="bfloat16"))
    found = named_plan(plan, case.model, traced("llama"), parse_mesh(mesh), CPU, request)
    made = export_torch(found, case.model, case.args, case.kwargs)
    assert any("of torch only fully_shard casts them" in remark for remark in made.remarks)
    assert "mp_policy=PRECISION" in made.text


def test_a_policy_is_priced_as_the_plan_computes() -> None:
    case, training = build("llama"), Training(param_dtype="bfloat16", reduce_dtype="float32")
    found = named_plan(
        "zero3", case.model, traced("llama"), Mesh((4,), ("dp",)), CPU, replace(ANYTHING, training=training)
    )
    made = export_torch(found, case.model, case.args, case.kwargs)
    assert "PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in made.text
    assert made.priced.training == training and not any("param_dtype" in remark for remark in made.remarks)
