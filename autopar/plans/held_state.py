"""`held_state`: the tensors of training state that each device of a plan holds, as boxes of global indices."""

import math
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.training import Training
from autopar.ir.graph import Input
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.placement import Layout

KINDS = ("parameters", "optimizer", "buffers")


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter with its optimizer state, or a buffer.

    `element_bytes`: kind of state, one of `KINDS` -> bytes of an element. `layouts`: (rank along the pipeline, layout
    on its part of the mesh) of each that holds it.
    """

    shape: tuple[int, ...]
    element_bytes: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[int, Layout], ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """The part of a tensor that each device holds, in ranks' order: indices from `low` up to `high` of each dim.

    low, high: int64 [devices, dims]. holds: bool [devices], False of devices without the tensor, whose box is empty.
    """

    low: np.ndarray
    high: np.ndarray
    holds: np.ndarray

    @property
    def num_elements(self) -> np.ndarray:
        """int64 [devices]."""
        return np.where(self.holds, (self.high - self.low).prod(axis=1), 0)


def held_state(plan: Plan | StagedPlan) -> dict[str, Held]:
    """FQN -> parameter with its optimizer state, or buffer."""
    if isinstance(plan, Plan):
        return _of_stages([(0, plan)], plan.training)
    return _of_stages([(plan.schedule.rank_of(at), stage) for at, stage in enumerate(plan.stages)], plan.training)


def _of_stages(stages: list[tuple[int, Plan]], training: Training) -> dict[str, Held]:
    items: dict[str, Input] = {}
    layouts: dict[str, dict[int, Layout]] = {}
    for rank, stage in stages:
        for item in stage.graph.inputs:
            if item.kind in ("parameter", "buffer"):
                items[item.fqn] = item
                layouts.setdefault(item.fqn, {})[rank] = stage.assignment.layouts[item.value.name]
    return {
        fqn: Held(item.value.shape, _element_bytes(item, training), tuple(sorted(layouts[fqn].items())))
        for fqn, item in items.items()
    }


def _element_bytes(item: Input, training: Training) -> tuple[tuple[str, int], ...]:
    own = ((item.kind + "s", item.value.stored_itemsize),)
    is_updated = item.kind == "parameter" and item.value.needs_grad and training.has_state
    return own + ((("optimizer", training.state_bytes(item.value.stored_itemsize)),) if is_updated else ())


def boxes(held: Held, num_devices: int, mesh: Mesh) -> Boxes:
    """The part of a tensor on each of `num_devices`, of which those of a rank of the pipeline are a `mesh`."""
    num_dims, num_inner = len(held.shape), math.prod(mesh.shape)
    low, high = (np.zeros((num_devices, num_dims), np.int64) for _ in range(2))
    holds = np.zeros(num_devices, bool)
    known: dict[Layout, tuple[np.ndarray, np.ndarray]] = {}
    for rank, layout in held.layouts:
        if layout not in known:
            known[layout] = _parts(held.shape, layout, mesh.shape)
        own = slice(rank * num_inner, (rank + 1) * num_inner)
        low[own], high[own] = known[layout]
        holds[own] = True
    return Boxes(low, high, holds)


def _parts(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(first indices, ends), [devices, dims], of the parts of a tensor, which are those of `part_sizes`."""
    places = np.indices(mesh_shape).reshape(len(mesh_shape), -1)
    low = np.zeros((places.shape[1], len(shape)), np.int64)
    high = low + np.array(shape, np.int64)
    for place, placement, size in zip(places, layout, mesh_shape):
        if placement.is_split:
            is_plain = placement.unit == 1 and not placement.shares and not placement.sections
            assert is_plain, f"state is stored as DTensors are, found {placement}"
            first, end = low[:, placement.dim].copy(), high[:, placement.dim].copy()
            most = -(-(end - first) // size)
            low[:, placement.dim] = np.minimum(first + place * most, end)
            high[:, placement.dim] = np.minimum(first + (place + 1) * most, end)
    return low, high
