"""`step_cost`: a record of the cost of each op and each conversion of an assignment in a training step.

`evaluate` sums the records, `profile` assigns them to ops, and the cost table uses their counts.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.costmodel.activations.autograd_footprint import footprints
from autopar.costmodel.activations.saved_activations import NOWHERE, Saving, savings
from autopar.costmodel.activations.transients import largest_transient, transient_bytes
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.conversion_cost import Transition, kept_bytes
from autopar.costmodel.inner_collectives import inner_collectives
from autopar.costmodel.memory import saved_by_op, waiting_bytes
from autopar.costmodel.roofline import local_shapes, shapes_time, splitting_s
from autopar.costmodel.training import Training
from autopar.ir.gradients.observed_footprint import Footprint
from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.assignment import Assignment, Conversion, conversions
from autopar.sbp.redistribute import Collective, again_in_backward, collectives_of_value, redistribute
from autopar.sbp.signature import Strategy


@dataclass(frozen=True, slots=True)
class Runs:
    """The number of runs of a conversion.

    `is_once`: once a step, otherwise once a microbatch. `num_again`: repetitions in backward each time, without a
    gradient.
    """

    is_once: bool
    num_again: int


def runs_of(saving: Saving, training: Training, *, is_parameter: bool, is_regathered: bool) -> Runs:
    """The runs of a conversion in a step of `training`.

    A parameter is converted once a step and kept for all microbatches. A regathered parameter is gathered for each
    forward and again for each backward. If weight gradients are put off, backward runs the reading op twice and gathers
    twice, except in a recomputed region, whose second run is kept for both. Any other value is converted in each
    microbatch, and again when its region is recomputed.
    """
    if not is_parameter:
        return Runs(is_once=False, num_again=int(saving.region != NOWHERE))
    if not is_regathered:
        return Runs(is_once=True, num_again=0)
    is_split = training.num_waiting > 0 and saving.region == NOWHERE
    return Runs(is_once=False, num_again=(1 + is_split) * saving.is_saved)


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one run of an op on one device.

    `forward_s`, `backward_s`: of compute alone. `saved_bytes`: results and internal tensors that it saves for backward.
    `waiting_bytes`: the gradient kept until a weight's gradient is computed. `collectives`: its inner ones, in forward
    and in backward.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    waiting_bytes: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """The cost of one conversion.

    `collectives`: in forward and in backward; `again`: of each of the `runs.num_again` repetitions in backward.
    `kept_bytes`: from forward to backward, of all microbatches in flight; `inside_bytes`: more while its region is
    recomputed; `moved_bytes`: offloaded in each microbatch.
    """

    conversion: Conversion
    saving: Saving
    is_parameter: bool
    runs: Runs
    collectives: tuple[Collective, ...]
    again: tuple[Collective, ...]
    kept_bytes: int
    inside_bytes: int
    moved_bytes: int

    def time_s(self, collective: Collective, mesh: Mesh, cluster: Cluster) -> float:
        """Seconds of one of its collectives; in a bucket, the conversion's share of that of the bucket."""
        share, is_copied = self.conversion.latency_share, self.conversion.is_copied
        return collective_time(cluster, mesh, collective, latency_share=share, is_copied=is_copied)


@dataclass(frozen=True)
class StepCost:
    """The records of a step.

    `ops`: op name -> cost. `conversions`: value name -> costs, in the order of `assignment.conversions`; `savings`:
    value name -> the saving of each of these. `footprints`: op name -> footprint. `transients`: op name -> bytes of its
    transient that count. `pending`: parameters whose gradients do not exist at that time.
    """

    ops: Mapping[str, OpCost]
    conversions: Mapping[str, tuple[ConversionCost, ...]]
    savings: Mapping[str, tuple[Saving, ...]]
    footprints: Mapping[str, Footprint]
    transients: Mapping[str, float]
    pending: frozenset[str]

    def all_conversions(self) -> Iterator[ConversionCost]:
        """The costs of all conversions, one value after the other."""
        for of_value in self.conversions.values():
            yield from of_value


