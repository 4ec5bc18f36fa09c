"""`plan_rows`: each op and each tensor of a plan with its layout and its seconds, by names that two plans share."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.activations.saved_activations import region_of_ops
from autopar.costmodel.evaluate import PlannedCollective
from autopar.costmodel.step_cost import op_cost
from autopar.ir.graph import Op, call_key
from autopar.ir.op_facts import family
from autopar.plans.plan import Plan
from autopar.sbp.placement import format_layout


@dataclass(frozen=True, slots=True)
class PlanRow:
    """An op, a parameter or another input of a plan.

    `key`: the same for the same op or tensor of another plan. `layout`: its signatures or stored layout, by axis name,
    and what else was decided of it. `seconds`: of compute, and of collectives by axis and kind, in a step; `stage`: its
    number, -1 without stages.
    """

    key: tuple[str, str, int]
    source: str
    layout: str
    seconds: Mapping[str, float]
    stage: int = -1

    @property
    def time_s(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


def plan_rows(plan: AnyPlan) -> dict[tuple[str, str, int], PlanRow]:
    """Key -> row, in the order of the graph.

    A key is (module, family of the op, number of this op in the module), or ("", FQN, 0) of an input. A tensor that
    several stages hold has the row of the first.
    """
    rows: dict[tuple[str, str, int], PlanRow] = {}
    numbers = Counter[tuple[str, str]]()
    stages = [(-1, plan)] if isinstance(plan, Plan) else list(enumerate(plan.stages))
    for stage, part in stages:
        for row in (*_inputs(part, stage), *_ops(part, stage, numbers)):
            rows.setdefault(row.key, row)
    return rows


def _ops(plan: Plan, stage: int, numbers: Counter[tuple[str, str]]) -> Iterator[PlanRow]:
    again, issued = region_of_ops(plan.assignment.recomputed), _by_owner(plan)
    offloaded, num = region_of_ops(plan.assignment.offloaded), plan.costs.num_microbatches
    priced: dict = {}
    is_split = plan.training.num_waiting > 0
    for op in plan.graph.ops:
        strategy = plan.assignment.strategies[op.name]
        call = call_key(op), id(strategy)
        if call not in priced:
            priced[call] = op_cost(op, strategy, plan.mesh.shape, plan.cluster, is_split=is_split)
        cost, name = priced[call], (op.module, family(op.target))
        seconds = num * (cost.forward_s * (1 + (op.name in again)) + cost.backward_s)
        signatures = zip(plan.mesh.axis_names, strategy.signatures)
        layout = "; ".join(f"{axis}: {signature}" for axis, signature in signatures)
        layout += ", recomputed" * (op.name in again) + ", offloaded" * (op.name in offloaded)
        yield PlanRow((*name, numbers[name]), _source(op), layout, {"compute": seconds} | issued[op.name], stage)
        numbers[name] += 1


def _source(op: Op) -> str:
    return " ".join(part for part in (op.module, op.line) if part)


def _inputs(plan: Plan, stage: int) -> Iterator[PlanRow]:
    issued, chosen = _by_owner(plan), plan.assignment
    for item in plan.graph.inputs:
        name = item.value.name
        if item.kind == "argument" and stage > 0:
            continue  # a boundary tensor, or an argument that the first stage has too
        layout = "; ".join(f"{axis}: {p}" for axis, p in zip(plan.mesh.axis_names, chosen.layouts[name]))
        layout += ", regathered" * (name in chosen.regathered) + ", state on host" * (name in chosen.state_on_host)
        yield PlanRow(("", item.fqn or name, 0), item.kind, layout or format_layout(()), issued[name], stage)


def _by_owner(plan: Plan) -> Mapping[str, dict[str, float]]:
    """Op or input -> "kind axis" -> seconds in a step of the collectives on its values."""
    owners = {value.name: op.name for op in plan.graph.ops for value in op.outputs}
    found = defaultdict[str, dict[str, float]](dict)
    for planned in plan.costs.collectives:
        seconds, name = found[owners.get(planned.where, planned.where)], _name(plan, planned)
        seconds[name] = seconds.get(name, 0.0) + plan.costs.num_issued(planned) * planned.time_s
    return found


def _name(plan: Plan, planned: PlannedCollective) -> str:
    return f"{planned.collective.kind} {plan.mesh.name_of(planned.collective.axes)}"


def without_numbers(text: str) -> str:
    """A module's or tensor's name with "*" for the numbers of blocks.

    >>> without_numbers("model.layers.12.mlp.fc1.weight")
    'model.layers.*.mlp.fc1.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", text)
