"""Stages on real processes, under each schedule: loss and gradients are those of one device."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.pipeline.lanes import make_lanes
from autopar.runtime.pipeline.run_schedule import StageRunner
from autopar.runtime.pipeline.torch_stage import LocalStage, Wire, Work
from autopar.schedule.orders import Schedule, actions, can_run, num_in_flight
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank

BATCH, LENGTH, WIDTH, WORDS = 24, 3, 8, 11
Cut = tuple[int, ...]  # the first block of each stage but the first


class Model(nn.Module):
    """Blocks, and what goes past them: a mask and word numbers, an embedding that nobody reads after the first block,
    and another one, made after it, that the last stage reads."""

    def __init__(self, num_blocks: int, num_frozen: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.late = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        for frozen in [self.embed, *self.blocks][:num_frozen]:
            frozen.requires_grad_(False)

    def first(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed(ids)
        return x.transpose(0, 1), x, ids % 3 > 0, ids

    def block(self, i: int, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, skip, mask, ids = values
        if i == 1:
            skip = self.late(ids)
        return (x + self.blocks[i](x).tanh() * mask.T[..., None]).expand(*x.shape), skip, mask, ids

    def last(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, skip, _, ids = values
        return nn.functional.cross_entropy(self.head(x.transpose(0, 1) + skip).flatten(0, 1), ids.flatten())


def build(num_blocks: int, num_frozen: int = 0) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(num_blocks, num_frozen).double(), torch.randint(0, WORDS, (BATCH, LENGTH))


def truth(num_blocks: int, num_frozen: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    model, ids = build(num_blocks, num_frozen)
    values = model.first(ids)
    for i in range(num_blocks):
        values = model.block(i, values)
    loss = model.last(values)
    loss.backward()
    return float(loss.detach()), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pipeline(
    model: Model, ids: torch.Tensor, cut: Cut, mesh: Any, schedule: Schedule
) -> tuple[StageRunner, dict[int, Work]]:
    """The stages of this rank; the batch is split over the axis "dp", if there is one."""
    num_data = mesh["dp"].size() if "dp" in mesh.mesh_dim_names else 1
    part = ids.chunk(num_data)[mesh.get_local_rank("dp") if num_data > 1 else 0]
    batches = part.chunk(schedule.num_microbatches)
    bounds = list(pairwise((0, *cut, len(model.blocks))))
    size, wires = len(batches[0]), None
    x = (LENGTH, size, WIDTH), torch.float64
    frozen = [not any(p.requires_grad for p in m.parameters()) for m in (model.embed, *model.blocks)]
    stages, works = [], {}
    for index, (start, stop) in enumerate(bounds):
        received = wires if index else ()
        has_grad = not all(frozen[: stop + 1])
        wires = (Wire(*x, has_grad), Wire((size, LENGTH, WIDTH), x[1], stop > 1 or not frozen[0]))
        wires += (Wire((size, LENGTH), torch.bool, False), Wire((size, LENGTH), torch.int64, False))
        is_last = index == len(bounds) - 1
        if index in schedule.stages_of(mesh.get_local_rank("pp")):
            stages.append(LocalStage(index, received, (Wire((), torch.float64, True),) if is_last else wires))
            works[index] = work(model, index, range(start, stop), batches, is_last=is_last)
    lanes = make_lanes(mesh, schedule) if schedule.num_stages > 1 else None
    return StageRunner(schedule, stages, lanes, torch.device("cpu"), torch.float64), works


def work(model: Model, index: int, blocks: range, batches: Sequence[torch.Tensor], *, is_last: bool) -> Work:
    def body(microbatch: int, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values = values if index else model.first(batches[microbatch])
        for i in blocks:
            values = model.block(i, values)
        return (model.last(values) / len(batches),) if is_last else values

    return body


def steps(
    cases: Sequence[tuple[str, Cut, int]],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    num_blocks: int,
    num_frozen: int,
) -> Any:
    """For each (schedule, cut, microbatches) on this rank: the loss, the gradients, what was computed, in the second of
    two steps.
    """
    mesh = device_mesh(shape, axes)
    found = []
    for name, cut, num_microbatches in cases:
        model, ids = build(num_blocks, num_frozen)
        schedule = Schedule(name, len(cut) + 1, mesh["pp"].size(), num_microbatches)
        runner, works = pipeline(model, ids, cut, mesh, schedule)
        runner.step(works)
        model.zero_grad()
        step = runner.step(works, is_timed=True)
        loss = step.loss
        if "dp" in axes:
            for x in (loss, *gradients(model).values()):
                dist.all_reduce(x, group=mesh.get_group("dp"))
                x /= mesh["dp"].size()
        found.append((float(loss), gradients(model), [span.action for span in step.spans], mesh.get_local_rank("pp")))
    return found


def check(
    ranks: Ranks, cases: Sequence[tuple[str, Cut, int]], shape: tuple, axes: tuple, num_blocks: int, num_frozen: int = 0
) -> None:
    loss, expected = truth(num_blocks, num_frozen)
    results = ranks.run(steps, cases, shape, axes, num_blocks, num_frozen)
    for i, (name, cut, num_microbatches) in enumerate(cases):
        rows = actions(Schedule(name, len(cut) + 1, shape[axes.index("pp")], num_microbatches))
        seen = set()
        for result in results:
            found_loss, found, order, rank = result[i]
            assert found_loss == pytest.approx(loss, rel=1e-12), (name, cut, num_microbatches)
            for fqn, gradient in found.items():
                torch.testing.assert_close(
                    gradient, expected[fqn], rtol=1e-10, atol=1e-13, msg=f"{name} {cut} {num_microbatches} {fqn}"
                )
            assert tuple(order) == rows[rank], (name, cut, num_microbatches)
            seen |= found.keys()
        assert seen == expected.keys()


def most_alive(name: str, cut: Cut, num_microbatches: int) -> dict[int, tuple[int, int]]:
    """For each stage of this rank, of how many microbatches it has held what it received, and what it sent, at one
    time.
    """
    mesh = device_mesh((2,), ("pp",))
    model, ids = build(5)
    schedule = Schedule(name, len(cut) + 1, 2, num_microbatches)
    runner, works = pipeline(model, ids, cut, mesh, schedule)
    most = {}
    for index in works:
        works[index] = _watched(works[index], index, most)
    runner.step(works)
    runner.step(works)
    return most


def _watched(work: Work, index: int, most: dict[int, tuple[int, int]]) -> Work:
    received: list[StorageWeakRef] = []
    sent: list[StorageWeakRef] = []

    def body(microbatch: int, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        received.extend(StorageWeakRef(x.untyped_storage()) for x in values[:1])
        found = work(microbatch, values)
        found = (found[0].clone(memory_format=torch.contiguous_format), *found[1:])
        sent.append(StorageWeakRef(found[0].untyped_storage()))
        alive = [sum(not x.expired() for x in these) for these in (received, sent)]
        most[index] = tuple(map(max, zip(alive, most.get(index, (0, 0)))))
        return found

    return body


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


COUNTS = (1, 2, 3, 4, 6, 8)  # of microbatches, that divide the batch


def cases_of(cut: Cut, several: Cut, num_ranks: int, batch: int = BATCH) -> list[tuple[str, Cut, int]]:
    """Every schedule with every number of microbatches that it takes."""
    names = [("1f1b", cut), ("gpipe", cut), ("zero-bubble", cut), ("interleaved", several), ("zero-bubble", several)]
    return [(n, c, m) for n, c in names for m in COUNTS if batch % m == 0 and can_run(n, len(c) + 1, num_ranks, m)]


def test_uneven_stages_on_two_ranks(ranks2):
    check(ranks2, cases_of((3,), (2, 3, 4), 2), (2,), ("pp",), num_blocks=5)


def test_uneven_stages_on_four_ranks(ranks4):
    check(ranks4, cases_of((2, 3, 4), (1, 2, 3, 4, 5, 6, 7), 4), (4,), ("pp",), num_blocks=8)


def test_stages_on_data_parallel_ranks(ranks4):
    check(ranks4, cases_of((3,), (2, 3, 4), 2, BATCH // 2), (2, 2), ("pp", "dp"), num_blocks=5)


@pytest.mark.parametrize(
    "name, cut", [("1f1b", (3,)), ("gpipe", (3,)), ("zero-bubble", (3,)), ("interleaved", (2, 3, 4))]
)
def test_what_crosses_lives_as_long_as_its_microbatch_is_in_flight(ranks2, name, cut):
    schedule, last = Schedule(name, len(cut) + 1, 2, 8), len(cut)
    most = {stage: count for found in ranks2.run(most_alive, name, cut, 8) for stage, count in found.items()}
    for stage, found in most.items():
        in_flight = num_in_flight(schedule, stage)
        # the losses are kept
        assert found == (in_flight if stage else 0, 8 if stage == last else in_flight), stage


def test_frozen_stages(ranks2):
    check(ranks2, cases_of((3,), (1, 2, 4), 2), (2,), ("pp",), num_blocks=5, num_frozen=4)


def test_accumulation_on_one_device():
    loss, expected = truth(3)
    model, ids = build(3)
    schedule = Schedule("accumulate", 1, 1, 4)
    runner = StageRunner(schedule, [LocalStage(0, (), ())], None, torch.device("cpu"), torch.float64)
    step = runner.step({0: work(model, 0, range(3), ids.chunk(4), is_last=True)}, is_timed=True)
    assert float(step.loss) == pytest.approx(loss, rel=1e-12)
    assert [span.action for span in step.spans] == list(actions(schedule)[0])
    found = gradients(model)
    assert found.keys() == expected.keys()
    for fqn in expected:
        torch.testing.assert_close(found[fqn], expected[fqn], rtol=1e-10, atol=1e-13)
