"""The `autopar` command: its arguments, its subcommands, and the form of its errors."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from autopar.answers.plan_condition import FIGURES, parse_condition, why_failed
from autopar.answers.questions import Asked
from autopar.cli.calibrate_command import add_calibrate
from autopar.cli.diff_command import add_diff
from autopar.cli.export_command import add_export, export_file
from autopar.cli.fit_command import FitTask, add_fit, fit
from autopar.cli.hand_option import plan_by_hand, staged_by_hand, written_json, written_text
from autopar.cli.interrupt import STATUS, giving_up, until_interrupt
from autopar.cli.page_option import write_plan_page
from autopar.cli.question_options import add_questions, answers_to, are_asked, parse_pin
from autopar.cli.replan_command import add_replan
from autopar.cli.schedule_command import add_schedule
from autopar.cli.step_options import add_inference, add_training, check_kind, example_of, training_of
from autopar.cli.sweep_command import add_sweep
from autopar.codegen.plan_source import source_of
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.memory import SPARE_MEMORY
from autopar.errors import AutoparError
from autopar.explain.explain_plan import plan_json, plan_trace
from autopar.ir.graph import Graph
from autopar.ir.rarely_collected import rarely_collected
from autopar.mesh import Mesh, parse_devices, stages_first
from autopar.models.catalogue import MODELS, Example
from autopar.models.target import graph_of, load_target
from autopar.page.write_page import can_write
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.budget import Watch
from autopar.planner.choose import choose_plan
from autopar.planner.choose_devices import choose_devices
from autopar.planner.handwritten.function_plan import WrittenPlan
from autopar.planner.layouts.mesh_shapes import factorise
from autopar.planner.printed import printed
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import is_in_stages
from autopar.planner.status import status
from autopar.plans import staged_plan
from autopar.plans.plan import Plan
from autopar.plans.serialise import read, write
from autopar.plans.staged_plan import StagedPlan
from autopar.schedule.orders import NAMES as SCHEDULES
from autopar.verify.one_step import DTYPES, verify

_TARGET = f"a built-in model ({', '.join(MODELS)}) or path.py:function, where function() returns (model, args, kwargs)"
_UNITS = {
    "": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

Tell = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    0: done and, for verify, equal; 1: not equal, or for --fail-if the plan is as it says; 2: failed, the reason is on
    stderr; 130: ended by Ctrl-C, with what was found by then, if anything.
    """
    options = _parser().parse_args(argv)
    try:
        with rarely_collected():
            return options.run(options)
    except (AutoparError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STATUS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description="Plan, explain and check the parallel version of a model."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain", help="plan a model, without running it, and say what the plan does and costs"
    )
    _add_planning(explain, default_cluster=None)
    add_inference(explain)
    _add_output(explain)
    add_questions(explain)
    explain.set_defaults(run=_explain)
    check = commands.add_parser(
        "verify", help="run one training step on gloo processes of this machine and on one device, and compare"
    )
    _add_planning(check, default_cluster="free-links")
    check.add_argument("--plan", metavar="FILE", help="use the plan of this file")
    check.add_argument("--dtype", choices=sorted(DTYPES), help="convert the model and its inputs first")
    check.add_argument(
        "--time", action="store_true", help="also run further steps and compare each term's time with its prediction"
    )
    check.set_defaults(run=_verify)
    fits = commands.add_parser("fit", help="where no plan fits: the smallest changes that would each make one fit")
    _add_planning(fits, default_cluster=None)
    add_fit(fits)
    fits.set_defaults(run=_fit)
    add_sweep(commands.add_parser("sweep", help="the best plans for several numbers of devices, clusters and batches"))
    add_schedule(commands.add_parser("schedule", help="say which jobs get which devices of a cluster, and when"))
    add_diff(
        commands.add_parser("diff", help="compare two plans: layouts, collectives, time and memory by term and op")
    )
    add_replan(commands.add_parser("replan", help="a plan made anew for other devices, what moves, and when it pays"))
    exports = commands.add_parser("export", help="write a plan as a Python file that needs torch alone")
    _add_planning(exports, default_cluster="")
    add_export(exports)
    exports.set_defaults(run=_export)
    add_calibrate(
        commands.add_parser(
            "calibrate",
            help="measure the devices and links of this machine, of all ranks under torchrun, for --cluster",
        )
    )
    return parser


