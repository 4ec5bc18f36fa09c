"""`Replayed`: a stage that replays a recorded allocation trace instead of running its program."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from autopar.costmodel.activations.count_storages import RunOp, Storages, count_storages, run_plain
from autopar.ir.graph import Value
from autopar.peak_memory.dry_run import DryStage, Tensors
from autopar.plans.plan import Plan
from autopar.sbp.assignment import graph_names
from autopar.schedule.timeline import Action


@dataclass(frozen=True, slots=True)
class Change:
    """The change of memory by an action, relative to its start: `most_bytes` at its peak, `left_bytes` at its end."""

    most_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an action outputs.

    `alike`: index of the tensor, among the action's inputs and its earlier outputs, whose memory it shares, -1 for
    none; `is_stored`: whether it shares memory with a tensor that exists during the whole step.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    alike: int
    is_stored: bool

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensor adds; 0 if it shares memory."""
        return 0 if self.is_stored or self.alike >= 0 else torch.Size(self.shape).numel() * self.dtype.itemsize

    def make(self, handed: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor without data of this description; `handed`: the action's inputs and its earlier outputs."""
        if self.alike < 0 and not self.is_stored:
            return torch.empty(self.shape, dtype=self.dtype, requires_grad=self.needs_grad)
        like = torch.empty((), dtype=self.dtype) if self.is_stored else handed[self.alike].detach()
        return like.as_strided(self.shape, (0,) * len(self.shape)).requires_grad_(self.needs_grad)


@dataclass(frozen=True)
class Recording:
    """A recorded allocation trace of a stage.

    `changes`: kind of action -> its change in the first microbatch and in later ones. `outputs`, `gone`: tensors sent
    and gradients sent back. `drops_outputs`: whether its outputs are freed after "I".
    """

    gather: Change
    reduce: Change
    changes: dict[str, tuple[Change, Change]]
    outputs: tuple[Made, ...]
    gone: tuple[Made, ...]
    drops_outputs: bool = False


class Handed(NamedTuple):
    """The tensors that a microbatch sends, and `drops_outputs` as in `Recording`."""

    outputs: tuple[Made, ...]
    gone: tuple[Made, ...]
    drops_outputs: bool


def run_two(stage: DryStage, *, is_halved: bool, run: RunOp = run_plain) -> tuple[list[tuple[str, np.ndarray]], Handed]:
    """(changes of each action, tensors that the second microbatch sends) from running two microbatches of a fresh
    stage.

    The actions are called "gather", "F0", "B0", ..., "reduce". `is_halved`: whether backward is split in two parts.
    `run`: as in `count_storages`.
    """
    with count_storages(stage.rank.tensors(), run) as storages:
        phases = [("gather", _changes(storages, stage.open)[0])]
        for number in range(2):
            changes, handed = _microbatch(stage, number, storages, is_halved=is_halved)
            phases += [(f"{kind}{number}", change) for kind, change in changes.items()]
        phases.append(("reduce", _changes(storages, stage.close)[0]))
    return phases, handed


def recorded(phases: Sequence[tuple[str, np.ndarray]], handed: Handed) -> Recording:
    """The recording of a stage from the results of `run_two`."""
    found = {name: Change(int(np.cumsum(changes).max(initial=0)), int(changes.sum())) for name, changes in phases}
    kinds = [name[0] for name in found if name.endswith("0")]
    return Recording(
        found["gather"], found["reduce"], {kind: (found[f"{kind}0"], found[f"{kind}1"]) for kind in kinds}, *handed
    )


def _microbatch(
    stage: DryStage, number: int, storages: Storages, *, is_halved: bool
) -> tuple[dict[str, np.ndarray], Handed]:
    stored = [*stage.rank.tensors(), *stage.rank.used.values()]
    changes: dict[str, np.ndarray] = {}
    ahead, back = Action("F", 0, number), Action("I" if is_halved else "B", 0, number)
    received = stage.arrived[ahead] = stage.receive(ahead)
    changes["F"], sent = _changes(storages, partial(stage.forward, ahead))
    outputs = _made(sent, list(received.values()), stored)
    received, sent = None, None
    stage.arrived[back._replace(kind="B")] = stage.receive(back._replace(kind="B"))
    changes[back.kind], (came, gone) = _changes(storages, partial(stage.backward, back))
    made = _made(gone, came, stored)
    came, gone = None, None
    drops_outputs = is_halved and not stage.halved[number][0]
    if is_halved:
        changes["W"] = _changes(storages, partial(stage.weights, back._replace(kind="W")))[0]
    return changes, Handed(outputs, made, drops_outputs)


def _changes(storages: Storages, work: Callable[[], Any]) -> tuple[np.ndarray, Any]:
    """(changes of memory by `work`, its result, which is counted)."""
    storages.restart()
    result = work()
    return storages.take_changes(), result


def _made(tensors: Tensors, handed: Tensors, stored: Tensors) -> tuple[Made, ...]:
    fixed = {_key(x) for x in stored}
    known = {_key(x): number for number, x in enumerate(handed)}
    made = []
    for x in tensors:
        made.append(Made(tuple(x.shape), x.dtype, x.requires_grad, known.get(_key(x), -1), _key(x) in fixed))
        known.setdefault(_key(x), len(handed) + len(made) - 1)
    return tuple(made)


def _key(x: torch.Tensor) -> int:
    return id(x.untyped_storage())


def _blob(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _make(made: Sequence[Made], handed: Sequence[torch.Tensor]) -> Tensors:
    tensors: Tensors = []
    for one in made:
        tensors.append(one.make([*handed, *tensors]))
    return tensors


@dataclass
class Replayed(DryStage):
    """A `DryStage` that allocates blocks of bytes by its recording.

    `kept`: microbatch -> memory that its backward needs beyond received and sent tensors. `once`: the gathered
    parameters, then also their gradients, at last the gradients of the stored parameters.
    """

    recording: Recording = field(kw_only=True)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    once: Tensors = field(default_factory=list)
    begun: set[str] = field(default_factory=set)

    def open(self) -> None:
        """Allocate the gathered parameters."""
        _blob(self.recording.gather.most_bytes)
        self.once = [_blob(self.recording.gather.left_bytes)]

    def close(self) -> None:
        """Replace all memory of the step by the gradients of the parameters."""
        _blob(self.recording.reduce.most_bytes)
        left = sum(len(x) for x in self.once) + self.recording.reduce.left_bytes
        self.once.clear()
        # where the forward took gradients itself, more is freed in the end than the actions before had left
        self.once = [_blob(max(0, left))]

    def forward(self, action: Action) -> Tensors:
        """As in `DryStage`."""
        received = list(self.receive(action).values())
        left_bytes = self._run(action)
        outputs = _make(self.recording.outputs, received)
        for x in outputs:
            vars(x)["made_of"] = received  # autograd's graph holds its leaves alive
        self.kept[action.microbatch] = _blob(left_bytes - sum(x.num_bytes for x in self.recording.outputs))
        self.flying[action.microbatch] = outputs, received
        return outputs

    def backward(self, action: Action) -> tuple[Tensors, Tensors]:
        """As in `DryStage`."""
        came = [x for x in self.receive(action._replace(kind="B")) or () if x is not None]
        left_bytes = self._run(action)
        outputs, received = self.flying.pop(action.microbatch)
        left_bytes += len(self.kept.pop(action.microbatch)) - sum(x.num_bytes for x in self.recording.gone)
        if action.kind == "I":
            if self.recording.drops_outputs:
                left_bytes, outputs = left_bytes + sum(x.num_bytes for x in self.recording.outputs), []
            for x in outputs:
                vars(x)["made_of"] = None  # torch detaches it
            self.halved[action.microbatch] = outputs, came, received, _blob(left_bytes)
        del outputs, received
        gone = _make(self.recording.gone, came)
        self._accumulate(action)
        return came, gone

    def weights(self, action: Action) -> None:
        """As in `DryStage`."""
        self._run(action)
        del self.halved[action.microbatch]
        self._accumulate(action)

    def _run(self, action: Action) -> int:
        """Allocate the peak of an action; returns the bytes that a later action of its kind leaves."""
        first, later = self.recording.changes[action.kind]
        _blob(later.most_bytes if action.kind in self.begun else first.most_bytes)
        return later.left_bytes

    def _accumulate(self, action: Action) -> None:
        """Allocate what only the first action of its kind leaves, which exists until the end of the step."""
        first, later = self.recording.changes[action.kind]
        if action.kind not in self.begun:
            self.once.append(_blob(max(0, first.left_bytes - later.left_bytes)))
            self.begun.add(action.kind)


def likeness(plan: Plan, receives: Collection[str], *others: Hashable) -> Hashable:
    """A key that is equal for isomorphic stages."""
    graph, number = plan.graph, {}
    for place, name in enumerate(graph_names(graph)):
        number.setdefault(name, place)
    inputs = tuple((item.kind, replace(item.value, name=""), item.value.name in receives) for item in graph.inputs)
    ops = tuple((op.nameless, tuple(number[x.name] for x in op.inputs)) for op in graph.ops)
    outputs = tuple(number[x.name] if isinstance(x, Value) else repr(x) for x in graph.outputs)
    written = tuple(number[value.name] for _, value in graph.mutations)
    # the optimizer's state does not change the program
    key = replace(plan.assignment, state_on_host=frozenset()).key(number)
    return plan.mesh, inputs, ops, outputs, written, key, others
