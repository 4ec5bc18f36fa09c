"""A run that cannot be is refused by name before anything is moved or written."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.elastic import Run
from autopar.elastic.cached_plans import check_fewest
from autopar.elastic.lease import Lease
from autopar.elastic.plan_files import PlanFiles
from autopar.errors import AutoparError, InfeasibleError
from autopar.mesh import Devices
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from tests.answers.asked_plans import graph


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This process is the only rank; a run that ends with an error leaves its process group."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(folder, width, num_steps, **asked):
    """Some steps of a model of this width; its weights before and after."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
    before = [x.detach().clone() for x in net.parameters()]
    with Run(folder, **asked) as run:
        model = run.compile(net, args=(torch.ones(4, 8),), cluster="cpu", mesh=lambda n: (n,))
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            for _ in run.steps(num_steps, model, optimizer):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            after = [x.full_tensor().detach().clone() for x in model.parameters()]
            changed.append(not all(torch.equal(a, b) for a, b in zip(before, after)))


changed: list[bool] = []


def content(folder: Path) -> dict[str, bytes]:
    steps = (path for path in folder.rglob("*") if path.is_file() and "step-" in str(path))
    return {str(path): path.read_bytes() for path in steps}


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(tmp_path):
    train(tmp_path, 16, 2)
    saved = content(tmp_path)
    assert saved and changed.pop()
    with pytest.raises(
        AutoparError, match=r"is a checkpoint of another model \(0.bias: float32\[16\] in the checkpoint"
    ):
        train(tmp_path, 12, 4)
    assert not changed.pop() and content(tmp_path) == saved


def test_a_second_job_in_the_folder_is_refused_before_anything_is_written(tmp_path):
    other = Lease(tmp_path, "other job")
    try:
        with pytest.raises(AutoparError, match=r"in use by another group of ranks \(job 'other job'"):
            train(tmp_path, 16, 2)
    finally:
        other.release()
    assert not changed and not list(tmp_path.glob("step-*")) and not (tmp_path / "plans").exists()


def test_fewer_ranks_than_the_least_are_refused(tmp_path):
    with pytest.raises(AutoparError, match="min_ranks=2, but there are 1 ranks"):
        train(tmp_path / "run", 16, 2, min_ranks=2)
    assert not changed and not (tmp_path / "run").exists()


def test_so_few_ranks_that_they_do_not_hold_the_model_are_refused_with_the_fewest_that_do(tmp_path):
    request = PlanRequest(memory_limit_bytes=8 * 2**20)
    plan = choose_plan(graph(), Devices(8), load_cluster("cpu"), request)
    sizes = {size: Devices(size) for size in (1, 2, 4, 7)}
    with pytest.raises(
        InfeasibleError, match=r"min_ranks=1, but so few ranks do not hold the model .*fewest that do are"
    ):
        check_fewest(PlanFiles(tmp_path, "key"), plan, graph(), request, sizes)
    assert not list(tmp_path.iterdir())
