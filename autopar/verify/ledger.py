"""`Ledger`: measured steps of a running plan beside its prediction, term by term."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.costmodel.activations.saved_activations import region_of_ops
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.measured_terms import MemoryShare, memory_share
from autopar.costmodel.collective_time import issued_as
from autopar.costmodel.roofline import local_shapes, op_flops
from autopar.costmodel.step_cost import step_cost
from autopar.errors import AutoparError
from autopar.mesh import PIPELINE
from autopar.plans.plan import Plan
from autopar.plans.serialise import write
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.pipeline.trainer import Trainer, pipeline_mesh
from autopar.runtime.rank_agreement import gather
from autopar.runtime.sharded_module import ShardedModule
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.in_flight import in_turn
from autopar.sbp.redistribute import Collective
from autopar.units import format_seconds
from autopar.verify.count_collectives import CountingMode

# Kernels of products below autograd, by parts of their names.
_PRODUCTS = ("mm", "linear", "convolution", "scaled_dot_product", "flash_attention", "efficient_attention", "einsum")
PRODUCTS, OTHER_OPS, UPDATE, WAITING, BETWEEN = (
    "products",
    "other ops",
    "update",
    "waiting for other ranks",
    "between ops",
)
# Of stages: the time until what another stage sends is there, bubbles too, and that of starting sends and receives.
STAGE_WAIT, SENDS = "waiting for other stages", "starting sends and receives"
_OWN = (PRODUCTS, OTHER_OPS, UPDATE, STAGE_WAIT, SENDS)  # of one rank alone, where collectives are of several
Item = tuple[str, str, float]  # term, phase, seconds


@dataclass(frozen=True, slots=True)
class Entry:
    """A term of a step: seconds predicted and measured."""

    term: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Account:
    """The terms of a step. `step`: of steps run as ever; the terms are of steps in which each op was timed, which takes
    longer: `timed_s`.
    """

    step: Entry
    terms: tuple[Entry, ...]
    timed_s: float

    @property
    def worst(self) -> Entry:
        """The term that is off by most seconds."""
        return max(self.terms, key=lambda entry: abs(entry.measured_s - entry.predicted_s))

    def __str__(self) -> str:
        rows = [
            [x.term, format_seconds(x.predicted_s), format_seconds(x.measured_s), _ratio(x)]
            for x in (*self.terms, self.step)
        ]
        table = tabulate(rows, ["term", "predicted", "measured", "ratio"], disable_numparse=True)
        worst_s = format_seconds(abs(self.worst.measured_s - self.worst.predicted_s))
        return (
            f"{table}\n\nMost off: {self.worst.term}, by {worst_s}. Terms are of steps in which each op is timed,"
            f" {format_seconds(self.timed_s)} each; nothing is hidden in these."
        )


def _ratio(entry: Entry) -> str:
    return f"{entry.measured_s / entry.predicted_s:.2f}" if entry.predicted_s else "-"


class Ledger:
    """An iterator over training steps that measures them; each round of the loop is one step of the user's own.

        ledger = model.measure(steps=10)
        for _ in ledger:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(ledger.account)

    The first step is not counted, half of the others run as ever, and in the last ones each op and collective is timed.
    With stages (`model.train_step`), each rank of the pipeline has terms of its own. Every rank of the mesh takes part.
    A module that is not measured runs the same code as before.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        if not isinstance(model, ShardedModule):
            raise AutoparError(f"measure expects a module of autopar.compile, found {type(model).__name__}")
        if type(steps) is not int or steps < 3:
            raise AutoparError(f"measure: expected steps=3 or more (one is not counted), found {steps!r}")
        self.model, self.num_steps = model, steps
        self._account: Account | None = None

    @property
    def account(self) -> Account:
        """The comparison; AutoparError before the loop has ended."""
        if self._account is None:
            raise AutoparError("measure: no steps were measured; run the loop `for _ in ledger:` to its end first")
        return self._account

    def __iter__(self) -> Iterator[int]:
        device = torch.device(self.model._autopar.mesh.device_type)
        plain_s: list[float] = []
        timed: list[tuple[float, list[Item]]] = []
        num_plain = self.num_steps // 2
        for number in range(self.num_steps):
            start = time.perf_counter()
            if number <= num_plain:
                yield number
                _synchronize(device)
                plain_s.append(time.perf_counter() - start)
            else:
                timing = _TimingMode(_own_mesh(self.model), device)
                with in_turn(), timing as mode, _timed_waits(self.model, mode.items):
                    yield number
                timed.append((time.perf_counter() - start, mode.finished()))
        self._account = _account(self.model, plain_s[1:], timed)


def _own_mesh(model: ShardedModule) -> DeviceMesh:
    """The mesh of a rank's program: without stages the model's, else that of its stages."""
    loaded = model._autopar.current()
    return loaded.parts[0].loaded.mesh if isinstance(loaded, Trainer) else model._autopar.mesh


