"""`verify`: one training step on the ranks of a mesh, compared with the same step on one device."""

import copy
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.api import compile as shard
from autopar.costmodel.collective_time import issued_as
from autopar.errors import AutoparError
from autopar.ir.precision.mixed_precision import computed_in
from autopar.mesh import Mesh
from autopar.models.catalogue import Example
from autopar.models.target import load_target
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.runtime.pipeline.trainer import Trainer
from autopar.sbp.redistribute import Collective
from autopar.torch_compat import pytree
from autopar.verify.count_collectives import CountingMode
from autopar.verify.ledger import Account, Ledger

# The largest relative difference that counts as equal. The losses of transformers compute in float32 even in a float64
# model, so float64 is not compared to its full precision.
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-5}
# Of a plan that computes in a lower dtype, as many times the difference that this dtype makes on one device are equal:
# other orders of the same roundings.
ROUNDINGS = 2.0
# A gradient that is zero but for rounding is compared relative to this share of the largest gradient instead of to
# itself. AdamW's epsilon is a share of the largest gradient too, so that rounding does not become a full step.
FLOOR = 1e-4
LEARNING_RATE, EPSILON_SHARE = 1e-3, 1e-2
NUM_TIMED = 10
Send = tuple[str, int]  # "values" or "gradients", bytes


@dataclass(frozen=True)
class TrainingStep:
    """A training step on whole tensors: loss, gradients before the
    optimizer's step, parameters and buffers after it.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of `verify`: whether numbers and collectives are those
    of one device and of the plan, and the tables.
    """

    is_equal: bool
    text: str


def verify(
    target: str, plan: Plan | StagedPlan, dtype: torch.dtype | None = None, *, is_timed: bool = False
) -> Outcome:
    """Run a step of `target` under `plan` on a gloo process for each device and compare it with one device.

    `target` is cast to `dtype` if given. `is_timed`: run further steps, and add the predicted and the measured time of
    each term. AutoparError with the reason of the rank that failed first.
    """
    tolerance = _tolerance(plan)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        plan.save(Path(folder) / "plan.json")
        try:
            _start_ranks(plan.mesh, target, dtype, folder, is_timed)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise AutoparError(_first_cause(Path(folder)) or f"rank {error.error_index} died: {error}") from None
        sharded, issued, sends, account = pickle.loads((Path(folder) / "result").read_bytes())
    truth = train_step(_seeded(target, dtype), param_dtype := plan.training.compute_dtype)
    if param_dtype is not None:
        tolerance = max(tolerance, ROUNDINGS * _largest(truth, train_step(_seeded(target, dtype))))
    planned, mesh = planned_collectives(plan)
    outcome = _with_sends(_judge(sharded, truth, planned, issued, mesh, tolerance), planned_sends(plan), sends)
    return replace(outcome, text=f"{outcome.text}\n\n{account}") if is_timed else outcome


def planned_collectives(plan: Plan | StagedPlan) -> tuple[list[Collective], Mesh]:
    """The collectives that `plan` expects of the first rank in a step, and the mesh whose axes they name."""
    stages = [plan] if isinstance(plan, Plan) else [plan.stages[number] for number in plan.schedule.stages_of(0)]
    issued = (
        issued_as(item.collective, stage.cluster, stage.mesh) * stage.costs.num_issued(item)
        for stage in stages
        for item in stage.costs.collectives
    )
    return list(chain.from_iterable(issued)), stages[0].mesh


def planned_sends(plan: Plan | StagedPlan) -> Counter[Send]:
    """The sends between stages that `plan` expects of the first rank in a step -> their number."""
    sends: Counter[Send] = Counter()
    if isinstance(plan, StagedPlan):
        num, last = plan.schedule.num_microbatches, plan.schedule.num_stages - 1
        for stage in plan.schedule.stages_of(0):
            ahead = plan.sent_bytes(stage) if stage < last else ()
            back = plan.sent_bytes(stage - 1, only_gradients=True) if stage else ()
            sends.update({("values", size): num * count for size, count in Counter(ahead).items()})
            sends.update({("gradients", size): num * count for size, count in Counter(back).items()})
    return sends


def _with_sends(outcome: Outcome, planned: Counter[Send], issued: Counter[Send]) -> Outcome:
    """The outcome with the sends between stages, planned and counted."""
    if not planned and not issued:
        return outcome
    rows = []
    for what in ("values", "gradients"):
        both = ([(size, num) for (kind, size), num in sends.items() if kind == what] for sends in (planned, issued))
        rows.append([what, *(x for one in both for x in (sum(n for _, n in one), sum(s * n for s, n in one)))])
    table = tabulate(rows, ["sent to other stages", "planned", "bytes", "counted", "bytes"], disable_numparse=True)
    is_same = planned == issued
    verdict = "" if is_same else "\n\nNOT equal: the sends between stages are not those of the plan"
    return Outcome(outcome.is_equal and is_same, f"{outcome.text}\n\n{table}{verdict}")


