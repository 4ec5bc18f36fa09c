"""Split products of which the model's own code computes with the parts, and those of which it cannot."""

import pytest
from torch import nn

from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.plain_torch.local_parts import follow_parts
from autopar.sbp.analysis.megatron_pairs import structure_of
from tests.plain_torch.models import build


@pytest.mark.parametrize(
    ("name", "wrong", "met"),
    [
        ("scale", set(), {"blocks.0.scale", "blocks.1.scale"}),
        ("gate", {"blocks.0.up", "blocks.1.up"}, set()),  # the gate's gradient is on each rank that of a part
        ("norm", {"blocks.0.up"}, set()),  # a mean over all features; the other one is the row of a pair without it
        ("Qwen3", set(), {f"model.layers.{n}.self_attn.{x}_norm.weight" for n in range(2) for x in "qk"}),
    ],
)
def test_gates_and_means_cannot_take_parts_and_parameters_meet_them(name, wrong, met):
    case = build(name)
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    structure = structure_of(graph)
    rows = {name for name, kind in structure.kinds.items() if kind == "row"}
    columns = [
        op for op in graph.ops if isinstance(case.model.get_submodule(op.module), nn.Linear) and op.name not in rows
    ]
    columns = [op for op in columns if op.module.rpartition(".")[2] not in ("lm_head", "gate", "down")]
    parts = follow_parts(graph, structure, {op.name for op in columns})
    assert {op.module for op in columns if op.name in parts.wrong} == wrong
    assert set(parts.met) == met
