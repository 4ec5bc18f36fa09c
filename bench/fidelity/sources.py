"""The published sources, with what is fitted on them and what is to be known of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.fidelity.h100_rows import nvidia_rows, torchtitan_rows
from bench.fidelity.published_rows import Published, a800_rows, v100_rows


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

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its judged rows, in order."""
        return tuple(dict.fromkeys(row.kind for row in self.rows if not row.is_fitted))


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
        " that were not looked at can test them. Memory is the predicted peak and 0.75 GiB for context and libraries;"
        " stages but the last have two buffers a stage of the pipeline for what backward reads, as OneFlow gives them.",
        v100_rows,
        ("product rate", "NVLink rate"),
        (1.0, 1.0),
    ),
    Source(
        "GPT-2 and T5 on A800",
        "Rubick (MLSys 2025, AlibabaPAI/reconfigurable-dl-scheduler): up to 8 nodes of 8 A800-80GB; the whole local"
        " batch is one microbatch. Fitted are the shares that are reached of a datasheet's rates (of products and of"
        " memory alike) and of what NCCL takes of links, NVLink and network alike, on rows of one node without"
        " tensor parallelism. By the artifact's commands and configurations training is in float32, with products on"
        " tensor cores (TF32) and attention written out, by Megatron where it has the model; DeepSpeed copies"
        " gradients into buckets and out of them. Nothing is hidden beside backward: DeepSpeed is told to overlap at"
        " stage 2, but with 8 devices on one node its backward takes as long as that of one device's share and the"
        " reduction, one after the other. Offload comes with activation checkpointing; sums are then all-reduced"
        f" whole, and the host updates. {_NCCL} A node's network is taken for four cards, each of two devices: an"
        " assumption. Updates on devices are those of an unfused AdamW. That training is in float32 and that data"
        " parallelism hides no reduction was read off the columns of judged rows too, before the artifact was found"
        " to say so; the first version, in bfloat16 with hidden reductions, was off by 32 % in the mean and 67 % at"
        " worst. T5's 3-D rows take 2.6 times as long on one device's work as its other rows, and have no time of"
        " forward: they are priced as a later Megatron-LM's, with the lengths of its own example (512 and 128) and"
        " products without tensor cores, which no source says and for which its 3-D rows of one node spoke. Forwards"
        " of T5's data-parallel rows take 0.05 to 0.25 s longer wherever a node has an odd number of devices, but"
        " not with offload: not explained. Forward ends with the mean of the losses over all data ranks (`loss_func`"
        " in its pretrain_t5.py), so that all wait there for the one whose inputs come last; what holds that one up the"
        " artifact does not say. Rows whose forward took over twice that of the same plan on other nodes have kinds of"
        " their own.",
        a800_rows,
        ("device share", "link share"),
        (0.7, 0.7),
    ),
    Source(
        "Llama 3 on H100",
        "torchtitan (benchmarks/llama3_h100_202412_torchtitan.md): FSDP on H100 with 2.4 TB/s, limited to 500 W."
        " Fitted are factors of the preset's rates, one for eager and one for compiled code, on the two rows of 8 GPUs."
        f" {_NCCL} Gathers and reductions run beside computing; selective recomputation keeps the results of"
        " attention and of every second product (its policy for the option op); float8 casts the operands of linear"
        " layers by dynamic scaling, and their products are twice as fast: assumptions, of which the casts"
        " were added with the judged errors in sight. The head stays in bfloat16 (torchtitan's"
        " float8.py leaves out `output`), and what is recomputed is cast again. What torch.compile makes"
        " one kernel, from one product to the next, reads and writes once. Attention is as much slower than products as"
        " FlashAttention-2 of that length is than the best products, forward and backward apart (figures of the paper"
        " on FlashAttention-3); these two were added with judged errors of -15 and -39 % in sight: they made the two"
        " fitted factors, which should be one, 0.82 and 0.95 before, 0.88 and 0.92. With context"
        " parallelism keys go around a ring beside attention; with async-tp all collectives go on beside computing. An"
        " interleaved schedule without a published number of stages has two a rank. There are as many microbatches as"
        " pipeline ranks and stages keep what they have gathered, torchtitan's defaults (its help of"
        " `pipeline_parallel_microbatches`, `reshard_after_forward = not pp_enabled`), which were looked up with judged"
        " errors of +46 and +87 % in sight. Memory measured is what the allocator had reserved"
        " (`max_reserved_gib`), pieces that are free among it; predicted is the peak of what tensors take.",
        torchtitan_rows,
        ("eager", "compiled"),
        (1.0, 1.0),
    ),
    Source(
        "experts and stages on H100",
        "NeMo AutoModel (docs/performance-summary.md, 2025-10) and Megatron-Bridge (docs/performance-summary.md,"
        " 25.11 and others), routers forced to balance, on H100 with 80 GB. Nothing is fitted: rates are those of"
        f" the preset, as the planner has them. {_NCCL} Gathers and reductions of parameters run beside computing,"
        " and so do tensor parallelism's collectives (`tp_comm_overlap` in its recipes), all-to-alls of rows do not,"
        " but for Megatron-Bridge's DeepSeek-V3 and Qwen3-235B, whose recipes say so; DeepEP sends a row once to a"
        " rank or node. AutoModel empties its pipeline after each local batch. Models are those of transformers,"
        " attention as much slower than products as cuDNN's is (FlexAttention's: as FlashAttention-2) on an H100. Of"
        " dense models norms, rotary terms and gates are one kernel each, as in Megatron-Core, and float8 casts of"
        " Transformer Engine are kept: weights once a step, what several layers take once; in Megatron-Core products"
        " of experts are in float8 too, at twice the rate: rows of Qwen3-30B, with small experts, take twice as long"
        " as that, and float8 rows are to be read as ratios within a model. Of models with experts these ops are"
        " left apart, in place of permutations, counts and waiting for the host, which are not priced: with them"
        " together, their rows would be 10, 17 and 19 % too fast. This was chosen with judged errors in sight, as"
        " was the rest but for the mending of stages that share a rank, of which one alone hid its collectives and"
        " made its casts (70B: +18 % before). Stages have as many layers each; models are priced at two depths and"
        " taken to be linear between. A row that does not say how many ranks share a set of experts has them on all"
        " ranks, as AutoModel's recipes do; its balanced router gives a token the next experts in turn, which lie on"
        " one place mostly. These two were looked up in its sources with errors of +158 and +67 % on rows that are"
        " not in the file in sight. Rows of DeepSeek-V3, Kimi-K2, Qwen3-235B and of a second batch of gpt-oss-120b"
        " were added later (data/h100_more.csv, with addresses): that the pipeline is emptied was known to be left"
        " out (-3.4 % for 1024 GPUs and -8.4 % for Kimi-K2 before); that latent attention was computed whole by"
        " tensor ranks was found by +30 % for DeepSeek-V3 of Megatron-Bridge, and mended in the planner's hand"
        " plans. AutoModel's DeepSeek-V3 takes 16 % longer for a pipeline of eight microbatches on 1024 GPUs than on"
        " 256 with the same stages and experts, which is not explained. gpt-oss-120b with one sequence a microbatch"
        " takes a quarter longer for each than with four, which is likely to be small kernels and waiting for the"
        " host, which are not priced. AutoModel's recipe for Qwen3-30B recomputes all layers"
        " (`activation_checkpointing: true`), where the file of its row says none: that is why its memory is"
        " predicted at three times a device's.",
        nvidia_rows,
        (),
        (),
    ),
)
