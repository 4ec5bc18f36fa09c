"""The scores of predictions against figures by hand, the fit against known numbers, and published rows as plans."""

import math
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from autopar.costmodel.cluster.measured_terms import ProductShare
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.collective_time import spans
from autopar.costmodel.roofline import op_time
from bench.fidelity.h100_models import H100_MODELS
from bench.fidelity.h100_rows import h100_rows, nvidia_rows, torchtitan_rows
from bench.fidelity.peak_bytes import _more_buffers, peak_bytes
from bench.fidelity.published_models import A800_MODELS, v100_gpt
from bench.fidelity.published_rows import a800_rows, v100_rows
from bench.fidelity.scores import Pair, fitted, mean_error, rank_correlation, regrets, worst_error
from bench.fidelity.sources import SOURCES
from bench.fidelity.written_plans import HostUpdate, Library, WrittenPlan, on_cluster, staged, step_s
from bench.published import CLUSTER, measure

PAIRS = [Pair("a", 1.0, 1.1), Pair("a", 2.0, 1.0), Pair("b", 4.0, 4.0), Pair("b", 5.0, 3.0)]


def test_scores_by_hand():
    assert mean_error(PAIRS) == pytest.approx((0.1 + 0.5 + 0.0 + 0.4) / 4)
    assert worst_error(PAIRS) == 0.5
    assert regrets(PAIRS) == [1.0, 0.25]
    assert rank_correlation(PAIRS) == pytest.approx(1 - 6 * (1 + 1 + 1 + 1) / (4 * 15))
    assert rank_correlation([Pair("a", s, 7 * s) for s in (3.0, 1.0, 2.0)]) == pytest.approx(1)


def test_the_fit_finds_the_numbers_that_made_the_times():
    work, bytes_moved = [1.0, 2.0, 5.0, 3.0], [4.0, 1.0, 1.0, 6.0]

    def predict(numbers):
        return [w / numbers[0] + b / numbers[1] + 0.1 * w for w, b in zip(work, bytes_moved)]

    assert fitted(predict, predict((0.3, 1.7)), (1.0, 1.0)) == pytest.approx((0.3, 1.7), rel=1e-3)


def test_every_published_row_has_a_plan_and_none_is_named_twice():
    for source, rows_of, num in zip(SOURCES, (v100_rows, a800_rows, torchtitan_rows, nvidia_rows), (16, 166, 9, 18)):
        rows = list(rows_of())
        assert len(rows) == len({row.name for row in rows}) == num, source.title
        assert bool(source.start) <= sum(row.is_fitted for row in rows) < num
        for row in rows:
            written, cluster = row.written, row.cluster(source.start)
            assert cluster.num_devices >= written.data * written.tensor * written.stages * written.sequence
            assert row.measured_s > 0


def test_numbers_are_fitted_on_rows_of_one_node_only():
    for row in [*v100_rows(), *a800_rows()]:
        devices = row.written.data * row.written.tensor * row.written.stages
        assert not row.is_fitted or devices <= 8
        assert (
            not row.is_fitted
            or len(row.cluster((1.0, 1.0)).levels) == 1
            or row.cluster((1, 1)).levels[0].size >= devices
        )


@pytest.fixture(scope="module")
def small():
    return partial(v100_gpt, 8, 64, 4, 4)


def test_a_written_plan_has_its_stages_microbatches_and_recomputed_blocks(small):
    plan = staged(WrittenPlan(small, data=2, tensor=2, stages=2, num_microbatches=4, recomputed="all"))
    assert plan.schedule.num_microbatches == 4 and len(plan.stages) == 2
    assert [len(stage.assignment.recomputed) for stage in plan.stages] == [2, 2]
    assert plan.mesh.shape == (2, 2, 2)


def test_recomputation_costs_a_forward_of_the_blocks(small):
    cluster = PRESETS["v100"]
    none, every = (
        on_cluster(staged(WrittenPlan(small, recomputed=which)), cluster).stages[0] for which in ("none", "all")
    )
    names = {name for block in every.assignment.recomputed for name in block}
    assert len(every.assignment.recomputed) == 4
    again_s = sum(
        op_time(op, every.assignment.strategies[op.name], every.mesh.shape, cluster)[0]
        for op in every.graph.ops
        if op.name in names
    )
    assert every.costs.compute_backward_s - none.costs.compute_backward_s == pytest.approx(again_s)


