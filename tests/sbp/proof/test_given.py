"""Rules that users register: taken if they hold on samples, refused with the sample if they do not."""

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.placement import R, S
from autopar.sbp.proof.check_signature import make_op
from autopar.sbp.rules.given import register_rule
from autopar.sbp.signature import Signature


@torch.library.custom_op("given::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def texts() -> set[str]:
    op, _ = make_op("given.scaled.default", torch.randn(8, 4, 32), torch.randn(32))
    return set(map(str, signatures_of(op.nameless)))


def test_a_rule_replaces_what_was_discovered():
    assert "S(0) B -> S(0)" in texts()
    autopar.register_rule("given::scaled", lambda op: [Signature((S(1), R), (S(1),))])
    assert texts() == {"B B -> B", "S(1) B -> S(1)"}
    register_rule(torch.ops.given.scaled, "whole")
    assert texts() == {"B B -> B"}
    register_rule(torch.ops.given.scaled.default, "elementwise")  # all tensors of one shape: not these
    assert texts() == {"B B -> B"}


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (
            Signature((S(0), R), (R,)),
            r"S\(0\) B\* -> B\* on 2 ranks, of the sample given.scaled.default\(float64\[6, 10",
        ),
        (Signature((S(2), R), (S(2),)), r"is not true: S\(2\) B\* -> S\(2\)"),
        (Signature((S(0),), (S(0),)), "expected placements of 2 tensors and 1 results"),
        (Signature((S(0), R), (S(0),), role="mean"), "needs an implementation in"),
    ],
)
def test_a_rule_that_is_not_true_is_refused_with_the_sample(signature: Signature, message: str):
    register_rule(scaled, lambda op: [signature])
    with pytest.raises(AutoparError, match=message):
        texts()


@pytest.mark.parametrize(
    ("op", "rule", "message"),
    [
        ("given::missing", "batch", "expected the name of an op, 'library::op', found 'given::missing'"),
        (torch.nn.functional.relu, "batch", "expected an op of torch.library"),
        (torch.ops.aten.add, "batch", "expected an op of torch.library, or one of its overloads"),
        (torch.ops.aten.relu.default, "batch", "rules of torch's are autopar's"),
        (scaled, "rows", "expected 'elementwise', 'batch', 'whole' or a rule"),
    ],
)
def test_what_is_no_op_or_no_rule(op: object, rule: object, message: str):
    with pytest.raises(AutoparError, match=message):
        register_rule(op, rule)
