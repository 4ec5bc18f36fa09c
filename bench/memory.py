"""Predicted peaks of memory beside counted ones: `python -m bench.memory [--rows '^gpt2']`, under 5 minutes on 2 cores.

Each plan of each model is run by gloo ranks on CPU: steps with AdamW, allocation by allocation. The
prediction runs the generated program without data; the estimate is what the search adds up.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.costmodel.activations.count_storages import count_storages
from autopar.costmodel.activations.recomputable import recomputable
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace_with_loss import traced
from autopar.mesh import Mesh
from autopar.peak_memory.predict import Peak, predict_peak
from autopar.planner.budget import Budget
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.accumulate import open_step
from autopar.runtime.run_program import run
from autopar.sbp.candidates import annotate
from bench.memory_stages import KINDS as MESHES_AND_SCHEDULES
from bench.memory_stages import RANKS, measure_stages, stages_name
from bench.memory_stages import TEXT as STAGES_TEXT
from bench.memory_stages import table_row as stages_row
from bench.report import Cells, Table, add
from bench.report import Row as Saved
from bench.rows import parser, selected
from tests.runtime.split import load_program, microbatch
from tests.runtime.staged import Sample
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

MESH = Mesh((2, 2), ("dp", "tp"))
BATCH, SEQUENCE, VOCABULARY, WIDTH, LAYERS, HEADS = 16, 64, 1024, 128, 4, 4
TOLERANCE = 0.05
TIME_LIMIT_S = 5.0
NUM_STEPS = 3
TEXT = """Tensors are counted, storage by storage, on CPU. Nothing was measured on a GPU, and memory that an allocator
or a driver takes beyond tensors is not included. The peak is the most bytes that a rank has allocated at one time in
a step; it includes the rank's parts of parameters, gradients and AdamW's state, and the whole batch. "Measured": on 4
gloo ranks, every allocation counted, once optimizer state exists; for each phase the least of 3 steps, since gloo's
threads free some buffers a moment late; of the ranks the largest. "Predicted": by `peak_memory.predict`, without data
or ranks; the phase is the part of the step in which it expects the peak. The search's estimate is a sum over choices:
it counts gradients as if all of them existed together with all activations, and leaves out transients. The plan
"searched" is under a memory limit of 0.8 of the fastest plan's memory, "recomputed" is megatron with activation
checkpointing of every block, "4 microbatches" is zero2."""
KINDS = ("ddp", "zero3", "megatron", "searched", "recomputed", "4 microbatches")


class MLP(nn.Module):
    """Wide layers and a cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), labels)


def _mlp() -> Case:
    return Case(
        MLP(), (torch.randn(32 * BATCH, WIDTH), torch.randint(VOCABULARY, (32 * BATCH,))), {}, lambda loss: loss
    )


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": SEQUENCE}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False))
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    return _of_tokens(model)


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "vocab_size": VOCABULARY,
    }
    return _of_tokens(
        LlamaForCausalLM(
            LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, use_cache=False)
        )
    )


def _t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": LAYERS - 1, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_heads": HEADS}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}
    return _of_tokens(T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCABULARY, **ids)))


def _of_tokens(model: nn.Module) -> Case:
    tokens = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    return Case(model, (), {"input_ids": tokens, "labels": tokens.clone()}, lambda output: output.loss)


MODELS: Mapping[str, Callable[[], Case]] = {"mlp": _mlp, "gpt2": _gpt2, "llama": _llama, "t5": _t5}


@dataclass(frozen=True)
class Row:
    """One plan; measured: on each rank the most in each phase of the step."""

    model: str
    plan: str
    predicted: Peak
    measured: tuple[dict[str, int], ...]
    estimated_bytes: int

    @property
    def measured_bytes(self) -> int:
        """Of the rank that has most."""
        return max(max(phases.values()) for phases in self.measured)

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted.total_bytes / self.measured_bytes - 1