def _add_output(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("--json", action="store_true", help="the same content as JSON")
    explain.add_argument(
        "--code", action="store_true", help="print the generated Python instead, of each stage if there are several"
    )
    explain.add_argument(
        "--trace", metavar="FILE", help="write the timeline of a step for Perfetto or chrome://tracing"
    )
    explain.add_argument(
        "--watch", metavar="DIR", help="write every artifact of planning (graph, prices, choice, ...) as a text file"
    )
    explain.add_argument(
        "--html", metavar="FILE", help="write a page of the plan, with hand plans beside it, for a browser"
    )
    explain.add_argument("--plan", metavar="FILE", help="explain the plan of this file instead of searching")
    explain.add_argument("--save", metavar="FILE", help="write the plan")
    explain.add_argument(
        "--fail-if",
        type=_argument(parse_condition),
        metavar="CONDITION",
        help=f"end with status 1 if it holds, e.g. 'step_ms > 420 or gap > 2%%'; figures: {', '.join(FIGURES)}",
    )


def _add_planning(parser: argparse.ArgumentParser, *, default_cluster: str | None) -> None:
    parser.add_argument("target", metavar="TARGET", help=_TARGET)
    mesh_help = (
        "e.g. 2x4, dp=2,tp=4 or pp=2,dp=4 (stages along pp); 8, or nodes=2,devices=4, lets the search choose how to"
        " factorise it"
    )
    parser.add_argument(
        "--mesh", required=True, type=_argument(lambda text: stages_first(parse_devices(text))), help=mesh_help
    )
    cluster = f" (default {default_cluster})" if default_cluster else ""
    parser.add_argument(
        "--cluster",
        default=default_cluster,
        required=default_cluster is None,
        help=f"a preset, a JSON file, or groups of devices: '8 v100 + 8 p100 over 3GB/s'{cluster}",
    )
    parser.add_argument(
        "--hand",
        metavar="PLAN",
        help=(
            "use the hand plan ddp, fsdp, hf or e.g. megatron:dp=8,tp=8,sp or fsdp,ep=8,tp=2 instead of searching; or"
            " that of a function(model, mesh) that calls parallelize_module and fully_shard, path.py:function, or of"
            " DeepSpeed's configuration, path.json"
        ),
    )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="FQN=LAYOUT", help="e.g. lm_head.weight=S(0)B; may be repeated"
    )
    limit_help = f"per device, e.g. 16GiB (default: the memory of the cluster's devices less {SPARE_MEMORY:.0%}%)"
    parser.add_argument("--memory-limit", type=_argument(parse_bytes), metavar="SIZE", help=limit_help)
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="number of microbatches of a step (default: the fastest)"
    )
    parser.add_argument(
        "--schedule", choices=SCHEDULES, help="the order in which stages run microbatches (default: the fastest)"
    )
    add_training(parser)
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds of planning after tracing (default 30)"
    )


