"""`autopar diff`: two plan files side by side."""

import argparse
import json

from autopar.answers.compare_plans import compare
from autopar.answers.comparison_text import format_comparison
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.models.target import load_target
from autopar.planner.status import status
from autopar.plans.plan import Plan
from autopar.plans.serialise import read
from autopar.plans.staged_plan import StagedPlan, loads, mesh_in


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar diff`."""
    parser.add_argument("before", metavar="A", help="a plan's file, as autopar explain --save writes it")
    parser.add_argument("after", metavar="B", help="another one; for another mesh, cluster or version of the model")
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="TARGET",
        help="the model of both plans, as for explain; given twice: of A and of B",
    )
    parser.add_argument("--json", action="store_true", help="the same content as JSON, without leaving rows out")
    parser.set_defaults(run=_diff)


def _diff(options: argparse.Namespace) -> int:
    if len(options.model) > 2:
        raise AutoparError(f"--model: expected the model of both plans, or of A and of B, found {len(options.model)}")
    with status() as tell:
        tell("trace")
        graphs = [read_graph(target) for target in options.model]
        tell("read")
        before, after = read_plan(options.before, graphs[0]), read_plan(options.after, graphs[-1])
    found = compare(before, after, (options.before, options.after))
    print(json.dumps(found.as_json(), indent=1) if options.json else format_comparison(found))
    return 0


def read_graph(target: str) -> Graph:
    """The traced model that `target` names."""
    example = load_target(target)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


def read_plan(path: str, graph: Graph) -> Plan | StagedPlan:
    """The plan of `graph` in a file, on its own mesh; PlanError if there is none."""
    text = read(path)
    return loads(text, graph, mesh_in(text))
