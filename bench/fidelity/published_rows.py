"""The published rows: what was measured, the plan as its authors wrote it, and the cluster that it ran on."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import GroupRate, ProductShare
from autopar.costmodel.cluster.presets import LINK_EFFICIENCY, NETWORK_LATENCY_S, NVLINK_LATENCY_S, PCIE4, PRESETS
from autopar.models.catalogue import Example
from bench.fidelity.published_models import a800_gpt2, a800_t5, llama3, v100_gpt
from bench.fidelity.written_plans import Library, WrittenPlan

# Dynamic scaling reads an operand for its largest value, then reads it again and writes a byte (torchao.float8).
FP8_CAST_BYTES = 2 + 2 + 1
DATA = Path(__file__).parent / "data"
# NCCL runs rings and trees over all ranks, no collective level by level (NCCL, src/graph/tuning.cc).
NCCL = ("ring", "tree")


@dataclass(frozen=True)
class Published:
    """One measured row. `group`: of plans among which one chooses. `cluster`: from the fitted numbers. `is_fitted`: the
    numbers were fitted on it, so that it is not judged.
    """

    name: str
    group: str
    measured_s: float
    written: WrittenPlan
    library: Library
    cluster: Callable[[Sequence[float]], Cluster]
    is_fitted: bool


def _read(file: str) -> list[dict[str, str]]:
    with (DATA / file).open() as text:
        return list(csv.DictReader(text))


@cache
def _built(build: Callable[..., Example], *sizes: int | str) -> Callable[[], Example]:
    """The same function for the same sizes, so that a model is traced once."""
    return partial(build, *sizes)


def v100_rows(rows: Sequence[Mapping[str, str]] | None = None) -> Iterator[Published]:
    """GPT by OneFlow. Its actors receive ahead of use; reductions run on a stream of their own but with tensor
    parallelism (`nccl_use_compute_stream` in its `init_config`).
    """
    for row in rows if rows is not None else _read("gpt_plans_v100.csv"):
        data, tensor, stages, batch, hidden, layers, heads = (int(row[key]) for key in list(row)[:7])
        written = WrittenPlan(
            _built(v100_gpt, batch, hidden, layers, heads),
            data,
            tensor,
            stages,
            num_microbatches=32 if stages > 1 else 1,
            recomputed="all",
        )
        yield Published(
            f"hidden {hidden}, {layers} layers, batch {batch}: dp={data},tp={tensor},pp={stages}",
            f"{hidden} {layers} {batch} {data * tensor * stages}",
            float(row["step_ms"]) / 1e3,
            written,
            Library("nothing" if tensor > 1 else "reductions", is_early=True),
            _v100,
            is_fitted=data * tensor * stages <= 8,
        )


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


def a800_rows(rows: Sequence[Mapping[str, str]] | None = None) -> Iterator[Published]:
    """GPT-2 and T5 by Rubick: DDP and DeepSpeed reduce gradients beside backward; Megatron pads the vocabulary."""
    for row in rows if rows is not None else _read("rubick_a800.csv"):
        kind, stages, tensor, data = row["kind"], int(row["pp"]), int(row["tp"]), int(row["dp"])
        nodes = tuple(map(int, row["devices_of_each_node"].split("+")))
        if row["model"] == "gpt2":
            build = _built(a800_gpt2, 16, 50257 if tensor == 1 else math.ceil(50257 / 128 / tensor) * 128 * tensor)
        else:
            build = _built(a800_t5, 16)
        written = WrittenPlan(
            build,
            data,
            tensor,
            stages,
            flavour="zero2" if kind.startswith("zero") and data > 1 else "ddp",
            recomputed="all" if kind.endswith("checkpointing") else "none",
            is_state_on_host=kind == "zero-offload",
            num_layers=48 if row["model"] == "gpt2" else 32,
        )
        yield Published(
            f"{row['model']} {kind}: dp={data},tp={tensor},pp={stages} on {row['devices_of_each_node']}",
            f"{row['model']} {row['devices_of_each_node']}",
            float(row["step_s"]),
            written,
            Library("nothing" if kind == "3d" else "reductions", is_early=True),
            partial(_a800, nodes),
            is_fitted=len(nodes) == 1 and kind in ("3d", "ddp", "zero"),
        )


# 800 GB/s of NVLink are 400 of an A800, both ways; a node's 100 GB/s of network are taken for four cards, each of two
# devices, as in DGX A100 its PCIe switches are.
_A800_NVLINK, _A800_NETWORK, _A800_CARDS = 200e9, 100e9, 4


def _a800(nodes: Sequence[int], numbers: Sequence[float]) -> Cluster:
    """numbers: shares of the product rate and of the memory bandwidth of the datasheet that are reached. The node with
    the fewest devices has the fewest cards in use, and all wait for it.
    """
    preset = PRESETS["a100"]
    fewest, size = min(nodes), math.ceil(sum(nodes) / len(nodes))
    cards = math.ceil(fewest * _A800_CARDS / 8)
    network = LinkLevel(0, NETWORK_LATENCY_S, _A800_NETWORK / _A800_CARDS * cards / size * LINK_EFFICIENCY)
    node = LinkLevel(size, NVLINK_LATENCY_S, _A800_NVLINK * LINK_EFFICIENCY)
    alone = PCIE4 / 2 if max(nodes) > _A800_CARDS else PCIE4
    return replace(
        preset,
        name="a800",
        levels=(node, network) if size > 1 else (network,),
        flops_per_s={"bfloat16": 312e12 * numbers[0], "float32": 19.5e12 * numbers[0]},
        memory_bandwidth_bytes_per_s=2039e9 * numbers[1],
        host_bandwidth_bytes_per_s=alone * LINK_EFFICIENCY,
        algorithms=NCCL,
    )


def h100_rows(rows: Sequence[Mapping[str, str]] | None = None) -> Iterator[Published]:
    """Llama 3 8B by torchtitan; FSDP gathers and reduces beside computing.

    Rows of mixtures of experts, of context parallelism and of 70B and 405B are left out.
    """
    for row in rows if rows is not None else _read("h100_published.csv"):
        is_priced = row["model"] == "llama3.1-8b" and row["cp"] == "1"
        if not is_priced:
            continue
        gpus, batch, sequence = int(row["gpus"]), int(row["global_batch"]), int(row["sequence"])
        micro, is_compiled = int(row["microbatch"]), "compile" in row["technique"]
        written = WrittenPlan(
            _built(llama3, "llama3-8b", batch, sequence),
            data=gpus,
            num_microbatches=batch // gpus // micro,
            flavour="zero3",
            num_layers=32,
            recomputed={"none": "none", "selective": "half", "full": "all"}[row["recompute"]],
        )
        yield Published(
            f"{row['source']} {row['model']}, {gpus} GPUs, sequence {sequence}, {row['precision']}, {row['technique']}",
            f"{row['source']} {row['precision']} {sequence}",
            batch * sequence / gpus / float(row["tokens_per_s_per_gpu"]),
            written,
            Library("parameters", cast_bytes=FP8_CAST_BYTES * (row["precision"] == "fp8")),
            partial(_h100, is_compiled=is_compiled, is_fp8=row["precision"] == "fp8"),
            is_fitted=gpus == 8 and row["precision"] == "bf16",
        )


def _h100(numbers: Sequence[float], *, is_compiled: bool, is_fp8: bool) -> Cluster:
    """numbers: factors of the rates that eager and compiled code reach. H100 with HBM2e at 2.4 TB/s; fp8 products of
    linear layers are twice as fast as those of bfloat16 (NVIDIA H100 datasheet).
    """
    preset, factor = PRESETS["h100"], numbers[int(is_compiled)]
    return replace(
        preset,
        flops_per_s={dtype: rate * factor for dtype, rate in preset.flops_per_s.items()},
        memory_bandwidth_bytes_per_s=2.4e12 * factor,
        product_shares=(ProductShare(2.0, op="aten.linear"),) * is_fp8,
        memory_bytes=96 * 10**9,
        algorithms=NCCL,
    )
