"""What an assignment's own operations do to each of its fields: a field that one of them forgets fails here."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.state_offload import hostable
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.split_stages import cut, cut_points
from autopar.ir.trace import trace
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.analysis.sample_blocks import shorten
from autopar.sbp.assignment import Assignment, conversions, graph_names, only_gathers
from autopar.sbp.candidates import annotate
from tests.planner.cases import CPU, MESH
from tests.sbp.block import Block

FIELDS = [field.name for field in fields(Assignment)]
LAYERS = 6


@functools.cache
def traced() -> Graph:
    model = nn.Sequential(*(Block(8) for _ in range(LAYERS)), nn.Linear(8, 8))
    return trace(skeleton(model), (torch.zeros(4, 8),), {})


@functools.cache
def folded() -> Folded:
    return fold(traced())


@functools.cache
def full() -> Assignment:
    """Something in every field, the same for all copies of the block. A new field gets its value here."""
    graph = traced()
    by_hand = hand_plan(parse_hand_plan("zero3", MESH), graph, folded(), annotate(graph, MESH, folded()), MESH)
    blocks = recomputable(folded(), graph)
    state = frozenset(item.value.name for item in hostable(graph))
    firsts = {name: of_value[0] for name, of_value in conversions(graph, by_hand).items()}
    gathered = {name for name, first in firsts.items() if only_gathers(first.src, first.dst)}
    places = {name: place for name, place in parameter_buckets(graph, folded(), 1e9).items() if name in gathered}
    return replace(by_hand, recomputed=blocks, offloaded=blocks, state_on_host=state, parameter_buckets=places)


def of(name: str, assignment: Assignment) -> Any:
    return getattr(assignment, name)


def names_in(value: Any) -> Iterator[str]:
    """The names that a field's value has, in whatever form."""
    for part in value:
        yield from [part] if isinstance(part, str) else names_in(part)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_tested(name: str) -> None:
    assert set(names_in(of(name, full())))


@pytest.mark.parametrize("name", FIELDS)
def test_renaming_renames_each(name: str) -> None:
    names = {old: f"{old}!" for old in graph_names(traced())}
    renamed = full().renamed(names)
    assert set(names_in(of(name, renamed))) == {f"{old}!" for old in names_in(of(name, full()))}
    assert of(name, renamed.renamed({new: old for old, new in names.items()})) == of(name, full())


@pytest.mark.parametrize("name", FIELDS)
def test_stages_have_the_parts_that_are_about_them(name: str) -> None:
    graph, whole = traced(), full()
    assert of(name, whole.restricted(graph)) == of(name, whole)
    stages = [stage.graph for stage in cut(graph, [cut_points(folded(), graph)[2]])]
    parts = [of(name, whole.restricted(stage)) for stage in stages]
    known = [set(graph_names(stage)) for stage in stages]
    for part, names in zip(parts, known, strict=True):
        assert set(names_in(part)) <= names
        if isinstance(part, Mapping):
            assert all(choice == of(name, whole)[key] for key, choice in part.items())
    assert set().union(*map(names_in, parts)) == set(names_in(of(name, whole)))


@pytest.mark.parametrize("name", FIELDS)
def test_copies_that_are_left_out_come_back(name: str) -> None:
    short = shorten(traced(), folded())
    assert len(short.graph.ops) < len(traced().ops)
    part = full().restricted(short.graph)
    if name != "outputs":
        assert set(names_in(of(name, part))) < set(names_in(of(name, full())))
    assert of(name, short.expand(part)) == of(name, full())


@pytest.mark.parametrize("name", FIELDS)
def test_merging_takes_each_name_from_one_side(name: str) -> None:
    whole, nothing = full(), Assignment({}, {}, {}, {})
    names = sorted(set(names_in(of(name, whole))))
    assert of(name, nothing.merged(whole, names)) == of(name, whole)
    assert of(name, whole.merged(nothing, names)) == of(name, nothing)
    assert of(name, whole.merged(nothing, ())) == of(name, whole)
    half = names[: len(names) // 2]
    assert set(names_in(of(name, nothing.merged(whole, half)))) == set(half)
    assert set(names_in(of(name, whole.merged(nothing, half)))) == set(names) - set(half)


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_tells_choices_apart_and_not_names(name: str) -> None:
    whole, old = full(), list(dict.fromkeys(graph_names(traced())))
    numbers = {key: number for number, key in enumerate(old)}
    renamed = whole.renamed({key: f"{key}!" for key in old})
    assert renamed.key({f"{key}!": number for key, number in numbers.items()}) == whole.key(numbers)
    nothing = Assignment({}, {}, {}, {})
    assert whole.merged(nothing, [next(iter(names_in(of(name, whole))))]).key(numbers) != whole.key(numbers)
    hash(whole.key(numbers))


def _by_axis(choice: Any) -> tuple[Any, ...]:
    """The parts of a choice, one for each axis; the whole of one that has nothing to do with axes."""
    choice = getattr(choice, "signatures", choice)
    return choice if isinstance(choice, tuple) else (choice,)


@pytest.mark.parametrize("name", FIELDS)
def test_axes_are_those_that_are_asked_for(name: str) -> None:
    turned = of(name, full().on_axes((1, 0)))
    if isinstance(turned, Mapping):
        assert {key: _by_axis(choice) for key, choice in turned.items()} == {
            key: _by_axis(choice)[::-1] for key, choice in of(name, full()).items()
        }
    else:
        assert turned == of(name, full())


@pytest.mark.parametrize("name", FIELDS)
def test_copies_planned_otherwise_are_told_apart(name: str) -> None:
    if name == "outputs":  # only the last copy's value leaves the graph
        return
    graph = traced()
    third = {name for stage in cut(graph, cut_points(folded(), graph)[2:4])[1:2] for name in graph_names(stage.graph)}
    third -= {value.name for stage in cut(graph, cut_points(folded(), graph)[2:4])[:1] for value in stage.graph.outputs}
    other = replace(full(), **{name: of(name, full().merged(Assignment({}, {}, {}, {}), third))})
    assert as_planned(folded(), graph, other).repeats != as_planned(folded(), graph, full()).repeats


@pytest.mark.parametrize("name", FIELDS)
def test_a_plan_file_has_each(name: str) -> None:
    plan = plan_of(traced(), full(), MESH, CPU)
    assert of(name, Plan.loads(plan.dumps(), traced(), MESH).assignment) == of(name, full())