def step_cost(sampled: Sampled, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training) -> StepCost:
    """The records of `assignment` in a step of `training`, in graph order; its regions are those of the sampled graph.

    What the sampled graph lacks has no records of its own.
    """
    graph = sampled.graph
    known, regions = graph.once(footprints), (assignment.recomputed, assignment.offloaded)
    parameters = frozenset(item.value.name for item in graph.of_kind("parameter"))
    saved = savings(graph, known, *regions)
    largest = largest_transient(sampled, known, *regions, training.num_microbatches)
    ops = {op.name: op for op in graph.ops}
    transients = {}
    for name, share in largest.ops.items():
        shapes = local_shapes(ops[name], assignment.strategies[name], mesh.shape)
        transients[name] = share * transient_bytes(ops[name], *shapes, parameters)
    return StepCost(
        _op_costs(graph, assignment, mesh, cluster, is_split=training.num_waiting > 0),
        _conversion_costs(graph, assignment, mesh, training, saved),
        saved,
        known,
        transients,
        largest.pending,
    )


def _op_costs(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, is_split: bool
) -> dict[str, OpCost]:
    """Name of each op -> cost, with backward in two parts if it `is_split`.

    Equal calls with one strategy, as in the copies of a block, are priced once.
    """
    priced: dict[Hashable, OpCost] = {}
    costs = {}
    for op in graph.ops:
        strategy = assignment.strategies[op.name]
        key = id(op.nameless), id(strategy)
        if key not in priced:
            priced[key] = op_cost(op.nameless, strategy, mesh.shape, cluster, is_split=is_split)
        costs[op.name] = priced[key]
    return costs


def _conversion_costs(
    graph: Graph, assignment: Assignment, mesh: Mesh, training: Training, found: Mapping[str, tuple[Saving, ...]]
) -> dict[str, tuple[ConversionCost, ...]]:
    """Name of each value -> costs of its conversions; equal ones, as in the copies of a block, are priced once.

    found: name of each value -> the saving of each of its conversions.
    """
    parameters = frozenset(item.value.name for item in graph.of_kind("parameter"))
    priced: dict[Hashable, tuple] = {}
    costs = {}
    for name, of_value in conversions(graph, assignment).items():
        is_parameter, of_name = name in parameters, []
        for number, (each, saving) in enumerate(zip(of_value, found[name])):
            value = each.value
            ends = value.shape, value.dtypes, value.needs_grad, each.src, each.dst
            key = ends, each.is_regathered, saving, is_parameter, number == 0
            if key not in priced:
                flags = {"is_parameter": is_parameter, "is_first": number == 0}
                priced[key] = _conversion_cost(each, saving, mesh, training, **flags)
            of_name.append(ConversionCost(each, saving, is_parameter, *priced[key]))
        costs[name] = tuple(of_name)
    return costs


@lru_cache(maxsize=2**14)
def op_cost(
    op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], cluster: Cluster, *, is_split: bool = False
) -> OpCost:
    """The cost of `op` under `strategy`, with backward in two parts if it `is_split`."""
    inputs, outputs = local_shapes(op, strategy, mesh_shape)
    forward_s, backward_s = shapes_time(op, inputs, outputs, cluster)
    return OpCost(
        forward_s,
        backward_s + (splitting_s(op, inputs, outputs, cluster) if is_split else 0.0),
        saved_by_op(op, strategy, inputs, outputs, mesh_shape),
        waiting_bytes(op, outputs),
        inner_collectives(op, strategy, mesh_shape),
    )


def _conversion_cost(
    conversion: Conversion, saving: Saving, mesh: Mesh, training: Training, *, is_parameter: bool, is_first: bool
) -> tuple:
    """The fields of a `ConversionCost` from `runs` on."""
    value, steps = conversion.value, redistribute(conversion.src, conversion.dst)
    runs = runs_of(saving, training, is_parameter=is_parameter, is_regathered=conversion.is_regathered)
    way = Transition(value, (conversion.src,), (conversion.dst,), saving, is_parameter, is_stored=is_first)
    kept, inside, moved = (
        int(found[0, 0]) for found in kept_bytes(way, mesh.shape, training, again=conversion.is_regathered)
    )
    made = tuple(collective for step in steps for collective in collectives_of_value(step, value, mesh.shape))
    again = again_in_backward(steps, value, mesh.shape)
    return runs, made, again, kept, inside, moved
