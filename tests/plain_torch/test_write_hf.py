"""Files with the plans of transformers: which styles they name, what they are priced at, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.cli import main
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.plain_torch.export_plan import Exported, export_hf
from autopar.plain_torch.module_calls import ExampleRun
from autopar.plain_torch.torch_layout import TorchLayout
from autopar.plain_torch.write_hf import fitted_hf
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from tests.plain_torch.models import build
from tests.planner.cases import CPU

TP = Mesh((4,), ("tp",))


def exported(name: str, plan: str, mesh: Mesh = TP) -> tuple[Exported, dict[str, Any]]:
    """(the file, the names that it defines)."""
    case = build(name)
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    made = export_hf(named_plan(plan, case.model, graph, mesh, CPU, ANYTHING), case.model, case.args, case.kwargs)
    names: dict[str, Any] = {}
    exec(compile(made.text, "hf.py", "exec"), names)
    return made, names


@pytest.mark.parametrize("name", ["Mistral", "Qwen3", "Olmo2", "bert", "vit", "gpt2"])
def test_the_plan_read_back_as_transformers_has_it_takes_the_same_step(name):
    made, names = exported(name, "megatron")
    case = build(name)
    case.model._tp_plan = case.model._tp_plan | names["TP_PLAN"]  # as DistributedConfig is merged
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    read = named_plan("hf", case.model, graph, TP, CPU, ANYTHING)
    assert read.step_s == pytest.approx(made.priced.step_s, rel=1e-6)


def test_what_the_models_own_plan_splits_and_this_one_does_not_is_replicated_by_name():
    _, names = exported("Olmo2", "megatron")  # norms over the features of all heads: attention stays whole
    assert names["TP_PLAN"]["model.layers.*.self_attn.q_proj"] == "replicate"
    assert names["TP_PLAN"]["model.layers.*.mlp.up_proj"] == "colwise"
    _, names = exported("Qwen3", "megatron")
    assert names["TP_PLAN"]["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_products_that_transformers_cannot_split_stay_whole_with_their_price():
    made, names = exported("gpt2", "megatron")
    assert names["TP_PLAN"] == {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    assert "c_fc" in made.text and "a step" in made.text  # Conv1D has no style


def test_data_ranks_are_sharded_or_copies():
    _, names = exported("Mistral", "zero3", Mesh((4,), ("dp",)))
    config = names["distributed_config"]()
    assert (config.tp_size, config.fsdp_size, config.dp_replicate_size) == (1, 4, 1)
    assert names["FSDP_PLAN"]["model.layers.*"] == "free_full_weight"
    _, names = exported("Mistral", "ddp", Mesh((4,), ("dp",)))
    config = names["distributed_config"]()
    assert (config.tp_size, config.fsdp_size, config.dp_replicate_size) == (1, 1, 4)


def test_what_transformers_cannot_have_is_refused_by_name(tmp_path, capsys):
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8)
    plan = named_plan("ddp", model, trace(skeleton(model), (x,), {}), Mesh((4,), ("dp",)), CPU, ANYTHING)
    with pytest.raises(PlanError, match=r"Sequential is no model of transformers .* take --to torch"):
        export_hf(plan, model, (x,), {})
    case = build("Mistral")
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    staged = hand_plan_in_stages("pp=2", graph, parse_mesh("pp=2"), CPU, PlanRequest(num_microbatches=2))
    with pytest.raises(PlanError, match=r"2 stages and 2 microbatches; transformers' pipelines generate text alone"):
        export_hf(staged, case.model, case.args, case.kwargs)
    layout = TorchLayout(Mesh((2, 2), ("tp", "dp")), (), data_axes=(1,), shard_axes=(1,), tensor_axes=(0,))
    with pytest.raises(PlanError, match=r"tp is not the last axis of mesh tp=2,dp=2; change the order"):
        fitted_hf(layout, ExampleRun(case.model, case.args, case.kwargs, [graph]))
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),), {}\n"
    )
    args = ["export", f"{tmp_path}/net.py:build", "--mesh", "dp=4", "--cluster", "cpu", "--hand", "ddp", "--to", "hf"]
    assert main([*args, "--out", f"{tmp_path}/hf.py"]) == 2
    assert "Linear is no model of transformers" in capsys.readouterr().err
    assert not (tmp_path / "hf.py").exists()
