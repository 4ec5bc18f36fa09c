"""The referee must refuse what is wrong: a value, a gradient, a shape, a whole that is not."""

from typing import Any

import pytest
import torch

from autopar.sbp.placement import I, P, R, S
from autopar.sbp.signature import Signature
from tests.sbp.rulecheck import check_signature, make_op
from tests.sbp.samples import f64


@pytest.mark.parametrize(
    ("target", "args", "signature", "complaint"),
    [
        ("relu.default", (f64(4, 6),), Signature((P,), (P,)), "output 0"),
        ("add.Scalar", (f64(4, 6), 1.0), Signature((P,), (P,)), "output 0"),
        ("sum.dim_IntList", (f64(4, 6), (0,)), Signature((S(0),), (I,)), "whole on all ranks"),
        ("mean.dim", (f64(4, 6), (0,)), Signature((S(0),), (P,)), "output 0"),
        ("mul.Tensor", (f64(4, 6), f64(6)), Signature((S(0), I), (S(0),)), "whole on all ranks"),
        ("mul.Tensor", (f64(4, 6), f64(4, 6)), Signature((R, R), (I,)), "gradient of input 0"),
        ("mul.Tensor", (f64(4, 6), f64(4, 6)), Signature((P, I), (P,)), "whole on all ranks"),
        ("transpose.int", (f64(4, 6), 0, 1), Signature((S(0),), (S(0),)), "expected shapes"),
        ("cumsum.default", (f64(4, 6), 0), Signature((S(0),), (S(0),)), "output 0"),
    ],
)
def test_a_wrong_signature_is_refused(target: str, args: tuple[Any, ...], signature: Signature, complaint: str) -> None:
    torch.manual_seed(0)
    op, inputs = make_op(f"aten.{target}", *args)
    with pytest.raises(AssertionError, match=complaint):
        check_signature(op, signature, 2, inputs)


def test_what_does_not_divide_is_not_run() -> None:
    op, inputs = make_op("aten.relu.default", f64(4, 6))
    assert not check_signature(op, Signature((S(0),), (S(0),)), 3, inputs)
    assert check_signature(op, Signature((S(1),), (S(1),)), 3, inputs)
