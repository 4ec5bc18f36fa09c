"""Any valid plan of a drawn graph, run by ranks that are threads, beside the graph on one device."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any

import torch

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.costmodel.activations.recomputable import saves
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.ir.call_args import call
from autopar.ir.graph import Graph, Value
from autopar.mesh import Mesh
from autopar.runtime.accumulate import open_step
from autopar.runtime.load_program import axes_of, compile_source, namespace
from autopar.sbp.assignment import Assignment, InBucket, without_prefetch
from autopar.sbp.axis import Axis
from autopar.sbp.candidates import annotate
from autopar.sbp.convert import dual
from autopar.sbp.placement import I, Layout, P, R, S, can_split
from autopar.sbp.proof.cut_and_join import Coordinate, cut, join
from autopar.sbp.redistribute import Collective
from autopar.verify.count_collectives import count_collectives
from tests.runtime.as_priced import has_uneven_parts, is_as_priced
from tests.runtime.random_graphs import Builder, Refused
from tests.runtime.random_ops import FAMILIES, WEIGHTS
from tests.sbp.exercise import in_order, record
from tests.sbp.simulate import on_threads
from tests.workers import device_mesh

MESHES = ((2,), (4,), (2, 2), (2, 2, 2))
TOLERANCE = 1e-9
NOISE = 1e-12

Families = Mapping[str, Callable[[Builder], None]]
Tensors = dict[str, torch.Tensor]
Found = tuple[Counter[Collective], Tensors]  # of one rank


@dataclass(frozen=True)
class Example:
    """A graph with its inputs' contents, the gradients of its outputs by position, and a plan; is_split: the program
    has two parts.
    """

    graph: Graph
    values: Mapping[str, torch.Tensor]
    cotangents: Mapping[int, torch.Tensor]
    mesh: Mesh
    assignment: Assignment
    is_split: bool = False


def draw_example(
    draw: Random, num_calls: int, meshes: Sequence[tuple[int, ...]] = MESHES, families: Families = FAMILIES
) -> Example:
    torch.manual_seed(draw.randrange(2**16))
    graph, values = draw_graph(draw, num_calls, families)
    shape = draw.choice(meshes)
    mesh = Mesh(shape, tuple(f"a{axis}" for axis in range(len(shape))))
    cotangents = {index: _cotangent(draw, v) for index, v in enumerate(graph.outputs) if v.needs_grad}
    assignment, is_split = draw_assignment(draw, graph, mesh), draw.random() < 0.3
    assignment = without_prefetch(assignment) if is_split else assignment
    assignment = replace(assignment, recomputed=_any_regions(draw, graph), offloaded=_any_regions(draw, graph))
    if not _is_nested(assignment):
        assignment = replace(assignment, offloaded=())
    return Example(graph, values, cotangents, mesh, assignment, is_split)


def _any_regions(draw: Random, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Often none, else any stretches of the graph that save something: others are not run again."""
    ends = sorted(draw.choices(range(len(graph.ops) + 1), k=draw.choice((0, 0, 0, 2, 4))))
    stretches = [graph.ops[first:end] for first, end in zip(ends[::2], ends[1::2])]
    return tuple(tuple(op.name for op in ops) for ops in stretches if any(map(saves, ops)))


def _is_nested(assignment: Assignment) -> bool:
    overlaps = [(set(inner), set(outer)) for inner in assignment.recomputed for outer in assignment.offloaded]
    return all(inner <= outer or not inner & outer for inner, outer in overlaps)


def draw_graph(draw: Random, num_calls: int, families: Families = FAMILIES) -> tuple[Graph, Tensors]:
    b = Builder(draw)
    weights = [WEIGHTS.get(name, 1) for name in families]
    for family in draw.choices(list(families), weights, k=num_calls):
        try:
            families[family](b)
        except Refused:
            continue
    return b.graph(), b.values


def _cotangent(draw: Random, value: Value) -> torch.Tensor:
    """Random numbers, or what `sum` sends back: one number under every index."""
    if draw.random() < 0.2:
        return torch.ones((), dtype=value.dtype).expand(value.shape)
    return torch.randn(value.shape, dtype=value.dtype)


