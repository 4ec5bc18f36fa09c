"""`autopar diff`: two plan files side by side."""

import argparse
import json
from functools import lru_cache

import torch

from autopar.answers.compare_plans import compare
from autopar.answers.comparison_text import format_comparison
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.models.target import graph_of, load_target
from autopar.planner.status import status
from autopar.plans.plan import Plan
from autopar.plans.serialise import read
from autopar.plans.staged_plan import StagedPlan, loads, mesh_in, param_dtype_in


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
        before, after = read_plan(options.before, options.model[0]), read_plan(options.after, options.model[-1])
    found = compare(before, after, (options.before, options.after))
    print(json.dumps(found.as_json(), indent=1) if options.json else format_comparison(found))
    return 0


@lru_cache(maxsize=2)
def _graph(target: str, param_dtype: torch.dtype | None) -> Graph:
    return graph_of(load_target(target), param_dtype)


def read_plan(path: str, target: str) -> Plan | StagedPlan:
    """The plan of the model `target` in a file, on its own mesh; PlanError if there is none."""
    text = read(path)
    return loads(text, _graph(target, param_dtype_in(text)), mesh_in(text))
