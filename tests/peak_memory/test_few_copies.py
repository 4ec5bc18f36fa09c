"""What is run with few copies of a block against what is run with all, and by hand on made-up changes."""

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.split_stages import cut_points
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.peak_memory import few_copies, predict
from autopar.peak_memory.few_copies import extended, extended_in_turn
from autopar.peak_memory.predict import predict_peak, predict_peaks, rank_peaks
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import plan_of
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.assignment import Assignment, conversions, only_gathers
from autopar.sbp.candidates import annotate
from autopar.schedule.orders import Schedule, num_in_flight, num_waiting
from tests.planner.cases import CPU, MESH
from tests.zoo import HEADS, HIDDEN, SEQUENCE, VOCABULARY

SUBMESH = Mesh((2,), ("dp",))


@functools.cache
def deep(name: str, num_layers: int = 12) -> Graph:
    if name == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=num_layers, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCABULARY, use_cache=False)
        ).train()
    elif name == "llama":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": num_layers}
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=HEADS, use_cache=False, **sizes)
        )
    else:
        sizes = {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN}
        sizes |= {"num_layers": num_layers, "num_decoder_layers": num_layers + 3}
        config = T5Config(
            vocab_size=VOCABULARY, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0, use_cache=False, **sizes
        )
        model = T5ForConditionalGeneration(config)
    tokens = torch.zeros(8, SEQUENCE, dtype=torch.long)
    return trace(skeleton(model), (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False})


def by_hand(graph: Graph, kind: str, mesh: Mesh = MESH) -> Assignment:
    folded = fold(graph)
    kind, _, prefetched = kind.partition(" ")
    assignment = hand_plan(parse_hand_plan(kind, mesh), graph, folded, annotate(graph, mesh, folded), mesh)
    if not prefetched:
        return assignment
    return with_prefetch(graph, assignment)


def with_prefetch(graph: Graph, assignment: Assignment) -> Assignment:
    """The assignment with what it gathers in prefetched buckets, of a block each."""
    first = {name: of_value[0] for name, of_value in conversions(graph, assignment).items()}
    places = parameter_buckets(graph, fold(graph), 1e9, is_prefetched=True)
    gathered = {name: place for name, place in places.items() if only_gathers(first[name].src, first[name].dst)}
    assert gathered
    return replace(assignment, parameter_buckets=gathered)


def some_recomputed(graph: Graph, assignment: Assignment, num: int) -> Assignment:
    return replace(assignment, recomputed=recomputable(fold(graph), graph)[:num])


@pytest.mark.parametrize(
    ("name", "kind", "device_type", "num_recomputed", "num_microbatches"),
    [
        ("gpt2", "zero3", "cuda", 0, 1),
        ("gpt2", "zero3", "cpu", 12, 1),
        ("gpt2", "ddp", "cuda", 0, 2),
        ("gpt2", "zero3 prefetched", "cuda", 0, 1),
        ("llama", "zero3 prefetched", "cpu", 0, 1),
        ("llama", "megatron:sp,zero2", "cuda", 12, 1),
        ("llama", "megatron:sp,zero2", "cpu", 0, 2),
        ("t5", "zero3", "cuda", 6, 1),  # of two lengths, and the longer in two parts
        ("t5", "ddp", "cuda", 0, 1),
        ("gpt2", "zero3", "cuda", 10, 2),  # of two lengths, whose changes are alike where parameters are gathered
    ],
)
def test_few_copies_take_what_all_take(
    name: str, kind: str, device_type: str, num_recomputed: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
):
    graph, training = deep(name, max(12, 2 * num_recomputed)), Training("adamw", num_microbatches)
    assignment = some_recomputed(graph, by_hand(graph, kind), num_recomputed)
    found = few_copies._few_of(graph, assignment, MESH)
    sizes = []

    def counted(graph: Graph, *args: Any, **options: Any) -> Program:
        sizes.append(len(graph.ops))
        return lower(graph, *args, **options)

    monkeypatch.setattr(predict, "lower", counted)
    few, whole = (
        predict_peak(graph, MESH, assignment, training=training, on=device_type, is_whole=is_whole)
        for is_whole in (False, True)
    )
    short = [len(found.part(*longer)[0].ops) for longer in ((), range(len(found.times)))]
    in_turn = [len(found.part(number)[0].ops) for number in range(len(found.times))]
    assert sizes[:-1] in (short, short + in_turn) and sizes[-1] == len(graph.ops), "the shorter ones were enough"
    assert few.stored_bytes == whole.stored_bytes and (found.bucket_bytes > 0) == (kind == "ddp")
    for (phase, size), (_, expected) in zip(few.phases, whole.phases, strict=True):
        assert expected <= size <= expected + found.bucket_bytes, phase


