"""Normalisations on shards against the op itself."""

import pytest
import torch

from autopar.sbp.candidates import strategies_of
from autopar.sbp.op_signatures import signatures_of
from tests.sbp.exercise import exercise, exercise_mesh, f64
from tests.sbp.rulecheck import make_op

FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


def running(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return f64(channels, grad=False), f64(channels, grad=False).square()


@pytest.mark.parametrize("parameters", [(f64(6), f64(6)), (f64(6), None), (None, None)])
def test_layer_norm(parameters):
    found = exercise("aten.layer_norm.default", f64(2, 4, 6), [6], *parameters)
    assert {text.split("->")[1].strip() for text in found} == {"B", "B*", "S(0)", "S(1)", "S(2) [normalized]"}


def test_statistics_of_data_have_no_backward():
    exercise("aten.layer_norm.default", f64(2, 4, 6, grad=False), [6], f64(6), f64(6))
    exercise("aten.rms_norm.default", f64(2, 4, 6, grad=False), [6], f64(6))
    exercise(FUNCTIONAL, f64(4, 6, grad=False), f64(6), f64(6), *running(6), True, 0.1, 1e-5)


def test_layer_norm_over_several_dims_far_from_zero():
    x = (f64(2, 4, 6, grad=False) + 1e5).requires_grad_()
    assert "S(1) S(0) S(0) -> S(1) [normalized]" in exercise("aten.layer_norm.default", x, [4, 6], f64(4, 6), f64(4, 6))


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_rms_norm(eps):
    assert "S(2) S(0) -> S(2) [normalized]" in exercise("aten.rms_norm.default", f64(2, 4, 6), [6], f64(6), eps)
    assert "S(1) -> S(1) [normalized]" in exercise("aten.rms_norm.default", f64(2, 4, 6), [4, 6], None, eps)


@pytest.mark.parametrize("target", ["aten.layer_norm.default", "aten.rms_norm.default"])
def test_normalised_and_batch_dims_on_two_axes(target):
    args = f64(4, 2, 8), [8], f64(8)
    assert exercise_mesh(target, *args, roles=("split", "normalized")) == 2
    assert exercise_mesh(target, *args, roles=("normalized", "split")) == 2
    assert exercise_mesh(target, *args, roles=("normalized", "normalized")) == 1


@pytest.mark.parametrize("parameters", [(f64(8), f64(8)), (None, None)])
def test_group_norm(parameters):
    found = exercise("aten.group_norm.default", f64(2, 8, 3, 3), 4, *parameters)
    assert len(found) == 4
    assert (
        exercise_mesh("aten.group_norm.default", f64(2, 8, 3, 3), 4, *parameters, roles=("channel_groups", "split"))
        == 1
    )


def test_groups_are_not_cut():
    op, _ = make_op("aten.group_norm.default", f64(2, 8, 3), 2)
    roles = [[sig.role for sig in strategy.signatures] for strategy in strategies_of(op, (2, 2))]
    assert ["channel_groups", ""] in roles
    assert ["channel_groups", "channel_groups"] not in roles


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 3, 3)])
@pytest.mark.parametrize("parameters", [(f64(6), f64(6)), (None, None)])
def test_batch_statistics_are_those_of_the_global_batch(shape, parameters):
    found = exercise(FUNCTIONAL, f64(*shape), *parameters, *running(6), True, 0.1, 1e-5)
    assert sum("[batch]" in text for text in found) == 1
    assert any(text.startswith("S(1)") for text in found)


def test_batch_over_two_axes_and_beside_channels():
    args = f64(8, 6, 2), f64(6), f64(6), *running(6), True, 0.1, 1e-5
    assert exercise_mesh(FUNCTIONAL, *args, roles=("batch", "batch")) == 1
    assert exercise_mesh(FUNCTIONAL, *args, roles=("batch", "batch"), mesh_shape=(2, 4)) == 1
    assert exercise_mesh(FUNCTIONAL, *args, roles=("split", "batch")) == 1


def test_evaluation_needs_no_role():
    found = exercise("aten.batch_norm.default", f64(4, 6, 3), f64(6), f64(6), *running(6), False, 0.1, 1e-5, False)
    assert {text.split("->")[1].strip() for text in found} == {"B", "B*", "S(0)", "S(1)"}


def test_batch_norm_that_keeps_no_statistics():
    found = exercise("aten.batch_norm.default", f64(4, 6, 3), f64(6), f64(6), None, None, True, 0.1, 1e-5, False)
    assert "S(0) B* B* -> S(0) [batch]" in found


def test_batch_norm_that_writes_to_its_arguments_is_whole():
    op, _ = make_op("aten.batch_norm.default", f64(4, 6), None, None, *running(6), True, 0.1, 1e-5, False)
    assert len(signatures_of(op)) == 2


def test_instance_norm():
    found = exercise("aten.instance_norm.default", f64(2, 4, 6), f64(4), f64(4), None, None, True, 0.1, 1e-5, False)
    assert {"S(0) B* B* -> S(0)", "S(1) S(0) S(0) -> S(1)"} < found


def test_instance_norm_with_running_statistics_is_whole():
    op, _ = make_op("aten.instance_norm.default", f64(2, 4, 6), None, None, *running(4), False, 0.1, 1e-5, False)
    assert len(signatures_of(op)) == 2
