"""Parts of the batch in shares: converted to the byte as priced, and every rule in such parts."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.sbp.axis import Axis
from autopar.sbp.candidates import Extra, strategies_of
from autopar.sbp.convert import convert, dual
from autopar.sbp.placement import (
    I,
    P,
    Placement,
    R,
    S,
    codes_of,
    local_shape,
    parse_layout,
    parse_shares,
    placement_of,
    shared_sizes,
)
from autopar.sbp.proof.check_signature import make_op
from autopar.sbp.proof.cut_and_join import Coordinate, cut, join
from autopar.sbp.redistribute import collectives_of, redistribute
from autopar.sbp.uneven.parts import PartSize, part_size
from autopar.sbp.uneven.uneven_extents import SharedRows, _carry, _pairs
from tests.sbp.exercise import record
from tests.sbp.rulecheck import check_strategy
from tests.sbp.samples import calls, f64
from tests.sbp.simulate import on_threads
from tests.sbp.test_rules_op_db import HERE, UNREPEATABLE

ROWS = (1, 4, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 200), st.integers(1, 4))
def test_sizes_are_the_shares_or_in_proportion(shares: list[int], more: int, unit: int) -> None:
    total, count = sum(shares), len(shares) + more - 1
    assert shared_sizes(total * unit, tuple(shares), unit) == tuple(size * unit for size in shares)
    sizes = shared_sizes(count * unit, tuple(shares), unit)
    assert sum(sizes) == count * unit and all(size >= unit and size % unit == 0 for size in sizes)
    exact = [max(0.0, count * share / total - 1) for share in shares]
    scale = (count - len(shares)) / (sum(exact) or 1)
    assert all(abs(size / unit - 1 - one * scale) < 1 + 1e-9 for size, one in zip(sizes, exact) if sum(exact))
    largest = local_shape((count * unit,), (S(0, unit, tuple(shares)),), (len(shares),))
    assert largest == ((max(sizes),) if len(shares) > 1 else (count * unit,))


@pytest.mark.parametrize("text", ["S(0:3+1)B", "S(12/3:2x5+64x3)S(0)", "S(0/64)S(0:2x1)"])
def test_shares_are_written_and_read(text: str) -> None:
    layout = parse_layout(text)
    assert "".join(map(str, layout)) == text
    assert tuple(map(placement_of, codes_of(layout))) == layout


@pytest.mark.parametrize("text", ["3+0", "", "3+", "0x3", "99999x1", "3,1"])
def test_other_texts_are_no_shares(text: str) -> None:
    with pytest.raises(ValueError, match="not shares"):
        parse_shares(text)


def test_a_size_in_shares_is_an_expression_even_where_all_are_equal() -> None:
    found = part_size(40, 1, (I, S(1, 4, (5, 5))), (2, 2))
    assert isinstance(found, PartSize) and found == 20 and found.text == "self.axes[1].share(40, 4)"


@pytest.mark.parametrize(
    ("rows", "message"), [((3, 0), "one row of the batch or more"), ((3, 1, 1), "2 numbers"), ((2, 1.5), "one row")]
)
def test_bad_shares_are_refused(rows: tuple, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh((2, 2), ("dp", "tp"), ((0, rows),))


MOVES = [
    (S(0, 1, ROWS), R),
    (S(0, 1, ROWS), I),
    (P, S(0, 1, ROWS)),
    (I, S(0, 2, ROWS)),
    (S(0, 1, ROWS), S(1)),
    (S(1), S(0, 1, ROWS)),
    (S(0, 1, ROWS), P),
    (R, S(0, 1, ROWS)),
]


@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
@pytest.mark.parametrize(("mesh_shape", "axis"), [((3,), 0), ((2, 3), 1), ((3, 2), 0)])
def test_values_and_gradients_of_shares(src: Placement, dst: Placement, mesh_shape: tuple[int, ...], axis: int) -> None:
    """Each issues what is priced, also where the axis has other shares than the placement since."""
    torch.manual_seed(0)
    x = torch.randn(14, 6, dtype=torch.float64)
    before, after = (tuple(p if one == axis else I for one in range(len(mesh_shape))) for p in (src, dst))
    parts, grads = cut(x, before, mesh_shape), cut(x, tuple(map(dual, after)), mesh_shape)

    def rank(at: Coordinate, found: tuple[Axis, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = parts[at].clone().requires_grad_()
        out = convert(leaf, found[axis], src, dst, extent=x.shape[src.dim] if src.is_split else None)
        return out.detach(), torch.autograd.grad(out, leaf, grads[at])[0]

    with record(mesh_shape) as issued:
        found = on_threads(rank, mesh_shape, shares=((axis, ROWS),))
    torch.testing.assert_close(join({at: out for at, (out, _) in found.items()}, after), x)
    torch.testing.assert_close(join({at: back for at, (_, back) in found.items()}, tuple(map(dual, before))), x)
    (step,) = redistribute(before, after)
    expected = Counter(collectives_of(step, (14, 6), 8, mesh_shape, needs_grad=True))
    assert [issued[each] for each in issued] == [expected] * (math.prod(mesh_shape) if expected else 0)


@pytest.mark.parametrize(("src", "dst"), [("S(0:3+1)", "S(0)"), ("S(0)", "S(0:3+1)"), ("S(0:3+1)", "S(0:2+2)")])
def test_other_shares_go_by_way_of_the_whole(src: str, dst: str) -> None:
    steps = redistribute(parse_layout(src), parse_layout(dst))
    assert [step.dst.is_split for step in steps] == [False, True]


def shared_strategies(target: str, call: tuple, mesh_shape: tuple[int, ...], axis: int = 0) -> int:
    """Check the op with every dim that has rows enough in shares on one axis; how many strategies have some."""
    op, inputs = make_op(target, *call[0], **call[1])
    count = 0
    for rows in sorted({extent for value in (*op.inputs, *op.outputs) for extent in value.shape}):
        if rows < mesh_shape[axis] + 1:
            continue
        offered = {rows: {1}}
        _carry(offered, _pairs([op]))
        sizes = (*[1] * (mesh_shape[axis] - 1), rows - mesh_shape[axis] + 1)
        shared = SharedRows(
            axis, sizes, tuple((extent, tuple(sorted(units))) for extent, units in sorted(offered.items()))
        )
        for strategy in strategies_of(op, mesh_shape, Extra((), (), shared)):
            placed = (p for one in strategy.signatures for p in (*one.inputs, *one.outputs))
            if any(one.shares for one in placed):
                assert check_strategy(op, strategy, mesh_shape, inputs), f"{target}: {strategy}"
                count += 1
    return count


@pytest.mark.parametrize("target", [target for target in HERE if not any(part in target for part in UNREPEATABLE)])
def test_own_samples_in_shares(target: str) -> None:
    torch.manual_seed(0)
    for call in calls()[target]:
        shared_strategies(target, call, (2,))
        shared_strategies(target, call, (2, 2), 1)
        shared_strategies(target, call, (2, 2))


NORM = (f64(7, 4, 3), f64(4), f64(4))


def x_(*shape: int) -> torch.Tensor:
    return torch.randint(0, 5, shape)


@pytest.mark.parametrize(
    ("target", "args", "least"),
    [
        ("linear.default", (f64(7, 5), f64(10, 5), f64(10)), 2),
        ("reshape.default", (f64(7, 5, 6), (35, 6)), 2),
        ("embedding.default", (f64(10, 6), x_(7, 2)), 2),
        ("cross_entropy_loss.default", (f64(7, 10), x_(7)), 2),
        ("cross_entropy_loss.default", (f64(7, 10), f64(7, 10).softmax(1).detach()), 1),
        ("mse_loss.default", (f64(7, 10), f64(7, 10)), 2),
        ("mean.dim", (f64(7, 10), [0]), 2),
        ("conv2d.default", (f64(5, 4, 6, 6), f64(4, 4, 3, 3)), 1),
        ("batch_norm.default", (*NORM, None, None, True, 0.1, 1e-5, False), 1),
        ("scaled_dot_product_attention.default", (f64(5, 6, 6, 4), f64(5, 6, 6, 4), f64(5, 6, 6, 4)), 2),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize(("mesh_shape", "axis"), [((3,), 0), ((2, 3), 1), ((3, 2), 0)])
def test_ops_in_shares(target: str, args: tuple, least: int, mesh_shape: tuple[int, ...], axis: int) -> None:
    torch.manual_seed(0)
    assert shared_strategies(f"aten.{target}", (args, {}), mesh_shape, axis) >= least
