"""Loss curves in bfloat16 over float32 parameters beside float32 on one device: `python -m bench.low_precision [--rows
'^gpt2']`, three to eight minutes on 2 cores.

GPT-2 on text of Python's documentation, by bytes, and ViT on noisy patterns of ten classes, with random first weights.
"""

import copy
import itertools
import pydoc_data.topics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

import autopar
from bench.report import RESULTS, Cells, Row, Table, add, load
from bench.rows import parser, selected
from tests.workers import Ranks, device_mesh

STEPS, BATCH, LENGTH, WIDTH, LAYERS, HEADS = 200, 16, 64, 64, 2, 4
CLASSES, IMAGE = 10, 16
LEARNING_RATE = 1e-3
SMOOTH = 20  # steps of which means are compared
SEEDS = (0, 1)
TEXT = f"""Each run is {STEPS} steps of AdamW on the same batches. "Seed" is that of the first weights. The runs in
bfloat16 compute in bfloat16 over float32 parameters (`param_dtype=torch.bfloat16`) on 4 gloo ranks, dp=2,tp=2, with the
first weights of seed 0. The distance of two curves is the mean, over windows of {SMOOTH} steps, of the difference of
the windows' means. A run is within the spread if it is no further from seed 0 than seed 1 is."""


@dataclass(frozen=True)
class Curve:
    """A run: the plan's stored, computed and summed dtypes in words, and the loss of each step."""

    model: str
    run: str
    losses: tuple[float, ...]


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": 256, "n_positions": LENGTH}
    drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=None, eos_token_id=None, use_cache=False))
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    return model


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}
    images = {"image_size": IMAGE, "patch_size": 4, "num_channels": 3, "num_attention_heads": HEADS}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **images, **drops, num_labels=CLASSES))


MODELS = {"gpt2": _gpt2, "vit": _vit}
RUNS: Mapping[str, Mapping[str, Any]] = {
    **{f"float32, one device, seed {seed}": {"seed": seed} for seed in SEEDS},
    "bfloat16, sums in float32, 4 ranks": {"options": {"param_dtype": torch.bfloat16}},
    "bfloat16, sums in bfloat16, 4 ranks": {"options": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}},
}


