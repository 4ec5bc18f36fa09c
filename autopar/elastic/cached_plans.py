"""Plans for each number of ranks, kept beside the checkpoints, so that a restart plans nothing that is known."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.answers.replan import Planner, replanned, request_like
from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.hardware import Cluster
from autopar.elastic.plan_files import PlanFiles, name_of
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.staged_plan import loads, mesh_in
from autopar.torch_compat import pytree

_NICE = 10  # planning ahead gives way to training
_ASKED = ("pins", "num_microbatches", "schedule", "unknown_ops")  # of `autopar.compile`, and not in a plan


def plan_key(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A name for what a plan depends on but for the number of ranks: the tensors of model and call, and the options."""
    tensors = [(name, list(x.shape), str(x.dtype)) for name, x in [*model.named_parameters(), *model.named_buffers()]]
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    call = [(list(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    asked = {name: x.to_json() if isinstance(x, Cluster) else repr(x) for name, x in sorted(options.items())}
    what = [type(model).__qualname__, str(model), tensors, call, str(structure), asked, torch.__version__]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def asked_request(plan: AnyPlan, options: Mapping[str, Any]) -> PlanRequest:
    """The planning options for other numbers of ranks: those of `plan`, and what the user asked of all plans."""
    asked = {name: options[name] for name in _ASKED if options.get(name) is not None}
    return replace(request_like(plan), **asked)


def plan_ahead(
    files: PlanFiles, before: Path, graph: Graph, request: PlanRequest, meshes: Mapping[int, Mesh | Devices]
) -> subprocess.Popen | None:
    """Start planning `graph` for other numbers of ranks, in a process of its own: for each a plan made anew, and one
    that keeps the layouts of the plan in the file `before`, both weighed. None if all is there.
    """
    name = name_of(before)
    missing = {size: mesh for size, mesh in meshes.items() if not files.successors(size, name).exists()}
    if not missing:
        return None
    command = [sys.executable, "-m", "autopar.elastic.cached_plans"]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | hidden, **quiet)
    assert started.stdin is not None, "stdin is a pipe"
    with started.stdin as pipe:
        pickle.dump((files, before, graph, request, missing), pipe)
    return started


def check_fewest(
    files: PlanFiles, plan: AnyPlan, graph: Graph, request: PlanRequest, meshes: Mapping[int, Mesh | Devices]
) -> None:
    """Save a plan for the first of `meshes`, the fewest ranks; InfeasibleError with the fewest that hold the model.

    `meshes`: by number of ranks, fewest first, all fewer than those that there are, of which `plan` is.
    """
    fewest, refused = next(iter(meshes)), ""
    for num_ranks, mesh in meshes.items():
        try:
            found = choose_plan(graph, mesh, plan.cluster, request, predict=rank_peaks)
        except InfeasibleError as error:
            refused = refused or str(error)
            continue
        if not refused:
            return files.save(found, files.anew(fewest))
        raise _too_few(fewest, str(num_ranks), refused)
    raise _too_few(fewest, "as many as there are", refused)


def _too_few(fewest: int, expected: str, refused: str) -> InfeasibleError:
    return InfeasibleError(
        f"min_ranks={fewest}, but so few ranks do not hold the model ({refused}); the fewest that do are {expected}:"
        " give min_ranks= and torchrun's --nnodes so many"
    )


def plan_successors(
    files: PlanFiles, path: Path, graph: Graph, request: PlanRequest, meshes: Mapping[int, Mesh | Devices]
) -> None:
    """Make and weigh the plans of `plan_ahead`; numbers of ranks for which there is no plan are left out."""
    text = path.read_text()
    before, name = loads(text, graph, mesh_in(text), is_own=True), name_of(path)
    for num_ranks, mesh in meshes.items():
        try:
            made = _made_anew(files, num_ranks, mesh, before, request)
            found = replanned(before, mesh, _planner(before, made), request, range(before.mesh.num_devices))
        except (AutoparError, ValueError):
            continue
        files.save_successors(found, num_ranks, name)


def _made_anew(
    files: PlanFiles, num_ranks: int, mesh: Mesh | Devices, before: AnyPlan, request: PlanRequest
) -> AnyPlan:
    path = files.anew(num_ranks)
    if path.exists():
        text = path.read_text()
        return loads(text, before.graph, mesh_in(text), is_own=True)
    found = choose_plan(before.graph, mesh, before.cluster, request, predict=rank_peaks)
    files.save(found, path)
    return found


def _planner(before: AnyPlan, made: AnyPlan) -> Planner:
    """Plans for other devices than those of `before`; one that keeps no layouts is `made` already."""

    def planner(mesh: Mesh | Devices, request: PlanRequest) -> AnyPlan:
        if not request.stored:
            return made
        return choose_plan(before.graph, mesh, before.cluster, request, predict=rank_peaks)

    return planner


def _plan_all() -> None:
    """Make the plans that standard input asks for."""
    os.nice(_NICE)
    torch.set_num_threads(1)
    plan_successors(*pickle.load(sys.stdin.buffer))  # of the process that started this one


if __name__ == "__main__":
    _plan_all()
