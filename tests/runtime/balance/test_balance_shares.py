"""A rank becomes slow while a model is trained: its rows move, the losses stay."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError
from autopar.runtime.balance.balance_shares import share_anew
from autopar.verify.check_placements import check
from tests.runtime.shares_model import batch_of, differ, net, state_of, trained
from tests.workers import Ranks, device_mesh

ROWS, SLOW_AT, STEPS = 16, 6, 22


def slowed(model: nn.Module, row_s: list[float]) -> None:
    """Every gradient of the first parameter takes the rank so long for each of its rows."""

    def wait(gradient: torch.Tensor) -> None:
        rows = model._autopar.current().axes[0].share(ROWS)
        time.sleep(row_s[0] * rows)

    next(model.parameters()).register_hook(wait)


def straggling(shape: tuple[int, ...], slow: int, factor: float, batch: str) -> dict[str, Any]:
    """On every rank: train, from step SLOW_AT on with rank `slow` of dp slower; and the same undisturbed."""
    mesh = device_mesh(shape, ("dp", "tp")[: len(shape)])
    count, index = shape[0], mesh.get_local_rank("dp")
    equal = (ROWS // count,) * count
    data = list(zip(*batch_of(ROWS * STEPS, 3)))
    example = batch_of(ROWS if batch == "global" else ROWS // count)
    model = autopar.compile(net(), mesh, args=example, shares=equal, cluster="free-links", batch=batch)
    optimizer, losses, seen, row_s = torch.optim.SGD(model.parameters(), lr=0.1), [], [], [0.02 / count]
    sampler = autopar.StatefulSampler(len(data), equal, index, shuffle=False)
    whole = autopar.StatefulSampler(len(data), (ROWS,), 0, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler if batch == "local" else whole)
    slowed(model, row_s)
    balancer, changed_s = autopar.balance(model, sampler=sampler if batch == "local" else None), []
    for step, rows in enumerate(loader):
        if step == SLOW_AT and index == slow:
            row_s[0] *= factor
        optimizer.zero_grad()
        loss, _ = model(*rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seen.append(len(rows[0]))
        start, before = time.perf_counter(), len(balancer.changes)
        balancer.step()
        if len(balancer.changes) > before:
            changed_s.append(time.perf_counter() - start)
    balancer.close()
    check(model._autopar.current().program, mesh)
    alone = trained(net(), [batch_of_rows(data, step) for step in range(STEPS)], weight=0.0)
    return {
        "difference": differ([*losses, *state_of(model)], alone),
        "changes": balancer.changes,
        "changed_s": changed_s,
        "seen": seen,
        "shares": model.plan.mesh.shares,
        "text": model.plan.explain(),
    }


def batch_of_rows(data: list, step: int) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.stack, zip(*data[step * ROWS : (step + 1) * ROWS])))


@pytest.mark.multirank
@pytest.mark.parametrize(("shape", "batch"), [((4,), "global"), ((2, 2), "local")])
def test_rows_move_from_a_slow_rank_and_the_losses_stay(ranks4: Ranks, shape: tuple[int, ...], batch: str) -> None:
    factor = 4.0
    found = ranks4.run(straggling, shape, 1, factor, batch)
    for rank in found:
        assert rank["difference"] < 1e-6
        assert rank["changes"] == found[0]["changes"] and rank["changes"]
        steps, sizes = rank["changes"][0]
        assert SLOW_AT < steps <= SLOW_AT + 10 and sum(sizes) == ROWS
        assert sizes[1] < min(size for at, size in enumerate(sizes) if at != 1)
        assert max(rank["changed_s"]) < 0.5
        assert rank["shares"] == ((0, rank["changes"][-1][1]),)
    if batch == "local":
        assert sum(map(sum, (rank["seen"] for rank in found[::2]))) == ROWS * STEPS


def fixed_shares(sizes: tuple[tuple[int, ...], ...]) -> float:
    """On every rank: steps in these shares, changed in between, against one device; graphs made before stay right."""
    mesh = device_mesh((4,), ("dp",))
    model = autopar.compile(net(), mesh, args=batch_of(16), shares=sizes[0], cluster="free-links")
    alone, losses = net(), []
    for seed, one in enumerate(sizes):
        for each in (model, alone):
            each.zero_grad()
        pending = [each(*batch_of(16, seed))[0] for each in (model, alone)]
        share_anew(model._autopar, 0, one)
        for each, loss in zip((model, alone), pending):
            (loss + each(*batch_of(16, seed + 100))[0]).backward()
            losses.append(loss.detach())
    return max(differ(losses[::2], losses[1::2]), differ(state_of(model), state_of(alone)))


@pytest.mark.multirank
def test_a_graph_made_in_other_shares_is_differentiated_in_those(ranks4: Ranks) -> None:
    assert max(ranks4.run(fixed_shares, ((4, 4, 4, 4), (1, 2, 3, 10), (13, 1, 1, 1), (4, 4, 4, 4)))) < 1e-11


def not_in_shares() -> str:
    model = autopar.compile(net(), device_mesh((4,), ("dp",)), args=batch_of(16), cluster="free-links")
    try:
        autopar.balance(model)
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.multirank
def test_a_batch_that_is_not_in_shares_is_refused(ranks4: Ranks) -> None:
    assert all("compile it with shares=" in told for told in ranks4.run(not_in_shares))
