"""`flex_attention` on shards against the op itself, and the op against torch's own."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from autopar.errors import AutoparError, TraceError
from autopar.ir.attention import flex_op
from autopar.ir.attention.flex_op import BLOCKS_OF_KEYS, BLOCKS_OF_QUERIES, FLEX, attend
from autopar.ir.attention.index_functions import dims_read, share_seen, traced
from autopar.sbp.candidates import strategies_of
from tests.sbp.exercise import check, exercise, exercise_mesh, f64
from tests.sbp.rulecheck import make_op

CPU = torch.device("cpu")
QKV = f64(2, 4, 8, 4), f64(2, 2, 8, 4), f64(2, 2, 8, 6)  # grouped heads
SLOPES = f64(4)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]])


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def in_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def sloped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - SLOPES[h] * (q - k)


def by_number(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.tanh(score) * (1 + b) + 2.0 ** (-h) * (q - k)


def call(score: Any, mask: Any, *, batch: int | None = None, heads: int | None = None) -> tuple[Any, ...]:
    """The op's arguments."""
    blocks: tuple[Any, ...] = ()
    if mask is not None:
        block_mask = create_block_mask(mask, batch, heads, 8, 8, device="cpu", BLOCK_SIZE=2)
        blocks = tuple(getattr(block_mask, name) for name in (*BLOCKS_OF_QUERIES, *BLOCKS_OF_KEYS))
    name, captured = traced(score, mask, CPU)
    return *QKV, blocks, captured, name, 0.5, (2, 2)


