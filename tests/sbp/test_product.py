"""Products on shards against the op itself."""

from dataclasses import replace

import pytest
import torch

import autopar.ir.experts.grouped_linear
import autopar.ir.passes.unflatten_matmul  # noqa: F401 (both make ops)
from autopar.ir.passes.turn_grouped import TURNED as TURNED_GROUPED
from autopar.sbp.candidates import strategies_of
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.rules.matmul import RULES, parse_equation
from tests.sbp.exercise import exercise, exercise_mesh, f64
from tests.sbp.rulecheck import make_op


def f8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


SAMPLES = [
    ("_scaled_mm", (f8(8, 32), f8(32, 32), scales(), scales(), None, None, torch.float32)),
    ("_scaled_mm", (f8(8, 32), f8(32, 32), scales(8, 1), scales(1, 32), None, None, torch.float32)),
    ("_scaled_mm", (f8(8, 32), f8(32, 32), scales(), scales(), torch.randn(32), None, torch.float32)),
    ("linear", (f64(4, 2, 6), f64(8, 6), f64(8))),
    ("linear", (f64(4, 6), f64(8, 6), None)),
    ("linear", (f64(6), f64(8, 6), f64(8))),
    ("linear", (f64(4, 6), f64(6), None)),
    ("matmul", (f64(4, 6), f64(6, 8))),
    ("matmul", (f64(2, 4, 6), f64(6, 8))),
    ("matmul", (f64(4, 6), f64(2, 6, 8))),
    ("matmul", (f64(2, 1, 4, 6), f64(1, 4, 6, 2))),
    ("matmul", (f64(6), f64(2, 6, 8))),
    ("matmul", (f64(2, 4, 6), f64(6))),
    ("matmul", (f64(6), f64(6))),
    ("mm", (f64(4, 6), f64(6, 8))),
    ("bmm", (f64(2, 4, 6), f64(2, 6, 8))),
    ("mv", (f64(4, 6), f64(6))),
    ("dot", (f64(6), f64(6))),
    ("addmm", (f64(8), f64(4, 6), f64(6, 8))),
    ("addmm", (f64(4, 1), f64(4, 6), f64(6, 8))),
    ("addmv", (f64(4), f64(4, 6), f64(6))),
    ("baddbmm", (f64(1, 4, 8), f64(2, 4, 6), f64(2, 6, 8))),
    ("outer", (f64(4), f64(6))),
    ("inner", (f64(2, 4, 6), f64(2, 6))),
    ("inner", (f64(6), f64(6))),
    ("tensordot", (f64(2, 4, 6), f64(6, 8, 2), [0, -1], [2, 0])),
    ("einsum", ("bhid,bhjd->bhij", [f64(2, 4, 2, 6), f64(2, 4, 8, 6)])),
    ("einsum", ("...k,kn", [f64(2, 4, 6), f64(6, 8)])),
    ("einsum", ("b...,bc...->...c", [f64(2, 4, 6), f64(2, 8, 1, 6)])),
    ("einsum", ("ij,jk,kl->il", [f64(2, 4), f64(4, 6), f64(6, 2)])),
    ("einsum", ("iij->j", [f64(4, 4, 2)])),
    ("einsum", ("ij,k->k", [f64(2, 4), f64(6)])),
]
GROUPED_LINEAR = "autopar.grouped_linear.default"
GROUPED = {*TURNED_GROUPED, *TURNED_GROUPED.values(), GROUPED_LINEAR}
TURNED = "autopar.turned_linear.default"


def test_linear_with_a_turned_weight_is_split_as_linear():
    x, weight, bias = f64(4, 2, 6), f64(6, 8), f64(8)
    found = exercise(TURNED, x, weight, bias)
    turned = exercise("aten.linear.default", x, weight.detach().t().clone().requires_grad_(), bias)
    assert len(found) == len(turned) > 6
    assert torch.equal(
        torch.ops.autopar.turned_linear(x, weight, bias), torch.nn.functional.linear(x, weight.t(), bias)
    )


