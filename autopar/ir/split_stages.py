"""The cut of a graph into consecutive stages of a pipeline.

A boundary tensor, made by one stage and read by a later one, crosses every cut between them: it is an output of each
stage before a cut and an input of the stage behind it, even of a stage that only passes it on. Arguments, buffers,
constants and parameters are on every stage that reads them (a tied parameter on several). Values that follow from
arguments, buffers and constants alone (masks, rotary angles, shifted labels) are small and need no gradient: each stage
that reads one computes it itself. So it does with what is looked up or spread out from a small parameter, whatever the
batch is (T5's position biases, of which each microbatch would send as much as of a layer's result): the parameter is
tied then.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from autopar.errors import UnsupportedOp
from autopar.ir.folding.fold import Folded
from autopar.ir.function_ops import is_function
from autopar.ir.graph import Graph, Input, Op, Value, resolve
from autopar.ir.interpret import constants_for
from autopar.ir.op_facts import facts_of, is_random


@dataclass(frozen=True)
class StageGraph:
    """One stage as a valid Graph; `receives` and `sends` name the boundary tensors of the cuts before and behind it.

    The next stage's `receives` equal `sends`. The `inputs` of `graph` begin with the received values (kind "argument",
    the value's name as FQN), followed by the inputs that the stage reads; `arguments` names the arguments among them,
    in that order. `outputs` are the sent values, for the last stage the model's outputs. Parameters and buffers that no
    op reads are on the first stage.
    """

    graph: Graph
    receives: tuple[str, ...]
    sends: tuple[str, ...]


def cut(graph: Graph, starts: Sequence[str]) -> tuple[StageGraph, ...]:
    """The len(starts) + 1 stages of `graph`; `starts` names the first op of each stage but the first, in graph order.

    ValueError for starts that are no ops or out of order. UnsupportedOp for a buffer that one stage writes and another
    reads.
    """
    bounds = _bounds(graph, starts)
    made = {
        v.name: index
        for index, (start, stop) in enumerate(pairwise(bounds))
        for op in graph.ops[start:stop]
        for v in op.outputs
    }
    remade = remade_values(graph)
    again = [at for at, op in enumerate(graph.ops) if remade.issuperset(value.name for value in op.outputs)]
    blocks = [_block(graph, made, remade, again, span, index) for index, span in enumerate(pairwise(bounds))]
    readers = _readers(graph, blocks, made)
    _check_buffers(graph, readers)
    boundaries = _boundaries(graph, made, readers, remade, len(blocks))
    return tuple(_stage(graph, index, blocks, made, readers, boundaries) for index in range(len(blocks)))


def cut_points(folded: Folded, graph: Graph, *, least: int = 1) -> tuple[str, ...]:
    """Names of the ops at which a stage may start, in graph order.

    These are the first op of each copy of each repeat, and the first op behind the last repeat. If they give fewer than
    `least` stages, also each op before which a single tensor crosses, if a product comes before the next such op; and
    where these leave more work together than a stage's share (between the halves of a U-Net), of the ops from one
    product to the next the one before which the fewest tensors cross.
    """
    position = graph.position
    points, end = set(), 0
    for repeat in folded.repeats:
        first, block = position[repeat.ops[0]], len(repeat.ops)
        end = first + block * repeat.count
        points.update(range(first, end + 1, block) if repeat is folded.repeats[-1] else range(first, end, block))
    numbers = crossing_numbers(graph)
    inside = {point for point in points if 0 < point < len(graph.ops) and numbers[point]}
    if len(inside) + 1 < least:
        inside.update(_with_wider(graph, list(_narrow_points(graph)), least))
    return tuple(graph.ops[point].name for point in sorted(inside))


def _narrow_points(graph: Graph) -> Iterator[int]:
    """Positions of ops before which one tensor crosses, and behind which a product comes before the next of these."""
    numbers = crossing_numbers(graph)
    narrow = [at for at in range(1, len(graph.ops)) if numbers[at] == 1]
    for start, end in pairwise([*narrow, len(graph.ops)]):
        if any(_may_multiply(op) for op in graph.ops[start:end]):
            yield start


_MOST_WIDER = 64  # points, for whose number squared stages are compared


def _with_wider(graph: Graph, narrow: Sequence[int], least: int) -> list[int]:
    """`narrow` positions, and wider ones between two of them that have more than a stage's share of the products."""
    work = [0.0, *accumulate(map(_flops, graph.ops))]
    numbers, wider = crossing_numbers(graph), list[int]()
    for start, end in pairwise(sorted({0, *narrow, len(graph.ops)})):
        if (work[end] - work[start]) * least > work[-1]:
            products = [at for at in range(start, end) if facts_of(graph.ops[at].target).product]
            wider += [min(range(one + 1, other + 1), key=numbers.__getitem__) for one, other in pairwise(products)]
    return [*narrow, *wider[:: 1 + len(wider) // _MOST_WIDER]]


def _may_multiply(op: Op) -> bool:
    """Whether it is a product, or a custom function, which may be one."""
    return facts_of(op.target).product is not None or is_function(op)


def _flops(op: Op) -> float:
    product = facts_of(op.target).product
    shapes = [tuple(value.shape for value in values) for values in (op.inputs, op.outputs)]
    return product.flops(op, shapes[0], shapes[1]) if product else 0.0


def crossing_bytes(graph: Graph) -> list[int]:
    """For each op the bytes of all boundary tensors that cross a cut before it."""
    return _crossing(graph, lambda value: value.num_bytes)


def crossing_numbers(graph: Graph, remade: frozenset[str] | None = None) -> list[int]:
    """For each op the number of boundary tensors that cross a cut before it; `remade`: the values that each stage
    computes itself, by default `remade_values`.
    """
    return _crossing(graph, lambda _: 1, remade)


def _crossing(graph: Graph, weigh: Callable[[Value], int], remade: frozenset[str] | None = None) -> list[int]:
    """For each op, and the end, the sum of the weights of the boundary tensors that cross a cut before it."""
    remade, last = remade_values(graph) if remade is None else remade, dict[str, int]()
    for at, op in enumerate(graph.ops):
        last.update((value.name, at) for value in op.inputs)
    last.update((value.name, len(graph.ops)) for value in graph.outputs if isinstance(value, Value))
    changes = [0] * (len(graph.ops) + 2)
    for at, op in enumerate(graph.ops):
        for value in op.outputs:
            if value.name not in remade and value.name in last:
                changes[at + 1] += weigh(value)
                changes[last[value.name] + 1] -= weigh(value)
    return list(accumulate(changes))[:-1]


def _bounds(graph: Graph, starts: Sequence[str]) -> tuple[int, ...]:
    """The positions of the stages' first ops, and the number of ops; ValueError if they are not increasing."""
    position = graph.position
    unknown = [name for name in starts if name not in position]
    if unknown:
        raise ValueError(f"stages start at ops of the graph, found {', '.join(unknown)}; cut_points lists good ones")
    bounds = (0, *(position[name] for name in starts), len(graph.ops))
    if any(left >= right for left, right in pairwise(bounds)):
        raise ValueError(
            f"stages start at ops in graph order, each with at least one op; found starts {', '.join(starts)} at"
            f" {list(bounds[1:-1])} of {len(graph.ops)} ops"
        )
    return bounds


def remade_values(graph: Graph) -> frozenset[str]:
    """Names of the values that each stage which reads one computes itself."""
    return graph.once(_remade_values)


def _remade_values(graph: Graph) -> frozenset[str]:
    """`made_of_arguments`, and the values that follow from parameters without a product or a random number, where the
    parameters are no larger (a penalty on all weights is); element by element also with the former ones, as with masks.
    """
    remade = set(made_of_arguments(graph))
    size = {item.value.name: item.value.num_bytes for item in graph.of_kind("parameter")}
    written = {fqn for fqn, _ in graph.mutations}
    fixed = {item.value.name for item in graph.inputs if item.kind != "argument" and item.fqn not in written}
    known = remade | {item.value.name for item in graph.of_kind("argument") if not item.value.needs_grad}
    behind = {name: frozenset((name,)) for name in size if name in fixed}  # value -> the parameters it is made of
    follows = known | fixed | behind.keys()
    makers, wanted = dict[str, Op](), list[str]()
    for op in graph.ops:
        read, made = {value.name for value in op.inputs}, [value.name for value in op.outputs]
        if not read <= follows or is_random(op) or is_function(op) or facts_of(op.target).product:
            continue
        if read <= fixed:
            fixed.update(made)
        elif read & size.keys() or (len(read) > 1 and torch.Tag.pointwise not in resolve(op.target).tags):
            continue
        makers |= dict.fromkeys(made, op)
        follows.update(made)
        behind |= dict.fromkeys(made, frozenset[str]().union(*(behind[name] for name in read if name in behind)))
        wanted += [v.name for v in op.outputs if v.num_bytes >= sum(size[name] for name in behind[v.name])]
    while wanted:
        if (name := wanted.pop()) in makers and name not in remade:
            remade.update(value.name for value in makers[name].outputs)
            wanted += [value.name for value in makers[name].inputs]
    return frozenset(remade)


def made_of_arguments(graph: Graph) -> frozenset[str]:
    """Names of values that follow from arguments, constants and
    unwritten buffers, without gradient or random numbers.
    """
    written = {fqn for fqn, _ in graph.mutations}
    known = {
        item.value.name
        for item in graph.inputs
        if item.kind != "parameter" and item.fqn not in written and not item.value.needs_grad
    }
    remade: set[str] = set()
    for op in graph.ops:
        if all(v.name in known for v in op.inputs) and not is_random(op) and not any(v.needs_grad for v in op.outputs):
            names = [value.name for value in op.outputs]
            remade.update(names)
            known.update(names)
    return frozenset(remade)


def _block(
    graph: Graph,
    made: Mapping[str, int],
    remade: frozenset[str],
    again: Sequence[int],
    span: tuple[int, int],
    index: int,
) -> tuple[Op, ...]:
    """The ops of stage `index`, in graph order: those at its positions `span`, and of those that are made `again`, all
    of whose outputs are `remade`, those that it needs.
    """
    is_last = span[1] == len(graph.ops)
    wanted = {value.name for value in graph.outputs if isinstance(value, Value)} if is_last else set()
    wanted |= {value.name for _, value in graph.mutations if made.get(value.name) == index}
    chosen = []
    for at in sorted({*range(*span), *again}, reverse=True):
        op = graph.ops[at]
        names = [value.name for value in op.outputs]
        is_again = remade.issuperset(names)
        if not wanted.isdisjoint(names) if is_again else made[names[0]] == index:
            chosen.append(op)
            wanted.update(value.name for value in op.inputs)
    return tuple(reversed(chosen))


def _readers(graph: Graph, blocks: Sequence[Sequence[Op]], made: Mapping[str, int]) -> dict[str, set[int]]:
    """Value name -> the stages that need it.

    The last stage needs the outputs. A written buffer is needed by the stage that makes its new value (the first, if
    that is an input). Parameters and buffers that no op reads belong to the first stage.
    """
    readers: dict[str, set[int]] = defaultdict(set)
    for index, ops in enumerate(blocks):
        for name in {value.name for op in ops for value in op.inputs}:
            readers[name].add(index)
    for value in graph.outputs:
        if isinstance(value, Value):
            readers[value.name].add(len(blocks) - 1)
    stored = {item.fqn: item.value.name for item in (*graph.of_kind("parameter"), *graph.of_kind("buffer"))}
    for fqn, value in graph.mutations:
        for name in (value.name, stored[fqn]):
            readers[name].add(made.get(value.name, 0))
    unread = (
        item.value.name
        for item in graph.inputs
        if item.kind in ("parameter", "buffer") and item.value.name not in readers
    )
    return readers | {name: {0} for name in unread}


def _boundaries(
    graph: Graph, made: Mapping[str, int], readers: Mapping[str, set[int]], remade: frozenset[str], num_stages: int
) -> list[tuple[Value, ...]]:
    """The boundary tensors that enter each stage, in graph order, and an empty last entry."""
    boundaries: list[list[Value]] = [[] for _ in range(num_stages + 1)]
    for value in (value for op in graph.ops for value in op.outputs if value.name not in remade):
        for stage in range(made[value.name] + 1, max(readers.get(value.name, {0})) + 1):
            boundaries[stage].append(value)
    return [tuple(values) for values in boundaries]


def _stage(
    graph: Graph,
    index: int,
    blocks: Sequence[tuple[Op, ...]],
    made: Mapping[str, int],
    readers: Mapping[str, set[int]],
    boundaries: Sequence[tuple[Value, ...]],
) -> StageGraph:
    is_last, receives, sends = index == len(blocks) - 1, boundaries[index], boundaries[index + 1]
    read = tuple(item for item in graph.inputs if index in readers.get(item.value.name, ()))
    inputs = tuple(Input("argument", value, value.name) for value in receives) + read
    constant_ops, constants = constants_for(graph, {item.value.name for item in read})
    stage = Graph(
        inputs=inputs,
        ops=blocks[index],
        outputs=graph.outputs if is_last else sends,
        mutations=tuple((fqn, value) for fqn, value in graph.mutations if made.get(value.name, 0) == index),
        constant_ops=constant_ops,
        constants=constants,
        arguments=tuple(item.value.name for item in inputs if item.kind == "argument"),
        argument_spec=None,
        output_spec=graph.output_spec if is_last else None,
    )
    return StageGraph(stage, tuple(value.name for value in receives), tuple(value.name for value in sends))


def _check_buffers(graph: Graph, readers: Mapping[str, set[int]]) -> None:
    """UnsupportedOp for a written buffer on several stages: the write would not reach the other stages' copies."""
    written = {fqn for fqn, _ in graph.mutations}
    for item in (*graph.of_kind("parameter"), *graph.of_kind("buffer")):
        stages = sorted(readers[item.value.name])
        if item.fqn in written and len(stages) > 1:
            raise UnsupportedOp(
                f"{item.kind} {item.fqn} is written by the forward and read on stages {stages}; expected one stage, as"
                " the other stages would not see the written value: start the stages elsewhere"
            )
