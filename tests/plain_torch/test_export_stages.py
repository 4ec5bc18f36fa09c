"""Exported pipelines: each stage runs by the model's own code, and together they are the model."""

import ast
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.ir.trace_with_loss import trace_loss
from autopar.mesh import Mesh, parse_mesh
from autopar.plain_torch.export_plan import Exported, export_torch
from autopar.plain_torch.run_layout import namespace_of
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from tests.planner.cases import CPU, traced
from tests.zoo import Case, build


def of_case(name: str, mesh: str = "pp=2", plan: str = "pp=2", num: int = 2, schedule: str = "1f1b") -> Exported:
    case, request = build(name), PlanRequest(num_microbatches=num, schedule=schedule)
    if case.loss.__closure__:
        labels = case.loss.__closure__[0].cell_contents
        graph = trace_loss(skeleton(case.model), F.cross_entropy, (*case.args, labels), case.kwargs)
    else:
        graph = traced(name)
    found = hand_plan_in_stages(plan, graph, parse_mesh(mesh), CPU, request)
    return export_torch(found, case.model, case.args, case.kwargs)


def of_model(model: nn.Module, x: torch.Tensor, mesh: str = "pp=2", num: int = 2) -> Exported:
    graph = trace(skeleton(model), (x,), {})
    found = hand_plan_in_stages("pp=2", graph, parse_mesh(mesh), CPU, PlanRequest(num_microbatches=num))
    return export_torch(found, model, (x,), {})


def one_after_the_other(text: str, case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the result of all stages in one process, gradients by name: the sum of all stages')."""
    names = namespace_of(text)
    batch = dict(zip(names["ARGUMENTS"], case.args)) | case.kwargs
    parts, sent = [], ()
    for stage in range(names["NUM_STAGES"]):
        part = copy.deepcopy(case.model)
        names["keep_stage"](part, stage)
        sent = (part(*sent, **batch),)
        parts.append(part)
    loss = sent[0] if not sent[0].shape else sent[0].square().mean()
    loss.backward()
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return loss, found


def whole(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    output = case.model(*case.args, **case.kwargs)
    loss = output.square().mean() if isinstance(output, torch.Tensor) and output.shape else case.loss(output)
    loss.backward()
    return loss, {name: x.grad for name, x in case.model.named_parameters() if x.grad is not None}


def check(text: str, case: Case) -> None:
    loss, gradients = one_after_the_other(text, case)
    expected, all_gradients = whole(copy.deepcopy(case))
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    tied = {"lm_head.weight": "transformer.wte.weight"}
    tied |= {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    for name in list(gradients):
        if name not in all_gradients:  # the other name of a tied one
            gradients[tied[name]] = gradients.get(tied[name], 0) + gradients.pop(name)
    assert gradients.keys() == all_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "vgg13", "mlp"])
def test_stages_are_the_model(name):
    made = of_case(name)
    check(made.text, build(name))
    if name == "mlp":  # its forward adds each block's input to its output itself, so that only its head is on its own
        assert any("Stage 1 starts at head, in the plan at the op linear_2" in remark for remark in made.remarks)
        return
    assert made.priced.step_s == pytest.approx(made.plan.step_s, rel=0.03)


def test_the_file_is_torch_alone():
    text = of_case("gpt2", "pp=2,dp=2", "zero3,pp=2").text
    tree = ast.parse(text)
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} == {"collections", "torch"}
    assert max(map(len, text.splitlines())) <= 120
    assert "'transformer.h.1': (1, [8, 32])" in text and "Schedule1F1B(stages[0], MICROBATCHES" in text
    assert "((0, 'transformer.wte.weight'), (1, 'lm_head.weight'))" in text
    assert "for block in blocks_here(model, 'transformer.h', range(2)):" in text


