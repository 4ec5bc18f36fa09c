"""Seconds that chains of ops which only move bytes take less as one kernel each, as compilers make them."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from autopar.costmodel.roofline import local_shapes, shapes_time
from autopar.ir.graph import Graph, Op, resolve
from autopar.ir.op_facts import family, is_view
from autopar.plans.plan import Plan

# Reductions of rows, and copies, which a kernel of elementwise ops takes in.
_ROWWISE = frozenset(f"aten.{name}" for name in ("mean", "sum", "to", "cat"))


def fused_s(stage: Plan, again: Collection[str]) -> float:
    """Seconds of a step that `stage` takes less if each chain reads once what it takes from other ops, and writes once
    what they take of it; `again`: names of the ops that run again.

    Its backward reads that again, with the gradients of its results, and writes the gradients of what it took.
    """
    less_s = 0.0
    base, chains = _chains(stage.graph)
    users, sizes = _users(stage.graph, base), _local_bytes(stage, base)
    for chain in chains:
        names, made = {op.name for op in chain}, {value.name for op in chain for value in op.outputs}
        given = sum(sizes[name] for name in made if users[name] - names)
        taken = sum(sizes[name] for name in {base[value.name] for op in chain for value in op.inputs} - made)
        is_tracked = any(value.needs_grad for op in chain if not op.is_no_grad for value in op.outputs)
        num_forwards = 1 + any(name in again for name in names)
        moved = num_forwards * (taken + given) + is_tracked * (given + 2 * taken)
        apart_s = 0.0
        for op in chain:
            shapes = local_shapes(op, stage.assignment.strategies[op.name], stage.mesh.shape)
            forward_s, backward_s = shapes_time(op, *shapes, stage.cluster)
            apart_s += (1 + (op.name in again)) * forward_s + backward_s
        less_s += max(0.0, apart_s - moved / stage.cluster.memory_bandwidth_bytes_per_s)
    return stage.training.num_microbatches * less_s


def _chains(graph: Graph) -> tuple[Mapping[str, str], list[list[Op]]]:
    """Name of each value -> that of the one that it is a view of; and the ops that follow one another, also through
    views, with no other op on a way between two of them: those that as many other ops come before at most.
    """
    base: dict[str, str] = {item.value.name: item.value.name for item in graph.inputs}
    depth, chain_of = dict.fromkeys(base, 0), dict[str, list[Op]]()  # by name of a base
    for op in graph.ops:
        sources = [base[value.name] for value in op.inputs]
        if is_view(op.target) and not _is_fusible(op) and sources:
            base |= {value.name: sources[0] for value in op.outputs}
            continue
        before = max((depth[name] for name in sources), default=0)
        chain: list[Op] = []
        if _is_fusible(op):
            chain.append(op)
            for earlier in {
                id(chain_of[n]): chain_of[n] for n in sources if n in chain_of and depth[n] == before
            }.values():
                chain.extend(earlier)
                chain_of.update((value.name, chain) for each in earlier for value in each.outputs)
        for value in op.outputs:
            base[value.name], depth[value.name] = value.name, before + (not chain)
            if chain:
                chain_of[value.name] = chain
    return base, list({id(chain): chain for chain in chain_of.values()}.values())


def _is_fusible(op: Op) -> bool:
    return family(op.target) in _ROWWISE or torch.Tag.pointwise in getattr(resolve(op.target), "tags", ())


def _users(graph: Graph, base: Mapping[str, str]) -> Mapping[str, set[str]]:
    """Name of a base -> the users of it and of its views, but views."""
    views = {op.name for op in graph.ops if op.outputs and all(base[v.name] != v.name for v in op.outputs)}
    users = defaultdict[str, set[str]](set)
    for name, uses in graph.uses.items():
        users[base[name]] |= {use.user for use in uses} - views
    return users


def _local_bytes(stage: Plan, base: Mapping[str, str]) -> Mapping[str, float]:
    """Name of a base -> its bytes on a device, as it is made; of an input, as it is used."""
    sizes: dict[str, float] = {}
    for op in stage.graph.ops:
        inputs, outputs = local_shapes(op, stage.assignment.strategies[op.name], stage.mesh.shape)
        for value, shape in (*zip(op.outputs, outputs), *zip(op.inputs, inputs)):
            if base[value.name] == value.name:
                sizes.setdefault(value.name, math.prod(shape) * value.dtype.itemsize)
    for op in stage.graph.ops:  # inputs of which views alone are used
        for value in op.inputs:
            sizes.setdefault(base[value.name], 0.0)
    return sizes