def draw_assignment(draw: Random, graph: Graph, mesh: Mesh) -> Assignment:
    """Anything `annotate` offers; values are kept in any layout there is."""
    candidates = annotate(graph, mesh)
    values = {item.value.name: item.value for item in graph.inputs} | {
        v.name: v for op in graph.ops for v in op.outputs
    }
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    is_split = draw.random() < 0.4  # parameters all in parts, of which many are then gathered alike
    return Assignment(
        strategies={name: found[draw.choice(in_order(found))] for name, found in candidates.strategies.items()},
        layouts={
            name: max(found, key=_num_split) if is_split and name in parameters else draw.choice(found)
            for name, found in candidates.layouts.items()
        },
        kept={name: _any_layout(draw, values[name], mesh) for name in graph.uses if draw.random() < 0.5},
        outputs={name: draw.choice(found) for name, found in candidates.outputs.items()},
        regathered=frozenset(name for name in sorted(regatherable(graph, _same(graph))) if draw.random() < 0.5),
        parameter_buckets=_any_buckets(draw, graph) if draw.random() < 0.7 else {},
    )


def _num_split(layout: Layout) -> int:
    return sum(placement.is_split for placement in layout)


def _any_buckets(draw: Random, graph: Graph) -> dict[str, InBucket]:
    """Any runs of parameters in order of first use, with or without gaps."""
    used, sizes = graph.uses, {item.value.name: item.value.num_bytes for item in graph.of_kind("parameter")}
    names = [name for name in used if name in sizes and draw.random() < 0.9]
    starts = sorted({0, *(at for at in range(len(names)) if draw.random() < 0.15)})
    buckets = [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)])]
    totals = [sum(sizes[name] for name in bucket) for bucket in buckets]
    return {
        name: InBucket(total, at, is_prefetched)
        for bucket, total, is_prefetched in zip(buckets, totals, (draw.random() < 0.5 for _ in buckets))
        for at, name in enumerate(bucket)
    }


def _same(graph: Graph) -> dict[str, str]:
    """Everything stands for itself."""
    return {name: name for name in (*(op.name for op in graph.ops), *(item.value.name for item in graph.inputs))}


def _any_layout(draw: Random, value: Value, mesh: Mesh) -> Layout:
    whole = (I, *([R] if value.needs_grad else []), *([P] if value.dtype != torch.bool else []))
    splits = tuple(S(dim) for dim in range(len(value.shape)))
    layout = tuple(draw.choice(splits if splits and draw.random() < 0.5 else whole) for _ in mesh.shape)
    if draw.random() < 0.3:  # conversions of several axes at once
        layout = layout[:1] * mesh.ndim
    return layout if can_split(value.shape, layout, mesh.shape) else (draw.choice(whole),) * mesh.ndim


def differences(example: Example, found: Mapping[Coordinate, Found] | None = None) -> tuple[list[str], list[str]]:
    """What the plan computes otherwise than one device does, and issues otherwise than priced; `found` on threads
    unless given.
    """
    found = found or run_on_threads(example)
    priced = Counter(
        planned.collective
        for planned in evaluate(example.graph, example.assignment, example.mesh, _CLUSTER).collectives
    )
    wrong = [
        f"rank {at} issued besides {_text(counted - priced)}, not {_text(priced - counted)}"
        for at, (counted, _) in found.items()
        if not is_as_priced(
            counted,
            priced,
            is_exact=all_gradients_arrive(example.graph) and not _rests(example),
            is_first=not any(at) or not has_uneven_parts(example.graph, example.assignment, example.mesh.shape),
        )
    ]
    return _wrong_numbers(example, {at: tensors for at, (_, tensors) in found.items()}), wrong


