"""The published rows: what was measured, the plan as its authors wrote it, and the cluster that it ran on."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate, MemoryShare
from autopar.costmodel.cluster.presets import LINK_EFFICIENCY, NETWORK_LATENCY_S, NVLINK_LATENCY_S, PCIE4, PRESETS
from autopar.models.catalogue import Example
from bench.fidelity.published_models import A800_MODELS, a800_megatron, a800_model, v100_gpt
from bench.fidelity.written_plans import HostUpdate, Library, WrittenPlan

DATA = Path(__file__).parent / "data"
# NCCL runs rings and trees over all ranks, no collective level by level (NCCL, src/graph/tuning.cc).
NCCL = ("ring", "tree")


@dataclass(frozen=True)
class Published:
    """One measured row. `group`: of plans among which one chooses. `kind`: of rows that are judged together.
    `cluster`: from the fitted numbers. `is_fitted`: the numbers were fitted on it, so that it is not judged.
    `memory_bytes`: measured on a device, 0 where not published; `context_bytes` of it are of no tensor.
    """

    name: str
    group: str
    kind: str
    measured_s: float
    written: WrittenPlan
    library: Library
    cluster: Callable[[Sequence[float]], Cluster]
    is_fitted: bool
    memory_bytes: float = 0.0
    context_bytes: float = 0.0


def read(file: str) -> list[dict[str, str]]:
    """The rows of a file in `data`."""
    with (DATA / file).open() as text:
        return list(csv.DictReader(text))


@cache
def _built(build: Callable[..., Example], *sizes: int | str) -> Callable[[], Example]:
    """The same function for the same sizes, so that a model is traced once."""
    return partial(build, *sizes)


# The loss is in float16 too ("sparse_softmax_cross_entropy" is in the gray list of OneFlow's oneflow/core/job_rewriter/
# auto_mixed_precision_lists.cpp); in pipelines it is priced in float32, as autopar sums no losses in float16.
_V100_HALF_LOSS = partial(v100_gpt, loss_dtype=torch.float16)


def v100_rows(rows: Sequence[Mapping[str, str]] | None = None) -> Iterator[Published]:
    """GPT by OneFlow. Its actors receive ahead of use; reductions run on a stream of their own but with tensor
    parallelism (`nccl_use_compute_stream` in its `init_config`).
    """
    for row in rows if rows is not None else read("gpt_plans_v100.csv"):
        data, tensor, stages, batch, hidden, layers, heads = (int(row[key]) for key in list(row)[:7])
        written = WrittenPlan(
            _built(v100_gpt if stages > 1 else _V100_HALF_LOSS, batch, hidden, layers, heads),
            data,
            tensor,
            stages,
            num_microbatches=32 if stages > 1 else 1,
            recomputed="all",
        )
        yield Published(
            f"hidden {hidden}, {layers} layers, batch {batch}: dp={data},tp={tensor},pp={stages}",
            f"{hidden} {layers} {batch} {data * tensor * stages}",
            "stages" if stages > 1 else "tensor" if tensor > 1 else "data",
            float(row["step_ms"]) / 1e3,
            written,
            Library("nothing" if tensor > 1 else "reductions", buffers_by_stages=_V100_BUFFERS),
            _v100,
            is_fitted=data * tensor * stages <= 8,
            memory_bytes=int(row["memory_mib"]) * 2.0**20,
            context_bytes=_V100_CONTEXT,
        )


# Values of a forward that a backward reads have twice as many buffers as there are stages, but on the last stage
# (`PipelineBufferPass` in OneFlow's oneflow/core/job_rewriter/pipeline_buffer_pass.cpp).
_V100_BUFFERS = 2
# nvidia-smi counts the context and buffers of libraries too, 0.5 to 1 GiB.
_V100_CONTEXT = 0.75 * 2**30


def _v100(numbers: Sequence[float]) -> Cluster:
    """numbers: factors of the preset's product rate and of its NVLink rate. A pair of neighbours is joined by one of
    six NVLinks, four neighbours by four (NVIDIA DGX-1 System Architecture, WP-08437-001). What stages send goes by
    verbs of the card, at its own rate.
    """
    preset = PRESETS["v100"]
    node, network = preset.levels
    rates = (GroupRate(2, 1 / 6), GroupRate(4, 4 / 6), GroupRate(8))
    node = replace(node, bandwidth_bytes_per_s=node.bandwidth_bytes_per_s * numbers[1], group_rates=rates)
    network = replace(network, group_rates=(GroupRate(2, 1 / LINK_EFFICIENCY, kind="p2p"),))
    flops = {dtype: rate * numbers[0] for dtype, rate in preset.flops_per_s.items()}
    return replace(preset, levels=(node, network), flops_per_s=flops, algorithms=NCCL)


# The software of the rows, by the artifact's commands and configurations (AlibabaPAI/reconfigurable-dl-scheduler,
# benchmark/models). DeepSpeed copies gradients into buckets, divides them there and copies the sums back
# (`allreduce_bucket`, `unflatten` in its runtime/engine.py; `ipg_buffer`, `average_tensor` and the copies behind
# `all_gather` in runtime/zero/stage_1_and_2.py): six times what is reduced, after backward at stage 0
# (`DeepSpeedEngine.allreduce_gradients`). With offload the sums are all-reduced whole
# (`allreduce_and_copy_with_multiple_ranks`). Megatron-LM reduces after backward too.
_BUCKET_COPIES = 6.0
# A rank has eight cores of its host for an update there (`cpu_strategy` in sched/models), each of the rate of a copy by
# one thread in the preset; a host is taken to have two sockets, each of eight channels of DDR4-3200.
_RANK_CORES, _HOST_MEMORY = 8, 2 * 8 * 25.6e9 * LINK_EFFICIENCY
# T5's masks of encoder, decoder and between them are int64, joined on the host by one thread, and copied through a
# buffer (`get_batch` in pretrain_t5.py, mpu/data.py): each stage reads and writes them twice on the host.
_HOST_COPY, _T5_COPIES = PRESETS["cpu"].memory_bandwidth_bytes_per_s, 4
# Megatron-LM's own example of T5 (examples/pretrain_t5_distributed.sh) has decoders of 128 tokens.
_T5_DECODER = 128


def _a800_library(row: Mapping[str, str], nodes: Sequence[int]) -> Library:
    kind, host = row["kind"], None
    if kind == "zero-offload":
        host = HostUpdate(max(nodes), _RANK_CORES * _HOST_COPY, _HOST_MEMORY)
    return Library(
        gradient_copies=0.0 if kind == "3d" else _BUCKET_COPIES,
        reduces_whole=host is not None,
        host_update=host,
        batch_s=_t5_batch_s(row) if row["model"] == "t5" else 0.0,
    )


def _t5_batch_s(row: Mapping[str, str]) -> float:
    batch, encoder, decoder = _t5_sizes(row)
    elements = batch // int(row["dp"]) * (encoder**2 + decoder**2 + encoder * decoder)
    return _T5_COPIES * 8 * elements / _HOST_COPY


def _t5_sizes(row: Mapping[str, str]) -> tuple[int, int, int]:
    """The global batch and the lengths of encoder and decoder."""
    batch, sequence = _a800_sizes(row)
    return batch, sequence, _T5_DECODER if row["kind"] == "3d" else sequence


WAITS = "waits in forward"


def _waits_in_forward(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether its forward, in which data parallel devices exchange nothing, took over twice that of the same plan on
    other nodes.
    """
    if row["kind"] == "3d" or not row.get("forward_s"):
        return False
    alike = [other for other in rows if all(other[key] == row[key] for key in ("model", "kind", "dp", "tp", "pp"))]
    return float(row["forward_s"]) > 2 * min(float(other["forward_s"]) for other in alike)


