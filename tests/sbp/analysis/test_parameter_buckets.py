"""Parameter buckets: which parameters may share a collective, and where they do."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import price
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.assignment import Assignment, InBucket, buckets, conversions
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I
from tests.sbp.block import Block

LAYERS = 5
MESH = parse_mesh("8")


def traced(size: int = 16) -> Graph:
    with torch.device("meta"):
        layers = [nn.Linear(size, size), *(Block(size) for _ in range(LAYERS)), nn.Linear(size, 8)]
    return trace(skeleton(nn.Sequential(*layers)), (torch.zeros(8, size),), {})


def zero3(graph: Graph, cluster_name: str) -> Assignment:
    """The hand plan as the table prices it, on 8 devices."""
    folded, cluster = fold(graph), load_cluster(cluster_name)
    candidates = annotate(graph, MESH, folded)
    by_hand = hand_plan(parse_hand_plan("zero3", MESH), graph, folded, candidates, MESH)
    priced = price(graph, folded, candidates, MESH, cluster)
    return decode(priced, graph, folded, encode(priced, graph, folded, by_hand))


def test_a_bucket_has_the_parameters_of_a_block():
    graph = traced()
    places = parameter_buckets(graph, fold(graph), math.inf)
    blocks: dict[str, list[str]] = {}
    for item in graph.of_kind("parameter"):
        blocks.setdefault(item.fqn.split(".")[0], []).append(item.value.name)
    for names in blocks.values():
        total = sum(item.value.num_bytes for item in graph.of_kind("parameter") if item.value.name in names)
        assert {places[name].num_bytes for name in names} == {total}
        assert sorted(places[name].place for name in names) == list(range(len(names)))


def test_a_bucket_of_several_has_no_more_bytes_than_it_may():
    graph = traced()
    sizes = {item.value.name: item.value.num_bytes for item in graph.of_kind("parameter")}
    most = 16 * 32 * 4 + 200  # a product of a block and its bias
    places = parameter_buckets(graph, fold(graph), most)
    assert all(place.num_bytes <= max(most, sizes[name]) for name, place in places.items())
    assert any(place.place for place in places.values()) and sizes.keys() == places.keys()
    filled = parameter_buckets(graph, fold(graph), most, least=most / 2)
    assert len(set(filled.values())) < len(set(places.values())) or len(filled) == len(places)
    assert all(place.num_bytes >= min(most / 2, sizes[name]) for name, place in filled.items())
    alone = parameter_buckets(graph, fold(graph), min(sizes.values()))
    assert alone == {name: InBucket(size, 0) for name, size in sizes.items()}


def test_parameters_of_another_kind_are_in_another_bucket():
    model = nn.Sequential(*(Block(16) for _ in range(LAYERS)))
    for block in model:
        block.up.weight.requires_grad_(False)
        block.up.bias.requires_grad_(False)
    graph = trace(skeleton(model), (torch.zeros(8, 16),), {})
    places = parameter_buckets(graph, fold(graph), math.inf)
    values = {item.value.name: item.value for item in graph.of_kind("parameter")}
    of_kind = {kind: sum(v.num_bytes for v in values.values() if v.needs_grad == kind) for kind in (True, False)}
    assert {(values[name].needs_grad, place.num_bytes * LAYERS) for name, place in places.items()} == set(
        of_kind.items()
    )


@pytest.mark.parametrize("cluster", ["h100", "v100-25g"])
def test_a_block_is_one_collective_each_way(cluster: str) -> None:
    """The bytes are those of gathering each by itself; a latency is paid once for a bucket."""
    graph = traced()
    together = zero3(graph, cluster)
    alone = replace(together, parameter_buckets={})
    costs = [evaluate(graph, each, MESH, load_cluster(cluster)) for each in (together, alone)]
    assert costs[0].step_s < costs[1].step_s
    kinds = [Counter({(c.collective.kind, c.collective.phase): 0 for c in cost.collectives}) for cost in costs]
    for kind, cost in zip(kinds, costs):
        for c in cost.collectives:
            kind[c.collective.kind, c.collective.phase] += c.collective.num_bytes
    assert kinds[0] == kinds[1]
    gathers = [c for c in costs[0].collectives if (c.collective.kind, c.collective.phase) == ("all_gather", "forward")]
    parameters = {item.value.name: item.fqn.split(".")[0] for item in graph.of_kind("parameter")}
    split = [name for name in parameters if together.layouts[name] != (I,)]
    groups = {(parameters[name], name in together.regathered) for name in split}
    assert len(gathers) == len(groups) >= 2 * LAYERS


def test_large_parameters_are_gathered_by_themselves():
    """Copying them costs more than the latencies that are saved."""
    graph = traced(8192)
    of_weights = {name for name in zero3(graph, "h100").parameter_buckets if name.endswith("weight")}
    assert not of_weights


def test_a_copy_of_a_bucket_ends_where_the_next_begins():
    graph = traced()
    assignment = zero3(graph, "h100")
    for bucket in buckets(conversions(graph, assignment)):
        fqns = {item.fqn.split(".")[0] for item in graph.inputs if item.value.name in {c.value.name for c in bucket}}
        assert len(fqns) <= 1 or bucket[0].in_bucket is None
