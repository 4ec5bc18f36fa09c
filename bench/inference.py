"""Inference: plans of prefill and decode by price, and what `generate` takes beside one device.

    python -m bench.inference [--rows 'llama3-70b'] [--resume]

Times of `generate` are CPU seconds of the calling thread of the first rank, the least of several runs, for each token.
Of a length that is known, each run is of the same prompt; of new lengths, each run has a prompt of another one, first
some for which the model is recorded, then some for which one program runs all lengths.
"""

import copy
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.mesh import Mesh
from autopar.models.inference import inference_example
from autopar.models.target import load_target
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import FORWARD_ALONE
from autopar.plans.plan import Plan
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected
from bench.shapes import VOCABULARY, gpt2

MODEL, CLUSTER, DEVICES, HAND = "llama3-70b", "h100", 8, "megatron:tp=8"
CALLS = {  # name -> (samples, tokens before the one that is decoded; None: prefill)
    "prefill, 32 prompts of 8192 tokens": (32, None),
    "decode, 64 samples, 8192 tokens before": (64, 8192),
    "decode, 8 samples, 8192 tokens before": (8, 8192),
}
LIMIT_S = 120.0  # of planning, which takes longer on two cores that others use
NUM_NEW, NUM_RUNS = 32, 10
FIRST_LENGTHS = (5, 8, 11, 14)
RANKS = (1, 2, 4)


