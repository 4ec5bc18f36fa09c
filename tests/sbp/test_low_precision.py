"""Local implementations in low precision: the op's dtypes, its numbers within rounding, and collectives of float32
sums.
"""

import pytest
import torch

from autopar.sbp.local_ops.local_norm import rms_norm
from autopar.sbp.proof import check_signature as referee
from tests.sbp.exercise import exercise

FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def ones(channels: int) -> torch.Tensor:
    return torch.ones(channels)


CASES = [
    ("aten.softmax.int", (draw(4, 8), -1)),
    ("aten.softmax.int", (draw(4, 8), -1, torch.float32)),
    ("aten.log_softmax.int", (draw(4, 8, dtype=torch.float16), -1)),
    ("aten.logsumexp.default", (draw(4, 8), [-1])),
    ("aten.cross_entropy_loss.default", (draw(8, 16), torch.arange(8))),
    ("aten.cross_entropy_loss.default", (draw(8, 16), torch.arange(8), None, 0)),
    ("aten.cross_entropy_loss.default", (draw(8, 16, dtype=torch.float32), torch.arange(8))),
    ("aten.nll_loss_nd.default", (draw(8, 16, dtype=torch.float32), torch.arange(8))),
    ("aten.layer_norm.default", (draw(4, 8), [8], draw(8), draw(8))),
    ("aten.rms_norm.default", (draw(4, 8), [8], draw(8))),
    ("aten.rms_norm.default", (draw(4, 8, dtype=torch.float32), [8], draw(8, dtype=torch.float32))),
    (FUNCTIONAL, (draw(4, 6, 2, dtype=torch.float32), ones(6), ones(6), ones(6), ones(6), True, 0.1, 1e-5)),
    (
        FUNCTIONAL,
        (
            draw(4, 6, 2),
            ones(6).bfloat16(),
            ones(6).bfloat16(),
            ones(6).bfloat16(),
            ones(6).bfloat16(),
            True,
            0.1,
            1e-5,
        ),
    ),
    (FUNCTIONAL, (draw(4, 6, 2), ones(6), ones(6), ones(6), ones(6), True, 0.1, 1e-5)),
    ("aten.mse_loss.default", (draw(4, 8), draw(4, 8))),
    ("aten.embedding.default", (draw(8, 4), torch.arange(6))),
]


@pytest.mark.parametrize(("target", "args"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_dtypes_numbers_and_bytes(target, args, monkeypatch):
    def compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        rounding = 8 * torch.finfo(args[0].dtype).eps
        torch.testing.assert_close(found, expected, rtol=rounding, atol=4 * rounding, msg=lambda m: f"{what}: {m}")

    monkeypatch.setattr(referee, "_compare", compare)
    torch.manual_seed(0)
    assert any("[" in text for text in exercise(target, *args))


def test_rms_norm_adds_the_ops_own_epsilon():
    """Numbers so small that the default epsilon, that of the dtype, decides the result."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((2, 8), 1e-3, dtype=dtype)
        torch.testing.assert_close(rms_norm(x, [8], normalized=()), torch.ops.aten.rms_norm(x, [8]))
