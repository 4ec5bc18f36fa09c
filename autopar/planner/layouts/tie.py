"""`least_communication`: the choice among plans that prices cannot tell apart, by communication, then simplicity;
`least_gain`: what stages have to gain.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph
from autopar.planner.layouts.search_mesh import Solved
from autopar.units import format_seconds

# The least and the most that stages may have to gain.
_WORTH, _MOST_WORTH = 0.05, 0.5


def fit_error(cluster: Cluster) -> float:
    """The mean error of the cluster's prices over what was measured, as a share; 0 where it is not known."""
    return cluster.calibration.fit_error if cluster.calibration else 0.0


def least_gain(cluster: Cluster) -> float:
    """The share of a step that stages and microbatches, which change the training loop, have to gain to be chosen.

    A twentieth or, if that is more, the error of the difference between two prices whose errors are those of the fit
    and independent; at most half.
    """
    return min(_MOST_WORTH, max(_WORTH, math.sqrt(2) * fit_error(cluster)))


def least_communication(plans: Iterable[Solved], graph: Graph, cluster: Cluster, training: Training) -> Solved:
    """The fastest of `plans` by price or, of those as fast but for the error of the fit, the one that waits for
    communication for the fewest seconds; of those with equal seconds, the one on fewer axes, then a hand plan.

    Hand plans that fit the memory limit take part. The plan says so if it is not the fastest. Presets have no fit error
    and no ties.
    """
    solved = list(plans)
    fastest = min(solved, key=lambda plan: plan.cost_s)
    error = fit_error(cluster)
    if not error:
        return fastest
    within_s = fastest.cost_s * (1 + error)
    tied = [each for plan in solved for each in (plan, *_hand_plans(plan)) if each.cost_s <= within_s]
    costs = [evaluate(graph, plan.assignment, plan.mesh, cluster, training=training) for plan in tied]
    waits_s = {id(plan): _exposed_s(cost) for plan, cost in zip(tied, costs)}

    def rank(plan: Solved) -> tuple[float, int, bool, float]:
        num_axes = sum(size > 1 for size in plan.mesh.shape)
        return waits_s[id(plan)], num_axes, not plan.found_by.startswith("hand plan"), plan.cost_s

    chosen = min(tied, key=rank)
    if chosen is fastest:
        return fastest
    behind = chosen.cost_s / fastest.cost_s - 1
    less = f"{format_seconds(waits_s[id(chosen)])} of communication against {format_seconds(waits_s[id(fastest)])}"
    reason = f"a tie: {behind:.1%} behind the fastest by price, within the fit's error of {error:.1%}, with {less}"
    return replace(chosen, found_by=f"{chosen.found_by}, {reason}")


def _exposed_s(costs: Costs) -> float:
    """Seconds of communication that compute waits for."""
    return costs.communication_s("forward") + costs.communication_s("backward") - costs.hidden_s


def _hand_plans(plan: Solved) -> list[Solved]:
    """The hand plans on the same mesh, with the lower bound that was proven there."""
    return [replace(each, lower_bound_s=plan.lower_bound_s, bound_of=plan.bound_of) for each in plan.hand_plans]
