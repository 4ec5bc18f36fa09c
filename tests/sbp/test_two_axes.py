"""Every pair of signatures on a 2x2 mesh, for the ops that have a local implementation."""

import pytest
import torch

from autopar.ir.attention.flex_op import FLEX
from autopar.sbp.candidates import strategies_of
from autopar.sbp.local_ops import LOCAL_OPS, local_target
from tests.float8 import TENSORWISE, Float8Product
from tests.sbp.exercise import check, f64
from tests.sbp.functions.test_function_signatures import draw, target
from tests.sbp.rulecheck import make_op
from tests.sbp.test_flex_attention import call as flex_call

IDS = torch.tensor([5, 0, 2, -100])
GROUPED = "transformers.grouped_mm_fallback.default"

SAMPLES = [
    ("aten.layer_norm.default", (f64(4, 8), [8], f64(8), f64(8))),
    ("aten.rms_norm.default", (f64(4, 8), [8], f64(8))),
    ("aten.group_norm.default", (f64(4, 8, 2), 4, f64(8), f64(8))),
    ("aten.batch_norm.default", (f64(8, 4), f64(4), f64(4), None, None, True, 0.1, 1e-5, False)),
    (
        "aten._native_batch_norm_legit_functional.default",
        (f64(8, 4), f64(4), f64(4), f64(4, grad=False), f64(4, grad=False), True, 0.1, 1e-5),
    ),
    ("aten.conv2d.default", (f64(4, 8, 3, 3), f64(8, 2, 2, 2), f64(8), [1, 1], [0, 0], [1, 1], 4)),
    ("aten.cross_entropy_loss.default", (f64(4, 8), IDS, torch.rand(8, dtype=torch.float64))),
    ("aten.cross_entropy_loss.default", (f64(4, 8), IDS, None, 0, -100, 0.1)),
    ("aten.nll_loss_nd.default", (f64(4, 8), IDS)),
    ("aten.embedding.default", (f64(8, 4), IDS.clamp(0), 2)),
    ("aten.scaled_dot_product_attention.default", (f64(4, 4, 4, 4), f64(4, 4, 4, 4), f64(4, 4, 4, 4), None, 0.0, True)),
    (FLEX, flex_call(None, None)),
    ("aten.softmax.int", (f64(4, 8), -1)),
    ("aten._safe_softmax.default", (f64(4, 8), -1)),
    ("aten.log_softmax.int", (f64(4, 8), -1)),
    ("aten.logsumexp.default", (f64(4, 8), [-1])),
    ("aten.mse_loss.default", (f64(4, 8), f64(4, 8))),
    (GROUPED, (f64(8, 4), f64(4, 4, 4), torch.tensor([2, 2, 5, 8]))),
    (target(Float8Product, 2, TENSORWISE), (draw(4, 16, 64), draw(64, 64))),
]


@pytest.mark.parametrize(("target", "args"), SAMPLES, ids=lambda value: value if isinstance(value, str) else "")
def test_signatures_on_two_axes_are_independent(target, args):
    if target == GROUPED:
        pytest.importorskip("transformers.integrations.moe")
    op, inputs = make_op(target, *args)
    strategies = strategies_of(op, (2, 2))
    of_roles = any if "attention" in target else all  # causal parts of a sequence lie along one axis
    assert any(of_roles(signature.role for signature in strategy.signatures) for strategy in strategies)
    for strategy in strategies:
        check(op, strategy, (2, 2), inputs)


def test_each_kind_of_local_implementation_is_sampled():
    sampled = {LOCAL_OPS[local_target(target)].collectives for target, _ in SAMPLES}
    assert {local_op.collectives for local_op in LOCAL_OPS.values()} == sampled