class Block(nn.Module):
    """A block; `also`: "mask": it makes a mask, or takes that of the block before, and returns it beside x."""

    def __init__(self, also: str) -> None:
        super().__init__()
        self.also, self.up, self.down = also, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: Any = None) -> Any:
        if self.also == "mask" and y is None:
            y = torch.arange(x.shape[1], device=x.device) % 2 == 0
        x = x + self.down(self.up(x).relu() * (y[:, None] if self.also == "mask" else 1.0))
        return (x, y) if self.also == "mask" else x


class Blocks(nn.Module):
    """Four blocks; of `also` see `Block`. "root": the first block reads a parameter of the model itself."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.also, self.blocks = also, nn.ModuleList(Block(also) for _ in range(4))
        if also == "root":
            self.start = nn.Parameter(torch.randn(16))
        self.scale = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, y = self.scale(x), None
        if self.also == "root":
            first = first + self.start
        x = first
        for block in self.blocks:
            if self.also == "mask":
                x, y = block(x, y)
            else:
                x = block(x)
            if self.also == "twice":
                x = x + first
        return x.square().mean()


def of_blocks(also: str) -> tuple[nn.Module, torch.Tensor, Callable[[], Exported]]:
    torch.manual_seed(0)
    model, x = Blocks(also).double(), torch.randn(8, 6, 16, dtype=torch.float64)
    return model, x, lambda: of_model(model, x)


def test_a_mask_that_a_block_hands_on_is_not_stood_in_for():
    model, x, made = of_blocks("mask")
    check(made().text, Case(model, (x,), {}, lambda loss: loss))


def test_a_parameter_outside_of_modules_is_frozen_where_another_stage_trains_it():
    model, x, made = of_blocks("root")
    exported = made()
    check(exported.text, Case(model, (x,), {}, lambda loss: loss))
    assert any("Stage 1 has 128 B of parameters that others train, start first" in one for one in exported.remarks)
    part = copy.deepcopy(model)
    namespace_of(exported.text)["keep_stage"](part, 1)
    assert not part.get_parameter("start").requires_grad


def test_a_second_tensor_that_crosses_is_refused_by_name():
    with pytest.raises(PlanError, match=r"stage 1 starts at .* no module is left that is called once with all"):
        of_blocks("twice")[2]()


def test_a_cut_inside_of_a_block_moves_to_its_end_and_the_file_says_so():
    made = of_case("bert")
    assert "'bert.encoder.layer.1': (1, [8, 32])" in made.text
    assert any("Stage 1 starts at bert.encoder.layer.1, in the plan at the op" in remark for remark in made.remarks)


class NoRows(Blocks):
    """A further argument without the batch's rows."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * scale.sum()


def test_what_torch_pipelines_cannot_have_is_refused_by_name():
    model, x, scale = NoRows(), torch.randn(8, 6, 16), torch.ones(3)
    graph = trace(skeleton(model), (x, scale), {})
    plan = hand_plan_in_stages("pp=2", graph, Mesh((2,), ("pp",)), CPU, PlanRequest(num_microbatches=2))
    with pytest.raises(PlanError, match=r"shape \[3\], and torch's pipelines cut each tensor of a batch of 8 rows"):
        export_torch(plan, model, (x, scale), {})
    plan = hand_plan_in_stages("ddp", traced("gpt2"), Mesh((2,), ("dp",)), CPU, PlanRequest(num_microbatches=2))
    with pytest.raises(PlanError, match="2 microbatches without stages cannot be exported"):
        export_torch(plan, build("gpt2").model, (), build("gpt2").kwargs)


def test_several_stages_a_rank_are_interleaved():
    model, x = Blocks().double(), torch.randn(8, 6, 16, dtype=torch.float64)
    graph = trace(skeleton(model), (x,), {})
    found = hand_plan_in_stages("pp=2,vp=2", graph, Mesh((2,), ("pp",)), CPU, PlanRequest(num_microbatches=2))
    text = export_torch(found, model, (x,), {}).text
    assert "ScheduleInterleaved1F1B(stages, MICROBATCHES" in text and "copy.deepcopy(model)" in text
    check(text, Case(model, (x,), {}, lambda loss: loss))