def _argument(read: Callable) -> Callable:
    """`read` with its errors as ArgumentTypeError, the only kind whose text argparse shows."""

    def checked(text: str) -> object:
        try:
            return read(text)
        except (AutoparError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def parse_bytes(text: str) -> float:
    """The number of bytes of a size such as "16GiB"; ValueError if `text` is none.

    >>> parse_bytes("16GiB") == 16 * 2**30
    True
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a size: {text!r}; write e.g. 16GiB, 80GB or a number of bytes")
    return float(match[1]) * _UNITS[match[2]]


def _explain(options: argparse.Namespace) -> int:
    is_asked, ended = are_asked(options), 0
    if options.html:
        can_write(options.html, "--html")
    with status() as tell, giving_up() if is_asked else nullcontext():
        tell("load")
        example = example_of(options)
        written = _planned(options, example, tell)
        plan = written.plan if isinstance(written, WrittenPlan) else written
        asked = answers_to(options, _asked(options, plan, tell), example.model) if is_asked else ()
        answers, ended = until_interrupt(asked, "questions were answered")
        if options.html:
            _write_page(options, plan, example, tell)
    if options.save:
        plan.save(options.save)
    if options.trace:
        write(options.trace, plan_trace(plan))
    if options.code:
        print(source_of(plan))
    elif answers:
        print(
            json.dumps([answer.as_json() for answer in answers], indent=1)
            if options.json
            else "\n\n\n".join(map(str, answers))
        )
    elif options.json:
        print(json.dumps(plan_json(plan) | written_json(written), indent=1))
    else:
        print("\n\n".join(filter(None, (plan.explain(), written_text(written)))))
    return ended or _refused(options, plan)


def _write_page(options: argparse.Namespace, plan: Plan | StagedPlan, example: Example, tell: Tell) -> None:
    """The page of --html: of the plan that is searched, and of that of --hand beside it."""
    beside = {options.hand: plan} if options.hand else {}
    found = _found(options, plan.graph, tell) if options.hand else plan
    title = f"{options.target} on {found.mesh.num_devices} devices of {found.cluster.name}"
    write_plan_page(options.html, title, {"this plan": found} | beside, example.model, _request(options), tell)


def _refused(options: argparse.Namespace, plan: Plan | StagedPlan) -> int:
    """The exit status by --fail-if."""
    reason = why_failed(options.fail_if, plan) if options.fail_if else ""
    if reason:
        print(f"failed: {reason}", file=sys.stderr)
    return int(bool(reason))


def _export(options: argparse.Namespace) -> int:
    if not options.cluster and not options.plan:
        raise AutoparError("export: expected --cluster to make a plan for, or --plan with the file of one")
    with status() as tell:
        tell("load")
        example = load_target(options.target)
        plan = _plan(options, example, tell)
        tell("export")
        text = export_file(options, plan, example)
    print(text)
    return 0


def _fit(options: argparse.Namespace) -> int:
    if options.hand:
        raise AutoparError("fit searches for plans: leave out --hand")
    task = FitTask(options.target, options.mesh, load_cluster(options.cluster), _request(options))
    return fit(task, as_json=options.json)


def _verify(options: argparse.Namespace) -> int:
    dtype = DTYPES.get(options.dtype)
    with status() as tell:
        tell("load")
        example = load_target(options.target, dtype)
        if any(parameter.is_meta for parameter in example.model.parameters()):
            raise AutoparError(
                f"{options.target} is on the meta device and has no weights to run; verify a model of your own:"
                " path.py:function"
            )
        plan = _plan(options, example, tell)
        tell(f"run on {plan.mesh.num_devices} processes")
        if options.time and plan.cluster == load_cluster("free-links"):
            raise AutoparError(
                "verify --time: links that cost nothing predict no time of collectives; give --cluster cpu, or the file"
                " that autopar calibrate wrote for this machine"
            )
        outcome = verify(options.target, plan, dtype, is_timed=options.time)
    print(outcome.text)
    return 0 if outcome.is_equal else 1


def _watching(options: argparse.Namespace) -> Watch | None:
    """A function that writes each artifact of planning to a numbered file; None without --watch."""
    if not getattr(options, "watch", None):
        return None
    folder, numbers = Path(options.watch), count(1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoparError(
            f"--watch {options.watch}: expected a folder or the name of a new one; {error.strerror}: {error.filename}"
        ) from error

    def watch(name: str, artifact: Any) -> None:
        path = folder / f"{next(numbers):03d}-{re.sub(r'[^A-Za-z0-9=.-]+', '-', name).strip('-')}.txt"
        path.write_text(printed(artifact))

    return watch


def _plan(options: argparse.Namespace, example: Example, tell: Tell) -> Plan | StagedPlan:
    planned = _planned(options, example, tell)
    return planned.plan if isinstance(planned, WrittenPlan) else planned


def _planned(options: argparse.Namespace, example: Example, tell: Tell) -> Plan | StagedPlan | WrittenPlan:
    tell("trace")
    if options.plan:
        if options.hand:
            raise AutoparError(f"--plan {options.plan} and --hand {options.hand} are two plans; give one of them")
        text = read(options.plan)
        plan = staged_plan.loads(text, graph_of(example, staged_plan.param_dtype_in(text)), options.mesh)
        check_kind(plan, options)
        return plan
    graph = graph_of(example, training_of(options).compute_dtype)
    cluster = load_cluster(options.cluster)
    if options.hand:
        request = _request(options)
        if is_in_stages(options.hand, options.mesh, request):
            return staged_by_hand(options.hand, graph, options.mesh, cluster, request)
        mesh = options.mesh if isinstance(options.mesh, Mesh) else factorise(options.mesh.num_devices, cluster)[0]
        return plan_by_hand(options.hand, example.model, graph, mesh, cluster, request)
    return _found(options, graph, tell)


def _found(options: argparse.Namespace, graph: Graph, tell: Tell) -> Plan | StagedPlan:
    """The plan that is searched for `graph`."""
    where, told = (options.mesh, load_cluster(options.cluster)), {"progress": tell, "watch": _watching(options)}
    return choose_devices(graph, *where, _request(options), predict=rank_peaks, **told)


def _asked(options: argparse.Namespace, plan: Plan | StagedPlan, tell: Tell) -> Asked:
    """The plan with what is needed to make others, for questions about it."""

    def planner(request: PlanRequest, mesh: Mesh) -> Plan | StagedPlan:
        return choose_plan(plan.graph, mesh, plan.cluster, request, progress=tell, predict=rank_peaks)

    return Asked(plan, plan.graph, _request(options), planner)


def _request(options: argparse.Namespace) -> PlanRequest:
    return PlanRequest(
        pins=dict(parse_pin(text) for text in options.pin),
        memory_limit_bytes=options.memory_limit,
        training=training_of(options),
        num_microbatches=options.microbatches,
        schedule=options.schedule,
        time_limit_s=options.time_limit,
    )
