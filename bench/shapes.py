"""Calls of other sizes: what each takes, and how many traces and plans are made, on two gloo ranks of this machine.

    python -m bench.shapes [--rows 'transformer'] [--resume]

A row is a call of a model that has been called with other sizes before, in the order of the rows of its model. `CPU` is
that of the thread which calls, on the first rank, which plans: where others use the cores too, it tells more. The rows
of `generate` have the same on one device. Garbage is collected before each call: to collect all generations takes 200
ms of CPU after torch and transformers were imported, in whichever call it falls due.
"""

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

NUM_RANKS = 2
VOCABULARY = 1000
SIZES = {  # of calls, in order: (rows, tokens)
    "first call": (8, 64),
    "the same again": (8, 64),
    "second length": (8, 96),
    "third length": (8, 80),
    "fourth length, odd": (8, 73),
    "last batch": (4, 73),
    "last batch, odd": (3, 73),
    "first length again": (8, 64),
}
WAYS = {"gpt2": True, "gpt2 for inference": False}  # of generate: whether the compiled model trains
PROMPTS = {"first prompt": 5, "second prompt": 8, "third prompt": 11}
NUM_NEW = 32


class Transformer(nn.Module):
    """Two layers with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.table(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Gpt2(nn.Module):
    """Two layers of GPT-2 with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gpt2() -> GPT2LMHeadModel:
    """GPT-2 with two layers, which ends no text early."""
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"transformer": Transformer, "gpt2": Gpt2}


@dataclass
class Counts:
    """How often models were planned and exported."""

    plans: int = 0
    exports: int = 0


def counting(counts: Counts, model: nn.Module) -> Any:
    """A context that counts what is made for the calls of `model`."""
    plan, export = model._autopar.plan, torch.export.export

    class Planner:
        peaks = staticmethod(plan.peaks)

        def __call__(self, *args: Any) -> Any:
            counts.plans += 1
            return plan(*args)

    def exported(*args: Any, **kwargs: Any) -> Any:
        counts.exports += 1
        return export(*args, **kwargs)

    model._autopar.plan = Planner()
    return patch.object(torch.export, "export", exported)


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds, CPU seconds of this thread, result) of work that all ranks begin together."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.thread_time()
    result = work()
    return time.perf_counter() - start_s, time.thread_time() - cpu_s, result


def row_name(model: str, call: str) -> str:
    """The name of a row of either table."""
    return f"{model}, {call}"


def measure_calls(name: str) -> list[Row]:
    """A row for each call, on every rank; the loss must be that of one device."""
    torch.manual_seed(0)
    truth = MODELS[name]()
    torch.manual_seed(0)
    model = compiled(MODELS[name]())
    counts, rows = Counts(), []
    with counting(counts, model):
        for call, (batch, length) in SIZES.items():
            tokens = torch.randint(VOCABULARY, (batch, length))
            before = counts.plans, counts.exports
            seconds, cpu_s, loss = timed(lambda tokens=tokens: model(tokens))
            made = {"plans": counts.plans - before[0], "exports": counts.exports - before[1]}
            distance = float((loss - truth(tokens)).abs() / truth(tokens).abs())
            rows.append({"row": row_name(name, call), "seconds": seconds, "cpu_s": cpu_s, **made, "distance": distance})
    return rows


def compiled(model: nn.Module, *, trains: bool = True) -> nn.Module:
    """The model on all ranks, planned at its first call."""
    return autopar.compile(model, (NUM_RANKS,), cluster="cpu", trains=trains)


def measure_generate(way: str) -> list[Row]:
    """A row for each prompt, on every rank; the tokens must be those of one device."""
    torch.manual_seed(0)
    truth = gpt2().eval()
    torch.manual_seed(0)
    model = compiled(gpt2().eval(), trains=WAYS[way])
    counts, rows = Counts(), []
    with counting(counts, model):
        for call, length in PROMPTS.items():
            prompt = torch.randint(VOCABULARY, (1, length))
            before = counts.plans, counts.exports
            options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
            alone_s, alone_cpu_s, expected = timed(
                lambda prompt=prompt, options=options: truth.generate(prompt, **options)
            )
            seconds, cpu_s, found = timed(lambda prompt=prompt, options=options: model.generate(prompt, **options))
            made = {"plans": counts.plans - before[0], "exports": counts.exports - before[1]}
            if not torch.equal(found, expected):
                raise RuntimeError(f"generate gives {found}, one device {expected}")
            alone = {"alone_s": alone_s, "alone_cpu_s": alone_cpu_s}
            rows.append({"row": row_name(way, call), "seconds": seconds, "cpu_s": cpu_s, **alone, **made})
    return rows


def _call_cells(row: Row) -> Iterable[Cells]:
    times = f"{1e3 * row['seconds']:.0f}", f"{1e3 * row['cpu_s']:.0f}"
    yield row["row"], *times, str(row["exports"]), str(row["plans"]), f"{row['distance']:.0e}"


def _generate_cells(row: Row) -> Iterable[Cells]:
    times = [f"{1e3 * row[name]:.0f}" for name in ("seconds", "cpu_s", "alone_s", "alone_cpu_s")]
    ratios = f"{row['seconds'] / row['alone_s']:.1f}", f"{row['cpu_s'] / row['alone_cpu_s']:.1f}"
    yield row["row"], *times, *ratios, str(row["exports"]), str(row["plans"])


CALLS = Table(
    "Calls of other sizes",
    f"Forward of models of two layers, 128 wide, on {NUM_RANKS} gloo processes of one machine, in this order: {SIZES}"
    " (rows, tokens). Exports and plans: made for this call. Loss: its relative distance from that of one device.",
    ("call", "ms", "CPU of the caller, ms", "exports", "plans", "loss"),
    tuple(row_name(model, call) for model in MODELS for call in SIZES),
    _call_cells,
)
GENERATE = Table(
    "generate",
    f"{NUM_NEW} tokens by GPT-2 with two layers, 128 wide, and a cache, after prompts of {tuple(PROMPTS.values())}"
    f" tokens, on {NUM_RANKS} gloo processes of one machine, and on one of them without autopar. For inference:"
    " compiled with trains=False, as a model that is not trained here.",
    (
        "call",
        "ms",
        "CPU of the caller, ms",
        "one device, ms",
        "its CPU, ms",
        "ratio",
        "ratio of CPU",
        "exports",
        "plans",
    ),
    tuple(row_name(way, call) for way in WAYS for call in PROMPTS),
    _generate_cells,
)
TABLES = (CALLS, GENERATE)


def run_rank(rank: int, folder: str, wanted: dict[str, Sequence[str]]) -> None:
    """One rank of the benchmark; rank 0 writes the results."""
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=NUM_RANKS)
    found: dict[str, list[Row]] = {CALLS.title: [], GENERATE.title: []}
    for model in MODELS:
        if any(row.startswith(f"{model},") for row in wanted[CALLS.title]):
            found[CALLS.title] += measure_calls(model)
    for way in WAYS:
        if any(row.startswith(f"{way},") for row in wanted[GENERATE.title]):
            found[GENERATE.title] += measure_generate(way)
    if rank == 0:
        shared = {"cores for all ranks": len(os.sched_getaffinity(0)), "load before": load}
        add("shapes", TABLES, found, {"threads a rank": 1, **shared})
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Read the settings and start the ranks; all calls of a model are made if one of its rows is asked for."""
    wanted = selected(TABLES, parser(__doc__).parse_args(arguments), "shapes")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(run_rank, (folder, wanted), NUM_RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