def test_what_a_library_hides_is_no_more_than_computing_takes(small):
    written, cluster = WrittenPlan(partial(v100_gpt, 8, 512, 4, 4), data=8), PRESETS["v100"]
    plain, reduced, all_hidden = (
        step_s(written, cluster, Library(which)) for which in ("nothing", "reductions", "parameters")
    )
    costs = on_cluster(staged(written), cluster).stages[0].costs
    assert plain == pytest.approx(costs.step_s)
    assert all_hidden <= reduced <= plain
    assert reduced >= costs.compute_forward_s + costs.compute_backward_s + costs.optimizer_s
    assert not math.isclose(reduced, plain)


def test_copies_of_buckets_and_whole_sums_take_as_long_as_their_bytes(small):
    written, cluster = WrittenPlan(partial(v100_gpt, 8, 512, 4, 4), data=8, flavour="zero2"), PRESETS["v100"]
    plain, copied, whole = (
        step_s(written, cluster, library)
        for library in (Library(), Library(gradient_copies=6.0), Library(reduces_whole=True))
    )
    (stage,) = on_cluster(staged(written), cluster).stages
    reduced = [p for p in stage.costs.collectives if p.is_once and p.collective.kind == "reduce_scatter"]
    num_bytes = sum(p.collective.num_bytes for p in reduced)
    assert copied - plain == pytest.approx(6 * num_bytes / cluster.memory_bandwidth_bytes_per_s)
    assert whole - plain == pytest.approx(sum(p.time_s for p in reduced))


@pytest.mark.parametrize("stages", [1, 2])
def test_the_head_alone_is_not_cast_and_what_is_recomputed_is_cast_again(small, stages):
    slow = replace(PRESETS["v100"], flops_per_s={"float16": 1e9, "float32": 1e9})
    fast = replace(slow, product_shares=(ProductShare(2.0, op="aten.linear"),))
    more = []
    for which in ("none", "all"):
        written = WrittenPlan(small, stages=stages, recomputed=which)
        cast, plain = (step_s(written, fast, Library(cast_bytes=num_bytes)) for num_bytes in (1e-9, 0.0))
        more.append(cast - plain)
    # The head has 2 flops a multiplication in forward and twice that in backward; at half the rate, half of it is more.
    *_, last = staged(WrittenPlan(small, stages=stages)).stages
    *_, head = (op for op in last.graph.ops if op.target == "aten.linear.default")
    flops = 6 * math.prod(head.inputs[0].shape) * head.inputs[1].shape[0]
    rate = slow.flops_per_s["float16"]
    assert more == pytest.approx([flops / rate / 2] * 2, rel=0.05)
    gains = [
        step_s(written, fast, Library(cast_bytes=1e3)) - step_s(written, fast)
        for written in (WrittenPlan(small, stages=stages, recomputed=which) for which in ("none", "all"))
    ]
    assert gains[1] > gains[0]


def test_updates_on_the_host_share_its_memory_and_the_way_there():
    written, cluster = (
        WrittenPlan(partial(v100_gpt, 8, 64, 4, 4), data=4, flavour="zero2", optimizer="adam-master"),
        PRESETS["v100"],
    )
    (stage,) = on_cluster(staged(written), cluster).stages
    num = stage.costs.memory_bytes["optimizer"] / 12
    plain, alone, four = (step_s(written, cluster, Library(host_update=host)) for host in (None, *map(_host, (1, 4))))
    assert four - alone == pytest.approx(
        3 * 30 * num / 1e11, rel=1e-6
    )  # a float16 parameter and its state move 30 bytes
    moved = 30 * num * (1 / 1e10 + 1 / 1e11) + 8 * num / cluster.host_bandwidth_bytes_per_s
    assert alone - plain == pytest.approx(moved - stage.costs.optimizer_s, rel=1e-6)


def _host(ranks):
    return HostUpdate(ranks, rank_bytes_per_s=1e10, node_bytes_per_s=1e11)


def test_later_stages_wait_for_their_inputs(small):
    written, cluster = WrittenPlan(small, stages=4, num_microbatches=1), PRESETS["v100"]
    assert step_s(written, cluster, Library(batch_s=0.5)) == pytest.approx(step_s(written, cluster) + 1.5)


