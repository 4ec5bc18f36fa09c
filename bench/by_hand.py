"""The best of all plans that a person might write, priced like the plan found and asked to fit as that is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.training import Training
from autopar.errors import InfeasibleError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.passes.keep_loss import loss_only
from autopar.mesh import Devices, Mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.pipeline.hand_points import Model, grids, model_of
from autopar.planner.stages_by_hand import plan_by_hand
from bench.every_stage import Written, every_plan

# Tensors are split within so many nodes.
MOST_NODES = 2
# Of so many plans, fastest first, the predicted peak may be above the limit.
MOST_CHECKED = 60
# Plans are ordered by sums over their blocks. These are the plan's price to a thousandth, but with ZeRO, whose
# parameters are gathered in buckets, and with ZeRO-3, where a block that is recomputed gathers its parameters once for
# both, up to this factor above it: of such plans that are near, so many are priced op by op.
NEAR, MOST_NEAR = 2.0, 8


# Where the peak of the fastest is above the limit, a person recomputes more: as few blocks as fit in such parts of the
# limit.
PARTS_OF_LIMIT = (0.9, 0.8)


@dataclass(frozen=True)
class ByHand:
    """The fastest plan by hand that fits; None if none does. num_fitting: of how many the estimate fits; num_above: of
    how many that are faster and of which it does the predicted peak does not."""

    name: str | None
    step_s: float | None
    peak_bytes: int | None
    num_fitting: int
    num_above: int


def best_by_hand(
    graph: Graph, mesh: Mesh | Devices, cluster: Cluster, training: Training, limit_bytes: float
) -> ByHand:
    """Of a number of devices every product stages x data x tensor; of a mesh without stages every choice of its tensor
    axes.

    InfeasibleError if so many of the fastest do not fit as they are predicted that the best is not known.
    """
    whole = loss_only(graph)
    model = model_of(whole, fold(whole))
    every = partial(every_plan, model, tuple(_meshes(model, mesh, cluster)), cluster, training=training)
    points = sorted(every(limit_bytes=limit_bytes), key=_step_s)
    num_fitting, num_above, best = len(points), 0, None
    while points and best is None:
        if num_above == MOST_CHECKED:
            raise InfeasibleError(
                f"none of the {MOST_CHECKED} fastest of {num_fitting} plans by hand fits as it is predicted; expected"
                " one; raise MOST_CHECKED in bench/by_hand.py"
            )
        written = points.pop(0)
        plan = plan_by_hand(model, written.point, cluster, training)
        if (peak_bytes := max(rank_peaks(plan))) <= limit_bytes:
            best = ByHand(_name(written), plan.step_s, peak_bytes, num_fitting, num_above)
            break
        num_above += 1
        if num_above == 1:
            lighter = (every(limit_bytes=part * limit_bytes, recomputed=("fewest",)) for part in PARTS_OF_LIMIT)
            points = sorted([*points, *chain.from_iterable(lighter)], key=_step_s)
    for written in _near(points, best.step_s) if best else ():
        plan = plan_by_hand(model, written.point, cluster, training)
        if plan.step_s < best.step_s and (peak_bytes := max(rank_peaks(plan))) <= limit_bytes:
            best = ByHand(_name(written), plan.step_s, peak_bytes, num_fitting, num_above)
    return best or ByHand(None, None, None, num_fitting, num_above)


def _near(points: Sequence[Written], best_s: float) -> list[Written]:
    """The first of each kind of the plans that may be faster than `best_s` although their sums are above it."""
    kinds: dict[tuple, Written] = {}
    for written in points:
        if is_dear(written) and _step_s(written) <= NEAR * best_s:
            schedule = written.point.schedule
            kinds.setdefault(
                (written.point.mesh, written.point.plan, schedule.name, schedule.num_microbatches), written
            )
    return list(kinds.values())[:MOST_NEAR]


def _step_s(written: Written) -> float:
    return written.step_s


def is_dear(written: Written) -> bool:
    """Whether the sum over the plan's blocks may be well above its price, which has parameter buckets."""
    return written.point.plan.flavour != "ddp"


def _meshes(model: Model, mesh: Mesh | Devices, cluster: Cluster) -> Iterator[tuple[int, Mesh]]:
    if isinstance(mesh, Mesh):
        yield 1, mesh
        return
    most_tensor = MOST_NODES * (cluster.levels[0].size or mesh.num_devices)
    yield from grids(mesh.num_devices, cluster, num_layers=len(model.starts), most_tensor=most_tensor)


def _name(written: Written) -> str:
    """With the number of blocks that are recomputed."""
    num = sum(written.point.partition.num_recomputed)
    return written.name if num == 0 else f"{written.name} ({num} blocks)"
