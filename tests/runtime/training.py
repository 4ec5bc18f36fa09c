"""What the ranks run: a sharded model under a given plan beside the same model on one device."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.complete_layouts import bytes_moved, complete
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.layouts.search_meshes import make_plan, plan_of
from autopar.plans.plan import Plan
from autopar.runtime.sharded_module import ShardedModule, shard_module
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import is_even
from autopar.sbp.signature import Candidates
from autopar.verify.check_placements import check
from autopar.verify.count_collectives import count_collectives
from tests.sbp.exercise import in_order
from tests.workers import device_mesh
from tests.zoo import Case, build

AXES = ("dp", "tp", "ep")
LEARNING_RATE = 1e-2
# AdamW divides each gradient by its own size: of one that is zero but for rounding (a key's bias: softmax does not see
# it) it makes a full update of either sign. This eps lets such updates vanish; tensors are compared relative to at
# least these sizes.
EPS = 1e-3
LEAST = {"first": 1e-6, "last": LEARNING_RATE}


def train_under(name: str, plans: Mapping[str, Plan], steps: int = 3) -> list[dict[str, Any]]:
    """On every rank: train the model called `name` under each plan and report how far it is from one device."""
    truth = train(build(name), steps)
    reports = []
    for kind, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, build(name), mesh)
        found = train(case, steps)
        reports.append(
            {
                "kind": kind,
                "split": split_parameters(plan),
                "uneven": num_uneven(plan),
                "predicted": Counter(planned(plan)),
                "issued": issued(case, mesh),
            }
            | {when: worst(found[when], truth[when], least) for when, least in LEAST.items()}
        )
        check(case.model._autopar.current().program, mesh)
    return reports


def plans_for(name: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> dict[str, Plan]:
    """A plan of each kind for the model called `name`."""
    graph = traced(build(name))
    return {kind: plan_called(kind, graph, Mesh(shape, AXES[: len(shape)])) for kind in kinds}


def under(plan: Plan, case: Case, mesh: DeviceMesh) -> Case:
    """The case with its model sharded by `plan`, which was made for this very model: it is not traced again."""
    module = shard_module(case.model, mesh, lambda *_: plan, outputs="sharded")
    module._autopar._trace = lambda *_: plan.graph
    return case._replace(model=module)


def traced(case: Case) -> Graph:
    return trace(skeleton(case.model), case.args, case.kwargs)


def plan_called(kind: str, graph: Graph, mesh: Mesh) -> Plan:
    """ "searched", "random:SEED" or a hand plan."""
    cluster = load_cluster("free-links")
    if kind == "searched":
        return make_plan(graph, mesh, cluster)
    folded = fold(graph)
    candidates = annotate(graph, mesh, folded)
    if kind.startswith("random:"):
        assignment = random_assignment(graph, folded, candidates, mesh, random.Random(kind))
    else:
        assignment = hand_plan(parse_hand_plan(kind, mesh), graph, folded, candidates, mesh)
    return plan_of(graph, assignment, mesh, cluster)


def random_assignment(
    graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh, draw: random.Random
) -> Assignment:
    """Any valid strategy for every op, any storable layout for every parameter."""
    chosen = {
        name: found[draw.choice(in_order(found) or range(len(found)))]
        for name, found in sorted(candidates.strategies.items())
    }
    strategies = {op.name: chosen[folded.representative[op.name]] for op in graph.ops}
    arguments = {
        item.value.name: draw.choice(candidates.layouts[item.value.name]) for item in graph.of_kind("argument")
    }
    found = complete(graph, folded, candidates, strategies, arguments, bytes_moved(mesh))
    stored = {
        item.value.name: draw.choice(candidates.layouts[item.value.name])
        for item in graph.of_kind("parameter")
        if folded.representative[item.value.name] == item.value.name
    }
    layouts = {name: stored.get(folded.representative[name], layout) for name, layout in found.layouts.items()}
    return Assignment(found.strategies, layouts, found.kept, found.outputs)


def forward_backward(case: Case) -> dict[str, torch.Tensor]:
    """Loss and gradients of one pass."""
    case.model.zero_grad()
    loss = case.loss(whole_outputs(case.model(*case.args, **case.kwargs)))
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in case.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, whole, as they are now."""
    return {name: whole(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def finish(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """Parameters and buffers after `steps` AdamW steps, the first on the gradients already there."""
    optimizer = adamw(case.model)
    for step in range(steps):
        if step:
            forward_backward(case)
        optimizer.step()
    return state_of(case.model)


def train(case: Case, steps: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"first": forward_backward(case), "last": finish(case, steps)}


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_outputs(output: Any) -> Any:
    if isinstance(output, Mapping):
        return type(output)(**{key: whole(x) for key, x in output.items()})
    return whole(output)


def worst(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], least: float) -> tuple[float, str]:
    """Largest difference of any tensor, relative to that tensor's largest entry or to `least`, whichever is more."""
    assert found.keys() == truth.keys(), sorted(found.keys() ^ truth.keys())
    scale = {name: max(float(t.abs().max()), least) for name, t in truth.items()}
    return max((float((found[name].to(t.dtype) - t).abs().max()) / scale[name], name) for name, t in truth.items())


def split_parameters(plan: Plan) -> int:
    names = [item.value.name for item in plan.graph.of_kind("parameter")]
    return sum(any(p.is_split for p in plan.assignment.layouts[name]) for name in names)


def num_uneven(plan: Plan) -> int:
    """The number of inputs and results that lie in parts of different sizes."""
    layouts, shape = plan.assignment.layouts, plan.mesh.shape
    inputs = sum(not is_even(item.value.shape, layouts[item.value.name], shape) for item in plan.graph.inputs)
    return inputs + sum(
        not is_even(value.shape, plan.assignment.strategies[op.name].output_layout(i), shape)
        for op in plan.graph.ops
        for i, value in enumerate(op.outputs)
    )


def planned(plan: Plan) -> Iterator[Any]:
    return (planned.collective for planned in plan.costs.collectives)


def issued(case: Case, mesh: DeviceMesh) -> Counter:
    """How often the model issues each collective, forward and backward; the order of the latter is autograd's."""
    with count_collectives(mesh) as found:
        outputs = case.model(*case.args, **case.kwargs)
        leaves = [x.to_local() if isinstance(x, DTensor) else x for x in tree_leaves(outputs)]
        sum(x.sum() for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad).backward()
    return Counter(found)


def sharded(name: str, shape: tuple[int, ...], kind: str, **options: Any) -> tuple[Case, ShardedModule]:
    """The model called `name` and the same under a kind of plan, for tests of one property."""
    mesh, case = Mesh(shape, AXES[: len(shape)]), build(name, **options)
    plan = plan_called(kind, traced(case), mesh)
    return case, under(plan, case, device_mesh(shape, mesh.axis_names)).model
