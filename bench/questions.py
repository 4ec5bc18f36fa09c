"""Ten questions about plans: what is told, whether the terms sum up, and how long the answer takes beside the plan.

python -m bench.questions [--rows 'gpt2'] [--resume]
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from autopar.answers.questions import Answer, Asked, why, why_not_by_hand, why_not_pinned
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.models.catalogue import build_model
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import PlanRequest
from autopar.plans.base_plan import BasePlan
from bench.report import Row, Table, add
from bench.rows import parser, selected


@dataclass(frozen=True, slots=True)
class Subject:
    """A plan with two questions about it: `why` a name is as it is, `why_not` a hand plan or a layout."""

    model: str
    batch: int
    mesh: str
    cluster: str
    why: str
    why_not: str


SUBJECTS = (
    Subject("gpt2", 64, "dp=2,tp=4", "h100", "transformer.h.3.mlp.c_fc", "megatron:dp=2,tp=4,sp"),
    Subject("llama3-8b", 64, "dp=8,tp=8", "h100", "model.layers.3.mlp.down_proj.weight", "zero2"),
    Subject("bert-large", 64, "pp=2,dp=4", "v100-25g", "bert.encoder.layer.3.intermediate", "zero3"),
    Subject("vit-l", 128, "2x4", "v100-25g", "memory", "classifier.weight=S(0)B"),
    Subject("t5-large", 64, "dp=2,tp=4", "a100", "shared.weight", "ddp"),
)


def _name(subject: Subject, question: str) -> str:
    return f"{subject.model} {subject.mesh} {subject.cluster}: {question}"


def _cells(row: Row) -> Iterable[tuple[str, ...]]:
    steps = (f"{row[key] * 1e3:.4g}" for key in ("step_s", "other_s"))
    times = f"{row['answer_cpu_s'] / row['plan_cpu_s']:.2f}"
    yield row["row"], row["sentence"], *steps, f"{row['error_s']:.0e}", f"{row['plan_cpu_s']:.2g}", times


TABLE = Table(
    "Questions",
    "Questions about plans (by calculation): the step with and without, how far the terms that are told sum beside"
    " their difference, and the CPU seconds of the answer beside those of planning, in one process.",
    ("question", "answer", "step, ms", "the other, ms", "error of the sum, s", "planning, CPU s", "answer, times"),
    tuple(_name(each, text) for each in SUBJECTS for text in (f"why {each.why}", f"why not {each.why_not}")),
    _cells,
)


def _asked(subject: Subject) -> tuple[Asked, float]:
    """The plan, and the CPU seconds of planning."""
    example, cluster = build_model(subject.model, batch=subject.batch), load_cluster(subject.cluster)
    graph = trace(skeleton(example.model), example.args, dict(example.kwargs))

    def planner(request: PlanRequest, mesh: Mesh) -> BasePlan:
        return choose_plan(graph, mesh, cluster, request, predict=rank_peaks)

    start = time.process_time()
    plan = planner(PlanRequest(), parse_mesh(subject.mesh))
    return Asked(plan, graph, PlanRequest(), planner), time.process_time() - start


def _not(asked: Asked, text: str) -> Answer:
    if "=" in text.split(":")[0]:
        return why_not_pinned(asked, *text.split("=", 1))
    devices = asked.plan.mesh.num_devices
    mesh = Mesh((devices,), ("dp",)) if "pp" in asked.plan.mesh.axis_names else asked.plan.mesh
    request = replace(asked.request, memory_limit_bytes=asked.plan.memory_limit_bytes)
    other = named_plan(text, nn.Module(), asked.graph, mesh, asked.plan.cluster, request)
    return why_not_by_hand(asked, text, other)


def _measured(name: str, asked: Asked, plan_cpu_s: float, question: str) -> Row:
    print(name, file=sys.stderr, flush=True)
    start = time.process_time()
    answer = why(asked, question[4:]) if not question.startswith("why not ") else _not(asked, question[8:])
    text = str(answer)
    spent_s, found = time.process_time() - start, answer.comparison
    assert found is not None and text, f"{name}: {answer.why_none}"
    change_s = answer.other.step_s - answer.plan.step_s
    told_s = sum(after - before for before, after in found.terms_s.values())
    steps = {"step_s": answer.plan.step_s, "other_s": answer.other.step_s, "error_s": abs(told_s - change_s)}
    return {"row": name, "sentence": answer.sentence, **steps, "plan_cpu_s": plan_cpu_s, "answer_cpu_s": spent_s}


def main(arguments: list[str] | None = None) -> None:
    """Ask the questions that are asked for."""
    wanted = selected([TABLE], parser(__doc__).parse_args(arguments), "questions")[TABLE.title]
    for subject in SUBJECTS:
        questions = [f"why {subject.why}", f"why not {subject.why_not}"]
        names = {_name(subject, question): question for question in questions}
        if not names.keys() & set(wanted):
            continue
        asked, plan_cpu_s = _asked(subject)
        rows = [_measured(name, asked, plan_cpu_s, text) for name, text in names.items() if name in wanted]
        add("questions", [TABLE], {TABLE.title: rows}, {})


if __name__ == "__main__":
    main()
