"""The table of a deep model is made from a few copies of its blocks: it must be the one of all copies."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing import price as pricing
from autopar.costmodel.state_offload import hostable
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.folding.segments import segmented
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.planner.pipeline.wanted_stages import segments
from autopar.sbp.analysis.sampled_graph import Sampled, sampled
from autopar.sbp.assignment import NO_CHOICES
from autopar.sbp.candidates import annotate

IN_FLIGHT = replace(WHOLE_BATCH, num_in_flight=3, num_microbatches=4)
WAITING = replace(WHOLE_BATCH, num_waiting=2, num_microbatches=4)


@functools.cache
def deep(name: str) -> Graph:
    example = build_model(name, layers=12, batch=8)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.mark.parametrize(
    ("kind", "num_saved", "training", "is_on_host"),
    [
        ("recomputed", 0, WHOLE_BATCH, False),
        ("recomputed", 6, IN_FLIGHT, False),
        ("recomputed", 7, WAITING, False),
        ("recomputed", 12, WHOLE_BATCH, True),
        ("offloaded", 6, WHOLE_BATCH, False),
        ("offloaded", 12, WHOLE_BATCH, True),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "t5-large", "llama3-8b"])
def test_a_few_copies_give_the_table_of_all(
    name: str, kind: str, num_saved: int, training: Training, is_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, mesh, cluster = deep(name), parse_mesh("2x2"), PRESETS["h100"]
    folded = fold(graph)
    regions = recomputable(folded, graph)[:num_saved]
    folded = segmented(folded, graph, segments(folded, num_saved))
    on_host = frozenset(item.value.name for item in hostable(graph)) if is_on_host else frozenset()
    given = replace(NO_CHOICES, **{kind: regions}, state_on_host=on_host)
    everything = annotate(graph, mesh, folded)
    step = pricing.PricedStep(training, given)
    price = functools.partial(pricing.price, graph, folded, everything, mesh, cluster, step)
    assert len(sampled(graph, folded, (regions,), on_host).graph.ops) < len(graph.ops)
    few = price()
    monkeypatch.setattr(pricing, "sampled", lambda graph, *_: Sampled(graph))
    whole = price()
    assert few.entities == whole.entities
    edges = {(edge.a, edge.b): edge for edge in whole.table.edges}
    assert len(edges) == len(few.table.edges)
    for one, other in [
        *zip(few.table.nodes, whole.table.nodes),
        *((edge, edges[edge.a, edge.b]) for edge in few.table.edges),
    ]:
        np.testing.assert_allclose(one.cost_s, other.cost_s, rtol=1e-12, atol=1e-18)
        np.testing.assert_allclose(one.memory_bytes, other.memory_bytes, rtol=1e-12, atol=1e-3)


def test_copies_that_are_not_counted_alike_all_stay() -> None:
    graph = deep("gpt2")
    folded = fold(graph)
    regions = recomputable(folded, graph)
    assert len(sampled(graph, folded).graph.ops) < len(graph.ops)
    assert sampled(graph, folded, (regions[:6],)).graph is graph  # of one repeat some run again and some do not
    some = frozenset(item.value.name for item in hostable(graph)[::7])
    assert sampled(graph, folded, (), some).graph is graph


def test_every_op_and_parameter_is_counted_once() -> None:
    graph = deep("t5-large")
    few = sampled(graph, fold(graph))
    assert sum(few.num(op.name) for op in few.graph.ops) == len(graph.ops)
    assert sum(few.num(item.value.name) for item in few.graph.inputs) == len(graph.inputs)


@pytest.mark.parametrize("kind", ["recomputed", "offloaded"])
@pytest.mark.parametrize("training", [WHOLE_BATCH, WAITING])
@pytest.mark.parametrize("name", ["gpt2", "t5-large", "llama3-8b"])
def test_a_few_copies_give_the_costs_of_all(name: str, training: Training, kind: str) -> None:
    graph, mesh, cluster = deep(name), parse_mesh("2x2"), replace(PRESETS["h100"], host_bandwidth_bytes_per_s=2e10)
    folded, on_host = fold(graph), frozenset(item.value.name for item in hostable(graph))
    for number, (plan, assignment) in enumerate(hand_plans(graph, folded, annotate(graph, mesh, folded), mesh).items()):
        regions = recomputable(folded, graph)[: 3 * number]
        assignment = replace(assignment, **{kind: regions}, state_on_host=on_host if number % 2 else frozenset())
        few, whole = (
            evaluate(graph, assignment, mesh, cluster, training=training, is_whole=is_whole)
            for is_whole in (False, True)
        )
        assert few.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-12), plan
        assert few.communication == pytest.approx(whole.communication, rel=1e-9, abs=1e-15), plan
        assert (few.step_s, few.moved_bytes) == pytest.approx((whole.step_s, whole.moved_bytes), rel=1e-9), plan
        for phase in ("forward", "backward"):
            of_phase = [one for one in few.collectives if one.collective.phase == phase]
            listed_s = sum(few.num_issued(one) * one.time_s for one in of_phase)
            assert few.communication_s(phase) == pytest.approx(listed_s, rel=1e-9), plan