def built(name: str, seed: int) -> nn.Module:
    """The model with the first weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().train()


def batches(name: str, num_steps: int) -> Iterable[dict[str, torch.Tensor]]:
    """The same batches for each run."""
    draw = torch.Generator().manual_seed(0)
    text = "".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    patterns = torch.randn(CLASSES, 3, IMAGE, IMAGE, generator=draw)
    for _ in range(num_steps):
        if name == "gpt2":
            starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=draw)
            ids = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
            yield {"input_ids": ids, "labels": ids.clone()}
        else:
            labels = torch.randint(CLASSES, (BATCH,), generator=draw)
            noise = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=draw)
            yield {"pixel_values": patterns[labels] + 3 * noise, "labels": labels}


def train(name: str, num_steps: int, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> tuple[float, ...]:
    """The losses on this rank, compiled if there are `options`, else on one device."""
    model, given = built(name, seed), list(batches(name, num_steps))
    step = lambda batch: _backward(model, batch)  # noqa: E731
    if options is not None:
        mesh = device_mesh((2, 2), ("dp", "tp"))
        # links that cost nothing, so that the plan splits what it can
        how = {"kwargs": copy.copy(given[0]), "cluster": "free-links", "time_limit_s": 5.0}
        compiled = autopar.compile(model, mesh, **how, **options)
        step = lambda batch: compiled.train_step(**batch)  # noqa: E731
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), []
    for batch in given:
        optimizer.zero_grad()
        losses.append(float(step(batch)))
        optimizer.step()
    return tuple(losses)


def _backward(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def curve(ranks: Ranks, name: str, run: str, num_steps: int = STEPS) -> Curve:
    """A run, on one device in this process."""
    how = dict(RUNS[run])
    if "options" not in how:
        return Curve(name, run, train(name, num_steps, **how))
    losses, *others = ranks.run(_on_rank, name, num_steps, how, timeout_s=600)
    assert all(other == losses for other in others), "all ranks have the whole loss"
    return Curve(name, run, losses)


def _on_rank(name: str, num_steps: int, how: dict[str, Any]) -> tuple[float, ...]:
    return train(name, num_steps, **how)


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """The mean, over windows of `SMOOTH` steps, of the difference of their means."""
    pairs = zip(_windows(losses), _windows(others), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return sum(differences) / len(differences)


def _windows(losses: Sequence[float]) -> list[float]:
    rows = (losses[start : start + SMOOTH] for start in range(0, len(losses), SMOOTH))
    return [sum(row) / len(row) for row in rows]


def row_name(model: str, run: str) -> str:
    """The name of a row of the result file."""
    return f"{model}, {run}"


def cells(row: Row) -> list[Cells]:
    """A line of the table: its losses, and its distance from seed 0 as a share of that of the other seed."""
    saved = load("low_precision").get(TITLE, ())
    found = {each["run"]: each["losses"] for each in saved if each["model"] == row["model"]}
    found[row["run"]] = row["losses"]
    first, other = (found.get(f"float32, one device, seed {seed}") for seed in SEEDS)
    last = sum(row["losses"][-SMOOTH:]) / SMOOTH
    if first is None or other is None:
        return [(row["model"], row["run"], f"{row['losses'][0]:.3f}", f"{last:.3f}", "", "")]
    own, spread = distance(row["losses"], first), distance(other, first)
    is_within = "" if row["run"].startswith("float32") else ("yes" if own <= spread else "NO")
    return [(row["model"], row["run"], f"{row['losses'][0]:.3f}", f"{last:.3f}", f"{own:.4f}", is_within)]


TITLE = "Loss curves in bfloat16 over float32 parameters"
CURVES = Table(
    TITLE,
    TEXT,
    ("model", "run", "first loss", f"mean of the last {SMOOTH}", "distance from seed 0", "within the spread"),
    tuple(row_name(model, run) for model in MODELS for run in RUNS),
    cells,
)
TABLES = (CURVES,)


def draw(rows: Sequence[Row], path: str) -> None:
    """The curves of each model, means over `SMOOTH` steps."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(MODELS))
    for panel, model in zip(panels, MODELS):
        for row in (row for row in rows if row["model"] == model):
            style = "--" if row["run"].startswith("float32") else "-"
            means = _windows(row["losses"])
            steps = [SMOOTH * number + SMOOTH / 2 for number in range(len(means))]
            panel.plot(steps, means, style, label=row["run"])
        panel.set(title=model, xlabel="step", ylabel=f"loss, mean of {SMOOTH} steps")
    panels[0].legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Train, save after each run, and say which run is out of the spread."""
    wanted = selected(TABLES, parser(__doc__).parse_args(), "low_precision")[TITLE]
    ranks = Ranks(4)
    settings = {"steps": STEPS, "batch": BATCH, "width": WIDTH, "layers": LAYERS, "learning_rate": LEARNING_RATE}
    for model, run in itertools.product(MODELS, RUNS):
        if row_name(model, run) in wanted:
            made = asdict(curve(ranks, model, run)) | {"row": row_name(model, run)}
            add("low_precision", TABLES, {TITLE: [made]}, settings)
            print(f"{made['row']}: {made['losses'][0]:.3f} to {made['losses'][-1]:.3f}", flush=True)
    ranks.stop()
    rows = load("low_precision")[TITLE]
    add("low_precision", TABLES, {}, settings)  # with the distances of all rows
    draw(rows, str(RESULTS / "low_precision.png"))
    if off := [row["row"] for row in rows if cells(row)[0][-1] == "NO"]:
        raise SystemExit(f"out of the spread of two seeds: {'; '.join(off)}")


if __name__ == "__main__":
    main()