def staged(graph: Graph, schedule: Schedule, kind: str) -> StagedPlan:
    """Stages of as many blocks each, by hand."""
    points, num = cut_points(fold(graph), graph), schedule.num_stages
    starts = tuple(points[len(points) * stage // num] for stage in range(1, num))
    stages = []
    for number, stage in enumerate(stage_graphs(graph, starts, schedule.num_microbatches)[1]):
        counts = num_in_flight(schedule, number), num_waiting(schedule, number)
        assignment = by_hand(stage.graph, kind, SUBMESH)
        training = Training("adamw", schedule.num_microbatches, *counts)
        stages.append(plan_of(stage.graph, assignment, SUBMESH, CPU, training=training))
    mesh, training = Mesh((schedule.num_ranks, 2), ("pp", "dp")), Training("adamw", schedule.num_microbatches)
    return StagedPlan(mesh, CPU, training, math.inf, graph, schedule, starts, tuple(stages))


@pytest.mark.parametrize(("name", "num_layers"), [("1f1b", 10), ("zero-bubble", 10), ("zero-bubble", 2)])
def test_deep_stages_take_what_all_their_copies_take(name: str, num_layers: int):
    # behind the second rank more than one microbatch waits for gradients of weights
    num_ranks = 2 if num_layers > 2 else 4
    plan = staged(deep("gpt2", num_ranks * num_layers), Schedule(name, num_ranks, num_ranks, 4), "zero3")
    plan = replace(plan, cluster=replace(plan.cluster, device_type="cuda"))
    for found, whole in zip(predict_peaks(plan), predict_peaks(plan, is_whole=True), strict=True):
        assert found.stored_bytes == whole.stored_bytes and found.phases == whole.phases


def test_one_stage_that_runs_the_whole_batch_is_predicted_as_the_plan_without_stages_that_it_becomes():
    """Run as stages are, all gradients of gathered parameters would wait for the end of the step."""
    plan = staged(deep("gpt2"), Schedule("accumulate", 1, 1, 1), "zero2")
    (stage,) = plan.stages
    (found,) = rank_peaks(plan)
    assert (
        found
        == predict_peak(stage.graph, stage.mesh, stage.assignment).total_bytes
        < predict_peaks(plan)[0].total_bytes
    )


def test_what_is_planned_otherwise_is_not_left_out():
    graph = deep("gpt2")
    regions = recomputable(fold(graph), graph)
    every_other = replace(by_hand(graph, "zero3"), recomputed=regions[::2])
    assert few_copies._few_of(graph, every_other, MESH) is None
    again = replace(by_hand(graph, "zero3"), regathered=frozenset(sorted(by_hand(graph, "zero3").regathered)[::2]))
    found, whole = (predict_peak(graph, MESH, again, is_whole=is_whole) for is_whole in (False, True))
    assert found == whole


def numbers(*found: int) -> np.ndarray:
    return np.array(found)


def test_two_blocks_are_told_apart_by_their_order():
    few = numbers(7, 1, -1, 1, -1, 5, 2, 3, -4, 2, 3, -4, 9)
    more = numbers(7, 1, -1, 1, -1, 1, -1, 5, 2, 3, -4, 2, 3, -4, 2, 3, -4, 9)
    found, start = extended(few, more, (2, 3))
    assert found.tolist() == [7, *[1, -1] * 4, 5, *[2, 3, -4] * 5, 9] and start == 1


def test_what_is_not_repeated_is_not_extended():
    few = numbers(1, 2, 3, 4)
    assert extended(few, numbers(1, 2, 9, 3, 4), (5,)) is None  # new
    assert extended(few, numbers(1, 2, 5, 4), (5,)) is None  # another number
    assert extended(numbers(1, 2, 1, 2), numbers(1, 2, 1, 2, 1, 2), (2, 3)) is None  # whose?
    assert extended(numbers(1, 2, 1, 2), numbers(1, 2, 1, 2, 1, 2), (3, 3))[0].tolist() == [1, 2] * 5
    assert extended(few, few, (2, 3))[0].tolist() == few.tolist()


def test_blocks_that_change_the_same_are_told_apart_in_turn():
    few, more = numbers(7, 1, -1, 1, -1, 1, -1, 9), numbers(7, 1, -1, 1, -1, 1, -1, 1, -1, 9)
    assert extended(few, numbers(7, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 9), (2, 5)) is None
    found, start = extended_in_turn(few, (more, more), (2, 5))
    assert found.tolist() == [7, *[1, -1] * 10, 9] and start == 1
    assert extended_in_turn(few, (few, more), (2, 5))[0].tolist() == [7, *[1, -1] * 8, 9]
    assert extended_in_turn(few, (more, numbers(7, 1, -1, 1, 3, 1, -1, 9)), (2, 5)) is None
