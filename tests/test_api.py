"""The two calls as a user makes them."""

import copy
import inspect
import math

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from tests.workers import Ranks, device_mesh
from tests.zoo import MLP, build

X = torch.zeros(8, 32)


def test_plan_needs_no_process_group_and_no_data():
    assert not dist.is_initialized()
    with torch.device("meta"):
        model, x = MLP(), torch.zeros(8, 32)
    plan = autopar.plan(model, "dp=2,tp=2", cluster="free-links", args=(x,))
    assert plan.mesh.axis_names == ("dp", "tp") and all(p.is_meta for p in model.parameters())
    assert "dp=2,tp=2" in plan.explain()


def test_all_ways_to_write_a_mesh_and_a_cluster_agree(tmp_path):
    (tmp_path / "cluster.json").write_text(load_cluster("cpu").to_json())
    text = autopar.plan(MLP(), "2x2", cluster="cpu", args=(X,)).dumps()
    for mesh in ((2, 2), [2, 2], "a0=2,a1=2"):
        for cluster in ("cpu", load_cluster("cpu"), tmp_path / "cluster.json"):
            assert autopar.plan(MLP(), mesh, cluster=cluster, args=[X]).dumps() == text


def test_the_two_calls_take_the_same_options():
    shared = ("cluster", "args", "kwargs", "pins", "memory_limit_bytes", "time_limit_s")
    of_plan, of_compile = (inspect.signature(call).parameters for call in (autopar.plan, autopar.compile))
    assert set(shared) <= set(of_plan) & set(of_compile)
    assert all(of_compile[name].default is None for name in shared)
    assert all(of_plan[name].default in (None, ()) for name in shared)


def both_calls() -> None:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    case = build("mlp")
    for options in ({}, {"cluster": "h100"}, {"memory_limit_bytes": 1e9}, {"pins": {"head.weight": "S(0)B"}}):
        planned = autopar.plan(case.model, mesh, args=case.args, **options)
        compiled = autopar.compile(copy.deepcopy(case.model), mesh, args=case.args, **options).plan
        assert planned.dumps() == compiled.dumps(), options
        assert planned.cluster.name == options.get("cluster", "cpu")
        given = autopar.compile(copy.deepcopy(case.model), mesh, args=case.args, plan=planned).plan
        assert given.dumps() == planned.dumps()


@pytest.mark.multirank
def test_plan_and_compile_come_to_the_same(ranks4: Ranks) -> None:
    ranks4.run(both_calls)


def meshes_of_all_kinds() -> list[tuple[str, ...]]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    meshes = ["2x2", "dp=2,tp=2", (4,), init_device_mesh("cpu", (2, 2)), device_mesh((2, 2), ("dp", "tp"))]
    models = [autopar.compile(MLP(), mesh, args=(X,)) for mesh in meshes]
    assert all(math.isfinite(float(model(X).sum())) for model in models)
    return [model.plan.mesh.axis_names for model in models]


@pytest.mark.multirank
def test_compile_takes_meshes_of_all_kinds(ranks4: Ranks) -> None:
    expected = [("a0", "a1"), ("dp", "tp"), ("a0",), ("a0", "a1"), ("dp", "tp")]
    assert ranks4.run(meshes_of_all_kinds) == [expected] * 4


def open_mesh() -> list[tuple[int, ...]]:
    from autopar.errors import MeshError

    torch.manual_seed(0)
    case = build("mlp")
    with pytest.raises(MeshError, match="leaves the axes open"):
        autopar.compile(case.model, 4)
    module = autopar.compile(copy.deepcopy(case.model), "4", cluster="free-links", args=case.args)
    expected = case.model(*case.args)
    given = autopar.compile(case.model, 4, plan=module.plan)
    for found in (module(*case.args), given(*case.args)):
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, expected)
    return [m.plan.mesh.shape for m in (module, given)]


@pytest.mark.multirank
def test_compile_on_a_mesh_that_the_search_factorises(ranks4: Ranks) -> None:
    found = ranks4.run(open_mesh)
    assert found == [found[0]] * 4 and math.prod(found[0][0]) == 4 and found[0][0] == found[0][1]


def losses_on(ranks: list, axis_names: tuple[str, ...]) -> list[float] | str:
    """Losses of two steps by `train_step`, in two microbatches, or the error; on one device for no ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    torch.manual_seed(0)
    model, losses = MLP(), []
    y = torch.randn_like(model(X).detach())
    if ranks:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=axis_names)
        how = {"loss_fn": torch.nn.functional.mse_loss, "num_microbatches": 2}
        try:
            model = autopar.compile(model, mesh, args=(X, y), **how)
        except autopar.AutoparError as error:
            return str(error)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        if ranks:
            losses.append(model.train_step(X, y).item())
        else:
            losses.append((loss := torch.nn.functional.mse_loss(model(X), y)).item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("ranks", "axis_names"),
    [([[0, 1, 2, 3]], ("pp", "dp")), ([[[0, 1]], [[2, 3]]], ("dp", "pp", "tp"))],
    ids=["outermost", "between"],
)
def test_pipeline_axis_of_one_rank_is_no_pipeline(ranks4: Ranks, ranks: list, axis_names: tuple[str, ...]) -> None:
    for losses in ranks4.run(losses_on, ranks, axis_names):
        assert losses == pytest.approx(losses_on([], ()), rel=1e-5)


@pytest.mark.multirank
def test_ranks_of_a_mesh_that_do_not_ascend_are_refused(ranks4: Ranks) -> None:
    assert all("do not ascend along axis 0" in text for text in ranks4.run(losses_on, [3, 2, 1, 0], ("dp",)))


def submesh() -> str:
    """A model on half of the ranks; the others are told that they have no part in it."""
    from torch.distributed.device_mesh import DeviceMesh

    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
    try:
        model = autopar.compile(MLP(), mesh, args=(X,), pins={"head.weight": "S(0)"})
        text = f"{tuple(model.head.weight.to_local().shape)}"
    except autopar.AutoparError as error:
        text = str(error)
    autopar.compile(MLP(), "4", args=(X,))  # all ranks together again
    return text


def submeshes_and_then_a_world(kind: str) -> bool:
    """A model on half of the ranks, then a mesh of all, which needs groups that all ranks name alike."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    torch.manual_seed(0)
    names = {"unnamed": None, "stages": ("pp",)}[kind]
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=names)
    if mesh.get_coordinate() is not None:
        size = X.shape[1]
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.GELU(), torch.nn.Linear(size, size))
            for _ in range(4)
        )
        model = autopar.compile(torch.nn.Sequential(*blocks), mesh, args=(X, X), loss_fn=torch.nn.functional.mse_loss)
        assert torch.isfinite(model.train_step(X, X))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    return bool(torch.isfinite(autopar.compile(MLP(), mesh, args=(X,))(X).sum()))


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["unnamed", "stages"])
def test_groups_of_some_ranks_do_not_confuse_the_others(ranks4: Ranks, kind: str) -> None:
    assert ranks4.run(submeshes_and_then_a_world, kind, timeout_s=60.0) == [True] * 4


@pytest.mark.multirank
def test_model_on_some_of_the_ranks(ranks4: Ranks) -> None:
    texts = ranks4.run(submesh)
    assert (
        texts[1] == texts[3] == "(8, 32)"
        and "rank 0 is not in mesh" in texts[0]
        and "rank 2 is not in mesh" in texts[2]
    )
