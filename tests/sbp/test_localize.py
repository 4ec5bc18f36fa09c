"""Sizes that are baked in become local; everything else stays."""

from typing import Any

import pytest
import torch

from autopar.ir.graph import Slot, resolve
from autopar.sbp.localize import LOCAL_ARGUMENTS, localize
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.rules import RULES
from autopar.sbp.signature import Signature, Strategy
from tests.sbp.rulecheck import make_op
from tests.sbp.samples import f64

MESH = (2, 3)


def local(
    target: str, *args: Any, to: tuple[Placement, ...], src: tuple[Placement, ...], **kwargs: Any
) -> tuple[Any, Any]:
    op, _ = make_op(f"aten.{target}", *args, **kwargs)
    signatures = [Signature((a,) * len(op.inputs), (b,)) for a, b in zip(src, to)]
    return localize(op, Strategy(tuple(signatures)), MESH)


@pytest.mark.parametrize(
    ("target", "args", "src", "dst", "expected"),
    [
        ("reshape.default", ((4, 12), (4, 3, 4)), (S(0), S(1)), (S(0), S(1)), (2, 1, 4)),
        ("reshape.default", ((4, 12), (-1,)), (S(0), I), (S(0), I), (24,)),
        ("view.default", ((4, 12), (48,)), (P, R), (P, R), (48,)),
        ("expand.default", ((4, 1), (4, 6)), (S(0), R), (S(0), S(1)), (2, 2)),
        ("expand.default", ((6,), (4, -1)), (R, S(0)), (S(0), S(1)), (2, 2)),
        ("broadcast_to.default", ((1, 6), (12, 6)), (R, R), (S(0), S(0)), (2, 6)),
    ],
)
def test_the_size_is_that_of_the_local_output(target: str, args: Any, src: Any, dst: Any, expected: Any) -> None:
    shape, size = args
    found, kwargs = local(target, f64(*shape), size, src=src, to=dst)
    assert found == (Slot(0), expected)
    assert kwargs == ()


def test_only_the_split_sizes_of_unflatten_change() -> None:
    args, _ = local("unflatten.int", f64(4, 24), -1, (-1, 4), src=(S(0), S(1)), to=(S(0), S(1)))
    assert args == (Slot(0), -1, (2, 4))


def test_repeats_shrink_where_the_output_is_split_and_the_input_is_not() -> None:
    args, _ = local("repeat.default", f64(1, 6), (4, 1), src=(R, S(1)), to=(S(0), S(1)))
    assert args == (Slot(0), (2, 1))


def test_the_output_size_of_repeat_interleave() -> None:
    args, kwargs = local("repeat_interleave.self_int", f64(6, 2), 2, 0, output_size=12, src=(S(0), R), to=(S(0), R))
    assert args == (Slot(0), 2, 0)
    assert kwargs == (("output_size", 6),)
    assert local("repeat_interleave.self_int", f64(6, 2), 2, 0, src=(S(0), R), to=(S(0), R))[1] == ()


def test_new_tensors_follow_the_output_not_the_input() -> None:
    args, kwargs = local("new_full.default", f64(2, 2), (4, 6), 1.0, dtype=torch.float32, src=(I, I), to=(S(0), S(1)))
    assert args == (Slot(0), (2, 2), 1.0)
    assert kwargs == (("dtype", torch.float32),)


def test_other_ops_are_left_alone() -> None:
    op, _ = make_op("aten.split.Tensor", f64(4, 6), 2, 1)
    strategy = Strategy((Signature((S(0),), (S(0),) * 3), Signature((I,), (I,) * 3)))
    assert localize(op, strategy, MESH) == (op.args, op.kwargs)


def test_every_rule_is_of_an_op_that_torch_has() -> None:
    assert all(resolve(target) for target in RULES if target.startswith("aten."))


def test_every_localised_op_has_a_rule() -> None:
    assert set(LOCAL_ARGUMENTS) <= set(RULES)
