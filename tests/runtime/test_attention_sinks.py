"""GPT-OSS with fused attention trains on ranks as with its sinks in written-out scores on one device."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autopar.errors import TraceError
from autopar.ir.attention.flex_op import FLEX
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.verify.check_placements import check
from tests.runtime.as_priced import is_as_priced
from tests.runtime.training import forward_backward, issued, plan_called, planned, traced, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

BATCH, SEQUENCE, LAYERS, WINDOW = 4, 16, 4, 4


def built(attention: str, *, is_padded: bool = False) -> Case:
    """Half of the layers see a window. `is_padded`: some samples are shorter, which labels leave out."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"sliding_window": WINDOW, "max_position_embeddings": SEQUENCE, "use_cache": False, "pad_token_id": None}
    config = transformers.GptOssConfig(**sizes, attn_implementation=attention)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.uniform_(parameter, -1.0, 2.0)
    tokens = torch.randint(32, (BATCH, SEQUENCE))
    given = {"input_ids": tokens, "labels": tokens.clone()}
    if is_padded:
        lengths = torch.tensor([[SEQUENCE], [5], [9], [SEQUENCE]])
        given["attention_mask"] = (torch.arange(SEQUENCE) < lengths).long()
        given["labels"] = tokens.masked_fill(given["attention_mask"] == 0, -100)
    return Case(model, (), given, lambda output: output.loss)


def train_under(is_padded: bool, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """On every rank: a step under each plan beside the model with eager attention on one device."""
    truth, reports = forward_backward(built("eager", is_padded=is_padded)), []
    for kind, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, built("flex_attention", is_padded=is_padded), mesh)
        found = worst(forward_backward(case), truth, 1e-6)
        reports.append({"kind": kind, "found": found, "issued": issued(case, mesh), "planned": Counter(planned(plan))})
        if not is_padded:  # the checker has no rule for the guard of a mask's values
            check(case.model._autopar.current().program, mesh)
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_sinks_in_one_kernel_train_like_written_out_scores(ranks4: Ranks, is_padded: bool) -> None:
    graph = traced(built("flex_attention", is_padded=is_padded))
    assert sum(op.target == FLEX for op in graph.ops) == LAYERS
    shapes = {value.shape for op in graph.ops for value in op.outputs}
    assert (BATCH, 4, SEQUENCE, SEQUENCE) not in shapes, "a tensor of scores is left"
    mesh = Mesh((2, 2), ("dp", "tp"))
    kinds = ("searched", "zero3", "megatron", "megatron:ep=2")
    plans = {kind: plan_called(kind, graph, mesh) for kind in kinds}
    assert not any(c.kind == "all_to_all" for c in planned(plans["zero3"]))
    for rank, reports in enumerate(ranks4.run(train_under, is_padded, plans)):
        for report in reports:
            assert report["found"][0] < 2e-4, report
            # rows that are exchanged by expert are as many as the router sends
            has_rows = any(c.kind == "all_to_all" for c in report["planned"])
            priced = is_as_priced(report["issued"], report["planned"], is_exact=True, is_first=rank == 0)
            assert has_rows or priced, report


def test_what_the_kernel_with_sinks_does_not_take_is_refused() -> None:
    case = built("flex_attention")
    for module in case.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with pytest.raises(TraceError, match="with sinks and dropout is not traced"):
        traced(case)