@pytest.mark.parametrize(("score", "mask"), [(None, None), (None, causal), (sloped, in_document), (by_number, causal)])
def test_the_op_is_torchs_function_and_its_gradient_that_of_dense_scores(score: Any, mask: Any) -> None:
    out, lse = attend(*call(score, mask, batch=2 if mask is in_document else None))
    block_mask = None if mask is None else create_block_mask(mask, 2, None, 8, 8, device="cpu")
    with torch.no_grad():
        detached = [x.detach() for x in QKV]
        expected = flex_attention(*detached, score, block_mask, 0.5, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    query, key, value = QKV[0], *(x.repeat_interleave(2, 1) for x in QKV[1:])
    scores = query @ key.mT * 0.5
    b, h, q, k = (torch.arange(n).view([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate((2, 4, 8, 8)))
    scores = scores if score is None else score(scores, b, h, q, k)
    scores = scores if mask is None else scores.masked_fill(~mask(b, h, q, k), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    wanted = [*QKV, *([SLOPES] if score is sloped else [])]
    direction, of_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), wanted, (direction, of_lse))
    dense = torch.autograd.grad((scores.softmax(-1) @ value, scores.logsumexp(-1)), wanted, (direction, of_lse))
    for one, other in zip(found, dense):
        torch.testing.assert_close(one, other)


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    def later(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q > k

    out, lse = attend(*call(None, later))
    assert not out[:, :, 0].any() and bool((lse[:, :, 0] == -torch.inf).all())
    (gradient,) = torch.autograd.grad(out.sum(), QKV[0])
    assert bool(gradient.isfinite().all())


def test_a_second_derivative_is_refused() -> None:
    out, _ = attend(*call(None, causal))
    with pytest.raises(AutoparError, match="no second derivative"):
        torch.autograd.grad(out.sum(), QKV[0], create_graph=True)


def test_batch_heads_and_queries_are_split_with_what_is_read_at_their_indices() -> None:
    assert exercise(FLEX, *call(None, None)) == {
        "B B B -> B B",
        "B* B* B* -> B* B*",
        "S(0) S(0) S(0) -> S(0) S(0)",
        "S(1) S(1) S(1) -> S(1) S(1)",
        "S(2) B* B* -> S(2) S(2)",
        "S(1) B* B* -> S(1) S(1) [key_heads]",
        "S(2) S(2) S(2) -> S(2) S(2) [ring]",
    }
    found = exercise(FLEX, *call(sloped, in_document, batch=2))
    blocks, ids = "S(0) S(0) S(0) S(0) S(0) S(0) S(0) S(0)", "B* S(0)"
    assert f"S(0) S(0) S(0) {blocks} {ids} -> S(0) S(0)" in found
    assert "S(1) S(1) S(1) B B B B B B B B S(0) B -> S(1) S(1)" in found
    assert "S(2) B* B* S(2) S(2) S(2) S(2) B B B B B* B -> S(2) S(2) [queries]" in found


def test_functions_that_compute_with_an_index_are_told_where_a_part_begins() -> None:
    found = exercise(FLEX, *call(by_number, causal, batch=2, heads=4))
    roles = {signature.partition("[")[2].rstrip("]") for signature in found}
    assert roles == {"", "batch", "heads", "queries", "key_heads", "ring"}
    assert exercise_mesh(FLEX, *call(by_number, causal), roles=("batch", "queries")) == 1
    assert exercise_mesh(FLEX, *call(sloped, in_document, batch=2), roles=("split", "queries")) == 2
    assert exercise_mesh(FLEX, *call(by_number, causal), roles=("batch", "ring")) == 1
    assert exercise_mesh(FLEX, *call(by_number, in_document, batch=2), roles=("queries", "key_heads")) == 1
    assert exercise_mesh(FLEX, *call(by_number, causal), roles=("ring", "queries")) == 0


def test_parts_go_around_four_ranks_in_whole_blocks() -> None:
    op, inputs = make_op(FLEX, *call(by_number, in_document, batch=2))
    strategies = [one for one in strategies_of(op, (4,)) if one.signatures[0].role == "ring"]
    assert len(strategies) == 1
    check(op, strategies[0], (4,), inputs)
    assert not [one for one in strategies_of(op, (8,)) if one.signatures[0].role == "ring"]  # half a block each


def test_a_table_that_is_read_elsewhere_too_is_not_split() -> None:
    table = torch.randn(4, 4)
    name, _ = traced(lambda s, b, h, q, k: s + table[h, h], None, CPU)
    assert dims_read(name, "head") is None
    name, _ = traced(lambda s, b, h, q, k: s + table[h, 0] + table[0, 1], None, CPU)
    assert dims_read(name, "head") is None
    name, _ = traced(lambda s, b, h, q, k: s + table[h, 0] + table[h, 1], None, CPU)
    assert dims_read(name, "head") == (0,)
    wide = torch.randn(6)  # of which only some are read: no parts that belong to those of four heads
    found = exercise(FLEX, *call(lambda s, b, h, q, k: s + wide[h], None))
    assert not any("S(1) S(1) S(1)" in signature for signature in found)


def test_equal_functions_have_one_name_and_others_another() -> None:
    def make(window: int) -> Any:
        return lambda b, h, q, k: (q >= k) & (q - k < window)

    names = [traced(None, make(window), CPU)[0] for window in (4, 4, 5)]
    assert names[0] == names[1] != names[2]


def test_the_share_of_scores_is_that_of_the_mask() -> None:
    for mask, size in ((causal, 256), (lambda b, h, q, k: (q - k).abs() < 32, 512)):
        name, _ = traced(None, mask, CPU)
        counted = create_mask(mask, 1, 1, size, size, "cpu").double().mean(-1)[0, 0]
        assert share_seen(name, (), size, size, 1) == pytest.approx(float(counted.mean()), rel=0.05)
        assert share_seen(name, (), size, size, 4) == pytest.approx(float(counted.view(4, -1).mean(1).max()), rel=0.1)
    name, _ = traced(None, in_document, CPU)
    assert share_seen(name, ((2, 8),), 8, 8, 1) == 36 / 64  # as of one document


def test_a_mask_that_is_not_elementwise_is_refused_where_it_is_made_inside_a_model() -> None:
    from autopar.ir.attention.index_functions import broadcasting

    name, _ = traced(None, lambda b, h, q, k: torch.stack((q, k)).amax() > k, CPU)
    with pytest.raises(TraceError, match="not computed at all indices at once"):
        broadcasting(name)


def test_the_call_that_a_gpu_compiles_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has the forward of what it compiles for GPUs on CPUs too, where its graph is run op by op."""
    monkeypatch.setattr(flex_op, "_compiled", lambda: torch.compile(flex_attention, backend="eager"))
    args = tuple(x.detach().float() if isinstance(x, torch.Tensor) else x for x in call(sloped, in_document, batch=2))
    args = (*args[:4], tuple(x.detach().float() for x in args[4]), *args[5:])
    query, key, value, blocks, captured, functions, scale, size = args
    for part in (slice(0, 8), slice(0, 4), slice(4, 8)):
        of_part = tuple(x[:, :, part.start // 2 : part.stop // 2] for x in blocks[:4]) + tuple(blocks[4:])
        scoring = flex_op._Scoring(functions, scale, (0, 0, part.start, 0))
        with torch.no_grad():
            found = flex_op._compiled_attention(scoring, query[:, :, part], key, value, of_part, captured, size)
        expected = attend(*args)
        torch.testing.assert_close(found, tuple(x[:, :, part] for x in expected))
        for keys in (slice(0, 4), slice(4, 8)):  # a part in a ring
            of_keys = flex_op.of_key_blocks(of_part, keys.start // 2, 2)
            first = (0, 0, part.start, keys.start)
            some = (query[:, :, part], key[:, :, keys], value[:, :, keys])
            scoring = flex_op._Scoring(functions, scale, first)
            with torch.no_grad():
                found = flex_op._compiled_attention(scoring, *some, of_keys, captured, size)
            torch.testing.assert_close(found, attend(*some, of_keys, captured, functions, scale, size, first=first))
