"""Candidates of small graphs, pins and their errors."""

import itertools
import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PinError
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph, Input, Op, Slot, Value
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.sbp.candidates import annotate, even_layouts, not_divided, strategies_of
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.pins import restrict
from autopar.sbp.placement import I, format_layout, is_even
from autopar.sbp.rules import RULES
from autopar.sbp.signature import Candidates
from tests.sbp.rulecheck import make_op
from tests.sbp.samples import f64
from tests.zoo import build

MESH = parse_mesh("dp=2,tp=3")


def value(name: str, *shape: int, grad: bool = True) -> Value:
    return Value(name, shape, torch.float32, grad)


def call(name: str, target: str, inputs: tuple[Value, ...], output: Value) -> Op:
    slots = tuple(Slot(index) for index in range(len(inputs)))
    return Op(name, target, slots, (), inputs, (output,), False, "net", "net.py:1")


def two_layers() -> Graph:
    """x -> linear(w0) -> linear(w1), both weights 6 x 6, and a buffer that nothing reads."""
    x, weights, mask = (
        value("x", 12, 6, grad=False),
        [value(f"w{i}", 6, 6) for i in range(2)],
        value("mask", 5, grad=False),
    )
    first, second = value("y0", 12, 6), value("y1", 12, 6)
    inputs = [Input("parameter", w, f"layers.{i}.weight", (f"tied.{i}",)) for i, w in enumerate(weights)]
    inputs += [
        Input("buffer", mask, "mask"),
        Input("argument", x, "x"),
        Input("constant", value("c", 6, grad=False), "c"),
    ]
    ops = (
        call("linear_0", "aten.linear.default", (x, weights[0]), first),
        call("linear_1", "aten.linear.default", (first, weights[1]), second),
    )
    return Graph(tuple(inputs), ops, (second, 3), (), (), {}, ("x",), None, None)


def folded_layers() -> Folded:
    classes = {"w1": "w0", "linear_1": "linear_0"}
    return Folded(
        {name: classes.get(name, name) for name in ("x", "w0", "w1", "mask", "c", "linear_0", "linear_1")}, ()
    )


def texts(candidates: Candidates, name: str) -> set[str]:
    return {str(strategy) for strategy in candidates.strategies[name]}


def test_whole_signatures_come_first_and_gradients_decide_between_them() -> None:
    found = annotate(two_layers(), parse_mesh("2"))
    assert [str(strategy) for strategy in found.strategies["linear_1"][:2]] == ["B B -> B", "B* B* -> B*"]
    assert texts(found, "linear_1") == {
        *("B B -> B", "B* B* -> B*", "S(0) B* -> S(0)", "B* S(0) -> S(1)", "S(1) S(1) -> P", "P B* -> P", "B* P -> P")
    }
    assert {text for text in texts(found, "linear_0") if text.startswith("B")} == {
        "B B -> B",
        "B B* -> B*",
        "B S(0) -> S(1)",
        "B P -> P",
    }


def test_nothing_is_pending_or_summed_where_no_gradient_flows() -> None:
    op, _ = make_op("aten.add.Tensor", f64(4).detach(), f64(4).detach())
    assert {str(signature) for signature in signatures_of(op)} == {"B B -> B", "S(0) S(0) -> S(0)", "P P -> P"}
    compared, _ = make_op("aten.lt.Tensor", f64(4), f64(1))
    assert {str(signature) for signature in signatures_of(compared)} == {"B B -> B", "S(0) B -> S(0)"}


def test_an_axis_of_size_one_is_whole() -> None:
    op, _ = make_op("aten.neg.default", f64(4, 6))
    assert {str(strategy) for strategy in strategies_of(op, (1, 2))} >= {"B -> B | S(0) -> S(0)"}
    assert all(str(strategy).startswith("B -> B | ") for strategy in strategies_of(op, (1, 2)))


def test_two_axes_on_one_dim_must_divide_it_together() -> None:
    op, _ = make_op("aten.relu.default", f64(6, 12))
    found = {str(strategy) for strategy in strategies_of(op, (2, 2))}
    assert "S(1) -> S(1) | S(1) -> S(1)" in found
    assert "S(0) -> S(0) | S(0) -> S(0)" not in found
    assert "S(0) -> S(0) | S(1) -> S(1)" in found


def test_what_does_not_divide_is_listed() -> None:
    graph = two_layers()
    assert not not_divided(graph, parse_mesh("4"))  # 6 columns over 4 ranks: parts of 2, 2, 2 and none
    found = not_divided(graph, parse_mesh("32"))  # more ranks than columns
    assert {("linear_0", 1, 0), ("linear_0", 0, 0), ("w0", 0, 0)} <= set(found)


def test_an_op_without_rule_is_whole_and_listed() -> None:
    graph = two_layers()
    unknown = replace(graph.ops[1], target="aten.unheard_of.default")
    assert unknown.target not in RULES
    found = annotate(replace(graph, ops=(graph.ops[0], unknown)), MESH)
    assert found.without_rule == ("linear_1",)
    whole = ("B B -> B", "B* B* -> B*")
    assert texts(found, "linear_1") == {f"{outer} | {inner}" for outer in whole for inner in whole}


