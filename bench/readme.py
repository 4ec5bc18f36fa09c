"""The README's measured and predicted figures, written from the result files: `python -m bench.readme`.

A block of the README between `<!-- bench.readme NAME -->` and `<!-- end -->` is what `BLOCKS[NAME]` makes of
`bench/results`. A test compares them, and notices figures that are quoted outside of such blocks.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median

from tabulate import tabulate

from bench import memory, pipeline, step
from bench.cluster import __main__ as cluster
from bench.models import WORKLOADS
from bench.networks import __main__ as networks
from bench.papers import alpa, alpa_moe, autoddl, whale
from bench.published import TABLE as PUBLISHED
from bench.published import in_short, over_measured
from bench.report import Row, Table, load
from bench.search import RESULT_TABLES, WORTH, milliseconds, percent

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- bench\.readme ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The README with every block as the result files have it; KeyError for a block of another name."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]]() + "\n" + found[4], text)


def rows_of(name: str, table: Table) -> list[Row]:
    """The rows of a table that were measured and did not fail; LookupError if there are none."""
    found = [row for row in load(name).get(table.title, ()) if "error" not in row]
    if not found:
        raise LookupError(
            f"bench/results/{name}.json has no rows of {table.title!r}, which the README quotes; run python -m"
            f" bench.{name}"
        )
    return found


def source(name: str, tables: Sequence[Table]) -> str:
    """Where figures are from: file, command, commits, days and machines, and how many rows the tables have of those
    they should.
    """
    rows = [row for table in tables for row in rows_of(name, table)]
    commits, days, machines = (
        sorted({row["provenance"][key] for row in rows}) for key in ("commit", "date", "machine")
    )
    where = f"commit {', '.join(commits)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}; {', '.join(machines)}"
    num_all = sum(len(table.rows) for table in tables)
    lacks = "" if len(rows) == num_all else f" Rows that have figures: {len(rows)} of {num_all}."
    return f"*[{name}.md](bench/results/{name}.md), `python -m bench.{name}`: {where}.{lacks}*"


def grid(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table as the README has them."""
    body = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return re.sub(
        r"-{3,}", "---", re.sub(r" {2,}", " ", tabulate(body, header, tablefmt="github", disable_numparse=True))
    )


def span(values: Iterable[float], unit: str = "", spec: str = ".3g") -> str:
    """
    >>> span([1.0, 2.5], " s"), span([2.0, 2.0], spec=".2f")
    ('1 to 2.5 s', '2.00')
    """
    found = [f"{x:{spec}}" for x in sorted(values)]
    return " to ".join(dict.fromkeys((found[0], found[-1]))) + unit


