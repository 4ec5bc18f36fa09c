"""Tensors and ops that a plan leaves whole on some mesh axis although they are large, and what each costs."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.costmodel.activations.autograd_footprint import footprint
from autopar.costmodel.activations.saved_activations import savings
from autopar.costmodel.memory import input_bytes, input_update_s, local_bytes, memory_layout
from autopar.costmodel.roofline import op_time
from autopar.ir.graph import Input, Op
from autopar.ir.op_facts import is_view
from autopar.plans.plan import Plan
from autopar.sbp.assignment import produced_layouts

LARGE = 0.01  # the share of a device's memory, or of the step, from which something is large


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A tensor or the result of an op that all ranks of `axes` have whole, with its copies.

    `num_bytes`: the memory of a device that a split over these axes would save: of a parameter its gradient and
    optimizer state too, of a result what is saved for backward, 0 if nothing is. `time_s`: the seconds of a step in
    which these ranks do the same work: the op, or the update of a parameter.
    """

    name: str
    count: int
    axes: str
    num_bytes: int
    time_s: float


def stayed_whole(plan: Plan) -> tuple[WholeRow, ...]:
    """Rows of all that is whole on some axis and costs `LARGE` of the memory or the step, the largest share first."""
    memory, step_s = plan.costs.total_memory_bytes, plan.costs.step_s

    def share(row: WholeRow) -> float:
        return max(row.num_bytes / memory if memory else 0.0, row.time_s / step_s if step_s else 0.0)

    rows = [*_inputs(plan), *_ops(plan)]
    return tuple(sorted((row for row in rows if share(row) >= LARGE), key=lambda row: -share(row)))


def _inputs(plan: Plan) -> Iterator[WholeRow]:
    counts, shape = Counter(plan.folded.representative.values()), plan.mesh.shape
    for item in plan.graph.inputs:
        name, layout = item.value.name, plan.assignment.layouts[item.value.name]
        axes = [axis for axis, placement in enumerate(layout) if not placement.is_split and shape[axis] > 1]
        if axes and plan.folded.representative[name] == name:
            repeated = 1 - 1 / math.prod(shape[axis] for axis in axes)
            held = sum(input_bytes(item, layout, shape, plan.training).values())
            time_s = _update_s(plan, item) * repeated * counts[name]
            yield WholeRow(
                item.fqn, counts[name], plan.mesh.name_of(tuple(axes)), int(held * repeated * counts[name]), time_s
            )


def _update_s(plan: Plan, item: Input) -> float:
    layout = plan.assignment.layouts[item.value.name]
    own_s = input_update_s(item, layout, plan.mesh.shape, plan.training, plan.cluster)
    return max(0.0, own_s - plan.cluster.update_s)  # which parts take as well


def _ops(plan: Plan) -> Iterator[WholeRow]:
    counts, shape = Counter(plan.folded.representative.values()), plan.mesh.shape
    kept = savings(plan.graph, {op.name: footprint(op) for op in plan.graph.ops}, plan.assignment.recomputed)
    layouts = produced_layouts(plan.graph, plan.assignment)
    for op in plan.graph.ops:
        axes = _whole_axes(plan, op)
        if axes and plan.folded.representative[op.name] == op.name and not is_view(op.target):
            repeated = counts[op.name] * (1 - 1 / math.prod(shape[axis] for axis in axes))
            held = sum(
                local_bytes(value.shape, value.dtype.itemsize, memory_layout(layouts[value.name]), shape)
                for value in op.outputs
                if any(saving.is_saved for saving in kept.get(value.name, ()))
            )
            seconds = sum(op_time(op, plan.assignment.strategies[op.name], shape, plan.cluster))
            yield WholeRow(
                f"%{op.name}",
                counts[op.name],
                plan.mesh.name_of(tuple(axes)),
                int(held * repeated * plan.training.num_in_flight),
                seconds * repeated * plan.training.num_microbatches,
            )


def _whole_axes(plan: Plan, op: Op) -> list[int]:
    signatures = plan.assignment.strategies[op.name].signatures
    return [
        axis
        for axis, one in enumerate(signatures)
        if plan.mesh.shape[axis] > 1 and all(placed.kind in "IR" for placed in (*one.inputs, *one.outputs))
    ]