def a800_rows(rows: Sequence[Mapping[str, str]] | None = None) -> Iterator[Published]:
    """Models of Rubick, in float32: its commands have neither `--fp16` nor `--bf16`, its DeepSpeed configurations
    `"fp16": {"enabled": false}`. Commands of LLaMA are not in the artifact: it is taken to be trained so too.

    Rows with offload have activation checkpointing too ("ZeRO-Offload+GC", artifact/71_performance_model/model/
    validate_gpt.py and validation_t5.py). Megatron pads the vocabulary, and its tensor ranks send a part each to the
    next stage (Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, section 4.1; its default).
    """
    rows = read("rubick_a800.csv") if rows is None else rows
    for row in rows:
        kind, stages, tensor, data = row["kind"], int(row["pp"]), int(row["tp"]), int(row["dp"])
        nodes = tuple(map(int, row["devices_of_each_node"].split("+")))
        written = WrittenPlan(
            _a800_build(row),
            data,
            tensor,
            stages,
            flavour="zero2" if kind.startswith("zero") and data > 1 else "ddp",
            recomputed="all" if kind in ("ddp+checkpointing", "zero-offload") else "none",
            optimizer="adamw",
            are_sends_split=kind == "3d",
            num_layers=A800_MODELS[row["model"]].layers,
        )
        yield Published(
            f"{row['model']} {kind}: dp={data},tp={tensor},pp={stages} on {row['devices_of_each_node']}",
            f"{row['model']} {row['devices_of_each_node']}",
            f"{row['model']} {kind}, {'one node' if len(nodes) == 1 else 'several'}"
            + f", {WAITS}" * _waits_in_forward(row, rows),
            float(row["step_s"]),
            written,
            _a800_library(row, nodes),
            partial(_a800, nodes, has_tf32=(row["model"], kind) != ("t5", "3d")),
            is_fitted=len(nodes) == 1 and kind != "3d",
        )


