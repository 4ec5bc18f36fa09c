"""`--hand`: hand plans by name, written as a function, or as DeepSpeed's configuration."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.state_offload import hostable
from autopar.errors import AutoparError, PlanError
from autopar.explain.common_text import table
from autopar.ir.graph import Graph
from autopar.ir.print_graph import printable
from autopar.mesh import Devices, Mesh
from autopar.models.target import load_function
from autopar.planner.handwritten.deepspeed_json import read_deepspeed
from autopar.planner.handwritten.function_plan import WrittenPlan, function_plan
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import hand_plan_in_stages
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

_HOW = "write --hand path.py:function, where function(model, mesh) calls parallelize_module, fully_shard or both"


def is_file(text: str) -> bool:
    """Whether the text of a hand plan names a file."""
    return ".py:" in text or text.endswith((".json", ".py"))


def plan_by_hand(
    text: str, model: nn.Module, graph: Graph, mesh: Mesh, cluster: Cluster, request: PlanRequest
) -> WrittenPlan:
    """The hand plan `text` of `model`, traced as `graph`: a name with options (`parse_hand_plan`), "path.py:function",
    or the path of DeepSpeed's configuration, which ends in .json.

    PlanError for a text that is none of these, and with file and line for a file that cannot be read as a plan.
    """
    if ".py:" in text:
        return function_plan(_function(text), text, model, graph, mesh, cluster, request)
    if text.endswith(".py"):
        raise PlanError(f"no hand plan {text}: {_HOW}")
    if not text.endswith(".json"):
        return WrittenPlan(named_plan(text, model, graph, mesh, cluster, request), (), ())
    said, training = read_deepspeed(text), request.training
    training = replace(
        training,
        optimizer=said.optimizer or training.optimizer,
        reduce_dtype=said.reduce_dtype or training.reduce_dtype,
    )
    on_host = frozenset(item.value.name for item in hostable(graph)) if said.is_state_on_host else frozenset()
    request = replace(request, training=training, given=replace(request.given, state_on_host=on_host))
    plan = named_plan(said.flavour, model, graph, mesh, cluster, request)
    return WrittenPlan(replace(plan, found_by=f"hand plan {text} ({said.flavour})"), (), said.remarks)


def staged_by_hand(text: str, graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest) -> StagedPlan:
    """The hand plan `text` in stages or microbatches; PlanError for a file, which describes none."""
    if is_file(text):
        raise PlanError(
            f"--hand {text} is a plan without stages and microbatches and cannot be combined with a pipeline axis in"
            " --mesh, --microbatches or --schedule; write its letters, such as --hand pp=4,vp=2,fsdp,tp=8"
        )
    return hand_plan_in_stages(text, graph, mesh, cluster, request)


def written_text(planned: WrittenPlan | Plan | StagedPlan) -> str:
    """The text of layouts and remarks beside the price; "" for a plan by name, or one that was found."""
    if not isinstance(planned, WrittenPlan):
        return ""
    lines = [[printable(r.fqn) + f" x {r.count}" * (r.count > 1), r.dtensor, r.priced] for r in planned.rows]
    rows = f"Parameters as DTensor has them:\n{table(lines, ['parameter', 'DTensor', 'priced'])}" if lines else ""
    return "\n\n".join(part for part in (rows, "\n".join(map(printable, planned.remarks))) if part)


def written_json(planned: WrittenPlan | Plan | StagedPlan) -> dict[str, Any]:
    """The content of `written_text`."""
    if not isinstance(planned, WrittenPlan):
        return {}
    rows = [{"fqn": r.fqn, "count": r.count, "dtensor": r.dtensor, "priced": r.priced} for r in planned.rows]
    return {"by_hand": {"parameters": rows, "remarks": list(planned.remarks)}} if rows or planned.remarks else {}


def _function(text: str) -> Callable[..., Any]:
    path, _, name = text.rpartition(":")
    try:
        return load_function(path, name, _HOW)
    except AutoparError:
        raise
    except SyntaxError as error:
        raise PlanError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((one for one in reversed(frames) if one.filename.endswith(path)), frames[-1])
        where = f"{frame.filename}:{frame.lineno}: `{frame.line}`"
        raise PlanError(f"{where} raised {type(error).__name__}: {error}") from error