def all_gradients_arrive(graph: Graph) -> bool:
    """Whether every op that could send gradients back gets one; where one does not, its backward is priced but does not
    happen.
    """
    arrive = {v.name for v in graph.outputs if v.needs_grad}
    for op in reversed(graph.ops):
        if not op.is_no_grad and any(value.needs_grad for value in op.outputs):
            if not any(value.name in arrive for value in op.outputs):
                return False
            arrive.update(value.name for value in op.inputs if value.needs_grad)
    return True


def _rests(example: Example) -> bool:
    """Whether a recomputed region may not run again, for a norm or product in it gives a gradient to its bias alone,
    which backward takes from nothing saved; the second run is priced.
    """
    inside = set(chain.from_iterable(example.assignment.recomputed))
    trained = (
        [slot for slot, value in enumerate(op.inputs) if value.needs_grad]
        for op in example.graph.ops
        if op.name in inside and ("norm" in op.target or "linear" in op.target or "conv" in op.target)
    )
    return any(len(slots) == 1 and slots != [0] for slots in trained)


_CLUSTER = load_cluster("free-links")


def _text(collectives: Counter[Collective]) -> str:
    return (
        ", ".join(f"{count} x {c.kind} a{c.axes} {c.num_bytes} B {c.phase}" for c, count in collectives.items())
        or "none"
    )


def run_on_threads(example: Example) -> dict[Coordinate, Found]:
    """What every rank issues and computes, ranks being threads."""
    rank = rank_of(example)
    joint = lower(example.graph, example.mesh, example.assignment).joint_axes
    with record(example.mesh.shape) as issued:
        found = on_threads(lambda at, axes: (threading.get_ident(), rank(at, axes)), example.mesh.shape, joint)
    return {at: (issued.get(thread, Counter()), tensors) for at, (thread, tensors) in found.items()}


def run_on_gloo(seeds: Sequence[int], num_calls: int, shape: tuple[int, ...]) -> list[tuple[Coordinate, Found]]:
    """For each seed what this process, one of a gloo world, issues and computes."""
    mesh = device_mesh(shape, tuple(f"a{axis}" for axis in range(len(shape))))
    results = []
    for seed in seeds:
        example = draw_example(Random(seed), num_calls, (shape,))
        rank = rank_of(example)
        axes = axes_of(mesh, lower(example.graph, example.mesh, example.assignment).joint_axes)
        with count_collectives(mesh) as issued:
            tensors = rank(tuple(mesh.get_coordinate()), axes)
        results.append((tuple(mesh.get_coordinate()), (Counter(issued), tensors)))
    return results


def rank_of(example: Example) -> Callable[[Coordinate, tuple[Axis, ...]], Tensors]:
    """The function one rank runs: its local parts of everything `run_whole` gives."""
    graph, assignment, shape = example.graph, example.assignment, example.mesh.shape
    program, names = lower(graph, example.mesh, assignment, is_split=example.is_split), namespace()
    forward = compile_source(emit(program), names)
    parts = {name: cut(x, assignment.layouts[name], shape) for name, x in example.values.items()}
    layouts = {index: assignment.outputs[graph.outputs[index].name] for index in example.cotangents}
    gradients = {index: _parts_of_gradient(x, layouts[index], shape) for index, x in example.cotangents.items()}
    needs_grad = {item.value.name for item in graph.inputs if item.value.needs_grad}

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> Tensors:
        stored = {name: part[at].requires_grad_(name in needs_grad) for name, part in parts.items()}
        state = Rank(axes, stored, {}, program, names.get("gather"))
        opened = open_step(state, 1) if example.is_split else None
        outputs = forward(state, *(stored[name] for name in graph.arguments))
        mine = {index: g[at] for index, g in gradients.items()}
        if opened is None:
            return _results(graph, stored, outputs, state.written, mine)
        starts = [outputs[index] for index in mine]
        torch.autograd.backward(starts, list(mine.values()))
        found = _results(graph, stored, outputs, state.written, {})
        opened.close()
        return found | {f"gradient {name}": x.grad for name, x in stored.items() if x.grad is not None}

    return rank


