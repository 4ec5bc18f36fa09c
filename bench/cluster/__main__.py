"""Steps of autopar beside those of libraries on networks of this machine, in one run.

    python -m bench.cluster [--rows 'loopback|4x1 1gbit'] [--resume]

A network is calibrated, then autopar, with the mesh left open and in each library's layout, and the libraries take
turns in the same processes. Before it is timed, every variant trains a few steps whose losses must be those of one
process. Needs root and iproute2, but for the loopback of one host; for titan-llama also torchtitan, which `make
test-trainers` installs in .venv-trainers.
"""

from importlib.util import find_spec
from statistics import median

from bench.cluster.libraries import BUCKETS_MB, DDP, LIBRARIES, variants_of
from bench.cluster.picture import draw
from bench.cluster.run_ranks import FLOOR, OWN, ROUNDS, SAME
from bench.each_network import measure_rows, row_names
from bench.models import CLUSTER_WORKLOADS, TITAN
from bench.networks.run_ranks import MOST_STEPS
from bench.report import RESULTS, Cells, Row, Table, load

Seconds = dict[str, list[float]]


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """(median, least, most) of the rounds' ratios; with 7 rounds the last two enclose the median with 98 %.

    >>> ratio([2.0, 1.0, 3.0], [2.0, 2.0, 2.0])
    (1.0, 0.5, 1.5)
    """
    ratios = [mine / theirs for mine, theirs in zip(one, other, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def fastest(seconds: Seconds, library: str = "") -> str:
    """The variant of least median time, of a library or of all."""
    by_hand = [name for one in ([library] if library else LIBRARIES) for name in variants_of(one, seconds)]
    return min(by_hand, key=lambda name: median(seconds[name]))


def _shown(mine: list[float], theirs: list[float]) -> str:
    middle, least, most = ratio(mine, theirs)
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def cells(row: Row) -> list[Cells]:
    """The line of one model on one network."""
    seconds: Seconds = row["seconds"]
    best = fastest(seconds)
    same = (
        _shown(seconds[f"{OWN} as {library}"], seconds[fastest(seconds, library)])
        if f"{OWN} as {library}" in seconds
        else "-"
        for library in SAME
    )
    times = (f"{1e3 * median(seconds[name]):.0f}" for name in (OWN, best))
    to_floor = _shown(seconds[f"{OWN} as {DDP}"], seconds[FLOOR])
    return [(row["network"], row["model"], *times, best, _shown(seconds[OWN], seconds[best]), *same, to_floor)]


RANKS = "bench.cluster.run_ranks"
TABLE = Table(
    "Steps beside libraries on networks of this machine",
    "Training steps (forward, backward, AdamW) of four gloo ranks in network namespaces whose links tc limits, one"
    f" thread a rank, ratios of {ROUNDS} rounds of up to {MOST_STEPS} steps in turn: median, least and most. autopar:"
    " mesh left open, planned for the network's own calibration. As a library: the same layout, run by autopar, over"
    f" the library (DDP: the best of {len(BUCKETS_MB)} bucket sizes). Among the best by hand are also HSDP, of two"
    " replicas, and pipelining: 1F1B of four stages, or of two with FSDP2, where torch.distributed.pipelining can cut"
    " the model (gpt, long-gpt, wide-mlp, vgg13)."
    " titan-llama: torchtitan's Llama 3 under its own parallelize_llama. Floor of DDP: its compute and one all-reduce"
    " of all gradients at once, of which none waits for the other.",
    (
        "network",
        "model",
        "autopar, ms",
        "best by hand, ms",
        "which is",
        "autopar over it",
        *(f"as {library}" for library in SAME),
        "as DDP over its floor",
    ),
    row_names(CLUSTER_WORKLOADS),
    cells,
)


def main() -> None:
    """Measure the rows that are asked for, and draw all."""
    models = [name for name in CLUSTER_WORKLOADS if name != TITAN or find_spec("torchtitan")]
    measure_rows("cluster", TABLE, RANKS, __doc__, models)
    if rows := [row for row in load("cluster").get(TABLE.title, ()) if "error" not in row]:
        draw(rows, str(RESULTS / "cluster.png"))


if __name__ == "__main__":
    main()