def _a800_sizes(row: Mapping[str, str]) -> tuple[int, int]:
    """The global batch and the length that the artifact gives unless columns name others."""
    name = row["model"]
    if name not in A800_MODELS:
        raise ValueError(f"model: expected one of {', '.join(A800_MODELS)}, found {name!r}; give its sizes")
    model = A800_MODELS[name]
    batch = int(row.get("global_batch") or model.batch)
    if batch % int(row["dp"]):
        raise ValueError(f"dp: expected a divisor of the global batch of {name}, {batch}, found {row['dp']}")
    return batch, model.sequence and int(row.get("sequence") or model.sequence)


def _a800_build(row: Mapping[str, str]) -> Callable[..., Example]:
    (batch, sequence), name, tensor = _a800_sizes(row), row["model"], int(row["tp"])
    model = A800_MODELS[name]
    vocabulary = math.ceil(model.vocabulary / 128 / tensor) * 128 * tensor
    if not model.head:
        return _built(a800_megatron, name, batch, sequence, _t5_sizes(row)[2], vocabulary)
    return _built(a800_model, name, batch, sequence, vocabulary if row["kind"] == "3d" else 0)


# Eight NVLinks, of which NCCL takes 20 of 25 GB/s (`SM80_NVLINK_BW` in its src/graph/topo.h). A node's 100 GB/s of
# network are taken for four cards, each of two devices as in DGX A100, of which NCCL takes 24 of 25 GB/s
# (`speedArrayInter` in src/graph/search.cc). The same share of both is reached.
_A800_NVLINK, _A800_CARD, _A800_CARDS = 8 * 20e9, 24e9, 4
# Products of float32 on its tensor cores as TF32 (NVIDIA A100 datasheet), the default of torch before 1.12, and
# without. T5's 3-D rows have no time of forward, as a later Megatron-LM than that of the others logs it: they are taken
# to be of a later torch.
_A800_TF32, _A800_FLOAT32 = 156e12, 19.5e12
# An update by transformers' AdamW, which is not fused: each of its eight operations reads its operands and writes its
# result, 80 bytes of a parameter; clipping gradients reads them twice and writes them, zeroing writes them: 16. A fused
# one moves 28 (`memory.update_bytes`).
_UNFUSED_UPDATE = MemoryShare("update", 28 / 96)


def _a800(nodes: Sequence[int], numbers: Sequence[float], *, has_tf32: bool = True) -> Cluster:
    """numbers: shares of the rates that are reached: of products and of memory alike, and of links.

    The node with the fewest devices has the fewest cards in use, and all wait for it.
    """
    preset, (device, links) = PRESETS["a100"], numbers
    fewest, size = min(nodes), math.ceil(sum(nodes) / len(nodes))
    cards = math.ceil(fewest * _A800_CARDS / 8)
    inside = (sum(nodes) - 1) % size + 1  # devices of the last block of `size`, over which a ring shares the cards
    network = LinkLevel(0, NETWORK_LATENCY_S, _A800_CARD * links * cards / inside)
    node = LinkLevel(size, NVLINK_LATENCY_S, _A800_NVLINK * links)
    alone = PCIE4 / 2 if max(nodes) > _A800_CARDS else PCIE4
    return replace(
        preset,
        name="a800",
        levels=(node, network) if size > 1 else (network,),
        flops_per_s={"float32": (_A800_TF32 if has_tf32 else _A800_FLOAT32) * device},
        memory_bandwidth_bytes_per_s=2039e9 * device,
        host_bandwidth_bytes_per_s=alone * LINK_EFFICIENCY,
        algorithms=NCCL,
        memory_shares=(MemoryShare(""), _UNFUSED_UPDATE),
    )
