"""What the ranks run of a split program: microbatch after microbatch, beside the whole batch on one device."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.codegen.lower import lower
from autopar.ir.interpret import run_constants
from autopar.plans.plan import Plan
from autopar.runtime.accumulate import OpenStep, open_step
from autopar.runtime.dtensor_state import install, owners, shard_model
from autopar.runtime.load_program import Loaded, axes_of, load
from autopar.runtime.run_program import run
from autopar.sbp.in_flight import InFlight
from autopar.sbp.redistribute import Collective
from autopar.verify.check_placements import check
from autopar.verify.count_collectives import count_collectives
from tests.runtime.training import whole
from tests.workers import device_mesh
from tests.zoo import Case, build


def logits_case(name: str, **options: Any) -> Case:
    """The case with a loss of its logits that is a sum over the batch, in float64."""
    case = build(name, **options)
    kwargs = {key: x for key, x in case.kwargs.items() if key != "labels"}
    return case._replace(kwargs=kwargs, loss=_weighed)


def _logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def _weighed(output: Any) -> torch.Tensor:
    logits = whole(_logits(output))
    weights = torch.linspace(-1, 2, logits.shape[-1], dtype=logits.dtype)
    return (logits * weights).sum() + 0.1 * logits.square().sum()


def _local_sum(output: Any) -> torch.Tensor:
    """No number of interest, but one that issues no collective."""
    logits = _logits(output)
    return (logits.to_local() if isinstance(logits, DTensor) else logits).sum()


def microbatch(case: Case, number: int, count: int) -> Case:
    """The case with one of `count` equal parts of its batch."""
    part = lambda x: x.chunk(count)[number] if isinstance(x, torch.Tensor) else x  # noqa: E731
    return case._replace(args=pytree.tree_map(part, case.args), kwargs=pytree.tree_map(part, case.kwargs))


def load_program(plan: Plan, model: nn.Module, mesh: DeviceMesh, *, is_split: bool) -> Loaded:
    """The program of `plan`, whose tensors `model` holds from now on."""
    program = lower(plan.graph, plan.mesh, plan.assignment, is_split=is_split)
    install(model, plan.graph, shard_model(model, plan.graph, plan.assignment.layouts, mesh), is_in_use=False)
    constants = run_constants(plan.graph, "cpu")
    axes = axes_of(mesh, program.joint_axes)
    return load(
        program, choices=plan, graph=plan.graph, mesh=mesh, axes=axes, constants=constants, owners=owners(model)
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def step(loaded: Loaded, case: Case, count: int) -> float:
    """Forward and backward of every microbatch, one after the other."""
    opened, total = open_step(loaded, count), 0.0
    for number in range(count):
        part = microbatch(case, number, count)
        loss = case.loss(run(loaded, part.args, part.kwargs, None, is_whole=False))
        loss.backward()
        total += float(loss)
    assert not [name for name, x in opened.results.items() if x.requires_grad], "reduced beside the last backward"
    opened.close()
    assert not opened.results and not loaded.used
    return total


def accumulate(name: str, plans: Mapping[str, Plan], count: int) -> list[dict[str, Any]]:
    """Under each plan, which is for one of `count` microbatches: how far loss and gradients are from one device's, and
    what was issued.
    """
    truth = logits_case(name)
    loss = truth.loss(truth.model(*truth.args, **truth.kwargs))
    loss.backward()
    expected = {"loss": loss.detach()} | {
        key: p.grad for key, p in truth.model.named_parameters() if p.grad is not None
    }
    return [{"kind": kind} | _accumulate(name, plan, count, expected) for kind, plan in plans.items()]


def _accumulate(name: str, plan: Plan, count: int, expected: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    case, mesh = logits_case(name), device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    loaded, differences = load_program(plan, case.model, mesh, is_split=True), []
    landings = _landings(loaded, case, count)
    for times in (1, 2):  # gradients are added to those that are there
        loss = step(loaded, case, count)
        found = {"loss": torch.tensor(loss, dtype=torch.float64)} | {
            key: x / times for key, x in gradients(case.model).items()
        }
        assert found.keys() == expected.keys()
        differences += [float((found[key] - x).abs().max() / max(x.abs().max(), 1e-6)) for key, x in expected.items()]
    with count_collectives(mesh) as issued:
        step(loaded, case._replace(loss=_local_sum), count)
    check(loaded.program, mesh)
    return {"difference": max(differences), "issued": Counter(issued), "code": loaded.source, "landings": landings}


def _landings(loaded: Loaded, case: Case, count: int) -> list[str]:
    """The phase of a step in which each collective that is waited for late is waited for; its gradients are dropped."""
    phases, landed, close = ["microbatches"], InFlight.landed, OpenStep.close
    found: list[str] = []

    def noted(one: InFlight) -> torch.Tensor:
        found.append(phases[-1])
        return landed(one)

    def closing(opened: OpenStep) -> None:
        phases.append("close")
        close(opened)

    InFlight.landed, OpenStep.close = noted, closing  # type: ignore[method-assign]
    try:
        step(loaded, case, count)
    finally:
        InFlight.landed, OpenStep.close = landed, close  # type: ignore[method-assign]
    case.model.zero_grad()
    return found


def planned_collectives(plan: Plan, count: int) -> Counter[Collective]:
    """Those of parameters that are not regathered once, all others in every microbatch."""
    once = {item.value.name for item in plan.graph.of_kind("parameter")} - plan.assignment.regathered
    found: Counter[Collective] = Counter()
    for one in plan.costs.collectives:
        found[one.collective] += 1 if one.where in once else count
    return found
