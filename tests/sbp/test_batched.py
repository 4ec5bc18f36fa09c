"""Ops on matrices, signals, planes and recurrent cells, on shards against the op itself."""

import pytest
import torch

from autopar.sbp.rules.batched import RULES
from tests.sbp.exercise import exercise, f64

ROOT = f64(2, 4, 4, grad=False)
SPD = (ROOT @ ROOT.mT + 8 * torch.eye(4, dtype=torch.float64)).requires_grad_()
SIGNALS = f64(2, 32)
SPECTRUM = torch.stft(SIGNALS.detach(), 8, window=torch.hann_window(8, dtype=torch.float64), return_complex=True)
WINDOW = torch.hann_window(8, dtype=torch.float64)
PLANES, GRID = f64(2, 4, 4, 4), (f64(2, 4, 4, 2) * 0.3).detach().requires_grad_()
CELL = (f64(2, 4), f64(12, 4), f64(12, 4), f64(12), f64(12))
GATES = (f64(16, 4), f64(16, 4), f64(16), f64(16))
POOLED = torch.nn.functional.max_pool2d(PLANES.detach(), 2, return_indices=True)
COMPLEX = torch.complex(f64(2, 4, 6), f64(2, 4, 6)).detach().requires_grad_()
ROWS = f64(2, 6, grad=False).sort(-1).values

SAMPLES = [
    *[(f"fft_{name}.default", (COMPLEX,)) for name in ("fft", "ifft", "irfft", "hfft", "fft2", "ifft2", "irfft2")],
    *[(f"fft_{name}.default", (COMPLEX, None, [1, 2])) for name in ("fftn", "ifftn", "irfftn")],
    *[(f"fft_{name}.default", (f64(2, 4, 6),)) for name in ("rfft", "ihfft", "rfft2")],
    ("fft_rfftn.default", (f64(2, 4, 6), None, [1, 2])),
    *[(f"linalg_{name}.default", (SPD,)) for name in ("det", "inv", "slogdet", "svdvals", "cholesky", "eigvalsh")],
    *[(f"linalg_{name}.default", (SPD.detach(),)) for name in ("qr", "lu_factor", "eigh", "eigvals", "eig")],
    ("linalg_matrix_power.default", (SPD, 3)),
    ("linalg_solve_triangular.default", (SPD, f64(2, 4, 3)), {"upper": False}),
    ("linalg_solve.default", (SPD, f64(2, 4, 6))),
    ("linalg_solve.default", (SPD, f64(2, 4))),
    ("linalg_solve.default", (SPD[0].detach().requires_grad_(), f64(2, 4, 6))),
    ("linalg_solve.default", (SPD, f64(2, 6, 4)), {"left": False}),
    ("cholesky_solve.default", (f64(2, 4, 3), SPD)),
    *[(f"{name}.default", (SPD,)) for name in ("logdet", "inverse")],
    ("matrix_exp.default", (f64(2, 4, 4),)),
    ("grid_sampler.default", (PLANES, GRID, 0, 0, False)),
    ("grid_sampler_2d.default", (PLANES, GRID, 0, 1, True)),
    ("cdist.default", (f64(2, 4, 3), f64(2, 6, 3))),
    ("im2col.default", (PLANES, [2, 2], [1, 1], [0, 0], [2, 2])),
    ("col2im.default", (f64(2, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])),
    ("channel_shuffle.default", (PLANES, 2)),
    ("max_unpool2d.default", (POOLED[0].requires_grad_(), POOLED[1], [4, 4])),
    ("stft.default", (SIGNALS, 8, 4, 8, WINDOW, False, True, True)),
    ("stft.center", (SIGNALS, 8, 4, 8, WINDOW, False, "reflect", False, True, True)),
    ("istft.default", (SPECTRUM.requires_grad_(), 8, 2, 8, WINDOW)),
    ("_weight_norm.default", (f64(4, 6), f64(4, 1), 0)),
    ("searchsorted.Tensor", (torch.arange(5, dtype=torch.float64), f64(2, 4, grad=False))),
    ("searchsorted.Tensor", (ROWS, f64(2, 4, grad=False))),
    ("isin.Tensor_Tensor", (torch.arange(8).reshape(2, 4), torch.tensor([1, 5]))),
    ("bilinear.default", (f64(2, 4, 3), f64(2, 4, 5), f64(6, 3, 5), f64(6))),
    ("affine_grid_generator.default", (f64(2, 2, 3), [2, 3, 4, 4], False)),
    ("linalg_cross.default", (f64(2, 4, 3), f64(2, 4, 3))),
    ("fft_fftshift.default", (f64(2, 4, 6), [2])),
    ("fft_ifftshift.default", (f64(2, 4, 6), [1])),
    ("rot90.default", (f64(2, 4, 4), 1, [1, 2])),
    ("fliplr.default", (f64(2, 4, 6),)),
    ("lstm_cell.default", (f64(2, 4), [f64(2, 4), f64(2, 4)], *GATES)),
    ("gru_cell.default", (f64(2, 4), *CELL)),
    ("rnn_tanh_cell.default", (f64(2, 4), f64(2, 4), f64(4, 4), f64(4, 4), f64(4), f64(4))),
    ("rnn_relu_cell.default", (f64(2, 4), f64(2, 4), f64(4, 4), f64(4, 4), f64(4), f64(4))),
    ("vdot.default", (f64(6), f64(6))),
]
WHOLE_BATCH = ("affine_grid_generator.default", "vdot.default", "_weight_norm.default")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample[0])
def test_every_signature_gives_the_ops_numbers(sample):
    name, args, *kwargs = sample
    found = exercise(f"aten.{name}", *args, **(kwargs[0] if kwargs else {}))
    assert name in WHOLE_BATCH or any("S(0)" in text.split("->")[1] for text in found), found


@pytest.mark.parametrize(("of", "sides"), [((2, 4, 4), (4, 6)), ((4, 4), (4, 6)), ((4, 4), (4,)), ((4, 4, 4), (4, 4))])
def test_columns_of_right_sides_are_solved_apart(of, sides):
    """Whether right sides are vectors, and what is broadcast, torch tells from the shapes."""
    matrix = (8 * torch.eye(4, dtype=torch.float64) + f64(*of).detach()).requires_grad_()
    found = exercise("aten.linalg_solve.default", matrix, f64(*sides))
    is_matrix = len(sides) == 2 and of[:-1] != sides
    assert is_matrix == any(text.startswith("B* S(1)") for text in found), found


def test_every_rule_has_a_sample():
    assert {f"aten.{name}" for name, *_ in SAMPLES} == set(RULES)