@pytest.mark.parametrize(("name", "args"), SAMPLES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_signature_gives_the_ops_numbers(name, args):
    assert len(exercise(f"aten.{name}.default", *args)) > 2


def test_scaled_addition_is_split_too():
    found = exercise("aten.addmm.default", f64(4, 8), f64(4, 6), f64(6, 8), beta=0.5, alpha=3)
    assert {"P S(1) S(0) -> P", "S(0) S(0) B* -> S(0)", "S(1) B* S(1) -> S(1)", "P P B* -> P", "P B* P -> P"} < found


def test_linear_has_just_the_splits_of_its_letters():
    found = exercise("aten.linear.default", f64(4, 6), f64(8, 6), f64(8))
    assert found == {
        "B B B -> B",
        "B* B* B* -> B*",
        "S(0) B* B* -> S(0)",
        "B* S(0) S(0) -> S(1)",
        "S(1) S(1) P -> P",
        "P B* P -> P",
        "B* P P -> P",
    }


def test_weight_without_gradient_is_whole():
    assert "S(0) B -> S(0)" in exercise("aten.linear.default", f64(4, 6), f64(8, 6, grad=False), None)


def test_terms_of_a_product_in_float8_are_wider_and_have_no_bias() -> None:
    whole, plain = (scales(), scales()), "aten._scaled_mm.default"
    found = exercise(plain, f8(8, 32), f8(32, 32), *whole, None, None, torch.float32)
    assert found == {"B B B B -> B", "S(0) B B B -> S(0)", "B S(1) B B -> S(1)", "S(1) S(0) B B -> P"}
    narrow, _ = make_op(plain, f8(8, 32), f8(32, 32), *whole, None, None, torch.float8_e4m3fn)
    assert "S(1) S(0) B B -> P" not in map(str, signatures_of(narrow))
    by_rows = exercise(plain, f8(8, 32), f8(32, 32), scales(8, 1), scales(1, 32), None, None, torch.float32)
    assert {"S(0) B S(0) B -> S(0)", "B S(1) B S(1) -> S(1)", "S(1) S(0) B B -> P"} < by_rows


def test_scales_of_blocks_are_split_with_them_and_those_in_another_order_are_whole() -> None:
    a, b = f8(256, 256), f8(256, 256)
    op, _ = make_op("aten._scaled_mm.default", a, b, scales(), scales(), None, None, torch.bfloat16)
    of_blocks = tuple(replace(value, shape=shape) for value, shape in zip(op.inputs[2:], ((256, 2), (2, 2))))
    found = set(map(str, signatures_of(replace(op, inputs=(*op.inputs[:2], *of_blocks)))))
    assert {"S(0) B S(0) B -> S(0)", "B S(1) B S(1) -> S(1)", "S(1) S(0) S(1) S(0) -> P"} < found
    flat = tuple(replace(value, shape=(2048,), dtype=torch.float8_e8m0fnu) for value in op.inputs[2:])
    assert len(signatures_of(replace(op, inputs=(*op.inputs[:2], *flat)))) == 1


def test_one_tensor_in_two_places_of_an_einsum():
    x = f64(4, 6)
    assert "S(0) S(0) -> P" in exercise("aten.einsum.default", "ij,ij->", [x, x])


def test_implicit_output_has_the_letters_met_once_in_order():
    assert parse_equation("bca,c", [3, 1]) == ([("b", "c", "a"), ("c",)], ("a", "b"))


@pytest.mark.parametrize("ends", [[2, 2, 5, 8], [0, 0, 0, 8], [8, 8, 8, 8], [3, 4, 6, 6]])
def test_grouped_product(ends):
    moe = pytest.importorskip("transformers.integrations.moe")
    args = f64(8, 4), f64(4, 4, 6), torch.tensor(ends)
    target = "transformers.grouped_mm_fallback.default"
    assert moe and exercise(target, *args) == {
        "B B B -> B",
        "B* B* B -> B*",
        "S(1) S(1) B -> P",
        "B* S(2) B -> S(1)",
        "P B* B -> P",
        "B* P B -> P",
        "S(0) B* B -> S(0) [rows]",
        "B* S(0) B -> P [experts]",
    }
    assert exercise_mesh(target, *args, roles=("rows", "experts")) == 1
    assert exercise_mesh(target, *args, roles=("experts", "experts")) == 1


def test_a_grouped_product_with_turned_weights_is_split_as_one_without():
    pytest.importorskip("transformers.integrations.moe")
    x, weight, ends = f64(8, 4), f64(4, 4, 6), torch.tensor([2, 2, 5, 8])
    plain = "transformers.grouped_mm_fallback.default"
    found = exercise(TURNED_GROUPED[plain], x, weight.detach().mT.contiguous().requires_grad_(), ends)
    swapped = str.maketrans({"1": "2", "2": "1"})

    def turned(text):
        first, second, *rest = text.split(" ", 2)
        return " ".join((first, second.translate(swapped), *rest))

    assert found == set(map(turned, exercise(plain, x, weight, ends)))
    assert found == exercise(GROUPED_LINEAR, x, weight.detach().mT.contiguous().requires_grad_(), ends)


def test_grouped_product_of_aten_has_the_same_signatures():
    op, _ = make_op(
        "aten._grouped_mm.default", bf16(8, 16), bf16(4, 16, 8), torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    )
    assert "S(0) B* B -> S(0) [rows]" in set(map(str, signatures_of(op)))
    op, _ = make_op("aten._grouped_mm.default", bf16(4, 8, 16), bf16(4, 16, 8))
    assert len(signatures_of(op)) == 2


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_a_grouped_product_is_cut_no_finer_than_its_kernel_takes(num_parts):
    """The kernel refuses rows that are no multiple of 16 bytes; on the meta device it says so."""
    x, weight, ends = bf16(8, 32), bf16(4, 32, 16), torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    op, _ = make_op("aten._grouped_mm.default", x, weight, ends)
    offered = {str(strategy) for strategy in strategies_of(op, (num_parts,))}
    columns = {"S(1) S(1) B -> P": (x.chunk(num_parts, 1), weight.chunk(num_parts, 1))}
    cuts = columns | {"B* S(2) B -> S(1)": ((x,), weight.chunk(num_parts, 2))}
    for signature, (rows, weights) in cuts.items():
        given = [part[0].detach().contiguous().to("meta") for part in (rows, weights)]
        try:
            torch._grouped_mm(*given, offs=ends.to("meta"))
            has_kernel = True
        except RuntimeError as error:
            has_kernel = "multiple of 16 bytes" not in str(error)
        assert (signature in offered) == has_kernel


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def test_every_rule_has_a_sample():
    assert {f"aten.{name}.default" for name, _ in SAMPLES} == set(RULES) - GROUPED - {TURNED}
