"""Plans as plain PyTorch: the predicted step of each exported file beside that of its plan, by price alone.

python -m bench.export [--rows 'gpt2'] [--resume]
"""

import sys
from collections.abc import Iterable

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import PIPELINE, parse_mesh
from autopar.models.catalogue import Example, build_model
from autopar.peak_memory.predict import rank_peaks
from autopar.plain_torch.export_plan import ALIKE, export_torch
from autopar.planner.choose import choose_plan
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from autopar.plans.base_plan import BasePlan
from bench.report import Row, Table, add
from bench.rows import parser, selected

CLUSTER, MICROBATCHES, MOST_CAUSES = "h100", 8, 2
MODELS = ("gpt2", "llama3-8b", "bert-large", "vit-l", "vgg13")
FOUND = "found"
# mesh, plan: one by hand as people write it for torch, or the one that is found
KINDS = (
    ("dp=8", "zero3"),
    ("tp=8", "megatron"),
    ("dp=4,tp=2", "megatron:dp=4,tp=2,zero3"),
    ("pp=2,dp=4", "zero2,pp=2"),
    ("pp=2,tp=4", "megatron:pp=2,tp=4"),
    ("dp=8", FOUND),
    ("dp=4,tp=2", FOUND),
)


def _name(model: str, mesh: str, plan: str) -> str:
    return f"{model} {mesh} {plan}"


def _cells(row: Row) -> Iterable[tuple[str, ...]]:
    steps = (f"{row[key] * 1e3:.4g}" for key in ("step_s", "file_s"))
    change = row["file_s"] / row["step_s"] - 1
    causes = "; ".join(row["causes"]) if abs(change) > ALIKE else ""
    yield row["row"], *steps, f"{change:+.1%}", causes


TABLE = Table(
    "Exported files",
    "The predicted step of a plan and of the file of torch's calls that it is exported as, on 8 devices of"
    f" {CLUSTER}, by calculation; beyond {ALIKE:.0%} the decisions that cost most of the difference.",
    ("model, mesh, plan", "plan, ms", "file, ms", "difference", "largest differences"),
    tuple(_name(model, mesh, plan) for model in MODELS for mesh, plan in KINDS),
    _cells,
)


def _plan(example: Example, graph: Graph, text: str, plan: str) -> BasePlan:
    mesh, cluster, request = parse_mesh(text), load_cluster(CLUSTER), PlanRequest()
    if plan == FOUND:
        return choose_plan(graph, mesh, cluster, request, predict=rank_peaks)
    if PIPELINE in mesh.axis_names:
        return hand_plan_in_stages(plan, graph, mesh, cluster, PlanRequest(num_microbatches=MICROBATCHES))
    return named_plan(plan, example.model, graph, mesh, cluster, request)


def _measured(example: Example, graph: Graph, name: str, mesh: str, plan: str) -> Row:
    print(name, file=sys.stderr, flush=True)
    try:
        found = _plan(example, graph, mesh, plan)
        made = export_torch(found, example.model, example.args, example.kwargs)
    except PlanError as error:
        return {"row": name, "error": str(error)}
    causes = list(made.differences[:MOST_CAUSES])
    return {"row": name, "step_s": made.plan.step_s, "file_s": made.priced.step_s, "causes": causes}


def main(arguments: list[str] | None = None) -> None:
    """Export the plans that are asked for."""
    wanted = set(selected([TABLE], parser(__doc__).parse_args(arguments), "export")[TABLE.title])
    for model in MODELS:
        kinds = [(name, mesh, plan) for mesh, plan in KINDS if (name := _name(model, mesh, plan)) in wanted]
        if not kinds:
            continue
        example = build_model(model)
        graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
        rows = [_measured(example, graph, *kind) for kind in kinds]
        add("export", [TABLE], {TABLE.title: rows}, {"cluster": CLUSTER, "microbatches with stages": MICROBATCHES})


if __name__ == "__main__":
    main()