def llama() -> nn.Module:
    """Llama with two layers, 64 wide, which ends no text early."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    model.generation_config.eos_token_id = None
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}
WAYS = {"inference": False, "training": True}  # what the model is compiled for: `trains`


def plan_name(call: str) -> str:
    """The name of a row of plans."""
    return f"{MODEL}, {call}"


def generate_name(model: str, way: str, ranks: int) -> str:
    """The name of a row of `generate`."""
    return f"{model}, compiled for {way}, {ranks} rank{'s' * (ranks > 1)}"


def plan_row(call: str) -> Row:
    """The plan that is found for a call, and that by hand; both are priced alike."""
    samples, past = CALLS[call]
    example = inference_example(MODEL, load_target(MODEL, sizes={"batch": samples}), past)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    found = autopar.plan(
        example.model,
        str(DEVICES),
        cluster=CLUSTER,
        args=example.args,
        kwargs=example.kwargs,
        trains=False,
        time_limit_s=LIMIT_S,
    )
    taken = {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
    assert isinstance(found, Plan), "a call has no stages"
    mesh = Mesh((DEVICES,), ("a0",))
    hand = named_plan(HAND, example.model, found.graph, mesh, load_cluster(CLUSTER), FORWARD_ALONE)
    prices = {"step_s": found.step_s, "bound_s": found.lower_bound_s, "hand_s": hand.step_s}
    peaks = {"peak_bytes": max(found.peak_bytes), "found_by": found.found_by, "mesh": str(found.mesh)}
    return {"row": plan_name(call), **prices, **peaks, **taken}


def measure_generate(name: str, way: str, ranks: int) -> Row:
    """The times of one device and of the compiled model, on every rank; the tokens must be equal."""
    torch.manual_seed(0)
    truth = MODELS[name]().eval()
    model = autopar.compile(copy.deepcopy(truth), (ranks,), cluster="cpu", trains=WAYS[way])
    for length in FIRST_LENGTHS:
        _both(truth, model, length)
    known = [_both(truth, model, FIRST_LENGTHS[-1]) for _ in range(NUM_RUNS)]
    later = [_both(truth, model, FIRST_LENGTHS[-1] + 1 + i) for i in range(NUM_RUNS)]
    alone_s = min(alone for alone, _ in known + later)
    recorded, sized = later[: NUM_RUNS // 3], later[-NUM_RUNS // 3 :]
    times = {"known_s": known, "recorded_s": recorded, "sized_s": sized}
    least = {key: min(own for _, own in runs) for key, runs in times.items()}
    return {"row": generate_name(name, way, ranks), "alone_s": alone_s, **least, "is_split": _is_split(model)}


def _is_split(model: Any) -> bool:
    return any(p.is_split for layout in model.plan.assignment.layouts.values() for p in layout)


def _both(truth: Any, model: Any, length: int) -> tuple[float, float]:
    """CPU seconds for each new token, of one device and of the compiled model."""
    prompt = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    (alone_s, expected), (own_s, found) = (_timed(each, prompt) for each in (truth, model))
    if not torch.equal(found, expected):
        raise RuntimeError(f"generate gives {found}, one device {expected}")
    return alone_s, own_s


def _timed(model: Any, prompt: torch.Tensor) -> tuple[float, torch.Tensor]:
    gc.collect()
    dist.barrier()
    start_s = time.thread_time()
    tokens = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    return (time.thread_time() - start_s) / NUM_NEW, tokens


def _plan_cells(row: Row) -> Iterable[Cells]:
    prices = [f"{1e3 * row[key]:.2f}" for key in ("step_s", "hand_s", "bound_s")]
    yield row["row"], row["mesh"], *prices, f"{row['peak_bytes'] / 2**30:.1f}", row["found_by"], f"{row['cpu_s']:.0f}"


def _generate_cells(row: Row) -> Iterable[Cells]:
    times = [row[key] for key in ("known_s", "recorded_s", "sized_s")]
    split = "yes" if row["is_split"] else "no"
    ratios = [f"{1e3 * each:.2f} ({each / row['alone_s']:.2f})" for each in times]
    yield row["row"], split, f"{1e3 * row['alone_s']:.2f}", *ratios


PLANS = Table(
    "Plans of inference",
    f"By price, bfloat16, on {DEVICES} devices of {CLUSTER}; by hand: {HAND}. Prefill gives the cache and the last"
    " token's logits; decode, one token of each sample.",
    ("call", "mesh", "found, ms", "by hand, ms", "bound, ms", "peak, GiB", "found by", "CPU of planning, s"),
    tuple(map(plan_name, CALLS)),
    _plan_cells,
)
GENERATE = Table(
    "generate, a token",
    f"{NUM_NEW} tokens of one sample by models of two layers, with a cache, on gloo processes of one machine; plans for"
    " the preset cpu. CPU of the caller in ms for each token, and beside one device without autopar (ratio).",
    ("model", "split", "one device", "length known", "new length, recorded", "new length, one program"),
    tuple(generate_name(model, way, ranks) for model in MODELS for way in WAYS for ranks in RANKS),
    _generate_cells,
)
TABLES = (PLANS, GENERATE)


def run_rank(rank: int, folder: str, ranks: int, wanted: Sequence[str]) -> None:
    """One rank of the rows of `generate`; rank 0 writes the results."""
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/world{ranks}", rank=rank, world_size=ranks)
    for name in MODELS:
        for way in WAYS:
            if generate_name(name, way, ranks) in wanted:
                row = measure_generate(name, way, ranks)
                if rank == 0:
                    shared = {"cores for all ranks": len(os.sched_getaffinity(0)), "load before": load}
                    add("inference", TABLES, {GENERATE.title: [row]}, {"threads a rank": 1, **shared})
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Read the settings, plan, and start the ranks."""
    wanted = selected(TABLES, parser(__doc__).parse_args(arguments), "inference")
    for call in CALLS:
        if plan_name(call) in wanted[PLANS.title]:
            add("inference", TABLES, {PLANS.title: [plan_row(call)]}, {})
    for ranks in RANKS:
        if any(generate_name(name, way, ranks) in wanted[GENERATE.title] for name in MODELS for way in WAYS):
            with tempfile.TemporaryDirectory() as folder:
                settings = folder, ranks, wanted[GENERATE.title]
                torch.multiprocessing.start_processes(run_rank, settings, ranks, start_method="spawn")


if __name__ == "__main__":
    main()
