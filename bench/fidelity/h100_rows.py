"""The rows on H100: training throughput that makers of libraries published for their best plans by hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.measured_terms import ProductShare
from autopar.costmodel.cluster.presets import PRESETS
from bench.fidelity.h100_models import H100_MODELS, builder, config_of
from bench.fidelity.published_rows import NCCL, Published, read
from bench.fidelity.run_again import ATTENTION_ALONE, OTHER_PRODUCTS
from bench.fidelity.written_plans import LINEAR, Library, WrittenPlan

# Dynamic scaling reads an operand for its largest value, then reads it again and writes a byte (torchao.float8).
FP8_CAST_BYTES = 2 + 2 + 1
# Transformer Engine's, on Hopper, writes it transposed too, for the product that takes it by columns (its
# documentation, "Handling transposes").
TE_CAST_BYTES = 2 + 2 + 1 + 1
# More rows of the same sources, each with its address, and the local batch: the samples that a data rank takes through
# the pipeline before it is empty again.
_FILE, _MORE, _TORCHTITAN = "h100_published.csv", "h100_more.csv", "torchtitan"
_NODE = 8
_builder = cache(builder)  # the same function for the same sizes, so that a model is traced once


def torchtitan_rows() -> Iterator[Published]:
    """Llama 3 by torchtitan."""
    yield from h100_rows([row for row in read(_FILE) if row["source"].startswith(_TORCHTITAN)])


def nvidia_rows() -> Iterator[Published]:
    """Dense models and mixtures of experts by NeMo AutoModel and Megatron-Bridge."""
    yield from h100_rows([row for row in (*read(_FILE), *read(_MORE)) if not row["source"].startswith(_TORCHTITAN)])


def h100_rows(rows: Sequence[Mapping[str, str]]) -> Iterator[Published]:
    """Each row's plan by its letters: fsdp, tp, pp, cp, vp, ep. ValueError for one that is no such plan.

    Rows of torchtitan are of its cluster, at the fitted rates; others of the preset, on which nothing is fitted.
    """
    for row in rows:
        gpus, batch, sequence = int(row["gpus"]), int(row["global_batch"]), int(row["sequence"])
        is_fp8, is_torchtitan = row["precision"] == "fp8", row["source"].startswith(_TORCHTITAN)
        cluster = (
            partial(_torchtitan, is_compiled="compile" in row["technique"])
            if is_torchtitan
            else partial(_preset, rows_sent=_rows_sent(row), is_megatron=_is_megatron(row))
        )
        hides = "all" if _hides_activations(row) else "parameters"
        yield Published(
            f"{row['source']} {row['model']}, {gpus} GPUs, {_letters(row)}, sequence {sequence}, {row['precision']},"
            f" {row['technique']}",
            f"{row['source']} {row['model']} {gpus} {row['precision']} {sequence}",
            f"{row['precision']} {'experts' if _num_experts(row) > 1 else 'dense'}",
            batch * sequence / gpus / float(row["tokens_per_s_per_gpu"]),
            h100_plan(row),
            Library(
                hides,
                cast_bytes=(FP8_CAST_BYTES if is_torchtitan else TE_CAST_BYTES) * is_fp8,
                cast_ops=(LINEAR, *(GROUPED if _is_megatron(row) else ())),
                keeps_casts=not is_torchtitan,
                fuses=_fuses(row),
            ),
            partial(cluster, is_fp8=is_fp8),
            is_fitted=is_torchtitan and gpus == 8 and not is_fp8,
            memory_bytes=float(row["memory_gib"] or 0.0) * 2.0**30,
        )


def _hides_activations(row: Mapping[str, str]) -> bool:
    """Whether collectives on activations run beside computing: a ring sends beside the attention of the part that it
    has; "async-tp" has products beside their collectives, and so has Megatron-Bridge, whose recipes for H100 set
    `tp_comm_overlap` where there are tensor ranks (scripts/performance/configs/llama3), and of models with experts for
    DeepSeek-V3 and Qwen3-235B the overlap of their all-to-alls (`moe_a2a_overlap` in scripts/performance/configs).
    """
    is_dense = _num_experts(row) == 1
    is_megatron = _is_megatron(row) and (row["tp"] != "1" if is_dense else row["model"] in _HIDDEN_EXPERTS)
    return row["cp"] != "1" or "async-tp" in row["technique"] or is_megatron


_HIDDEN_EXPERTS = ("deepseek-v3", "qwen3-235b-a22b")


def _fuses(row: Mapping[str, str]) -> bool:
    """Whether norms, rotary terms and gates are one kernel each: torch.compile makes them so, and of dense models
    Megatron-Core has such kernels. Of models with experts they are left apart, in place of what libraries do besides:
    permutations, counts of rows, and waiting for the host.
    """
    return "compile" in row["technique"] or (_is_megatron(row) and _num_experts(row) == 1)


def _is_megatron(row: Mapping[str, str]) -> bool:
    return row["source"].startswith("megatron-bridge")


def _rows_sent(row: Mapping[str, str]) -> float:
    """The share of the rows of experts that the library sends of those that this runtime does.

    Megatron-Core's tensor ranks send a part of the sequence each (`expert_tensor_parallel_size=1` in Megatron-Bridge's
    recipes), where each sends all to the part of an expert here. DeepEP, which its recipe for DeepSeek-V3 on H100
    enables too, sends a row once to a rank of its node, and once to another node, which forwards it (README of DeepEP):
    of k experts drawn evenly on n of these n (1 - (1 - 1/n)^k), on a limited number of groups at most those, and of
    those that AutoModel's balanced router gives in turn their number of places.
    """
    if _num_experts(row) == 1:
        return 1.0
    share = 1 / int(row["tp"]) if _is_megatron(row) else 1.0
    if "DeepEP" not in row["technique"] and not (_is_megatron(row) and row["model"] == "deepseek-v3"):
        return share
    config, ranks = config_of(row["model"]), _num_experts(row)
    places, num_chosen = ranks if ranks <= _NODE else ranks // _NODE, config.num_experts_per_tok
    if row["source"].startswith("automodel") and "forced balance" in row["technique"]:
        return share * _num_places(_total_experts(config), num_chosen, places) / num_chosen
    drawn = places * (1 - (1 - 1 / places) ** num_chosen)
    groups = getattr(config, "n_group", None) or 1
    if groups > 1:
        drawn = min(drawn, places * config.topk_group / groups)
    return share * drawn / num_chosen


def _total_experts(config: Any) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _num_places(num_experts: int, num_chosen: int, places: int) -> float:
    """The mean number of places, with as many experts each, of a token to which AutoModel's balanced router gives the
    next experts in turn (`FakeBalancedGate` in its nemo_automodel/components/moe/layers.py).
    """
    first = range(0, num_experts * num_chosen, num_chosen)
    each = [{(i + j) % num_experts * places // num_experts for j in range(num_chosen)} for i in first]
    return sum(map(len, each)) / len(each)


def _letters(row: Mapping[str, str]) -> str:
    shown = [f"{key}={row[key]}" for key in ("fsdp", "tp", "pp", "vp", "cp", "ep") if row[key] not in ("", "1")]
    return ",".join(shown)


def h100_plan(row: Mapping[str, str]) -> WrittenPlan:
    """Ranks that split parameters are all data ranks; without fsdp they split the optimizer's state.

    An interleaved schedule has two stages a rank where the row does not say how many. Tensor ranks split the sequence
    between their regions, as torchtitan's and Megatron-Core's do. Fully sharded stages keep what they have gathered for
    all microbatches (torchtitan's `reshard_after_forward = not pp_enabled`). A microbatch that is not published is a
    sequence; torchtitan's has as many microbatches as pipeline ranks (the default of `pipeline_parallel_microbatches`),
    thus one without stages. Experts on more ranks than there are data ranks lie on tensor ranks too, which split each
    of them here.
    """
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    tensor, stages, sequence = (int(row[key]) for key in ("tp", "pp", "cp"))
    data = gpus // (tensor * stages * sequence)
    is_torchtitan = row["source"].startswith(_TORCHTITAN)
    micro = int(row["microbatch"] or (max(1, batch // max(1, data * stages)) if is_torchtitan else 1))
    chunks = int(row["vp"] or 1) if row["vp"] or "interleaved" not in row["technique"] else 2
    of_data = data * micro
    if data * tensor * stages * sequence != gpus or batch % of_data:
        raise ValueError(f"{row['model']}: {gpus} GPUs and a batch of {batch} are not divided by {_letters(row)}")
    if int(row["fsdp"]) not in (0, data, data * sequence):
        raise ValueError(f"{row['model']}: fsdp: expected 0 or the {data} data ranks, found {row['fsdp']}")
    local_batch = int(row.get("local_batch") or batch // data)
    if batch % (data * local_batch) or local_batch % micro:
        raise ValueError(f"{row['model']}: a local batch of {local_batch} does not divide {batch} on {data} data ranks")
    experts = _num_experts(row)
    if experts > data and (data * tensor) % experts == 0:
        experts = data
    selective = OTHER_PRODUCTS if is_torchtitan else ATTENTION_ALONE
    builder_of = _builder(row["model"], batch, int(row["sequence"]))
    return WrittenPlan(
        builder_of,
        data,
        tensor,
        stages,
        num_microbatches=batch // of_data,
        flavour="zero3" if int(row["fsdp"]) and stages == 1 else "zero2",
        recomputed={"none": "none", "selective": selective, "full": "all"}[row["recompute"]],
        chunks=chunks,
        are_sends_split=tensor > 1,
        num_layers=H100_MODELS[row["model"]].layers,
        period=H100_MODELS[row["model"]].period,
        experts=experts,
        sequence=sequence,
        is_sequence_parallel=tensor > 1,
        flushes=batch // (data * local_batch) if stages > 1 else 1,
    )


def _num_experts(row: Mapping[str, str]) -> int:
    """The ranks that share a set of experts: all where a row does not say, as in AutoModel's recipes of such rows
    (`ep_size` in examples/benchmark/configs/gptoss_20b_te_deepep.yaml and gptoss_120b_te_deepep.yaml).
    """
    has_experts = bool(H100_MODELS[row["model"]].head) if row["model"] in H100_MODELS else False
    return int(row["ep"] or int(row["gpus"]) // int(row["pp"])) if has_experts else 1


# Causal attention on an H100 of 700 W, by length, Tflop/s of a forward and of a backward (Shah et al.,
# "FlashAttention-3", arXiv:2407.08608, figures 5 and 6), where products of matrices reach 80 to 90 % of 989.4 (its
# introduction). What keeps products of a device from that, as a limit of 500 W, keeps attention too: it is taken to
# reach as much less than products as there. In causal attention of a length each element of queries takes part in as
# many multiplications, which is `ProductShare.reuse`. Heads of models without sinks have 128 elements, or are taken
# for such, those of gpt-oss 64, whose attention is `flex_attention` here.
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_BEST_PRODUCTS = 0.85 * 989.4
_HEADS_128, _HEADS_64 = "aten.scaled_dot_product_attention", "autopar.flex_attention"
_FLASH_2 = {
    _HEADS_128: ((191, 260, 298, 319, 333, 335), (214, 260, 291, 310, 318, 322)),
    _HEADS_64: ((180, 229, 262, 284, 295, 299), (198, 238, 264, 279, 287, 291)),
}
_CUDNN = {
    _HEADS_128: ((315, 410, 484, 518, 529, 539), (305, 408, 465, 499, 518, 516)),
    _HEADS_64: ((225, 288, 334, 363, 379, 388), (266, 348, 395, 417, 432, 433)),
}
# torch ran FlashAttention-2 then; Transformer Engine, of both other sources, runs cuDNN's. NeMo AutoModel runs sinks by
# FlexAttention, which is taken to be as fast as FlashAttention-2, with which its authors compare it.
_TORCHTITAN_ATTENTION, _MEGATRON_ATTENTION = _FLASH_2, _CUDNN
_AUTOMODEL_ATTENTION = {**_CUDNN, _HEADS_64: _FLASH_2[_HEADS_64]}


def _attention_shares(rates: Mapping[str, Sequence[Sequence[float]]]) -> tuple[ProductShare, ...]:
    return tuple(
        ProductShare(forward / _BEST_PRODUCTS, float(length), op=op, backward=backward / _BEST_PRODUCTS)
        for op, of_op in rates.items()
        for length, forward, backward in zip(_LENGTHS, *of_op)
    )


# The models are traced in bfloat16; libraries have products in fp8, at the preset's rate: those of linear layers, in
# Megatron-Core those of experts too, whose grouped products are Transformer Engine's `GroupedLinear`.
GROUPED = (
    "aten._grouped_mm",
    "transformers.grouped_mm_fallback",
    "autopar.turned_grouped_mm",
    "autopar.turned_grouped_mm_fallback",
    "autopar.grouped_linear",
)


def _fp8_shares(ops: Sequence[str]) -> tuple[ProductShare, ...]:
    rates = PRESETS["h100"].flops_per_s
    return tuple(ProductShare(rates["float8_e4m3fn"] / rates["bfloat16"], op=op) for op in ops)


def _torchtitan(numbers: Sequence[float], *, is_compiled: bool, is_fp8: bool) -> Cluster:
    """numbers: factors of the rates that eager and compiled code reach. H100 with HBM2e at 2.4 TB/s."""
    preset, factor = PRESETS["h100"], numbers[int(is_compiled)]
    return replace(
        preset,
        flops_per_s={dtype: rate * factor for dtype, rate in preset.flops_per_s.items()},
        memory_bandwidth_bytes_per_s=2.4e12 * factor,
        product_shares=_attention_shares(_TORCHTITAN_ATTENTION) + _fp8_shares((LINEAR,) * is_fp8),
        memory_bytes=96 * 10**9,
        algorithms=NCCL,
    )


def _preset(numbers: Sequence[float], *, is_fp8: bool, is_megatron: bool, rows_sent: float) -> Cluster:
    rates = _MEGATRON_ATTENTION if is_megatron else _AUTOMODEL_ATTENTION
    shares = _attention_shares(rates) + _fp8_shares(((LINEAR,) + GROUPED * is_megatron) * is_fp8)
    return replace(PRESETS["h100"], product_shares=shares, algorithms=NCCL, kind_factors={"all_to_all": rows_sent})
