"""Ranks that differ, fail or die: every rank raises, soon, and says why."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import api
from autopar.errors import AutoparError, PeerFailed, RankMismatch
from autopar.runtime import module_runtime, rank_agreement
from tests.journey.stack import Stack, batch
from tests.workers import RankError, Ranks, device_mesh
from tests.zoo import build

pytestmark = pytest.mark.multirank

PINS = {"blocks.0.0.weight": "BS(0)", "blocks.0.2.weight": "BS(1)"}
SOON_S = 10.0


def _compile(name: str = "mlp", **options: Any) -> nn.Module:
    case = build(name)
    options = {"cluster": "free-links", "args": case.args, "kwargs": case.kwargs} | options
    return autopar.compile(options.pop("model", case.model), device_mesh((2, 2), ("dp", "tp")), **options)


def _mlp(**options: Any) -> nn.Module:
    from tests.zoo import MLP

    torch.manual_seed(0)
    return MLP(**options).double()


def other_model() -> None:
    _compile(model=_mlp(depth=1 + dist.get_rank() // 3))


def other_weights() -> None:
    model = build("mlp").model
    if dist.get_rank() == 2:
        model.head.bias.data[3] += 1e-9
    _compile(model=model, check="strict")


def other_buffers() -> None:
    model = build("resnet").model
    if dist.get_rank() == 1:
        model.stem[1].running_mean += 1
    _compile("resnet", model=model, check="strict")


def other_dtype() -> None:
    model = _mlp()
    model.register_buffer("unused", torch.zeros(3, dtype=torch.int32 if dist.get_rank() == 3 else torch.int64))
    _compile(model=model)


def meta_on_one() -> None:
    if dist.get_rank():
        _compile(model=_mlp())
    with torch.device("meta"):
        model = _mlp()
    _compile(model=model)


def other_pins() -> None:
    _compile(pins=PINS if dist.get_rank() else {})


def other_plan() -> None:
    case = build("mlp")
    given = autopar.plan(case.model, "2x2", args=case.args, cluster="free-links" if dist.get_rank() else "cpu")
    _compile(plan=given, cluster=None)


def other_mode() -> None:
    _compile(model=build("mlp").model.train(dist.get_rank() > 0))


def other_shapes_later() -> None:
    model, (x,) = _compile(), build("mlp").args
    model(x)
    model(x[: 2 if dist.get_rank() == 3 else 4])


def other_structure_later() -> None:
    model, (x,) = _compile(), build("mlp").args
    model(x[:4]) if dist.get_rank() == 0 else model(x=x[:4])


def other_seeds() -> None:
    model = _mlp(dropout=0.1)
    torch.manual_seed(dist.get_rank())
    _compile(model=model)


def only_here_other_shapes() -> None:
    model, (x,) = _compile(), build("mlp").args
    model(x)
    if dist.get_rank() == 3:
        with pytest.MonkeyPatch.context() as patch:  # these ranks run other tests afterwards
            patch.setattr(module_runtime, "LATER_WAIT_S", 1.0)
            patch.setattr(rank_agreement, "LONG_S", 0.2)
            with pytest.warns(UserWarning, match="rank 3 waits for ranks 0, 1, 2, which"):
                model(x[:4])


DIFFERENCES: dict[Callable[[], None], str] = {
    other_model: "rank 3 .*different models: first .*, on rank 0 `%[a-z]",
    other_weights: "head.bias on rank 2",
    other_buffers: "stem.1.running_mean on rank 1",
    other_dtype: "rank 3 .*different models: first .*unused.*i32.*, on rank 0 .*i64",
    meta_on_one: "on rank 1 has data, and rank 0's is on the meta device",
    other_pins: "rank 1 .*different plans, pins",
    other_plan: "rank 1 .*different plans",
    other_mode: "rank 1 .*modes",
    other_shapes_later: "rank 3 .*different arguments",
    other_structure_later: "rank 1 .*different structures of arguments",
    other_seeds: "torch.manual_seed",
}


def raises(function: Callable[[], None], kind: type[Exception], match: str) -> float:
    """Seconds until `function` raised what it should."""
    start = time.monotonic()
    with pytest.raises(kind, match=match):
        function()
    return time.monotonic() - start


@pytest.mark.parametrize("different", DIFFERENCES, ids=lambda function: function.__name__)
def test_ranks_that_differ_are_told_so_on_every_rank(ranks4: Ranks, different: Callable[[], None]) -> None:
    ranks4.run(raises, different, RankMismatch, DIFFERENCES[different])


def test_rank_that_alone_is_called_otherwise_does_not_wait_forever(ranks4: Ranks) -> None:
    with pytest.raises(RankError, match=r"3 of the mesh's 4 ranks were not within 1 s \(ranks 0, 1, 2\)"):
        ranks4.run(only_here_other_shapes)


class Fails(nn.Module):
    """Its forward fails on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fails = dist.get_rank() == rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("this rank has no luck")
        return self.linear(x)


