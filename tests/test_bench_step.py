"""The step benchmark compares only what trains the same model."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.interop import plain_layers
from bench import step
from bench.models import Classifier, Workload
from tests.workers import Ranks
from tests.zoo import MLP

SMALL = Workload(
    lambda: Classifier(MLP(hidden=64)),
    lambda: (torch.randn(32, 64), torch.randint(16, (32,))),
    ("body.blocks.0", "body.blocks.1"),
    step.WORKLOADS["wide-mlp"].tensor_parallel,
)


def distances(names: list[str]) -> list[float]:
    """On a rank: of each variant, how far its losses are from those of one process."""
    expected = step.one_process_losses(SMALL)
    return [step.check_losses(name, step.losses_of(step.built(name, SMALL).step), expected) for name in names]


def without_synchronisation() -> str:
    """On a rank: what is said of a data-parallel variant that forgets to reduce its gradients."""
    torch.manual_seed(0)
    model, args = SMALL.build(), step.part(SMALL.inputs(), dist.get_rank(), step.NUM_RANKS)
    # a model that had rows of its own on this rank before would have the gradients compared at the first step
    with patch.object(plain_layers._seen(), "mesh", None):
        losses = step.losses_of(functools.partial(step.train_step, model, args, step.adamw(model)))
    expected = step.one_process_losses(SMALL)
    assert losses[0] == pytest.approx(expected[0], rel=1e-5), "its first loss, before any update, is right"
    try:
        step.check_losses("forgetful", losses, expected)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.multirank
@pytest.mark.parametrize(
    "names", [["autopar, mesh 2x2"], [step.DDP, "FSDP2 fully_shard", "fully_shard x parallelize_module, 2x2"]]
)
def test_variants_train_the_same_model(ranks4: Ranks, names: list[str]) -> None:
    assert max(ranks4.run(distances, names)[0]) < step.LOSS_TOLERANCE / 5


@pytest.mark.multirank
def test_a_missing_gradient_synchronisation_is_noticed(ranks4: Ranks) -> None:
    for said in ranks4.run(without_synchronisation):
        assert "forgetful" in said and "does not train the same model" in said


def test_regret_is_of_the_plan_chosen_over_the_fastest_measured() -> None:
    rows = [
        {"variant": step.CHOSEN, "median_s": 0.3},
        {"variant": "autopar, mesh 4", "median_s": 0.2},
        {"variant": step.DDP, "median_s": 0.25},
    ]
    chosen, best, times = step.regret(rows)
    assert chosen["variant"] == step.CHOSEN and best["variant"] == "autopar, mesh 4" and times == pytest.approx(1.5)


def test_a_row_has_a_line() -> None:
    row = {
        "row": "x",
        "model": "gpt",
        "variant": step.DDP,
        "predicted_s": None,
        "mesh": None,
        "loss_distance": 2e-6,
        "seconds": [0.01, 0.03],
        "median_s": 0.02,
        "collectives": [{"num_bytes": 1_500_000}],
    }
    (line,) = step.cells(row)
    assert (
        len(line) == len(step.TABLE.header) and line[2:4] == ("20.0", "15.0 to 25.0") and line[-2:] == ("1.50", "2e-06")
    )
