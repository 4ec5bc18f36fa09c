"""Plans for each number of ranks, kept beside the checkpoints, so that a restart plans nothing that is known."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.answers.replan import request_like
from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.torch_compat import pytree

_NICE = 10  # planning ahead gives way to training


def plan_key(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A name for what a plan depends on but for the number of ranks: the tensors of model and call, and the options."""
    tensors = [(name, list(x.shape), str(x.dtype)) for name, x in [*model.named_parameters(), *model.named_buffers()]]
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    call = [(list(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    asked = {name: x.to_json() if isinstance(x, Cluster) else repr(x) for name, x in sorted(options.items())}
    what = [type(model).__qualname__, str(model), tensors, call, str(structure), asked, torch.__version__]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def plan_path(folder: Path, num_ranks: int, key: str) -> Path:
    """The file of the plan for this number of ranks."""
    return folder / "plans" / f"{num_ranks}-{key}.plan.json"


def save_plan(plan: Plan | StagedPlan, path: Path) -> None:
    """Write a plan for a later start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)


def plan_ahead(plan: Plan | StagedPlan, graph: Graph, meshes: Mapping[Path, Mesh | Devices]) -> subprocess.Popen | None:
    """Start planning `graph` for other meshes as `plan` was, in a process of its own; None if all plans are there."""
    missing = {path: mesh for path, mesh in meshes.items() if not path.exists()}
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
        pickle.dump((graph, plan.cluster, request_like(plan), missing), pipe)
    return started


def check_fewest(plan: Plan | StagedPlan, graph: Graph, meshes: Sequence[tuple[int, Mesh | Devices, Path]]) -> None:
    """Save a plan for the first of `meshes`, the fewest ranks; InfeasibleError with the fewest that hold the model.

    `meshes`: (ranks, mesh, file), fewest ranks first, all fewer than those that there are, of which `plan` is.
    """
    request, fewest, refused = request_like(plan), meshes[0][0], ""
    for num_ranks, mesh, path in meshes:
        try:
            found = choose_plan(graph, mesh, plan.cluster, request, predict=rank_peaks)
        except InfeasibleError as error:
            refused = refused or str(error)
            continue
        if not refused:
            return save_plan(found, path)
        raise _too_few(fewest, str(num_ranks), refused)
    raise _too_few(fewest, "as many as there are", refused)


def _too_few(fewest: int, expected: str, refused: str) -> InfeasibleError:
    return InfeasibleError(
        f"min_ranks={fewest}, but so few ranks do not hold the model ({refused}); the fewest that do are {expected}:"
        " give min_ranks= and torchrun's --nnodes so many"
    )


def _plan_all() -> None:
    """Make the plans that standard input asks for; sizes for which there is none are left out."""
    os.nice(_NICE)
    torch.set_num_threads(1)
    graph, cluster, request, meshes = pickle.load(sys.stdin.buffer)  # of the process that started this one
    for path, mesh in meshes.items():
        try:
            save_plan(choose_plan(graph, mesh, cluster, request, predict=rank_peaks), path)
        except (AutoparError, ValueError):
            continue


if __name__ == "__main__":
    _plan_all()
