"""Questions about a plan on the command line: --why, --why-not and --top."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from autopar.answers.best_plans import Ranking, best_plans
from autopar.answers.questions import Answer, Asked, why, why_not_by_hand, why_not_pinned
from autopar.cli.hand_option import is_file, plan_by_hand
from autopar.errors import AutoparError, PlanError
from autopar.mesh import PIPELINE, Mesh
from autopar.planner.handwritten.hand_plan import FLAVOURS
from autopar.planner.layouts.mesh_shapes import factorise
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

_STYLES = (*FLAVOURS, "megatron", "hf")
_MOST_MESHES = 4


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of questions, each of which makes the plan again with a choice changed."""
    parser.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "tell what it would cost to lay out an op (%%linear_3), a parameter or a module (its most expensive op)"
            " otherwise, or to do without a collective on it (%%linear_3:all_gather); or memory: what its limit costs"
        ),
    )
    parser.add_argument(
        "--why-not",
        action="append",
        default=[],
        metavar="CHOICE",
        help=(
            "tell what it would cost to take a hand plan (megatron:dp=8,tp=8, or a file as of --hand) or a layout"
            " (lm_head.weight=S(0)B)"
        ),
    )
    parser.add_argument(
        "--top",
        type=int,
        default=0,
        metavar="N",
        help="the N best plans that differ in mesh, stages, or in which of the largest parameters are split",
    )


def are_asked(options: argparse.Namespace) -> bool:
    """Whether the command has a question; AutoparError for one that cannot be answered."""
    if options.top < 0:
        raise AutoparError(f"--top {options.top}: expected a positive number of plans")
    is_asked = bool(options.why or options.why_not or options.top)
    if is_asked and options.hand:
        raise AutoparError(
            f"--hand {options.hand} is a plan that nobody chose: ask --why-not {options.hand} of the plan that is"
        )
    return is_asked


def answers_to(options: argparse.Namespace, asked: Asked, model: nn.Module) -> Iterator[Answer | Ranking]:
    """The answers to all questions, in the order --why, --why-not, --top."""
    for name in options.why:
        yield why(asked, name)
    for text in options.why_not:
        if is_file(text) or text.replace(":", "=").split("=")[0] in _STYLES:
            yield why_not_by_hand(asked, text, _by_hand(text, asked, model))
        else:
            yield why_not_pinned(asked, *parse_pin(text))
    if options.top:
        others = [] if isinstance(options.mesh, Mesh) else list(_on_other_meshes(asked))
        yield best_plans(asked, options.top, others)


def _on_other_meshes(asked: Asked) -> Iterator[Plan | StagedPlan]:
    plan = asked.plan
    for mesh in factorise(plan.mesh.num_devices, plan.cluster)[:_MOST_MESHES]:
        if mesh.shape != plan.mesh.shape:
            try:
                yield asked.planner(asked.request, mesh)
            except AutoparError:
                continue


def _by_hand(text: str, asked: Asked, model: nn.Module) -> Plan:
    """The hand plan on the plan's mesh, or where it has stages or other degrees, on the first mesh that has these."""
    plan, failures = asked.plan, []
    own = () if PIPELINE in plan.mesh.axis_names else (plan.mesh,)
    request = replace(asked.request, pins={}, memory_limit_bytes=plan.memory_limit_bytes)
    for mesh in (*own, *factorise(plan.mesh.num_devices, plan.cluster)):
        try:
            return plan_by_hand(text, model, asked.graph, mesh, plan.cluster, request).plan
        except PlanError as error:
            failures.append(error)
    raise failures[0]  # on the plan's own mesh


def parse_pin(text: str) -> tuple[str, str]:
    """(FQN, layout) of "FQN=LAYOUT"; ValueError for another text."""
    fqn, separator, layout = text.partition("=")
    if not (fqn and separator and layout):
        raise ValueError(f"cannot read pin {text!r}; write FQN=LAYOUT, e.g. lm_head.weight=S(0)B")
    return fqn, layout