def untraceable_on(rank: int) -> None:
    torch.manual_seed(0)
    autopar.compile(Fails(rank), device_mesh((4,), ("dp",)), args=(torch.ones(8, 8),))


def untraceable_on_two() -> None:
    untraceable_on(2)


def untraceable_on_first() -> None:
    untraceable_on(0)


def planner_crashes() -> None:
    def crash(*args: Any, **kwargs: Any) -> None:
        assert dist.get_rank() == 0, "only the first rank plans"
        raise ZeroDivisionError("a bug")

    original, api.choose_plan = api.choose_plan, crash
    try:
        _compile()
    finally:
        api.choose_plan = original


def too_little_memory() -> None:
    _compile(memory_limit_bytes=1000)


def unreadable_on_one() -> None:
    case = build("mlp")
    path = Path(f"/tmp/autopar-test-{os.getpid()}.json")
    if dist.get_rank() != 1:
        autopar.plan(case.model, "2x2", args=case.args, cluster="cpu").save(path)
    try:
        _compile(plan=path, cluster=None)
    finally:
        path.unlink(missing_ok=True)


def _fails_to_move(*args: Any) -> Any:
    if dist.get_rank() == 3:
        raise MemoryError("no room")
    return {}


def sharding_fails_on_one() -> None:
    from autopar.runtime import module_runtime

    original, module_runtime.shard_model = module_runtime.shard_model, _fails_to_move
    try:
        _compile()
    finally:
        module_runtime.shard_model = original


FAILURES: dict[Callable[[], None], str] = {
    untraceable_on_two: r"no luck",
    untraceable_on_first: r"test_faults.py:\d+: .*cannot be traced: ValueError: this rank has no luck",
    planner_crashes: "planning failed: ZeroDivisionError: a bug",
    too_little_memory: "least|would do|fits",
    unreadable_on_one: "cannot read plan",
    sharding_fails_on_one: "sharding the model failed: MemoryError: no room",
}


@pytest.mark.parametrize("failing", FAILURES, ids=lambda function: function.__name__)
def test_error_of_one_rank_reaches_all(ranks4: Ranks, failing: Callable[[], None]) -> None:
    ranks4.run(raises, failing, AutoparError, FAILURES[failing])


class LeavesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        os._exit(1)


def die(when: str, folder: str) -> None:
    """Rank 2 dies in the middle of a step; the others write what they met and after how long."""
    model, (x,) = _compile(pins=PINS), build("mlp").args
    model(x).sum()
    dying = dist.get_rank() == 2
    if dying and when == "before the call":
        os._exit(1)
    if dying and when == "in the forward":
        loaded = model._autopar.current()
        axis = loaded.axes[1]
        object.__setattr__(axis, "group", _Deadly())
    start = time.monotonic()
    error: Exception | None = None
    try:
        output = model(x)
        output = output.to_local() if hasattr(output, "to_local") else output
        if dying:
            output = LeavesInBackward.apply(output) if when == "in the backward" else os._exit(1)
        for _ in range(3):  # gradients may be computed without this rank's peers: the step after meets them
            output.sum().backward()
            output = model(x)
            output = output.to_local() if hasattr(output, "to_local") else output
    except Exception as met:
        error = met
    (Path(folder) / str(dist.get_rank())).write_text(f"{time.monotonic() - start}\n{type(error).__name__}\n{error}")
    os._exit(0)


def change_alone(kind: str, folder: str) -> None:
    """Rank 2 changes its module, or is given fewer rows, between two steps; all write what they met and after how
    long.
    """
    model, (x,) = _compile(pins=PINS), build("mlp").args
    for _ in range(3):
        model(x).sum().backward()
    if dist.get_rank() == 2:
        if kind == "attribute":
            model.blocks[0].slope = 0.5
        elif kind == "rows":
            x = x[:2]
        else:
            model.blocks[0].requires_grad_(False)
    start = time.monotonic()
    error: Exception | None = None
    try:
        for _ in range(3):
            model(x).sum().backward()
    except Exception as met:
        error = met
    (Path(folder) / str(dist.get_rank())).write_text(f"{time.monotonic() - start}\n{type(error).__name__}\n{error}")
    os._exit(0)


