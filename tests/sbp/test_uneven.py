"""Parts of unequal sizes: as torch.chunk has them, converted to the byte as priced, and every rule in such parts."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.sbp.axis import Axis
from autopar.sbp.candidates import Extra, strategies_of
from autopar.sbp.convert import convert, convert_together, dual
from autopar.sbp.placement import I, Layout, P, Placement, R, S, is_even, local_shape, parse_layout
from autopar.sbp.proof.cut_and_join import Coordinate, cut, join
from autopar.sbp.redistribute import collectives_of, redistribute
from autopar.sbp.uneven.parts import PartSize, part_size, part_sizes
from autopar.sbp.uneven.uneven_extents import _carry, _pairs
from tests.sbp.exercise import record
from tests.sbp.rulecheck import Tensors, check_strategy, make_op
from tests.sbp.samples import calls, f64
from tests.sbp.simulate import on_threads
from tests.sbp.test_rules_op_db import HERE, UNREPEATABLE


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_parts_are_those_of_chunk(extent: int, axes: list[int]) -> None:
    parts = [torch.arange(extent)]
    for size in axes:
        chunks = [list(part.chunk(size)) + [part[:0]] * size for part in parts]
        parts = [chunk for found in chunks for chunk in found[:size]]
    assert part_sizes(extent, tuple(axes)) == tuple(len(part) for part in parts)
    layout = (S(0),) * len(axes)
    assert (
        local_shape((extent,), layout, tuple(axes)) == (len(parts[0]),) == (part_size(extent, 0, layout, tuple(axes)),)
    )


def test_a_size_that_differs_is_an_expression() -> None:
    found = part_size(1600, 1, (I, S(1, 64), S(0), S(1, 64)), (2, 4, 2, 2))
    assert isinstance(found, PartSize) and found == 4 * 64
    assert found.text == "self.axes[3].part(self.axes[1].part(1600, 64), 64)"
    assert not isinstance(part_size(1600, 1, (S(1),), (4,)), PartSize)


@pytest.mark.parametrize("text", ["S(0/64)B", "S(12/3)S(0)"])
def test_units_are_written_and_read(text: str) -> None:
    assert "".join(map(str, parse_layout(text))) == text


MOVES = [(S(0), R), (S(0), I), (P, S(1)), (I, S(0)), (S(0), S(1)), (S(1, 2), S(0)), (S(0), P), (R, S(1, 2))]


@pytest.mark.parametrize(("mesh_shape", "axes"), [((3,), (0,)), ((4,), (0,)), ((2, 3), (0, 1)), ((2, 2, 2), (0, 2))])
@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
def test_values_and_gradients_of_uneven_parts(
    src: Placement, dst: Placement, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Also where ranks have no part; each issues what is priced."""
    torch.manual_seed(0)
    x = torch.randn(10, 6, dtype=torch.float64)
    before, after = (tuple(p if axis in axes else I for axis in range(len(mesh_shape))) for p in (src, dst))
    parts, grads = cut(x, before, mesh_shape), cut(x, tuple(map(dual, after)), mesh_shape)

    def rank(at: Coordinate, found: tuple[Axis, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = parts[at].clone().requires_grad_()
        out = convert(leaf, found[-1], src, dst, extent=x.shape[src.dim] if src.is_split else None)
        return out.detach(), torch.autograd.grad(out, leaf, grads[at])[0]

    with record(mesh_shape) as issued:
        found = on_threads(rank, mesh_shape, (axes,) if len(axes) > 1 else ())
    torch.testing.assert_close(join({at: out for at, (out, _) in found.items()}, after), x)
    torch.testing.assert_close(join({at: back for at, (_, back) in found.items()}, tuple(map(dual, before))), x)
    (step,) = redistribute(before, after)
    expected = Counter(collectives_of(step, (10, 6), 8, mesh_shape, needs_grad=True))
    assert [issued[each] for each in issued] == [expected] * (math.prod(mesh_shape) if expected else 0)


@pytest.mark.parametrize(
    ("sources", "targets"), [((S(0), S(1)), (R, R)), ((P, P), (S(1), S(0))), ((I, I), (S(0), S(1)))]
)
def test_a_bucket_of_uneven_parts(sources: tuple[Placement, ...], targets: tuple[Placement, ...]) -> None:
    torch.manual_seed(0)
    wholes = [torch.randn(10, 4, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)]
    given_ = [cut(x, (src,), (3,)) for x, src in zip(wholes, sources)]
    back = [cut(x, (dual(dst),), (3,)) for x, dst in zip(wholes, targets)]
    extents = tuple(x.shape[src.dim] if src.is_split else None for x, src in zip(wholes, sources))

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> tuple[Tensors, Tensors]:
        leaves = [part[at].clone().requires_grad_() for part in given_]
        outs = convert_together(axes[0], sources, targets, *leaves, extents=extents)
        return tuple(x.detach() for x in outs), torch.autograd.grad(outs, leaves, [g[at] for g in back])

    found = on_threads(rank, (3,))
    for number, whole in enumerate(wholes):
        torch.testing.assert_close(
            join({at: outs[number] for at, (outs, _) in found.items()}, (targets[number],)), whole
        )
        layout = (dual(sources[number]),)
        torch.testing.assert_close(join({at: grads[number] for at, (_, grads) in found.items()}, layout), whole)


def uneven_strategies(target: str, call: tuple, mesh_shape: tuple[int, ...]) -> int:
    """Check the op in all parts that it may be offered in, each size in any unit that goes with another size; how many
    are uneven.
    """
    op, inputs = make_op(target, *call[0], **call[1])
    offered = {extent: {1} for value in (*op.inputs, *op.outputs) for extent in value.shape if extent > 1}
    _carry(offered, _pairs([op]))
    extra = Extra((), tuple((extent, tuple(sorted(units))) for extent, units in sorted(offered.items())))
    count = 0
    for strategy in strategies_of(op, mesh_shape, extra):
        layouts = [strategy.input_layout(i) for i in range(len(op.inputs))]
        layouts += [strategy.output_layout(i) for i in range(len(op.outputs))]
        if not all(is_even(v.shape, layout, mesh_shape) for v, layout in zip(op.inputs + op.outputs, layouts)):
            assert check_strategy(op, strategy, mesh_shape, inputs), f"{target}: {strategy}"
            count += 1
    return count


@pytest.mark.parametrize("target", [target for target in HERE if not any(part in target for part in UNREPEATABLE)])
def test_own_samples_in_uneven_parts(target: str) -> None:
    torch.manual_seed(0)
    for call in calls()[target]:
        uneven_strategies(target, call, (5,))
        uneven_strategies(target, call, (2, 2))


def x_(*shape: int) -> torch.Tensor:
    return torch.randint(0, 5, shape)


@pytest.mark.parametrize(
    ("target", "args", "mesh_shape", "least"),
    [
        ("linear.default", (f64(7, 5), f64(10, 5), f64(10)), (3,), 3),
        ("linear.default", (f64(7, 5), f64(10, 5), f64(10)), (2, 3), 10),
        ("reshape.default", (f64(7, 5, 6), (35, 6)), (3,), 1),
        ("reshape.default", (f64(35, 6), (7, 5, 6)), (2, 2), 2),
        ("reshape.default", (f64(2, 20), (2, 5, 4)), (4,), 1),  # the last rank has none
        ("linear.default", (f64(7, 5), f64(10, 5), f64(10)), (4,), 3),
        ("matmul.default", (f64(5, 2, 7), f64(5, 7, 5)), (4,), 2),
        ("softmax.int", (f64(5, 7), 1), (4,), 1),
        ("rms_norm.default", (f64(5, 7), [7], f64(7)), (4,), 1),
        ("reshape.default", (f64(2, 28), (2, 7, 4)), (4,), 1),
        ("embedding.default", (f64(10, 6), x_(7, 2)), (4,), 2),
        ("cross_entropy_loss.default", (f64(7, 10), x_(7)), (4,), 2),
        ("cross_entropy_loss.default", (f64(7, 10), x_(7)), (2, 4), 4),
        ("cross_entropy_loss.default", (f64(7, 10), f64(7, 10).softmax(1).detach()), (4,), 1),
        ("nll_loss_nd.default", (f64(7, 10), x_(7)), (4,), 1),
        ("mse_loss.default", (f64(7, 10), f64(7, 10)), (4,), 2),
        ("mean.default", (f64(7, 10),), (4,), 2),
        ("mean.dim", (f64(7, 10), [0]), (2, 3), 3),
        ("conv2d.default", (f64(5, 4, 6, 6), f64(4, 4, 3, 3)), (3,), 1),
        ("layer_norm.default", (f64(7, 5, 6), [6], f64(6), f64(6)), (4,), 1),
        ("scaled_dot_product_attention.default", (f64(5, 7, 6, 4), f64(5, 7, 6, 4), f64(5, 7, 6, 4)), (3,), 2),
        ("scaled_dot_product_attention.default", (f64(2, 6, 6, 4), f64(2, 6, 6, 4), f64(2, 6, 6, 4)), (4,), 1),
        ("repeat_interleave.self_int", (f64(2, 7, 4), 3, 1), (4,), 1),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_ops_in_uneven_parts(target: str, args: tuple, mesh_shape: tuple[int, ...], least: int) -> None:
    torch.manual_seed(0)
    found = uneven_strategies(f"aten.{target}", (args, {}), mesh_shape)
    assert found >= least and (found or not least)


@pytest.mark.parametrize("mask", [torch.ones(6, 6).tril().bool(), torch.randn(6, 6, dtype=torch.float64)])
def test_attention_with_a_mask_where_a_rank_has_no_heads(mask: torch.Tensor) -> None:
    query = f64(2, 6, 6, 4)
    call = ((query, f64(2, 6, 6, 4), f64(2, 6, 6, 4), mask), {})
    assert uneven_strategies("aten.scaled_dot_product_attention.default", call, (4,))


def test_grouped_heads_are_cut_between_groups() -> None:
    torch.manual_seed(0)
    query, key = f64(2, 15, 6, 4), f64(2, 5, 6, 4)
    assert uneven_strategies(
        "aten.scaled_dot_product_attention.default", ((query, key, key.clone()), {"enable_gqa": True}), (3,)
    )


def layouts(text: str) -> Layout:
    return parse_layout(text)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("S(0/64)", "S(0)", ["all_gather", "slice"]),
        ("S(0/64)S(1)", "S(0)S(1)", ["all_gather", "slice"]),
        ("S(0)S(0/64)", "BB", ["all_gather", "all_gather"]),
        ("BS(0/64)", "S(0)S(0/64)", ["all_gather", "slice", "slice"]),
        ("S(1)S(0/2)", "S(0)B", ["all_gather", "all_to_all"]),
    ],
)
def test_other_units_go_by_way_of_the_whole(src: str, dst: str, expected: list[str]) -> None:
    steps = redistribute(layouts(src), layouts(dst))
    kinds = {(True, True): "all_to_all", (True, False): "all_gather", (False, True): "slice"}
    assert [kinds[step.src.is_split, step.dst.is_split] for step in steps] == expected