def build(name: str) -> Case:
    """The model with its weights and a batch, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = MODELS[name]()
    return case._replace(model=case.model.train())


def sample_of(name: str) -> Sample:
    """The same for a plan in stages."""
    case = build(name)
    return Sample(case.model, case.args, case.kwargs, None)


def training_of(kind: str, param_dtype: str = "") -> Training:
    """AdamW; microbatches where the plan is named after them."""
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": "float32" if param_dtype else ""}
    return Training("adamw", 4 if kind == "4 microbatches" else 1, **dtypes)


def plan_called(name: str, kind: str, param_dtype: str = "") -> Plan:
    """One of `KINDS`, computed in `param_dtype`; the graph is that of a microbatch."""
    training = training_of(kind, param_dtype)
    case = microbatch(build(name), 0, training.num_microbatches)
    given = skeleton(case.model), None, case.args, case.kwargs
    graph = training.reduced(traced_in(training.compute_dtype, traced, *given))
    if kind == "searched":
        cluster = load_cluster("free-links")
        unlimited = make_plan(
            graph, MESH, cluster, PlanRequest(memory_limit_bytes=math.inf), budget=Budget.of(TIME_LIMIT_S)
        )
        least = unlimited.costs.total_memory_bytes
        return make_plan(
            graph, MESH, cluster, PlanRequest(memory_limit_bytes=0.8 * least), budget=Budget.of(TIME_LIMIT_S)
        )
    folded = fold(graph)
    by_hand = parse_hand_plan({"recomputed": "megatron", "4 microbatches": "zero2"}.get(kind, kind), MESH)
    assignment = hand_plan(by_hand, graph, folded, annotate(graph, MESH, folded), MESH)
    if kind == "recomputed":
        assignment = replace(assignment, recomputed=recomputable(folded, graph))
    return plan_of(graph, assignment, MESH, load_cluster("cpu"), training=training)


def measure_on_rank(name: str, plan: Plan) -> dict[str, int]:
    """On every rank: the most bytes in each phase of a step, in the step in which that is least."""
    case, count = build(name), plan.training.num_microbatches
    loaded = load_program(plan, case.model, device_mesh(MESH.shape, MESH.axis_names), is_split=count > 1)
    optimizer = torch.optim.AdamW(case.model.parameters(), foreach=False)

    def step(tell: Callable[[str], None]) -> None:
        opened = open_step(loaded, count) if count > 1 else None
        tell("gather")
        for number in range(count):
            part = microbatch(case, number, count)
            loss = case.loss(run(loaded, part.args, part.kwargs, None, is_whole=False))
            tell(f"0F{number}")
            loss.backward()
            del loss
            tell(f"0B{number}")
        if opened is not None:
            opened.close()
        tell("reduce")
        optimizer.step()
        tell("update")
        optimizer.zero_grad()

    step(lambda _: None)
    state = [x for of_parameter in optimizer.state.values() for x in of_parameter.values()]
    batch = [x for x in tree_leaves((case.args, case.kwargs)) if isinstance(x, torch.Tensor)]
    phases: dict[str, int] = {}

    def tell(phase: str) -> None:
        most = storages.restart()
        phases[phase] = min(phases.get(phase, most), most)

    with count_storages(
        [*case.model.parameters(), *case.model.buffers(), *loaded.constants.values(), *state, *batch]
    ) as storages:
        for _ in range(NUM_STEPS):
            storages.restart()
            step(tell)
    return phases


def measure(ranks: Ranks, name: str, kind: str, param_dtype: str = "") -> Row:
    """One row of the table."""
    plan = plan_called(name, kind, param_dtype)
    predicted = predict_peak(plan.graph, plan.mesh, plan.assignment, training=plan.training)
    measured = ranks.run(measure_on_rank, name, plan, timeout_s=120)
    return Row(name, kind, predicted, tuple(measured), plan.costs.total_memory_bytes)


def table_row(row: Row) -> Saved:
    """The row as it is saved."""
    return asdict(row) | {
        "row": f"{row.model}, {row.plan}",
        "measured_bytes": row.measured_bytes,
        "predicted_bytes": row.predicted.total_bytes,
        "phase": row.predicted.phase,
        "error_share": row.error,
    }


def cells(row: Saved) -> list[Cells]:
    """A line of either table: what tells its rows apart, then the figures."""
    first = (
        row["model"],
        *([row["mesh"], row["schedule"], row["rank_and_stages"]] if "mesh" in row else [row["plan"]]),
    )
    measured, predicted, estimated = (row[f"{kind}_bytes"] for kind in ("measured", "predicted", "estimated"))
    figures = _mib(measured), _mib(predicted), f"{row['error_share']:+.1%}", row["phase"]
    return [(*first, *figures, _mib(estimated), f"{estimated / measured - 1:+.1%}")]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


_FIGURES = ("measured, MiB", "predicted, MiB", "error", "phase", "estimate of the search, MiB", "its distance")
WHOLE = Table(
    "Peak memory of a step",
    TEXT,
    ("model", "plan", *_FIGURES),
    tuple(f"{name}, {kind}" for name in MODELS for kind in KINDS),
    cells,
)
IN_STAGES = Table(
    "Peak memory of a step in stages",
    STAGES_TEXT,
    ("model", "mesh", "schedule", "rank: stages", *_FIGURES),
    tuple(stages_name(name, *kind, rank) for name in MODELS for kind in MESHES_AND_SCHEDULES for rank in RANKS),
    cells,
)
TABLES = (WHOLE, IN_STAGES)


def main() -> None:
    """Measure, save after each plan, and say if a prediction is off."""
    wanted = selected(TABLES, parser(__doc__).parse_args(), "memory")
    ranks, errors = Ranks(MESH.num_devices), {}
    settings = {
        "mesh": str(MESH),
        "batch": BATCH,
        "sequence": SEQUENCE,
        "width": WIDTH,
        "layers": LAYERS,
        "vocabulary": VOCABULARY,
    }

    def save(table: Table, rows: list[Saved]) -> None:
        add("memory", TABLES, {table.title: rows}, settings)
        for row in rows:
            errors[row["row"]] = row["error_share"]
            print(f"{row['row']}: predicted {row['error_share']:+.1%}", file=sys.stderr, flush=True)

    for name in MODELS:
        for mesh, schedule in MESHES_AND_SCHEDULES:
            if {stages_name(name, mesh, schedule, rank) for rank in RANKS} & set(wanted[IN_STAGES.title]):
                save(IN_STAGES, list(map(stages_row, measure_stages(ranks, name, sample_of(name), mesh, schedule))))
        for kind in (kind for kind in KINDS if f"{name}, {kind}" in wanted[WHOLE.title]):
            save(WHOLE, [table_row(measure(ranks, name, kind))])
    ranks.stop()
    off = [row for row, error in errors.items() if abs(error) > TOLERANCE]
    if off:
        raise SystemExit(f"predictions are more than {TOLERANCE:.0%} off: {'; '.join(off)}")


if __name__ == "__main__":
    main()