def _tolerance(plan: Plan | StagedPlan) -> float:
    dtypes = {item.value.stored_dtype or item.value.dtype for item in plan.graph.of_kind("parameter")}
    if not dtypes <= TOLERANCES.keys():
        names = ", ".join(sorted(map(str, dtypes)))
        raise AutoparError(
            f"the model has parameters of {names}, too coarse to compare; pass --dtype float32 or float64"
        )
    return max((TOLERANCES[dtype] for dtype in dtypes), default=min(TOLERANCES.values()))


def _first_cause(folder: Path) -> str:
    """The error text of the rank that failed first, whose failure made the others fail; "" if no rank wrote one."""
    written = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
    return f"rank {written[0].name.removeprefix('error')} failed: {written[0].read_text()}" if written else ""


def _start_ranks(mesh: Mesh, target: str, dtype: torch.dtype | None, folder: str, is_timed: bool) -> None:
    """Run `_run_rank` for each device and wait for all; the processes are forks of one that has imported everything."""
    of_models = [name for name in sys.modules if name.startswith("transformers.models.")]
    multiprocessing.set_forkserver_preload([__name__, *of_models])
    given = (mesh, target, dtype, folder, is_timed)
    mp.start_processes(_run_rank, given, nprocs=mesh.num_devices, start_method="forkserver")


