"""Losses on shards against the op itself."""

import pytest
import torch

from autopar.ir.guards.kept_losses import CTC
from autopar.sbp.rules.loss import MEAN, NONE, RULES, SUM
from tests.sbp.exercise import combinations, exercise, exercise_mesh, f64

CROSS_ENTROPY = "aten.cross_entropy_loss.default"
IDS = torch.tensor([5, 0, 2, -100, 1, 3, 3, -100])
WEIGHT = torch.rand(6, dtype=torch.float64) + 0.5
OPTIONS = combinations(weight=[None, WEIGHT], label_smoothing=[0.0, 0.1])


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy_splits_tokens_and_classes(reduction, options):
    found = exercise(CROSS_ENTROPY, f64(8, 6), IDS, reduction=reduction, **options)
    weight = " B" if options["weight"] is not None else ""
    tokens = {NONE: "S(0)", MEAN: "P [tokens]", SUM: "P"}[reduction]
    assert found == {
        f"B B{weight} -> B",
        f"B* B{weight} -> B*",
        f"S(0) {'S(0)' + weight} -> {tokens}",
        f"S(1) B{weight} -> B [vocab]",
    }


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy_on_two_axes(reduction, options):
    call = {"target": CROSS_ENTROPY, "reduction": reduction, **options}
    tokens = {NONE: "split", MEAN: "tokens", SUM: "split"}[reduction]
    for roles in ((tokens, "vocab"), ("vocab", tokens), (tokens, tokens)):
        assert _on_mesh(f64(8, 6), IDS, roles=roles, **call) == 1
    assert _on_mesh(f64(8, 12), IDS, roles=("vocab", "vocab"), **call | _longer(options)) == 1


def _on_mesh(logits, ids, *, target, roles, **options):
    return exercise_mesh(target, logits, ids, roles=roles, **options)


def _longer(options):
    return {"weight": None if options["weight"] is None else torch.cat([WEIGHT, WEIGHT + 1])}


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_cross_entropy_of_more_dims(reduction):
    ids = torch.randint(6, (4, 2, 2))
    ids[0, 0] = 9
    options = {"weight": WEIGHT, "reduction": reduction, "ignore_index": 9, "label_smoothing": 0.2}
    found = exercise(CROSS_ENTROPY, f64(4, 6, 2, 2), ids, **options)
    assert len(found) == 6
    tokens = "tokens" if reduction == MEAN else "split"
    assert exercise_mesh(CROSS_ENTROPY, f64(4, 6, 2, 2), ids, roles=(tokens, "vocab"), **options) == 3


def test_cross_entropy_of_one_token():
    assert exercise(CROSS_ENTROPY, f64(6), torch.tensor(4)) == {"B B -> B", "B* B -> B*", "S(0) B -> B [vocab]"}


def test_all_tokens_ignored_gives_nan_as_on_one_device():
    exercise(CROSS_ENTROPY, f64(4, 6), torch.full((4,), -100))


def test_large_logits():
    exercise(CROSS_ENTROPY, (f64(8, 6, grad=False) * 1e4).requires_grad_(), IDS)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_cross_entropy_of_probabilities(reduction):
    for shape in ((4, 6), (4, 6, 2)):
        found = exercise(CROSS_ENTROPY, f64(*shape), f64(*shape), WEIGHT, reduction=reduction, label_smoothing=0.1)
        assert len(found) == len(shape) + 1


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_nll_loss(reduction, weight):
    found = exercise("aten.nll_loss_nd.default", f64(8, 6), IDS, weight, reduction)
    assert any(text.startswith("P") and text.endswith("-> P") for text in found)
    assert len(exercise("aten.nll_loss_nd.default", f64(8, 6, 2), IDS[:, None].expand(8, 2), weight, reduction)) == 5
    if reduction == MEAN:
        assert (
            exercise_mesh("aten.nll_loss_nd.default", f64(8, 6), IDS, weight, reduction, roles=("tokens", "tokens"))
            == 1
        )


