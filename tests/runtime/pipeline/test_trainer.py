"""train_step of a plan in stages: gradients of several steps add up, tied parameters' too, and a failure of one rank is
that of all.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import PlanError
from tests.workers import RankError, Ranks, device_mesh
from tests.zoo import build

pytestmark = pytest.mark.multirank


def compiled(name: str):
    case = build(name)
    options = {"cluster": "free-links", "num_microbatches": 4, "schedule": "1f1b"}
    return (
        autopar.compile(case.model, device_mesh((2, 2), ("pp", "dp")), args=case.args, kwargs=case.kwargs, **options),
        case,
    )


def steps_without_zero_grad(name: str, num_steps: int) -> dict[str, torch.Tensor]:
    """The gradients that this rank has after so many steps."""
    model, case = compiled(name)
    for _ in range(num_steps):
        model.train_step(*case.args, **case.kwargs)
    found = {fqn: p.grad for fqn, p in model.named_parameters()}
    return {fqn: x.full_tensor() for fqn, x in found.items() if isinstance(x, DTensor)}


def test_gradients_of_steps_add_up_where_parameters_are_tied(ranks4: Ranks) -> None:
    case = build("gpt2")
    for _ in range(3):
        case.loss(case.model(*case.args, **case.kwargs)).backward()
    truth = {fqn: p.grad for fqn, p in case.model.named_parameters()}
    results = ranks4.run(steps_without_zero_grad, "gpt2", 3)
    tied = "transformer.wte.weight"
    assert all(tied in found for found in results), "both stages hold the tied embedding"
    assert {fqn for found in results for fqn in found} == truth.keys()
    for found in results:
        for fqn, gradient in found.items():
            torch.testing.assert_close(
                gradient, truth[fqn], rtol=1e-4, atol=1e-6 * float(truth[fqn].abs().max()), msg=fqn
            )


def fails_on_one(folder: str) -> None:
    """Write what this rank raised in a step in which rank 1's stage fails; each process ends after that, as a script
    would.
    """
    model, case = compiled("gpt2")
    model.train_step(*case.args, **case.kwargs)
    if dist.get_rank() == 1:
        object.__setattr__(model._autopar.current().parts[0].loaded, "function", _no_luck)
    found = []
    for _ in range(2):
        try:
            model.train_step(*case.args, **case.kwargs)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    (Path(folder) / str(dist.get_rank())).write_text("\n".join(found))
    os._exit(0)


def _no_luck(*_: object) -> None:
    raise ValueError("no luck today")


def test_an_error_within_a_step_is_everybodys(tmp_path: Path) -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match="died"):
            ranks.run(fails_on_one, str(tmp_path))
    finally:
        ranks.stop()
    cause = "rank 1 failed first, ValueError: no luck today"
    for rank in range(4):
        first, second = (tmp_path / str(rank)).read_text().split("\n")
        assert (
            first == "ValueError: no luck today" if rank == 1 else first.startswith("PeerFailed") and cause in first
        ), first
        assert second.startswith("AutoparError") and "failed before" in second and cause in second, second


def train_under_another_autocast() -> str:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    asked = {"cluster": "free-links", "loss_fn": torch.nn.functional.mse_loss}
    model, batch = autopar.compile(net, device_mesh((2, 2), ("pp", "dp")), **asked), (torch.ones(8, 8),) * 2
    model.train_step(*batch)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError) as refused:
        model.train_step(*batch)
    return str(refused.value)


def test_a_step_under_an_autocast_that_was_not_compiled_in_is_refused_with_the_remedy(ranks4: Ranks) -> None:
    """It said that the plan does not know op 'to' of the model, and to make it anew."""
    for text in ranks4.run(train_under_another_autocast):
        assert "torch.autocast that the model was not compiled in" in text and "Compile it in the state" in text
