"""Known clusters. Rates are one direction, dense; every number names its source."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.cluster.attention_kernel import EFFICIENT, FUSED
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel

# Latency of one step of NCCL's ring, protocol Simple, over NVLink and over the network: NCCL, src/graph/tuning.cc,
# `hwLat`.
NVLINK_LATENCY_S = 3.4e-6
NETWORK_LATENCY_S = 14.0e-6

# Share of a datasheet's product rate and link rate that training reaches. Fitted, in steps of 0.05 and 0.1, on the six
# one-node GPT steps that OneFlow's DLPerf measured (report of 2021-05-12: 8 V100-SXM2-16GB, float16, checkpointing);
# what remains is 8 % (root mean square of the log of measured over predicted). Other devices and the network are given
# the same shares for want of such measurements.
PRODUCT_EFFICIENCY = 0.55
LINK_EFFICIENCY = 0.6

GBIT = 1e9 / 8

# PCI Express with 16 lanes, one direction, as the datasheets of P100 and V100 (gen3, 32 GB/s both ways), A100 (gen4,
# 64) and H100 (gen5, 128) give it. How many GPUs share such a way to a processor: two in DGX-1 (their switch, "PIX" in
# `nvidia-smi topo -m`; NVIDIA DGX-1 System Architecture, WP-08437-001) and in DGX A100 (four switches, each of two GPUs
# and two network cards; DGX A100 User Guide, DU-09821-001), one in DGX H100, where each GPU hangs at a ConnectX-7 card
# of its own, which is the switch (DGX H100 User Guide, table of network modules: CX0 to CX3 of two modules, a GPU
# each).
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
_EFFICIENCY_NOTE = f"products at {PRODUCT_EFFICIENCY} and links at {LINK_EFFICIENCY} of these"


def datasheet_share(cluster: Cluster) -> float:
    """The share of a datasheet's product rate that `flops_per_s` is: of a preset of GPUs, else 1, as for a calibration,
    whose rates were measured.
    """
    return PRODUCT_EFFICIENCY if cluster.source.endswith(_EFFICIENCY_NOTE) else 1.0


@dataclass(frozen=True, slots=True)
class _Links:
    """Datasheet rates of a device's links, bytes/s in one direction: within its node of `per_node` devices, to other
    nodes, and to the host's memory.
    """

    per_node: int
    nvlink: float
    network: float
    host: float


def _gpus(
    name: str,
    links: _Links,
    *,
    peak: Mapping[str, float],
    memory_bandwidth: float,
    memory: int,
    source: str,
    has_flash: bool = True,
) -> Cluster:
    """A cluster of GPUs. peak: datasheet flop/s by dtype; memory_bandwidth: bytes/s; memory: bytes; has_flash: compute
    capability 8.0 or newer.
    """
    levels = (LinkLevel(0, NETWORK_LATENCY_S, links.network * LINK_EFFICIENCY),)
    if links.per_node > 1:
        levels = (LinkLevel(links.per_node, NVLINK_LATENCY_S, links.nvlink * LINK_EFFICIENCY),) + levels
    rates = {dtype: rate * PRODUCT_EFFICIENCY for dtype, rate in peak.items()}
    return Cluster(
        name,
        levels,
        rates,
        memory_bandwidth,
        memory,
        f"{source}; {_EFFICIENCY_NOTE}",
        host_bandwidth_bytes_per_s=links.host * LINK_EFFICIENCY,
        attention_kernels=FUSED if has_flash else (EFFICIENT,),
    )


def _v100(name: str, node_gbit: float) -> Cluster:
    return _gpus(
        name,
        _Links(per_node=8, nvlink=150e9, network=node_gbit * GBIT / 8, host=PCIE3 / 2),
        peak={"float16": 125e12, "bfloat16": 15.7e12, "float32": 15.7e12, "float64": 7.8e12},
        memory_bandwidth=900e9,
        memory=16 * 2**30,
        source=(
            f"NVIDIA V100 datasheet (SXM2 16 GB, 6 NVLinks); 8 GPUs of a node share {node_gbit:g} Gbit/s, "
            "pairs of them PCIe 3.0 x16 to the host"
        ),
        has_flash=False,
    )


def _a100(name: str, gpu_gbit: float) -> Cluster:
    return _gpus(
        name,
        _Links(per_node=8, nvlink=300e9, network=gpu_gbit * GBIT, host=PCIE4 / 2),
        peak={"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        memory_bandwidth=2039e9,
        memory=80 * 10**9,
        source=(
            f"NVIDIA A100 datasheet (SXM4 80 GB, NVLink 3); {gpu_gbit:g} Gbit/s per GPU; PCIe 4.0 x16 to the host"
            " for two"
        ),
    )


_P100 = _gpus(
    "p100",
    _Links(per_node=1, nvlink=0.0, network=10.2e9, host=PCIE3),
    peak={"float16": 18.7e12, "bfloat16": 9.3e12, "float32": 9.3e12, "float64": 4.7e12},
    memory_bandwidth=732e9,
    memory=16 * 2**30,
    source=(
        "NVIDIA P100 datasheet (PCIe 16 GB); one GPU and one Cray Aries card (10.2 GB/s injection, Cray XC whitepaper)"
        " per node; PCIe 3.0 x16 to the host"
    ),
    has_flash=False,
)

_H100 = _gpus(
    "h100",
    _Links(per_node=8, nvlink=450e9, network=400 * GBIT, host=PCIE5),
    peak={
        "float8_e4m3fn": 1978.9e12,
        "float8_e5m2": 1978.9e12,
        "float16": 989.4e12,
        "bfloat16": 989.4e12,
        "float32": 67e12,
        "float64": 67e12,
    },
    memory_bandwidth=3350e9,
    memory=80 * 10**9,
    source=(
        "NVIDIA H100 datasheet (SXM5 80 GB, NVLink 4); one 400 Gbit/s card per GPU as in DGX H100, PCIe 5.0 x16 to the"
        " host"
    ),
)

_CPU = Cluster(
    "cpu",
    (LinkLevel(0, 1.0e-4, 1.6e9),),
    {"float32": 170e9, "float64": 92e9},
    5.8e9,
    4 * 2**30,
    "measured on one 2-core Xeon: gloo on the loopback, 2 and 4 processes, 4 KiB and 16 MiB buffers; products of"
    " 1024x1024 and a copy of 128 MiB on one thread; memory: 4 GiB a process, a choice",
    {"all_gather": 1.4, "reduce_scatter": 2.6, "all_to_all": 0.6},
    5.8e9,
    "cpu",
)

_FREE_LINKS = Cluster(
    "free-links",
    (LinkLevel(0, 0.0, float("inf")),),
    {"float32": 1e9},
    1e9,
    2**50,
    "made up for tests and demonstrations: communication costs nothing and devices are slow, so that whatever can be"
    " split is",
    host_bandwidth_bytes_per_s=1e9,
    device_type="cpu",
)

PRESETS: Mapping[str, Cluster] = {
    preset.name: preset
    for preset in (
        _P100,
        _v100("v100", 100),
        _v100("v100-25g", 25),
        _v100("v100-50g", 50),
        _v100("v100-100g", 100),
        _a100("a100", 200),
        _a100("a100-100g", 100),
        _H100,
        _CPU,
        _FREE_LINKS,
    )
}
