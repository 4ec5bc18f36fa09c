"""Split programs: the gradients of the whole batch from its microbatches, each parameter converted once a step."""

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.ir.interpret import run_constants
from autopar.ir.run_graph import run
from autopar.ir.split_stages import StageGraph, cut
from autopar.mesh import Mesh
from autopar.runtime.accumulate import open_step
from autopar.runtime.load_program import compile_source, namespace
from autopar.sbp.assignment import Assignment
from autopar.sbp.axis import Axis
from autopar.sbp.placement import I
from autopar.sbp.proof.cut_and_join import Coordinate, join
from autopar.sbp.proof.cut_and_join import cut as parts_of
from tests.runtime.any_plan import draw_assignment
from tests.runtime.split import accumulate, logits_case, microbatch, planned_collectives
from tests.runtime.training import AXES, plan_called, traced
from tests.sbp.simulate import on_threads
from tests.workers import Ranks


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape", "kinds", "count"),
    [
        ("mlp", (4,), ("ddp", "zero2", "zero3", "random:1"), 2),
        ("gpt2", (2, 2), ("megatron", "random:2"), 4),
        ("mlp", (2, 2), ("random:3",), 1),
    ],
    ids=str,
)
def test_microbatches_add_up_to_the_batch(
    ranks4: Ranks, name: str, shape: tuple[int, ...], kinds: tuple[str, ...], count: int
) -> None:
    graph = traced(microbatch(logits_case(name), 0, count))
    plans = {kind: plan_called(kind, graph, Mesh(shape, AXES[: len(shape)])) for kind in kinds}
    for reports in ranks4.run(accumulate, name, plans, count):
        for report in reports:
            plan = plans[report["kind"]]
            assert report["difference"] < 1e-9, report
            late = report["landings"]
            assert set(late) <= {"close"} and (late or report["kind"] not in ("ddp", "zero2")), report["kind"]
            assert report["issued"] == planned_collectives(plan, count), report["kind"]
            in_gather, in_forward = (part.count(" B backward") for part in report["code"].split("def forward"))
            assert in_gather and (in_forward or report["kind"] in ("ddp", "zero2"))
    everything = sum((planned_collectives(plan, count) for plan in plans.values()), Counter())
    assert len({c.kind for c in everything}) > 1


@dataclass
class _Rank:
    """`self` of a stage's generated functions."""

    program: Program
    axes: tuple[Axis, ...]
    state: dict[str, torch.Tensor]  # by FQN
    constants: dict[str, torch.Tensor]
    function: Any
    gather: Any
    used: dict[str, torch.Tensor] = field(default_factory=dict)

    def local(self, fqn: str) -> torch.Tensor:
        return self.state[fqn]

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    def draw_seed(self) -> int:
        return 0


def _assigned(draw: Random, stage: StageGraph, stored: dict[str, Any]) -> Assignment:
    """Anything for a stage, but what crosses is whole, and a parameter lies as on the stages before."""
    found = draw_assignment(draw, stage.graph, MESH)
    for item in stage.graph.of_kind("parameter"):
        stored.setdefault(item.fqn, found.layouts[item.value.name])
    layouts = {item.value.name: stored.get(item.fqn, found.layouts[item.value.name]) for item in stage.graph.inputs}
    layouts |= dict.fromkeys(stage.receives, (I,))
    return replace(found, layouts=layouts, outputs=dict.fromkeys(found.outputs, (I,)))


MESH = Mesh((2,), ("a",))


def test_stages_hand_on_what_later_ones_read() -> None:
    """Three stages under drawn plans, twice over: values cross as leaves, also through a stage that only hands them
    on.
    """
    case = logits_case("gpt2")
    graph = traced(case)
    tensors = dict(case.model.named_parameters())
    values = {item.value.name: tensors[item.fqn] for item in graph.of_kind("parameter")}
    batch = {item.value.name: case.kwargs["input_ids"] for item in graph.of_kind("argument")}
    (logits,), _ = run(graph, values | batch)
    logits.square().sum().backward()
    products = [op.name for op in graph.ops if op.target == "autopar.turned_linear.default"]
    stages = cut(graph, tuple(products[:2]))  # between the two, nobody reads the residual
    assert set(stages[0].sends) & set(stages[1].sends)
    stored: dict[str, Any] = {}
    assignments = [_assigned(Random(seed), stage, stored) for seed, stage in enumerate(stages)]
    parts = {fqn: parts_of(tensors[fqn].detach(), layout, MESH.shape) for fqn, layout in stored.items()}

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> dict[str, torch.Tensor]:
        mine = {fqn: part[at].requires_grad_() for fqn, part in parts.items()}
        ranks = [_stage_rank(stage, assignment, axes, mine) for stage, assignment in zip(stages, assignments)]
        opened = [open_step(one, 2) for one in ranks]
        for _ in range(2):
            _forward_backward(stages, ranks, batch)
        for one in opened:
            one.close()
        return {fqn: x.grad for fqn, x in mine.items()}

    found = on_threads(rank, MESH.shape)
    for fqn, layout in stored.items():
        joined = join({at: gradients[fqn] for at, gradients in found.items()}, layout)
        torch.testing.assert_close(joined, 2 * tensors[fqn].grad, rtol=1e-9, atol=1e-9)


def _stage_rank(
    stage: StageGraph, assignment: Assignment, axes: tuple[Axis, ...], state: dict[str, torch.Tensor]
) -> _Rank:
    program, names = lower(stage.graph, MESH, assignment, is_split=True), namespace()
    function = compile_source(emit(program), names)
    return _Rank(program, axes, state, run_constants(stage.graph, "cpu"), function, names["gather"])


def _forward_backward(stages: tuple[StageGraph, ...], ranks: list[_Rank], batch: dict[str, torch.Tensor]) -> None:
    steps, sent = [], {}
    for stage, one in zip(stages, ranks):
        received = {name: sent[name].detach().requires_grad_(sent[name].requires_grad) for name in stage.receives}
        outputs = one.function(one, *((received | batch)[name] for name in stage.graph.arguments))
        sent = dict(zip(stage.sends, outputs))
        steps.append((received, outputs))
    steps[-1][1][0].square().sum().backward()
    for (received, _), stage, (_, outputs) in zip(steps[:0:-1], stages[-2::-1], steps[-2::-1]):
        pairs = [(x, received[name].grad) for name, x in zip(stage.sends, outputs) if received[name].grad is not None]
        torch.autograd.backward(*zip(*pairs))