def _parts_of_gradient(x: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...]) -> dict[Coordinate, torch.Tensor]:
    parts = cut(x, tuple(map(dual, layout)), mesh_shape)
    is_one_number = x.numel() > 1 and not any(x.stride())
    return {at: x.flatten()[0].expand(part.shape) for at, part in parts.items()} if is_one_number else parts


@dataclass
class Rank:
    """`self` of the generated function; every input has its own name as FQN."""

    axes: tuple[Axis, ...]
    constants: Tensors
    written: Tensors
    program: Program
    gather: Any
    used: Tensors = field(default_factory=dict)

    def local(self, fqn: str) -> torch.Tensor:
        return self.constants[fqn]

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.constants[fqn].clone()

    def draw_seed(self) -> int:
        return 0

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        self.written[fqn] = value.clone()
        self.constants[fqn].copy_(value)


def run_whole(example: Example, noise: float = 0.0) -> Tensors:
    """Outputs, gradients of inputs and new buffers on one device; with `noise`, every number
    is off by about so much.
    """
    graph = example.graph
    leaves = {
        item.value.name: example.values[item.value.name].clone().requires_grad_(item.value.needs_grad)
        for item in graph.inputs
    }
    env = {name: _disturbed(x, noise) for name, x in leaves.items()}
    for op in graph.ops:
        results = call(op, [env[value.name] for value in op.inputs])
        env.update((value.name, _disturbed(x, noise)) for value, x in zip(op.outputs, results))
    written = {fqn: env[value.name].detach() for fqn, value in graph.mutations}
    return _results(graph, leaves, [env[value.name] for value in graph.outputs], written, example.cotangents)


def _disturbed(x: torch.Tensor, noise: float) -> torch.Tensor:
    return x + noise * torch.randn_like(x) if noise and x.is_floating_point() else x


def _results(
    graph: Graph, leaves: Tensors, outputs: Any, written: Tensors, cotangents: Mapping[int, torch.Tensor]
) -> Tensors:
    wanted = {item.value.name: leaves[item.value.name] for item in graph.inputs if item.value.needs_grad}
    starts = [outputs[index] for index in cotangents]
    found = (
        torch.autograd.grad(starts, list(wanted.values()), list(cotangents.values()), allow_unused=True)
        if starts and wanted
        else ()
    )
    gradients = {f"gradient {name}": g for name, g in zip(wanted, found) if g is not None}
    return (
        {f"output {i}": x.detach() for i, x in enumerate(outputs)}
        | gradients
        | {f"buffer {fqn}": x for fqn, x in written.items()}
    )


def layout_of(example: Example, result: str) -> Layout:
    kind, name = result.split()
    if kind == "output":
        return example.assignment.outputs[example.graph.outputs[int(name)].name]
    layout = example.assignment.layouts[name]
    return tuple(map(dual, layout)) if kind == "gradient" else layout


def _wrong_numbers(example: Example, found: Mapping[Coordinate, Tensors]) -> list[str]:
    expected, wrong = run_whole(example), []
    for name, truth in expected.items():
        parts = {at: tensors.get(name) for at, tensors in found.items()}
        if any(part is None for part in parts.values()):
            if bool(truth.any()):
                wrong.append(f"{name} is missing")
            continue
        try:
            joined = join(parts, layout_of(example, name))
            assert joined.shape == truth.shape and joined.dtype == truth.dtype
            torch.testing.assert_close(joined, truth, rtol=0.0, atol=TOLERANCE * _scale(truth), equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def _scale(truth: torch.Tensor) -> float:
    has_size = truth.numel() > 0 and (truth.is_floating_point() or truth.is_complex())
    return max(1.0, float(truth.abs().max())) if has_size else 1.0


def is_stable(example: Example) -> bool:
    """Whether tiny errors stay tiny: the order of a sum may not decide which of two equal numbers is the larger."""
    expected = run_whole(example)
    for _ in range(3):
        found = run_whole(example, NOISE)
        if found.keys() != expected.keys() or any(_is_far(found[name], x) for name, x in expected.items()):
            return False
    return True


def _is_far(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point():
        return not torch.equal(found, expected)
    return not torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
