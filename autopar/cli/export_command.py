"""`autopar export`: a plan as a file that runs without autopar."""

import argparse
from pathlib import Path

from autopar.errors import AutoparError
from autopar.ir.print_graph import printable
from autopar.models.catalogue import Example
from autopar.plain_torch.export_plan import AnyPlan, export
from autopar.plans.staged_plan import StagedPlan


def add_export(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar export` beside those of planning."""
    parser.add_argument("--plan", metavar="FILE", help="export the plan of this file instead of making one")
    parser.add_argument(
        "--to",
        choices=("torch", "hf"),
        default="torch",
        help="torch: a function parallelize(model, mesh), with stages pipeline(model, mesh, loss_fn) (default); hf: the"
        " plans of a transformers model for from_pretrained(distributed_config=)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, whole or not at all")


def export_file(options: argparse.Namespace, plan: AnyPlan, example: Example) -> str:
    """Write the file; the text to print about it."""
    if not Path(options.out).parent.is_dir():
        raise AutoparError(f"--out {options.out}: there is no folder {Path(options.out).parent}")
    made = export(plan, example.model, options.out, example.args, example.kwargs, to=options.to)
    function = "pipeline(model, mesh, loss_fn)" if isinstance(plan, StagedPlan) else "parallelize(model, mesh)"
    function = "distributed_config()" if options.to == "hf" else function
    lines = [f"{options.out}: {function} for mesh {plan.mesh}.", made.summary, *made.remarks]
    return "\n".join(printable(line) for line in lines)