def _run_rank(rank: int, mesh: Mesh, target: str, dtype: torch.dtype | None, folder: str, is_timed: bool) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=mesh.num_devices)
        result = _sharded_step(mesh, target, dtype, folder, is_timed)
        if rank == 0:
            (Path(folder) / "result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        text = str(error) if isinstance(error, AutoparError) else traceback.format_exc()
        (Path(folder) / f"error{rank}").write_text(text)
        raise


def _sharded_step(
    mesh: Mesh, target: str, dtype: torch.dtype | None, folder: str, is_timed: bool
) -> tuple[TrainingStep, list[Collective], Counter[Send], Account | None]:
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
    example = _seeded(target, dtype)
    model = shard(
        example.model,
        device_mesh,
        args=example.args,
        kwargs=example.kwargs,
        plan=Path(folder) / "plan.json",
        outputs="sharded",  # gathers of a call would not be the plan's
    )
    loaded = model._autopar.current()
    parts = [part.loaded for part in loaded.parts] if isinstance(loaded, Trainer) else [loaded]
    if any(part.program.has_random_ops for part in parts):
        raise AutoparError(
            "the model draws random numbers (dropout), so no two layouts agree; call .eval() or set its probability"
            " to 0"
        )
    issued: list[Collective] = []
    with CountingMode(parts[0].mesh, issued) as counting:
        # the loss and the gradients that train_step gives are whole
        summed = (
            [model.train_step(*example.args, **example.kwargs)]
            if isinstance(loaded, Trainer)
            else backward(model, example)
        )
    step = _finish(model, summed)
    run = model.train_step if isinstance(loaded, Trainer) else None
    account = _timed(model, example, run) if is_timed else None
    if isinstance(loaded, Trainer):
        between = [collective for collective in issued if collective.axes]
        return _of_all_stages(step), between, _sends(loaded, counting.sends), account
    return step, issued, Counter(), account


def _sends(trainer: Trainer, issued: Sequence[tuple[str, int]]) -> Counter[Send]:
    """Of the sends that were issued, those between stages, by the process groups that are theirs alone."""
    lanes = trainer.runner.lanes
    kinds = {} if lanes is None else {str(group.group_name): kind for (kind, _), group in lanes.of_lane.items()}
    words = {"F": "values", "B": "gradients"}
    return Counter((words[kinds[name]], size) for name, size in issued if name in kinds)


def _timed(model: nn.Module, example: Example, run: Callable[..., Any] | None) -> Account:
    """The terms of further steps beside their prediction; `run`: makes forward and backward of stages."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # no step changes what the next one computes
    ledger = Ledger(model, NUM_TIMED)
    for _ in ledger:
        optimizer.zero_grad()
        run(*example.args, **example.kwargs) if run is not None else backward(model, example)
        optimizer.step()
    return ledger.account


def _of_all_stages(step: TrainingStep) -> TrainingStep:
    """The step with the gradients and the state of all ranks' stages; other ranks than the first keep their own."""
    gathered: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((step.gradients, step.state), gathered)
    parts = gathered or [(step.gradients, step.state)]
    gradients, state = ({name: x for part in reversed(parts) for name, x in part[which].items()} for which in (0, 1))
    return TrainingStep(step.loss, gradients, state)


def _seeded(target: str, dtype: torch.dtype | None) -> Example:
    torch.manual_seed(0)  # equal weights on every rank, whether the target seeds or not
    return load_target(target, dtype)


def train_step(example: Example, param_dtype: torch.dtype | None = None) -> TrainingStep:
    """The training step of `example` on one device, computed in `param_dtype`."""
    model = copy.deepcopy(example.model)
    return _finish(model, backward(computed_in(param_dtype, model), example))


def backward(model: Callable[..., Any], example: Example) -> list[torch.Tensor]:
    """Run forward and backward of `example`; returns the outputs whose sum is the loss.

    These are the first scalar or, if there is none, all floating outputs. AutoparError if there is no floating output.
    """
    outputs = model(*example.args, **example.kwargs)
    floating = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not floating:
        raise AutoparError("the model returns no floating tensor to compute gradients of; return a loss")
    scalars = [x for x in floating if x.ndim == 0]
    summed = [scalars[0]] if scalars else floating
    # A rank's part of a split output is a term of the sum; its gradient needs no collective.
    reduce(torch.add, [_local(x).sum() for x in summed]).backward()
    return [x.detach() for x in summed]


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a DTensor, gathered innermost axis first as its parts are nested.

    A plain tensor unchanged.
    """
    if not isinstance(x, DTensor):
        return x
    for axis in reversed(range(x.device_mesh.ndim)):
        x = x.redistribute(placements=[*x.placements[:axis], Replicate(), *x.placements[axis + 1 :]])
    return x.to_local()


def _finish(model: nn.Module, summed: list[torch.Tensor]) -> TrainingStep:
    loss = reduce(torch.add, [whole(x).sum() for x in summed])
    own = [(name, p) for name, p in model.named_parameters() if not isinstance(p, ParameterElsewhere)]
    gradients = {name: whole(p.grad).clone() for name, p in own if p.grad is not None}
    largest = _of_all_ranks(max((float(x.abs().max()) for x in gradients.values() if x.numel()), default=0.0))
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON_SHARE * largest).step()
    return TrainingStep(loss, gradients, {name: whole(x).detach() for name, x in model.state_dict().items()})


def _of_all_ranks(largest: float) -> float:
    if not dist.is_initialized():
        return largest
    of_all = torch.tensor(largest, dtype=torch.float64)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return float(of_all)


def _judge(
    sharded: TrainingStep,
    truth: TrainingStep,
    planned: list[Collective],
    issued: list[Collective],
    mesh: Mesh,
    tolerance: float,
) -> Outcome:
    rows = _differences(sharded, truth)
    close = all(largest <= tolerance for _, largest, _ in rows)
    counted, same = _compare(planned, issued, mesh)
    lines = [[what, f"{worst:.1e}", where] for what, worst, where in rows]
    table = tabulate(lines, ["what", "largest relative difference", "at"], disable_numparse=True)
    verdict = "equal" if close and same else "NOT equal"
    return Outcome(
        close and same, f"{table}\n\n{counted}\n\n{verdict}: tolerance {tolerance:g}, {len(issued)} collectives issued"
    )


def _differences(sharded: TrainingStep, truth: TrainingStep) -> list[tuple[str, float, str]]:
    """Of each part of a step its name, and its largest difference and where that is."""
    return [
        ("loss", *difference({"loss": sharded.loss}, {"loss": truth.loss})),
        ("gradients", *difference(sharded.gradients, truth.gradients)),
        ("parameters and buffers after AdamW", *difference(sharded.state, truth.state)),
    ]


def _largest(sharded: TrainingStep, truth: TrainingStep) -> float:
    return max(largest for _, largest, _ in _differences(sharded, truth))


def difference(sharded: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any tensor, relative to its largest entry in `truth`, and the tensor's name.

    It is infinity if one side lacks a tensor.
    """
    if missing := sorted(sharded.keys() ^ truth.keys()):
        return float("inf"), missing[0]
    floor = FLOOR * max((float(x.abs().max()) for x in truth.values() if x.numel()), default=0.0)
    pairs = {name: (sharded[name].double(), x.double()) for name, x in truth.items() if x.numel()}
    worst = {
        name: float((a - b).abs().max()) / max(float(b.abs().max()), floor, 1e-300) for name, (a, b) in pairs.items()
    }
    name = max(worst, key=lambda name: worst[name] if worst[name] == worst[name] else float("inf"), default="")
    return (worst[name], name) if name else (0.0, "")


def _compare(planned: list[Collective], issued: list[Collective], mesh: Mesh) -> tuple[str, bool]:
    """A table of planned and counted collectives by phase, axis and kind, and whether both are the same multiset."""
    keys = sorted({_key(c) for c in (*planned, *issued)}, key=lambda key: (key[0] != "forward", *key[1:]))
    rows = [
        [key[0], mesh.name_of(key[1]) or "other", key[2], *_sums(planned, key), *_sums(issued, key)] for key in keys
    ]
    headers = ["phase", "axis", "kind", "planned", "bytes", "counted", "bytes"]
    text = tabulate(rows, headers, disable_numparse=True) if rows else "No collective is planned, none was issued."
    return text, Counter(planned) == Counter(issued)


def _key(collective: Collective) -> tuple[str, tuple[int, ...], str]:
    return collective.phase, collective.axes, collective.kind


def _sums(collectives: Iterable[Collective], key: tuple[str, tuple[int, ...], str]) -> list[Any]:
    sizes = [collective.num_bytes for collective in collectives if _key(collective) == key]
    return [len(sizes), sum(sizes)]