ELEMENTWISE = {
    "mse_loss": {},
    "l1_loss": {},
    "smooth_l1_loss": {"beta": 0.5},
    "huber_loss": {"delta": 0.5},
    "soft_margin_loss": {},
    "kl_div": {"log_target": True},
    "binary_cross_entropy": {},
    "binary_cross_entropy_with_logits": {
        "weight": torch.rand(4, 1, dtype=torch.float64),
        "pos_weight": f64(6, grad=False),
    },
}


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name, reduction):
    x, target = (torch.rand(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    target = target.detach() if name == "soft_margin_loss" else target
    found = exercise(f"aten.{name}.default", x, target, reduction=reduction, **ELEMENTWISE[name])
    assert len(found) == 4
    assert any("elements" in text for text in found) == (reduction == MEAN)
    if reduction == MEAN:
        roles = ("elements", "elements")
        assert (
            exercise_mesh(f"aten.{name}.default", x, target, roles=roles, reduction=reduction, **ELEMENTWISE[name]) == 3
        )


def test_weights_are_split_where_they_are_not_broadcast():
    x, target = (torch.rand(4, 6, dtype=torch.float64) for _ in range(2))
    found = exercise(
        "aten.binary_cross_entropy.default", x.requires_grad_(), target, torch.rand(4, 1, dtype=torch.float64)
    )
    assert {"S(0) S(0) S(0) -> P [elements]", "S(1) S(1) B -> P [elements]"} < found


def signs(*shape):
    return torch.randint(2, shape).double() * 2 - 1


LABELS = torch.tensor([[3, 1, -1, 0, 0, 0], [0, -1, 0, 0, 0, 0], [5, 4, 2, -1, 1, 0], [-1, 0, 0, 0, 0, 0]])
OTHERS = {
    "margin_ranking_loss": ((f64(4, 6), f64(4, 6), signs(4, 6)), {"margin": 0.3}),
    "hinge_embedding_loss": ((f64(4, 6), signs(4, 6)), {"margin": 0.5}),
    "poisson_nll_loss": ((f64(4, 6), torch.rand(4, 6).double(), True, False, 1e-8), {}),
    "cosine_embedding_loss": ((f64(4, 6), f64(4, 6), signs(4)), {"margin": 0.2}),
    "multi_margin_loss": ((f64(4, 6), torch.tensor([0, 5, 2, 2]), 2, 0.5, f64(6, grad=False)), {}),
    "multilabel_margin_loss": ((f64(4, 6), LABELS), {}),
    "triplet_margin_loss": ((f64(4, 6), f64(4, 6), f64(4, 6)), {"margin": 2.0, "swap": True}),
}


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_split_by_rows(name, reduction):
    args, more = OTHERS[name]
    # poisson_nll_loss has its reduction by position
    args, more = ((*args, reduction), {}) if name == "poisson_nll_loss" else (args, more | {"reduction": reduction})
    found = exercise(f"aten.{name}.default", *args, **more)
    assert any(text.startswith("S(0) S(0)") for text in found), found
    assert any("elements" in text for text in found) == (reduction == MEAN)


def test_a_single_sample_is_not_split():
    for name in ("multilabel_margin_loss", "triplet_margin_loss"):
        args, more = OTHERS[name]
        assert not any("S(" in text for text in exercise(f"aten.{name}.default", *(x[0] for x in args), **more))


def test_every_rule_has_a_sample():
    assert {f"aten.{name}.default" for name in [*ELEMENTWISE, *OTHERS]} | {
        CROSS_ENTROPY,
        CTC,
        "aten.nll_loss_nd.default",
    } == set(RULES)


def test_ctc_loss_splits_the_samples() -> None:
    log_probs = torch.randn(7, 6, 4, dtype=torch.float64).log_softmax(-1).requires_grad_()
    labels, steps, wanted = torch.randint(1, 4, (6, 3)), torch.tensor([7, 6, 5, 7, 7, 2]), torch.arange(6) % 4
    assert "S(1) S(0) S(0) S(0) -> S(0)" in exercise(CTC, log_probs, labels, steps, wanted, 0, True)
    assert len(exercise(CTC, log_probs, labels.flatten()[: int(wanted.sum())], steps, wanted, 0, True)) == 2  # whole