def gather_alone(folder: str) -> None:
    """Rank 0 alone asks for the whole state, the others train on; it writes what it met and after how long."""
    model, (x,) = _compile(pins=PINS), build("mlp").args
    for _ in range(3):
        model(x).sum().backward()
    start = time.monotonic()
    if dist.get_rank() == 0:
        try:
            model.full_state_dict()
        except RankMismatch as error:
            (Path(folder) / "0").write_text(f"{time.monotonic() - start}\n{error}")
        os._exit(0)
    model(x).sum().backward()
    os._exit(0)


def test_whole_state_asked_for_by_one_rank_alone_is_refused_soon(tmp_path: Path) -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match="died"):
            ranks.run(gather_alone, str(tmp_path))
        deadline = time.monotonic() + 2 * SOON_S
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        ranks.stop()
    seconds, error = (tmp_path / "0").read_text().split("\n", 1)
    assert float(seconds) < 2 * SOON_S
    assert re.search(
        r"rank 0 called model.full_state_dict\(\).*call it on every rank, outside of `if rank == 0`", error
    )


def freeze_a_stage() -> None:
    """Only ranks 0 and 1 freeze, before a step whose arguments are compared, what they hold; they live on."""
    torch.manual_seed(0)
    model, args = Stack(), batch()
    mesh = device_mesh((2, 2), ("pp", "dp"))
    model = autopar.compile(model, mesh, args=args, num_microbatches=2, cluster="free-links")
    model.train_step(*args)
    if dist.get_rank() < 2:
        model.blocks[0].requires_grad_(False)
        with pytest.raises(AutoparError, match=r"blocks\.0.* after the model was cut into stages"):
            model.train_step(*args)
        time.sleep(60)
    model.train_step(*args)


def test_error_of_one_stage_ends_the_comparison_of_the_others() -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match=r"rank [23]:\nthe process died"):
            ranks.run(freeze_a_stage, timeout_s=40.0)
    finally:
        ranks.stop()


@pytest.mark.parametrize("kind", ["attribute", "gradient", "rows"])
def test_module_changed_on_one_rank_is_met_soon_by_all(tmp_path: Path, kind: str) -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match="died"):
            ranks.run(change_alone, kind, str(tmp_path))
        deadline = time.monotonic() + SOON_S
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        ranks.stop()
    found = {path.name: path.read_text().split("\n", 2) for path in tmp_path.iterdir()}
    assert found.keys() == {"0", "1", "2", "3"}, f"only {sorted(found)} met an error"
    assert all(float(seconds) < SOON_S for seconds, *_ in found.values()), found
    assert found["2"][1] == RankMismatch.__name__, found["2"]
    why = r"called otherwise.*\(2, .*pad each rank's rows" if kind == "rows" else r"changed on this rank \(blocks\.0"
    assert re.search(f"rank 2 needs a new program for this call.*{why}", found["2"][2])
    assert all(found[rank][1] in (PeerFailed.__name__, "RuntimeError") for rank in "013"), found


class _Deadly:
    def __getattr__(self, name: str) -> Any:
        os._exit(1)

    def size(self) -> int:
        os._exit(1)


@pytest.mark.parametrize("when", ["before the call", "in the forward", "between the passes", "in the backward"])
def test_death_of_a_rank_is_met_soon_by_all_others(tmp_path: Path, when: str) -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match="died"):
            ranks.run(die, when, str(tmp_path))
        deadline = time.monotonic() + SOON_S
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        ranks.stop()
    found = {path.name: path.read_text().split("\n", 2) for path in tmp_path.iterdir()}
    assert found.keys() == {"0", "1", "3"}, f"only {sorted(found)} met an error"
    for rank, (seconds, kind, text) in found.items():
        assert float(seconds) < SOON_S, f"rank {rank} took {seconds} s"
        assert kind == PeerFailed.__name__ or (when != "before the call" and kind == "RuntimeError"), (
            f"rank {rank}: {kind}: {text}"
        )
        assert kind != PeerFailed.__name__ or "its error is the cause" in text