def test_uneven_nodes_share_the_cards_of_the_smallest():
    """A ring over 8 devices goes at the rate of the cards of one node, however the other nodes are filled."""
    rates = {}
    for row in a800_rows():
        if " ddp: dp=8" in row.name:
            cluster, nodes = row.cluster((1.0, 1.0)), row.name.rsplit(" ", 1)[1]
            ((*_, outer),) = spans(cluster.levels, (8,), (0,))
            rates[nodes] = outer.bandwidth_bytes_per_s * outer.num_inside
    assert rates.pop("8") == pytest.approx(8 * 20e9)
    two_cards = {nodes: rates.pop(nodes) for nodes in ("3+5", "4+4")}
    assert rates == pytest.approx(dict.fromkeys(rates, 24e9)), rates
    assert two_cards == pytest.approx(dict.fromkeys(two_cards, 48e9)), two_cards


def test_peak_memory_is_linear_in_layers_and_higher_without_recomputation(small):
    plain, every = (
        peak_bytes(WrittenPlan(small, recomputed=again), PRESETS["v100"], Library()) for again in ("none", "all")
    )
    assert every < plain
    build = partial(v100_gpt, 8, 64, heads=4)
    whole = [peak_bytes(WrittenPlan(partial(build, layers=n)), PRESETS["v100"], Library()) for n in (8, 12)]
    line = WrittenPlan(build, num_layers=12)
    assert peak_bytes(line, PRESETS["v100"], Library()) == pytest.approx(whole[1], rel=0.01)
    assert peak_bytes(replace(line, num_layers=8), PRESETS["v100"], Library()) == pytest.approx(whole[0])


def test_buffers_of_a_library_are_held_beside_those_in_flight(small):
    """Two a stage of the pipeline are eight, of which the first stage of 1f1b has four anyway."""
    plan = staged(WrittenPlan(small, stages=4, num_microbatches=8, recomputed="all"))
    saved = plan.stages[0].costs.memory_bytes["activations"] / 4
    more = [_more_buffers(plan, rank, Library(buffers_by_stages=2)) for rank in range(4)]
    assert more[0] == 4 * saved and more[1] > 0 and more[3] == 0
    assert _more_buffers(plan, 0, Library(buffers_by_stages=1)) == _more_buffers(plan, 0, Library()) == 0


def _a800_row(model, kind, *, pp=1, tp=1, dp=4, **columns):
    devices = str(pp * tp * dp)
    plan = {"pp": str(pp), "tp": str(tp), "dp": str(dp), "devices": devices, "devices_of_each_node": devices}
    return {"model": model, "kind": kind, **plan, "step_s": "1", **columns}


# `PARAMETER_SIZE` in artifact/71_performance_model/model of AlibabaPAI/reconfigurable-dl-scheduler; of RoBERTa-large by
# arXiv:1907.11692.
A800_PARAMETERS = {
    "gpt2": 1_557_686_400,
    "t5": 1_240_809_472,
    "bert": 336_297_858,
    "roberta": 355_000_000,
    "vit": 85_952_456,
    "llama7": 6_738_423_808,
    "llama30": 33_170_309_120,
}


def _a800_example(model, kind="ddp", **columns):
    (row,) = a800_rows([_a800_row(model, kind, **columns)])
    return row.written.build(layers=row.written.num_layers)


def test_models_of_the_a800_cluster_have_the_published_numbers_of_parameters():
    assert set(A800_MODELS) == set(A800_PARAMETERS)
    for name, published in A800_PARAMETERS.items():
        num = sum(p.numel() for p in _a800_example(name).model.parameters())
        assert num == pytest.approx(published, rel=0.02), name
        assert num == published or name not in ("bert", "vit")


@pytest.mark.parametrize("model", A800_PARAMETERS)
def test_every_model_of_the_a800_cluster_is_priced_for_every_kind(model):
    kinds = ("ddp", "zero", "ddp+checkpointing", "zero-offload")
    plans = [_a800_row(model, kind) for kind in kinds]
    plans += [_a800_row(model, "3d", tp=4, dp=1), _a800_row(model, "3d", pp=2, tp=2, dp=2)]
    *plain, again, offloaded, tensor, stages = (
        step_s(row.written, row.cluster((0.75, 0.5)), row.library) for row in a800_rows(plans)
    )
    assert 0 < max(plain) < again < offloaded < math.inf
    assert 0 < stages < tensor < math.inf  # twice the devices