def test_layouts_of_inputs_and_outputs() -> None:
    found = annotate(two_layers(), MESH)
    assert [format_layout(layout) for layout in found.layouts["w0"]] == [
        *("BB", "BS(0)", "BS(1)", "S(0)B", "S(0)S(0)", "S(0)S(1)", "S(1)B", "S(1)S(0)", "S(1)S(1)")
    ]
    assert found.layouts["c"] == ((I, I),)
    assert found.layouts["mask"] == ((I, I),)  # 5 divides by neither axis
    assert len(found.layouts["x"]) == 9
    assert set(found.outputs) == {"y1"}
    assert even_layouts((), (2, 3)) == ((I, I),)


def test_a_leaf_that_needs_its_gradient_is_handed_in_whole() -> None:
    graph = two_layers()
    leaf = Input("argument", value("x", 12, 6, grad=True), "x")
    graph = replace(graph, inputs=(*graph.inputs[:3], leaf))
    found = annotate(replace(graph, argument_spec="of a call"), MESH)
    assert found.layouts["x"] == ((I, I),)
    stage = annotate(replace(graph, argument_spec=None), MESH)  # its gradient is sent back as it is laid out
    assert (I, I) in stage.layouts["x"] and len(stage.layouts["x"]) > 1


def test_folded_ops_are_left_to_their_representative() -> None:
    found = annotate(two_layers(), MESH, folded_layers())
    assert set(found.strategies) == {"linear_0"}
    assert set(found.layouts) == {"w0", "w1", "mask", "x", "c"}


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3).map(tuple)


@settings(max_examples=50)
@given(shapes, st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(tuple))
def test_strategies_are_the_even_products_of_signatures(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """Against the definition: every product, filtered by `is_even` on every tensor."""
    op, _ = make_op("aten.mul.Tensor", f64(*shape), f64(shape[-1]))
    found = strategies_of(op, mesh_shape)
    assert len(set(found)) == len(found)
    expected = 0
    choices = [signatures_of(op)[: 1 if size == 1 else None] for size in mesh_shape]
    for combination in itertools.product(*choices):
        layouts = [tuple(signature.inputs[i] for signature in combination) for i in range(2)]
        layouts.append(tuple(signature.outputs[0] for signature in combination))
        expected += all(is_even(v.shape, layout, mesh_shape) for v, layout in zip(op.inputs + op.outputs, layouts))
    assert len(found) == expected


def test_a_model_is_annotated_in_no_time() -> None:
    case = build("gpt2")
    graph = trace(case.model, case.args, case.kwargs)
    folded = fold(graph)
    strategies_of.cache_clear()
    begin = time.perf_counter()
    found = annotate(graph, Mesh((2, 2, 2), ("a", "b", "c")), folded)
    assert time.perf_counter() - begin < 1.5
    assert found.without_rule == ()


@pytest.mark.parametrize(
    ("fqn", "text", "layout"),
    [
        ("layers.0.weight", "S(0)S(1)", "S(0)S(1)"),
        ("layers.0.weight", "tp:S(1)", "BS(1)"),
        ("layers.0.weight", "tp:S(1), dp:S(0)", "S(0)S(1)"),
        ("tied.0", "BB", "BB"),
    ],
)
def test_a_pin_leaves_one_layout(fqn: str, text: str, layout: str) -> None:
    found = restrict(annotate(two_layers(), MESH), two_layers(), {fqn: text}, MESH)
    assert [format_layout(item) for item in found.layouts["w0"]] == [layout]
    assert len(found.layouts["w1"]) == 9


def test_a_pin_holds_for_all_repeats() -> None:
    graph, folded = two_layers(), folded_layers()
    found = restrict(annotate(graph, MESH, folded), graph, {"layers.1.weight": "S(0)B"}, MESH, folded)
    assert {format_layout(layout) for name in ("w0", "w1") for layout in found.layouts[name]} == {"S(0)B"}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layers.0.weigth": "BB"}, "layers.0.weight"),
        ({"x": "BB"}, "no parameter or buffer"),
        ({"layers.0.weight": "S(0)"}, "needs 2 placements, found 1"),
        ({"layers.0.weight": "pp:S(0)"}, "no mesh axis 'pp'; the mesh has dp, tp"),
        ({"layers.0.weight": "tp:S(0)B"}, "takes one placement"),
        ({"layers.0.weight": "rowwise"}, "not a layout"),
        ({"layers.0.weight": "S(0)P"}, "stored split (S(dim)) or whole (B)"),
        ({"layers.0.weight": "S(0)B*"}, "stored split (S(dim)) or whole (B)"),
        ({"layers.0.weight": "S(2)B"}, "cannot be stored so"),
        ({"layers.0.weight": "S(0/2)B"}, "cannot be stored so"),
        ({"mask": "S(0)S(0)"}, "shape [5] cannot be stored so on mesh dp=2,tp=3"),
        ({"layers.0.weight": "S(0)B", "tied.0": "BB"}, "'layers.0.weight' and 'tied.0'"),
    ],
)
def test_a_wrong_pin_says_what_to_change(pins: dict[str, str], message: str) -> None:
    with pytest.raises(PinError, match=re.escape(message)):
        restrict(annotate(two_layers(), MESH), two_layers(), pins, MESH)
