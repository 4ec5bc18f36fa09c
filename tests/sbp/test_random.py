"""Random ops on shards: equal numbers where seeded alike, the same statistics where split."""

import pytest
import torch

from autopar.ir.graph import resolve
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.placement import P, S
from autopar.sbp.rules.random import RULES
from tests.sbp.exercise import exercise, f64
from tests.sbp.rulecheck import make_op

PLAIN = {
    "dropout.default": (),
    "alpha_dropout.default": (),
    "feature_dropout.default": (),
    "feature_alpha_dropout.default": (),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_drops_it_is_the_identity_everywhere(name):
    assert "S(0) -> S(0)" in exercise(f"aten.{name}", f64(2, 4, 6), 0.5, False)


@pytest.mark.parametrize("name", ["dropout.default", "native_dropout.default", "feature_dropout.default"])
def test_equal_drops_of_terms_sum_to_the_drops_of_the_sum(name):
    x, noise = f64(4, 6, grad=False), f64(4, 6, grad=False)
    op, _ = make_op(f"aten.{name}", x, 0.5, True)
    assert any(signature.inputs == (P,) for signature in signatures_of(op))

    def run(term: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        out = resolve(op.target)(term, 0.5, True)
        return out[0] if isinstance(out, tuple) else out

    torch.testing.assert_close(run(x - noise) + run(noise), run(x))


@pytest.mark.parametrize("name", ["alpha_dropout.default", "feature_alpha_dropout.default"])
def test_dropping_to_a_constant_passes_no_terms(name):
    op, _ = make_op(f"aten.{name}", f64(2, 4), 0.5, True)
    assert all(signature.inputs != (P,) for signature in signatures_of(op))


@pytest.mark.parametrize("name", ["feature_dropout.default", "feature_alpha_dropout.default"])
def test_features_are_dropped_whole_so_only_they_are_split(name):
    op, inputs = make_op(f"aten.{name}", torch.ones(4, 8, 6), 0.5, True)
    split = {placement for signature in signatures_of(op) for placement in signature.inputs if placement.is_split}
    assert split == {S(0), S(1)}
    assert torch.all((resolve(op.target)(*inputs, 0.5, True)).std(-1) == 0)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("dropout.default", (f64(2, 4), 0.5, True)),
        ("native_dropout.default", (f64(2, 4), 0.5, True)),
        ("alpha_dropout.default", (f64(2, 4), 0.5, True)),
        ("bernoulli.default", (torch.rand(2, 4),)),
        ("bernoulli.p", (torch.rand(2, 4), 0.5)),
        ("rand_like.default", (f64(2, 4),)),
        ("randn_like.default", (f64(2, 4),)),
        ("randint_like.default", (f64(2, 4), 5)),
    ],
)
def test_elements_are_independent_so_all_dims_split_alike(name, args):
    op, _ = make_op(f"aten.{name}", *args)
    splits = [signature for signature in signatures_of(op) if signature.inputs[0].is_split]
    assert [(s.inputs, set(s.outputs)) for s in splits] == [((S(0),), {S(0)}), ((S(1),), {S(1)})]


@pytest.mark.parametrize("name", ["rand_like.default", "randn_like.default"])
def test_only_the_shape_is_read(name):
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return resolve(f"aten.{name}")(x)

    op, _ = make_op(f"aten.{name}", f64(2, 4))
    assert any(str(signature) == "P -> B" for signature in signatures_of(op))
    assert torch.equal(run(torch.zeros(2, 4)), run(torch.full((2, 4), 5.0)))


def test_every_rule_is_met_above():
    met = {*PLAIN, "native_dropout.default", "bernoulli.default", "bernoulli.p"}
    met |= {"rand_like.default", "randn_like.default", "randint_like.default"}
    assert {f"aten.{name}" for name in met} == set(RULES)