def test_an_unknown_model_and_a_batch_that_ranks_cannot_share_are_refused_by_name():
    with pytest.raises(ValueError, match=f"expected one of {', '.join(A800_MODELS)}, found 'gpt3'"):
        list(a800_rows([_a800_row("gpt3", "ddp")]))
    with pytest.raises(ValueError, match="dp: expected a divisor of the global batch of llama30, 4, found 8"):
        list(a800_rows([_a800_row("llama30", "zero", dp=8)]))


def test_columns_name_the_batch_and_the_length_and_tensor_ranks_pad_the_vocabulary():
    assert _a800_example("bert").kwargs["input_ids"].shape == (32, 512)
    example = _a800_example("roberta", "3d", tp=4, global_batch="8", sequence="128")
    assert example.kwargs["input_ids"].shape == (8, 128)
    words = example.model.get_parameter("roberta.embeddings.word_embeddings.weight")
    assert words.shape == (50688, 1024)  # 99 times 128 x 4 words
    images = _a800_example("vit", global_batch="8", sequence="197").kwargs["pixel_values"]
    assert images.shape == (8, 3, 224, 224)


# Of the models' cards, in billions: all parameters.
H100_PARAMETERS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.4,
    "moonlight-16b-a3b": 16.0,
}


def _h100_row(model, **columns):
    row = {"source": "megatron", "model": model, "gpus": "64", "precision": "bf16", "global_batch": "128"}
    row |= {"microbatch": "1", "sequence": "4096", "fsdp": "0", "tp": "1", "pp": "1", "cp": "1", "vp": "1", "ep": "1"}
    return row | {"recompute": "none", "technique": "", "tokens_per_s_per_gpu": "1000", "memory_gib": ""} | columns


@pytest.mark.parametrize("model", H100_PARAMETERS)
def test_models_on_h100_have_the_published_numbers_of_parameters(model):
    """From two depths, with as many layers before the first experts."""
    first, few = H100_MODELS[model].layers, 4
    (row,) = h100_rows([_h100_row(model)])
    low, high = (sum(p.numel() for p in row.written.build(layers=n).model.parameters()) for n in (few, few + 1))
    assert (low + (first - few) * (high - low)) / 1e9 == pytest.approx(H100_PARAMETERS[model], rel=0.01)


def test_letters_of_a_published_plan_are_its_mesh_and_stages():
    row = _h100_row("gpt-oss-120b", tp="2", pp="4", vp="2", ep="4", fsdp="8", global_batch="64")
    (known,) = h100_rows([row])
    written = known.written
    assert (written.data, written.tensor, written.stages, written.chunks, written.experts) == (8, 2, 4, 2, 4)
    assert written.num_microbatches == 8 and written.flavour == "zero2" and written.is_sequence_parallel
    assert "fsdp=8,tp=2,pp=4,vp=2,ep=4" in known.name
    (more,) = h100_rows([row | {"ep": "16"}])
    assert (more.written.experts, more.written.tensor) == (8, 2)


def test_experts_lie_on_all_ranks_of_a_stage_where_a_row_does_not_say():
    (row,) = h100_rows([_h100_row("gpt-oss-120b", source="automodel", fsdp="64", ep="")])
    assert (row.written.experts, row.written.data) == (64, 64)