def listed(items: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


STEP_NAMES = {"gpt": "small GPT", "wide-mlp": "wide MLP", "vgg13": "VGG13"}


def step_block() -> str:
    """Measured training steps, who wins where, and the regret."""
    rows = rows_of("step", step.TABLE)
    of = {model: {row["variant"]: row for row in rows if row["model"] == model} for model in WORKLOADS}
    of = {model: variants for model, variants in of.items() if variants}

    def cell(model: str, variant: str) -> str:
        shown = f"{1e3 * of[model][variant]['median_s']:.0f}"
        return f"**{shown}**" if variant == step.regret(list(of[model].values()))[1]["variant"] else shown

    lines = [(variant, *(cell(model, variant) for model in of)) for variant in step.VARIANTS]
    table = grid(("step, ms", *(STEP_NAMES[model] for model in of)), lines)
    said = " ".join(_regret_said(model, list(variants.values())) for model, variants in of.items())
    ratios = [row["median_s"] / row["predicted_s"] for row in rows if row["predicted_s"]]
    predicted = (
        f"Measured steps of autopar's plans take {span(ratios, ' times', '.2g')} what the cost model predicts with the"
        " calibration that `autopar.compile` made of the machine by itself."
    )
    return "\n\n".join([table, source("step", step.TABLES), said, predicted])


def _regret_said(model: str, rows: Sequence[Row]) -> str:
    _, best, regret = step.regret(rows)
    winner = "DistributedDataParallel wins" if best["variant"] == step.DDP else f"the fastest is {best['variant']}"
    chosen = f"the plan that autopar chose takes {regret:.2f} times as long (its regret)"
    return (
        f"On the {STEP_NAMES[model]} {winner}:"
        f" {chosen if best['variant'] != step.CHOSEN else 'autopar chose the fastest'}."
    )


def cluster_block() -> str:
    """Measured steps beside libraries on networks, and in each library's own layout."""
    rows = rows_of("cluster", cluster.TABLE)
    lines, best, same = [], [], dict[str, list[float]]()
    for row in rows:
        seconds = row["seconds"]
        by_hand = cluster.fastest(seconds)
        best.append(cluster.ratio(seconds[cluster.OWN], seconds[by_hand])[0])
        for library in cluster.SAME:
            if (own := seconds.get(f"{cluster.OWN} as {library}")) is not None:
                same.setdefault(library, []).append(cluster.ratio(own, seconds[cluster.fastest(seconds, library)])[0])
        times = (f"{1e3 * median(seconds[name]):.0f}" for name in (cluster.OWN, by_hand))
        lines.append((row["network"], row["model"], *times, by_hand, f"{best[-1]:.2f}"))
    table = grid(("network", "model", "autopar, ms", "best by hand, ms", "which is", "autopar over it"), lines)
    layouts = listed(
        [f"{library} {geometric_mean(ratios):.2f} ({span(ratios, '', '.2f')})" for library, ratios in same.items()]
    )
    said = (
        f"autopar's own plan takes {geometric_mean(best):.2f} times the best of the libraries, by geometric mean"
        f" ({span(best, '', '.2f')}). In a library's own layout autopar's execution over the library's: {layouts}."
    )
    return "\n\n".join(["![Steps](bench/results/cluster.png)", said, table, source("cluster", [cluster.TABLE])])


def networks_block() -> str:
    """Predicted beside measured steps of many plans on networks."""
    rows, lines = rows_of("networks", networks.TABLE), []
    for network in dict.fromkeys(row["network"] for row in rows):
        of = [row["points"] for row in rows if row["network"] == network]
        errors, regrets = [networks.error(point) for points in of for point in points], list(map(networks.regret, of))
        found = (fmean(errors), max(errors), fmean(regrets), max(regrets))
        lines.append((network, str(len(of)), str(len(errors)), *(f"{100 * share:.0f} %" for share in found)))
    header = ("network", "models", "plans", "mean error", "worst", "mean regret", "worst regret")
    return "\n\n".join([grid(header, lines), source("networks", [networks.TABLE])])


def planning_block() -> str:
    """How long planning takes."""
    plans, staged, scope = (rows_of("search", _search(name)) for name in ("plans", "stages", "scope"))
    times = [row["plan_s"] for row in plans]
    free = {axes: [row["none"]["search_s"] for row in scope if row["mesh"].count("x") + 1 == axes] for axes in (2, 3)}
    alone = listed([f"{span(found, ' s', '.2g')} on {axes} mesh axes" for axes, found in free.items() if found])
    gap, bound_gap = (percent(max(row[limit]["gap"] for row in scope)) for limit in ("none", "binding"))
    said = (
        f"Model in to plan out takes {span(times, ' s')} on the rows of the table under Predicted (median"
        f" {median(times):.3g} s), the check of the peak included, and {span([row['plan_s'] for row in staged], ' s')}"
        f" on those made for stages. The search alone, without a memory limit, takes {alone}, with a gap of at most"
        f" {gap}; under a limit that binds it takes {span([row['binding']['search_s'] for row in scope], ' s', '.2g')},"
        f" with a gap of at most {bound_gap}."
    )
    return "\n\n".join([said, source("search", [_search(name) for name in ("plans", "stages", "scope")])])


def pipeline_block() -> str:
    """Simulated and predicted pipeline steps."""
    simulated, predicted = rows_of("pipeline", pipeline.SIMULATED), rows_of("pipeline", pipeline.PREDICTED)
    sleeping = [row for row in simulated if row["stages"] != "computes"]
    alone = [
        f"{STEP_NAMES[row['model']]} in two stages takes {1e3 * row['measured_s']:.0f} ms, of which the cost model"
        f" alone predicts {1e3 * row['predicted_s']:.0f} ms"
        for row in predicted
    ]
    said = (
        "Pipelines: real steps take"
        f" {span([row['measured_s'] / row['simulated_s'] for row in simulated], ' times', '.2f')} what the simulator"
        " says. The simulator is given the time that each stage and each send was measured to take, so this tests the"
        f" order and the waiting, not the cost model; in {len(sleeping)} of the {len(simulated)} cases the stages sleep"
        f" for a given time instead of computing. Without given times, a step of the {listed(alone)}."
    )
    return "\n\n".join([said, source("pipeline", pipeline.TABLES)])


def memory_block() -> str:
    """Predicted peaks beside counted ones."""
    rows = [row for table in memory.TABLES for row in rows_of("memory", table)]
    away = [row["estimated_bytes"] / row["measured_bytes"] - 1 for row in rows]
    said = (
        "Peaks of memory: predicted ones differ from counted ones by at most"
        f" {max(abs(row['error_share']) for row in rows):.1%} in {len(rows)} cases of small models. Tensors were"
        f" counted, on CPU, on ranks that hold at most {max(row['measured_bytes'] for row in rows) / 2**20:.0f} MiB:"
        " neither an allocator's fragmentation nor a model that fills a device was measured. The estimate that the"
        f" search adds up lies {max(0.0, -min(away)):.0%} below to {max(0.0, max(away)):.0%} above the counted peak."
    )
    return "\n\n".join([said, source("memory", memory.TABLES)])


def _search(name: str) -> Table:
    return next(table for table in RESULT_TABLES if table.title == name)


def plans_block() -> str:
    """Every row of the suite beside the best plan by hand."""
    table = _search("plans")
    header = ("model", "devices", "batch", "plan", "step, ms", "gap", "best by hand", "by hand / plan")
    lines = grid(header, map(_plan_line, load("search").get(table.title, ())))
    return "\n\n".join([lines, source("search", [table]), _beaten(rows_of("search", table))])


def _plan_line(row: Row) -> tuple[str, ...]:
    asked = row["model"], f"{row['devices']} {row['cluster']}", str(row["batch"])
    if "error" in row:
        return (*asked, f"no plan: {row['error'][:60]}", "-", "-", "-", "-")
    plan = row["mesh"] if row["schedule"].startswith("one stage") else f"{row['mesh']}; {_short(row['schedule'])}"
    found = plan, milliseconds(row["step_s"]), percent(row["gap"])
    if not row.get("hand_name"):
        return (*asked, *found, "not known" if "hand_unknown" in row else "none fits", "-")
    return (*asked, *found, _plain(row["hand_name"]), f"{row['hand_step_s'] / row['step_s']:.2f}")


def _beaten(rows: Sequence[Row]) -> str:
    """On which rows a plan by hand is faster."""
    faster = {row["row"]: row["hand_step_s"] / row["step_s"] for row in rows if row.get("hand_step_s")}
    faster = {name: ratio for name, ratio in faster.items() if ratio < 1 - 1e-6}
    if not faster:
        return "Under the same cost model no plan by hand is faster on these rows."
    least = f"{1 - min(faster.values()):.1%}"
    why = (
        f"; autopar chooses stages only where they gain more than {WORTH:.0%}"
        if min(faster.values()) >= 1 - WORTH
        else ""
    )
    return f"Under the same cost model a plan by hand is faster on {listed(list(faster))}, by at most {least}{why}."


def _short(schedule: str) -> str:
    """
    >>> _short("interleaved, 8 stages on 2 ranks, 16 microbatches")
    'interleaved, m=16'
    >>> _short("accumulate, 1 stages on 1 ranks, 8 microbatches")
    'm=8'
    """
    name, _, microbatches = schedule.split(", ")
    return ", ".join([name] * (name != "accumulate") + [f"m={microbatches.split()[0]}"])


def _plain(hand: str) -> str:
    """
    >>> _plain("pp=4,zero2,1f1b,m=8,balanced,recompute none"), _plain("pp=1,ddp,accumulate,m=1,balanced,recompute none")
    ('pp=4,zero2,1f1b,m=8', 'ddp')
    """
    words = [
        word for word in hand.split(",") if word not in ("pp=1", "accumulate", "m=1", "balanced", "recompute none")
    ]
    return ",".join(words)


def stages_block() -> str:
    """The rows that are made for stages."""
    table = _search("stages")
    rows = rows_of("search", table)
    gains = [row["hand_step_s"] / row["step_s"] for row in rows if row.get("hand_step_s")]
    num_staged = sum(row["mesh"].startswith("pp=") for row in rows)
    said = (
        f"On {len(rows)} more rows, where devices are small or links slow, {num_staged} of the plans have stages; under"
        f" the same cost model the best plan by hand takes {span(gains, ' times', '.2f')} as long as autopar's."
    )
    return "\n\n".join([said, source("search", [table])])


def published_block() -> str:
    """The plans found beside the best ones by hand that makers of libraries publish."""
    rows = rows_of("published", PUBLISHED)
    ratios = [row["found"]["step_s"] / row["published"]["step_s"] for row in rows]
    in_bf16, slower = over_measured(rows)
    said = (
        "The best plans by hand that makers of libraries publish for H100, and the plans found for the same devices,"
        f" batch and sequence, at most as large: these take {span(ratios, ' times', '.2f')} as long, by the cost model"
        f" (median {median(ratios):.2f}). Both are priced as they would run here, without the overlap that those"
        " libraries have; how such plans are predicted as their libraries run them is in"
        " [fidelity.md](bench/results/fidelity.md). Where the published step was measured in bfloat16, that of the plan"
        f" found is {span(in_bf16, ' times', '.2f')} that step (median {median(in_bf16):.2f}); above it for"
        f" {' and '.join(slower) or 'none'}."
    )
    header = ("published plan", "plan found", "step, times", "its step, s", "published, measured, s")
    table = grid(header, map(in_short, rows))
    return "\n\n".join([said, table, source("published", [PUBLISHED])])


def papers_block() -> str:
    """Published comparisons: ranges over settings that are not known, and scaling."""
    return "\n\n".join(
        [_autoddl(), _whale(), *_alpa(), source("papers", [alpa.ALPA.tables[0], alpa_moe.ALPA_MOE.tables[0], *_VARIED])]
    )


_VARIED = (autoddl.AUTODDL.tables[0], whale.WHALE.tables[0])


def _autoddl() -> str:
    rows, lines = rows_of("papers", _VARIED[0]), []
    for model in autoddl.MODELS:
        for has_several, nodes in ((False, "one GPU a node"), (True, "8 GPUs a node")):
            own = [row for row in rows if row["model"] == model and autoddl.MACHINES[row["machine"]][1] == has_several]
            if own:
                ranges = (
                    span([row[f"less than {what}, %"] for row in own], " %") for what in ("DP", "the better of both")
                )
                lines.append(
                    (f"{model}, {nodes}", f"up to {own[0]['published, at most %']:g} %", *ranges, str(len(own)))
                )
    header = (
        "AutoDDL: step shorter by",
        "published",
        "than data parallelism",
        "than the better of it and tuned Megatron",
        "settings",
    )
    return grid(header, lines)


def _whale() -> str:
    rows, lines = rows_of("papers", _VARIED[1]), []
    for count, published in whale.PUBLISHED.items():
        own = [row for row in rows if row["V100"] == count]
        fit = [row["ours over DP, times"] for row in own if row["DP fits"] == "yes"]
        if fit:
            lines.append(
                (f"{count} V100", f"{published:g}", span(fit, spec=".2f"), str(len(fit)), str(len(own) - len(fit)))
            )
    header = (
        "Whale: times as fast as data parallelism",
        "published",
        "here",
        "settings in which it fits",
        "does not fit",
    )
    return grid(header, lines)


def _alpa() -> list[str]:
    rows, experts = (rows_of("papers", paper.tables[0]) for paper in (alpa.ALPA, alpa_moe.ALPA_MOE))
    fast = "".join(
        f"On one GPU the cost model runs products {row[alpa.TOO_FAST]:.2f} times as fast as Alpa was measured to, so"
        " seconds are not compared. "
        for row in rows
        if row["V100"] == 1
    )
    of_gpt = _scaling("GPT", rows, ("Alpa", "Megatron-LM"))
    return [of_gpt, _scaling("MoE", experts, ("Alpa", "DeepSpeed")), fast + _scaled_less(rows, experts)]


def _scaling(kind: str, rows: Sequence[Row], systems: Sequence[str]) -> str:
    columns = [f"{of}, of its one-GPU rate" for of in (*systems, "ours")]
    lines = [
        (f"{kind} {row[kind]} on {row['V100']}", *("-" if row[of] is None else f"{row[of]:.2f}" for of in columns))
        for row in rows
    ]
    measured = (f"{of}, measured" for of in systems)
    return grid(("Alpa: work a device, of the same system's on one GPU", *measured, "here, predicted"), lines)


def _scaled_less(*tables: Sequence[Row]) -> str:
    lose = [
        row["row"].split(", ")[1]
        for rows in tables
        for row in rows
        if row["ours, of its one-GPU rate"] < row["Alpa, of its one-GPU rate"]
    ]
    return f"Here scaling is below Alpa's on {listed(lose)}." if lose else "Here scaling is not below Alpa's."


BLOCKS: Mapping[str, Callable[[], str]] = {
    "step": step_block,
    "cluster": cluster_block,
    "networks": networks_block,
    "planning": planning_block,
    "pipeline": pipeline_block,
    "memory": memory_block,
    "plans": plans_block,
    "stages": stages_block,
    "published": published_block,
    "papers": papers_block,
}


def main() -> None:
    """Write the README's blocks."""
    README.write_text(filled(README.read_text()))
    print("written to README.md")


if __name__ == "__main__":
    main()
