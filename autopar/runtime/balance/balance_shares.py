"""`balance`: shares of the batch that follow the ranks' speeds while a model is trained."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, warn
from autopar.plans.choices import Choices
from autopar.runtime.balance.watch_times import Advice, TimeWatch
from autopar.runtime.load_program import Loaded
from autopar.runtime.module_runtime import Runtime
from autopar.runtime.pipeline.trainer import Trainer
from autopar.runtime.rank_agreement import peers_alive
from autopar.runtime.sharded_module import ShardedModule
from autopar.sbp.in_flight import WAITED
from autopar.sbp.nested import gather_into
from autopar.shares.stateful_sampler import StatefulSampler


@dataclass
class Balance:
    """The shares of a model that is trained. `changes`: (steps that were made before, shares from then on)."""

    model: ShardedModule
    axis: int
    watch: TimeWatch
    sampler: StatefulSampler | None = None
    changes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    num_steps: int = 0
    _since_s: float = 0.0
    _told: tuple[int, ...] = ()

    @property
    def shares(self) -> tuple[int, ...]:
        """The rows of each rank of the axis in the next step."""
        return self.watch.sizes

    def step(self) -> None:
        """Every rank calls this after each step of the optimizer. It compares how long the ranks computed since the
        last call, without what collectives took, and gives them other shares if one is slower for good.
        """
        now_s = time.perf_counter()
        computed_s = now_s - self._since_s - WAITED.seconds
        self.num_steps += 1
        advice = self.watch.take(_of_all(self.model._autopar.mesh, self.axis, computed_s))
        if advice is not None:
            self._tell(advice)
        if advice is not None and advice.sizes != self.shares:
            self._change(advice.sizes)
        self._start()

    def close(self) -> None:
        """Stop measuring; the shares stay."""
        WAITED.is_asking = False

    def _start(self) -> None:
        WAITED.is_asking, WAITED.seconds, self._since_s = True, 0.0, time.perf_counter()

    def _change(self, sizes: tuple[int, ...]) -> None:
        share_anew(self.model._autopar, self.axis, sizes)
        if self.sampler is not None:
            self.sampler.set_shares(sizes)
        self.watch.change(sizes)
        self.changes.append((self.num_steps, sizes))

    def _tell(self, advice: Advice) -> None:
        if advice.without and advice.without != self._told:
            name = (self.model._autopar.mesh.mesh_dim_names or ())[self.axis]
            warn(
                f"the ranks {advice.without} of axis {name} take longer for one row than the others for the whole"
                f" batch: a step would take {advice.without_s:.3g} s of computing without them, {advice.step_s:.3g} s"
                " with them; save a checkpoint and start again on a mesh without them"
            )
        self._told = advice.without


def balance(model: ShardedModule, *, sampler: StatefulSampler | None = None) -> Balance:
    """Measure how long each rank computes, and give ranks that are slower for good fewer rows of the batch.

    The model was compiled with `shares=`, equal ones if nothing is known: `autopar.compile(..., shares=(8, 8, 8, 8))`.
    Call `step()` of the result after each step of the optimizer, on every rank; it exchanges one number. Losses and
    gradients are those of the whole batch as before, and nothing is traced or planned again. In a pipeline the ranks of
    all stages at one place of the axis count as the slowest of them; in microbatches a rank has as many rows in each.
    With batch="local" the next batch is in the new `shares`: `sampler` is told, of a data loader that fetches no
    batches ahead (num_workers=0). AutoparError if the batch is not in shares, or the devices are no CPUs, whose waiting
    is not seen.
    """
    running = model._autopar.current()
    loaded = running.parts[0].loaded if isinstance(running, Trainer) else running
    if not loaded.shares:
        raise AutoparError(
            "the batch of the model is not in shares, so that nothing can be balanced: compile it with shares=, equal"
            " ones if nothing is known of the ranks, e.g. autopar.compile(..., shares=(8, 8, 8, 8))"
        )
    if model._autopar.mesh.device_type != "cpu":
        raise AutoparError(
            f"balance measures the time that a rank computes on CPUs only, found {model._autopar.mesh.device_type};"
            " give shares= of autopar.compile by hand"
        )
    ((axis, _),) = running.plan.mesh.shares
    sizes, unit = tuple(loaded.shares), _num_microbatches(running)
    found = Balance(model, axis, TimeWatch(sizes, _most_rows(running, max(sizes)), unit), sampler)
    found._start()
    return found


def share_anew(runtime: Runtime, axis: int, sizes: tuple[int, ...]) -> None:
    """From the next call on the ranks of mesh axis `axis` have shares of these sizes, in all programs."""
    programs = {id(one): one for one in (*runtime.loaded.values(), runtime.first) if one is not None}
    for program in programs.values():
        program.share(sizes)
    runtime.shares = ((axis, sizes),)
    if runtime.parts is not None and runtime.parts.shares is not None:
        name, _, index = runtime.parts.shares
        runtime.parts = replace(runtime.parts, shares=(name, sizes, index))


def _num_microbatches(running: Loaded | Trainer) -> int:
    """The number of equal parts in which a step takes the rows of each rank."""
    return running.planned.schedule.num_microbatches if isinstance(running, Trainer) else 1


def _most_rows(running: Loaded | Trainer, largest: int) -> int | None:
    """The rows that fit into memory if all of the predicted peak grows with them; None if no peak is known."""
    plan = running.planned if isinstance(running, Trainer) else running.choices
    if isinstance(plan, Choices) or not plan.peak_bytes or plan.memory_limit_bytes == float("inf"):
        return None
    if plan.cluster.groups is not None:  # the peak is that of one group, and the memory of others may be less
        return largest
    return max(largest, int(largest * plan.memory_limit_bytes / max(plan.peak_bytes)))


def _of_all(mesh: DeviceMesh, axis: int, seconds: float) -> Sequence[float]:
    """The `seconds` of each rank of the axis; of the slowest where other axes have several that share its rows."""
    own = torch.tensor([seconds], dtype=torch.float64)
    found = own.new_empty(mesh.size(axis))
    with peers_alive():
        for other in range(mesh.ndim):
            if other != axis and mesh.size(other) > 1:
                dist.all_reduce(own, op=dist.ReduceOp.MAX, group=mesh.get_group(other))
        gather_into(found, own, group=mesh.get_group(axis))
    return found.tolist()
