"""The rules of `autopar.append` and `autopar.write`, beside the ops on shards."""

import torch

from autopar.ir.inference.append_op import APPEND, WRITE
from autopar.sbp.proof.check_signature import make_op
from tests.sbp.rulecheck import check_rule


def test_all_dims_but_that_of_the_rows_are_split() -> None:
    past, rows = torch.randn(6, 12, 5, 6, dtype=torch.float64), torch.randn(6, 12, 1, 6, dtype=torch.float64)
    found = {str(signature) for signature in check_rule(*make_op(APPEND, past, rows, 2))}
    assert {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)", "S(3) S(3) -> S(3)"} <= found
    assert not any("S(2)" in text for text in found)


def test_all_dims_but_the_one_written_along_are_split() -> None:
    past, rows = torch.randn(6, 12, 5, 6, dtype=torch.float64), torch.randn(6, 12, 1, 6, dtype=torch.float64)
    found = {str(signature) for signature in check_rule(*make_op(WRITE, past, 2, torch.tensor([3]), rows))}
    assert {"S(0) B S(0) -> S(0)", "S(1) B S(1) -> S(1)", "S(3) B S(3) -> S(3)"} <= found
    assert not any("S(2)" in text for text in found)
