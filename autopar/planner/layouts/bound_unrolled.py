"""What is proven of plans in which no two layers need be alike."""

import math

from autopar.costmodel.pricing.unroll import copies_apart, unfold
from autopar.ir.folding.segments import segmented
from autopar.planner.layouts.search_mesh import fold_stored
from autopar.planner.problem import Setting
from autopar.search.min_plus.repeat_power import condensed
from autopar.search.solve import solve

# On three axes a block hands on some hundred states, and the search of the condensed table takes as long as that of the
# plan.
MOST_AXES = 2


def bound_unfolded(setting: Setting) -> float:
    """Seconds below which no plan is, memory aside, whatever each layer does; `inf` where this says nothing.

    That is on more than `MOST_AXES` axes, and where the inner copies of a repeat are not read alike or hand on more
    than one value.
    """
    if sum(size > 1 for size in setting.mesh.shape) > MOST_AXES:
        return math.inf
    folded = fold_stored(setting.graph, setting.request)
    priced = setting.problem(segmented(folded, setting.graph, copies_apart(folded))).priced
    try:
        table = condensed(unfold(setting.graph, folded, priced))
    except ValueError:
        return math.inf
    return setting.budget.run("bound", lambda: solve(table, deadline=setting.budget.deadline)).lower_bound_s