def test_a_library_sends_a_row_of_experts_once_to_each_place():
    """Against draws: 8 of 128 experts, 16 on each of 8 ranks; and 8 of 256 on at most 4 of 8 nodes."""
    draw = Random(0)
    drawn = [len({expert // 16 for expert in draw.choices(range(128), k=8)}) for _ in range(4000)]
    deep_ep = {"technique": "TE DeepEP forced balance", "ep": "8", "gpus": "8", "global_batch": "512"}
    (here,) = h100_rows([_h100_row("qwen3-30b-a3b", fsdp="8", **deep_ep)])
    assert here.cluster(()).kind_factors["all_to_all"] == pytest.approx(sum(drawn) / len(drawn) / 8, rel=0.01)
    automodel = {**deep_ep, "source": "automodel"}
    (in_turn,) = h100_rows([_h100_row("qwen3-30b-a3b", fsdp="8", **automodel)])
    assert in_turn.cluster(()).kind_factors["all_to_all"] == 1 / 8  # 16 experts on a rank, 8 in turn on one
    (between,) = h100_rows([_h100_row("moonlight-16b-a3b", fsdp="8", **automodel)])  # 8 on a rank, 6 in turn
    assert between.cluster(()).kind_factors["all_to_all"] == pytest.approx((1 + 2 + 2 + 1) / 4 / 6)
    columns = {"source": "megatron-bridge", "tp": "2", "pp": "8", "ep": "64", "gpus": "1024", "global_batch": "8192"}
    (far,) = h100_rows([_h100_row("deepseek-v3", **columns)])
    assert far.cluster(()).kind_factors["all_to_all"] == 4 / 8 / 2 and far.library.hides == "all"


def test_a_pipeline_that_is_emptied_in_each_local_batch_waits_as_often(small):
    """Each further time the slower of two stages waits for the other one, and for what they send."""
    cluster = PRESETS["v100"]
    written = WrittenPlan(small, stages=2, num_microbatches=8)
    plan = on_cluster(staged(written), cluster)
    once, often = (step_s(replace(written, flushes=flushes), cluster) for flushes in (1, 4))
    each = [times.forward_s + times.backward_s + times.weight_s for times in plan.times]
    sent_s = plan.times[0].send_s + plan.times[1].send_back_s
    assert once == plan.step_s
    assert 3 * min(each) <= (often - once) * 1.0001 and often - once <= 3 * (max(each) + sent_s) * 1.0001
    row = _h100_row("gpt-oss-120b", pp="4", ep="8", fsdp="16", global_batch="512", local_batch="8")
    (known,) = h100_rows([row])
    assert (known.written.num_microbatches, known.written.flushes) == (32, 4)
    with pytest.raises(ValueError, match="a local batch of 7 does not divide 512 on 16 data ranks"):
        list(h100_rows([row | {"local_batch": "7"}]))


@pytest.mark.parametrize(("pp", "num", "flavour"), [("8", 8, "zero2"), ("1", 1, "zero3")])
def test_torchtitan_has_as_many_microbatches_as_pipeline_ranks_where_none_are_published(pp, num, flavour):
    columns = {"source": "torchtitan-2024-12", "gpus": str(64 * int(pp)), "global_batch": "256", "microbatch": ""}
    (known,) = h100_rows([_h100_row("llama3-405b", tp="8", pp=pp, fsdp="8", **columns)])
    assert (known.written.num_microbatches, known.written.flavour) == (num, flavour)


def test_the_plan_found_is_not_slower_than_the_published_one_and_takes_no_more_memory():
    (row,) = h100_rows([_h100_row("llama3-8b", gpus="4", global_batch="8", fsdp="4", sequence="512")])
    found = measure("few layers", replace(row.written, num_layers=4))
    assert found["found"]["step_s"] <= found["published"]["step_s"] * (1 + 1e-9)
    assert found["found"]["gib"] <= max(found["published"]["gib"], 0.9 * CLUSTER.memory_bytes / 2**30)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"model": "gpt-9"}, "expected one of .*, found 'gpt-9'"),
        ({"fsdp": "4"}, "fsdp: expected 0 or the 64 data ranks, found 4"),
        ({"global_batch": "96"}, "64 GPUs and a batch of 96 are not divided"),
        ({"tp": "3"}, "are not divided by fsdp=0,tp=3"),
    ],
)
def test_a_row_that_is_no_plan_is_refused_by_name(columns, told):
    with pytest.raises(ValueError, match=told):
        list(h100_rows([_h100_row(**{"model": "qwen3-30b-a3b", **columns})]))


def test_sequences_and_experts_are_inner_axes_of_the_data_ranks(small):
    plan = staged(WrittenPlan(small, data=2, sequence=4, flavour="zero3"))
    assert plan.stages[0].mesh.shape == (2, 4) and plan.stages[0].mesh.axis_names == ("dp", "cp")
    kinds = {p.collective.kind for p in plan.stages[0].costs.collectives}
    assert {"all_gather", "reduce_scatter"} <= kinds
    with pytest.raises(ValueError, match="ep: expected a divisor of the 2 data ranks, found 4"):
        staged(WrittenPlan(small, data=2, experts=4))


def test_collectives_of_tensors_are_hidden_only_where_all_are(small):
    written, cluster = WrittenPlan(partial(v100_gpt, 8, 512, 4, 4), data=2, tensor=2), PRESETS["v100"]
    plain, parameters, everything = (step_s(written, cluster, Library(x)) for x in ("nothing", "parameters", "all"))
    assert everything < parameters < plain