@contextmanager
def _timed_waits(model: ShardedModule, items: list[Item]) -> Iterator[None]:
    """A context in which the waits of this rank's stages for others are added to `items`."""
    loaded = model._autopar.current()
    if not isinstance(loaded, Trainer):
        yield
        return
    loaded.runner.waited = lambda seconds: items.append((STAGE_WAIT, "", seconds))
    try:
        yield
    finally:
        loaded.runner.waited = None


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


class _TimingMode(CountingMode):
    """Times each op below autograd. A collective takes until the next op: the wait for it comes after its own op."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(mesh, [])
        self.device, self.items = device, list[Item]()
        self.pending: tuple[Collective, float] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._end_pending()
        num_issued, start = len(self.issued), time.perf_counter()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if len(self.issued) > num_issued:
            self.pending = self.issued[-1], start
            return out
        _synchronize(self.device)
        name = func._schema.name.partition("::")[2]
        is_product = any(part in name for part in _PRODUCTS)
        term = SENDS if func.namespace == "c10d" else PRODUCTS if is_product else OTHER_OPS
        self.items.append((term, self.phase(), time.perf_counter() - start))
        return out

    def _end_pending(self) -> None:
        if self.pending is not None:
            _synchronize(self.device)
            collective, start = self.pending
            self.items.append((_name(collective, self.mesh), collective.phase, time.perf_counter() - start))
            self.pending = None

    def finished(self) -> list[Item]:
        """The items of the step; what follows its backward is the update."""
        self._end_pending()
        backward = [position for position, item in enumerate(self.items) if item[1] == "backward"]
        last = backward[-1] if backward else len(self.items)
        behind = [position > last and item[0] not in (STAGE_WAIT, SENDS) for position, item in enumerate(self.items)]
        return [(UPDATE, "update", item[2]) if is_late else item for is_late, item in zip(behind, self.items)]


def _name(collective: Collective, mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"a{axis}" for axis in range(mesh.ndim))
    kind = collective.kind if collective.level < 0 else "collectives of each link level"
    return f"{kind} on {'+'.join(names[axis] for axis in collective.axes) or 'other ranks'}"


def _account(model: ShardedModule, plain_s: Sequence[float], timed: Sequence[tuple[float, list[Item]]]) -> Account:
    plan, mesh = model.plan, model._autopar.mesh
    place = pipeline_mesh(mesh)[2] if isinstance(plan, StagedPlan) else 0
    ranks = gather(mesh, (place, list(plain_s), list(timed)))
    step_s = median(max(rank[1][step] for rank in ranks) for step in range(len(plain_s)))
    timed_s = median(max(rank[2][step][0] for rank in ranks) for step in range(len(timed)))
    terms: list[Entry] = []
    for number in sorted({rank[0] for rank in ranks}):
        of_place = [rank[2] for rank in ranks if rank[0] == number]
        measured = _measured(of_place, timed_s)
        predicted = predicted_terms(plan, _own_mesh(model), number)
        start = f"rank {number} of the pipeline: " if PIPELINE in (mesh.mesh_dim_names or ()) else ""
        names = dict.fromkeys((*predicted, *measured))
        terms += (Entry(start + name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names)
    account = Account(Entry("step", plan.step_s, step_s), tuple(terms), timed_s)
    model.__dict__["_autopar_account"] = account
    return account


def _measured(ranks: Sequence[Sequence[tuple[float, list[Item]]]], timed_s: float) -> dict[str, float]:
    """Term -> seconds of a step of `timed_s`, from the timed steps of ranks that run the same program."""
    steps = [_of_step([rank[step][1] for rank in ranks]) for step in range(len(ranks[0]))]
    names = dict.fromkeys(name for step in steps for name in step)
    measured = {name: median(step.get(name, 0.0) for step in steps) for name in names}
    return measured | {BETWEEN: max(0.0, timed_s - sum(measured.values()))}


def _of_step(ranks: Sequence[list[Item]]) -> dict[str, float]:
    """Term -> seconds of a step: of ops the median over ranks, of collectives that of the rank that came last, which
    waits for none; what the others waited on top is a term of its own, the mean over ranks.
    """
    terms: dict[str, float] = defaultdict(float)
    sums = [defaultdict[str, float](float) for _ in ranks]
    for total, items in zip(sums, ranks):
        for term, phase, seconds in items:
            if term in _OWN:
                total[f"{term}, {phase}" if term in (PRODUCTS, OTHER_OPS) else term] += seconds
    for name in dict.fromkeys(name for total in sums for name in total):
        terms[name] = median(total[name] for total in sums)
    collectives = [[item for item in items if item[0] not in _OWN] for items in ranks]
    for same in zip(*collectives):
        least = min(seconds for _, _, seconds in same)
        term, phase, _ = same[0]
        terms[f"{term}, {phase}"] += least
        terms[WAITING] += sum(seconds - least for _, _, seconds in same) / len(same)
    return dict(terms)


def predicted_terms(plan: Plan | StagedPlan, mesh: DeviceMesh, rank: int = 0) -> dict[str, float]:
    """Term -> predicted seconds of a step of `plan`; their sum is that of the step with nothing hidden.

    `mesh`: that of a program, whose axes the collectives name. `rank`: of the pipeline, whose stages are meant.
    """
    if isinstance(plan, Plan):
        return _terms_of(plan, mesh)
    terms: dict[str, float] = defaultdict(float)
    for stage in plan.schedule.stages_of(rank):
        for name, seconds in _terms_of(plan.stages[stage], mesh).items():
            terms[name] += seconds
    if plan.schedule.num_ranks > 1:
        hidden_s = sum(plan.stages[stage].costs.hidden_s for stage in plan.schedule.stages_of(rank))
        terms[STAGE_WAIT] = plan.step_s + hidden_s - sum(terms.values())  # a measured step has it in turn
    return dict(terms)


def _terms_of(plan: Plan, mesh: DeviceMesh) -> dict[str, float]:
    costs, terms = plan.costs, dict[str, float]()
    step = step_cost(Sampled(plan.graph), plan.assignment, plan.mesh, plan.cluster, plan.training)
    again = region_of_ops(plan.assignment.recomputed)
    for op in plan.graph.ops:
        shapes = local_shapes(op, plan.assignment.strategies[op.name], plan.mesh.shape)
        kind, cost = PRODUCTS if op_flops(op, *shapes) else OTHER_OPS, step.ops[op.name]
        backward_s = cost.backward_s + (cost.forward_s if op.name in again else 0.0)
        for phase, seconds in (("forward", cost.forward_s), ("backward", backward_s)):
            name = f"{kind}, {phase}"
            terms[name] = terms.get(name, 0.0) + costs.num_microbatches * seconds
    terms[UPDATE] = costs.optimizer_s
    for planned in costs.collectives:
        first, *_ = issued_as(planned.collective, plan.cluster, plan.mesh)
        name = f"{_name(first, mesh)}, {first.phase}"
        terms[name] = terms.get(name, 0.0) + planned.time_s * costs.num_issued(planned)
    if transfers_s := sum(costs.waiting_s.values()):
        terms["transfers from and to the host"] = transfers_s
    return terms


def calibrate_from(model: ShardedModule, path: str | os.PathLike | None = None) -> Cluster:
    """The cluster of the model's plan with its rates corrected by what `model.measure` has measured last; one rank may
    give `path`, to which it is written as JSON, whole or not at all.

    Products, other ops, the update and each kind of collective are scaled, each by measured over predicted seconds. The
    gaps between ops count as other ops. AutoparError if nothing was measured.
    """
    account = model.__dict__.get("_autopar_account")
    if account is None:
        raise AutoparError("calibrate_from: the model was not measured; run `for _ in model.measure(steps=10):` first")
    cluster: Cluster = model.plan.cluster
    by_kind: dict[str, list[Entry]] = defaultdict(list)
    for entry in account.terms:
        name = entry.term.rpartition(": ")[2].split(",")[0].split(" on ")[0]
        by_kind[OTHER_OPS if name == BETWEEN else name].append(entry)
    times = {
        name: measured_s / predicted_s
        for name, entries in by_kind.items()
        if (predicted_s := sum(x.predicted_s for x in entries)) and (measured_s := sum(x.measured_s for x in entries))
    }
    products, others, update = (times.get(name, 1.0) for name in (PRODUCTS, OTHER_OPS, UPDATE))
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    factors = {kind: cluster.kind_factors.get(kind, 1.0) * times[kind] for kind in kinds if kind in times}
    corrected = replace(
        cluster,
        flops_per_s={dtype: rate / products for dtype, rate in cluster.flops_per_s.items()},
        memory_bandwidth_bytes_per_s=cluster.memory_bandwidth_bytes_per_s / others,
        kernel_s=cluster.kernel_s * others,
        memory_shares=_with_update(cluster, others / update),
        update_s=cluster.update_s * update,
        kind_factors={**cluster.kind_factors, **factors},
        source=f"{cluster.source}, corrected by steps of a model",
    )
    if path is not None:
        write(path, corrected.to_json())
    return corrected


def _with_update(cluster: Cluster, times_faster: float) -> tuple:
    """The memory shares with those of the update, which keeps its time where that of other ops is scaled."""
    others = tuple(row for row in cluster.memory_shares if row.op != "update") or (MemoryShare(""),)
    own = [row for row in cluster.memory_shares if row.op == "update"]
    own = own or [replace(memory_share(cluster.memory_shares, "update"), op="update", backward=1.0)]
    return (*others, *(replace(row, forward=row.forward * times_faster) for row in own))
