"""Running cases: on one device here, on every rank under autopar or beside it under DDP and FSDP2."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import autopar
from autopar import api
from autopar.ir.folding.fold import fold
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import plan_of
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.sbp.candidates import annotate
from tests.journey.case import DDP, DP, DP_TP, FREE, FSDP2, PP, TOLERANCE, Numbers, Run, cases_of
from tests.journey.stack import BATCH
from tests.workers import RankError, Ranks, device_mesh

LEAST_S, EACH_S = 40.0, 10.0  # that a call may take: in all, and for each case on a machine that is busy


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of a case: its numbers, or the error. `is_refusal`: an error made to be read."""

    numbers: Mapping[str, torch.Tensor]
    error: str = ""
    is_refusal: bool = False


@dataclass(frozen=True)
class _Setting:
    """A mesh and how the plan on it is made: by hand, or by a search with links that cost nothing."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    by_hand: str = ""
    num_microbatches: int | None = None


_SETTINGS = {
    DP: _Setting((4,), ("dp",), "zero3"),
    DP_TP: _Setting((2, 2), ("dp", "tp"), "megatron"),
    FREE: _Setting((2, 2), ("a", "b")),
    PP: _Setting((2, 2), ("pp", "dp"), num_microbatches=2),
}


class Ranked(Run):
    """Under autopar, on this rank."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._how = _SETTINGS[setting]
        self.mesh = device_mesh(self._how.shape, self._how.axis_names)

    def compile(self, model: nn.Module, **options: Any) -> nn.Module:
        options = {"cluster": "free-links", "num_microbatches": self._how.num_microbatches} | options
        return autopar.compile(model, self.mesh, **options)

    def step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.setting == PP:
            return model.train_step(*args, **kwargs)
        return super().step(model, *args, **kwargs)

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(fqn, p) for fqn, p in super().named(model) if not isinstance(p, ParameterElsewhere)]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def planned(self) -> Any:
        """Inside, plans are those of the setting."""
        return _planned_by_hand(self._how.by_hand) if self._how.by_hand else nullcontext()


@contextmanager
def _planned_by_hand(kind: str) -> Iterator[None]:
    original = api.choose_plan

    def choose(graph: Any, mesh: Any, cluster: Any, request: Any, **more: Any) -> Any:
        if request.stored or request.pins or request.num_microbatches:  # asked for something else as well
            return original(graph, mesh, cluster, request, **more)
        folded = fold(graph)
        assignment = hand_plan(parse_hand_plan(kind, mesh), graph, folded, annotate(graph, mesh, folded), mesh)
        return plan_of(graph, assignment, mesh, cluster)

    api.choose_plan = choose
    try:
        yield
    finally:
        api.choose_plan = original


class Peer(Run):
    """Under DDP or FSDP2: each rank has its part of the batch, the loss is the mean of the ranks'."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self.mesh = device_mesh((dist.get_world_size(),), ("dp",))

    def compile(self, model: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(model) if self.setting == DDP else fully_shard(model, mesh=self.mesh)

    def step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = tree_map_only(torch.Tensor, _own_part, (args, kwargs))
        loss = super().step(model, *args, **kwargs)
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def inner(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(fqn.removeprefix("module."), p) for fqn, p in model.named_parameters()]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x


def _own_part(x: torch.Tensor) -> torch.Tensor:
    """Of tensors whose first dim is the batch's."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if x.ndim and len(x) == BATCH else x


def outcomes_of(ranks: Ranks, theme: str, names: tuple[str, ...], setting: str) -> dict[str, list[Outcome]]:
    """What each rank saw of the cases, run in one call; where one ended the ranks, each in a call of its own."""
    try:
        results = ranks.run(run_on_rank, theme, names, setting, timeout_s=LEAST_S + EACH_S * len(names))
    except RankError as error:
        if len(names) == 1:
            return {names[0]: [Outcome({}, f"the ranks ended: {error}")]}
        return {name: outcomes_of(ranks, theme, (name,), setting)[name] for name in names}
    return {name: [result[name] for result in results] for name in names}


def run_on_rank(theme: str, names: tuple[str, ...], setting: str) -> dict[str, Outcome]:
    """Each of the cases, one after the other, on this rank."""
    return {name: _outcome(theme, name, setting) for name in names}


def truth(theme: str, name: str) -> Numbers:
    """The case's numbers on one device."""
    torch.manual_seed(0)
    return cases_of(theme)[name].function(Run())


def _outcome(theme: str, name: str, setting: str) -> Outcome:
    function, is_peer = cases_of(theme)[name].function, setting in (DDP, FSDP2)
    run = Peer(setting) if is_peer else Ranked(setting)
    torch.manual_seed(0)
    with warnings.catch_warnings(), nullcontext() if is_peer else run.planned():
        warnings.simplefilter("ignore")
        try:
            return Outcome({key: x.detach() for key, x in function(run).items()})
        except Exception as error:
            refusal = isinstance(error, (autopar.AutoparError, ValueError))
            return Outcome({}, f"{type(error).__name__}: {error}", refusal)


def difference(outcomes: list[Outcome], expected: Numbers, tolerance: float = TOLERANCE) -> str:
    """In what the ranks' numbers are not those of one device; "" if in nothing. Each rank of a pipeline has some."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            return f"rank {rank}: {outcome.error}"
    found = {key for outcome in outcomes for key in outcome.numbers}
    if found != expected.keys():
        return f"other numbers: {sorted(found ^ expected.keys())}"
    # what is zero but for rounding (a bias before a norm) is compared with the size of the others
    least = 1e-3 * max((float(x.abs().max()) for x in expected.values() if x.numel()), default=1.0)
    for rank, outcome in enumerate(outcomes):
        for key, x in outcome.numbers.items():
            if x.shape != expected[key].shape:
                return f"rank {rank}: {key} has shape {tuple(x.shape)}, expected {tuple(expected[key].shape)}"
            scale = (max(float(expected[key].abs().max()), least) if x.numel() else 1.0) or 1.0
            gap = float((x - expected[key]).abs().max()) / scale if x.numel() else 0.0
            if not gap < tolerance:
                return f"rank {rank}: {key} is off by {gap:.2g} of its largest entry"
    return ""
