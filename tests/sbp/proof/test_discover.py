"""Ops without a rule: what running them on samples says, and what it must not say."""

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.graph import Op
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.proof.check_signature import make_op
from autopar.sbp.proof.discover import discovered
from tests.workers import Ranks, device_mesh

T = torch.Tensor


@torch.library.custom_op("discovery::gated", mutates_args=())
def gated(x: T, weight: T) -> T:
    return x.sigmoid() * weight


@torch.library.custom_op("discovery::in_pairs", mutates_args=())
def in_pairs(x: T) -> T:
    """The mean of each pair of rows; a last row without another stays itself."""
    even = x.shape[0] // 2 * 2
    pairs = x[:even].unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, *x.shape[1:]).flatten(0, 1)
    return torch.cat([pairs, x[even:]])


@torch.library.custom_op("discovery::clipped", mutates_args=())
def clipped(x: T) -> T:
    """Numbers whose norm is 10 at most, over all."""
    return x * (10 / x.norm()).clamp(max=1)


@torch.library.custom_op("discovery::halves", mutates_args=())
def halves(x: T, width: int) -> tuple[T, T]:
    """The halves of the last dim, which must have `width` columns."""
    assert x.shape[-1] == width
    return x[..., : width // 2].clone(), x[..., width // 2 :].sum(-1)


@torch.library.custom_op("discovery::looked_up", mutates_args=())
def looked_up(table: T, rows: T) -> T:
    return table[rows]


@torch.library.custom_op("discovery::in_single", mutates_args=())
def in_single(x: T) -> T:
    assert x.dtype == torch.float32
    return x.exp()


@torch.library.custom_op("discovery::drawn", mutates_args=())
def drawn(x: T) -> T:
    return x + torch.rand_like(x)


@torch.library.custom_op("discovery::normed_gradient", mutates_args=())
def normed_gradient(x: T) -> T:
    return x.clone()


for op in (gated, in_pairs, clipped, looked_up, in_single, drawn, normed_gradient):
    op.register_fake(lambda x, *rest: torch.empty_like(x))


def _of_gated(ctx, grad: T) -> tuple[T, T]:
    x, weight = ctx.saved_tensors
    open_ = x.sigmoid()
    return grad * weight * open_ * (1 - open_), (grad * open_).sum(tuple(range(x.dim() - 1)))


gated.register_autograd(_of_gated, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
# of norm 100 at most, over all samples: larger than that of gradients as they usually are
normed_gradient.register_autograd(
    lambda ctx, grad: grad * (100 / grad.norm()).clamp(max=1), setup_context=lambda ctx, inputs, output: None
)


def found(op: object, *args: object) -> set[str]:
    """The signatures discovered, as text."""
    return set(map(str, discovered(_op(op, *args)).signatures))


def why(op: object, *args: object) -> str:
    """The reason why the op stays whole."""
    result = discovered(_op(op, *args))
    assert not result.signatures
    return result.why


def _op(op: object, *args: object) -> Op:
    return make_op(str(op._opoverload), *args)[0].nameless


def test_rows_and_columns_with_the_gradient_of_a_weight():
    x, weight = torch.randn(8, 4, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    by_hand = {"S(0) B* -> S(0)", "S(1) B* -> S(1)", "S(2) S(0) -> S(2)", "B* P -> P"}
    assert found(gated, x, weight) == by_hand
    assert {str(one) for one in signatures_of(_op(gated, x, weight))} == by_hand | {"B B -> B"}


def test_pairs_of_rows_are_not_split_although_even_parts_would_be_right():
    assert found(in_pairs, torch.randn(8, 6)) == {"P -> P", "S(1) -> S(1)"}


def test_what_clips_large_numbers_stays_whole_and_says_on_which_sample():
    message = why(clipped, torch.randn(8, 6))
    assert message.startswith("its samples disagree: S(0) -> S(0) holds for discovery.clipped.default(float64[6, 10])")


def test_a_backward_that_clips_large_gradients_is_not_split():
    """Samples whose gradients are no larger than usual would agree."""
    x = torch.randn(8, 6, requires_grad=True)
    assert "its samples disagree" in why(normed_gradient, x)


def test_numbers_among_the_arguments_follow_the_sizes():
    assert found(halves, torch.randn(8, 4, 32), 32) == {"P -> P P", "S(0) -> S(0) S(0)", "S(1) -> S(1) S(1)"}


def test_integers_are_indices():
    table = torch.randn(16, 4, requires_grad=True)
    texts = found(looked_up, table.detach(), torch.randint(0, 16, (4, 2)))
    assert texts >= {"B* S(0) -> S(0)", "B* S(1) -> S(1)", "S(1) B* -> S(2)"}
    assert not any(text.startswith("S(0)") for text in texts)


def test_an_op_for_single_precision_alone():
    assert found(in_single, torch.randn(8, 6)) == {"S(0) -> S(0)", "S(1) -> S(1)"}


def test_random_numbers_without_the_tag_are_noticed():
    assert "two runs on the same sample give different results" in why(drawn, torch.randn(8, 6))


def test_an_op_that_no_sample_suits():
    @torch.library.custom_op("discovery::refusing", mutates_args=())
    def refusing(x: T) -> T:
        if torch.equal(x, torch.zeros_like(x)):
            return x.clone()
        raise ValueError("only zeros")

    assert "on samples it raises ValueError: only zeros" in why(refusing, torch.zeros(8, 6))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: T) -> T:
        return self.down(gated(self.up(x), self.weight)).square().mean()


def test_explain_tells_what_was_discovered_and_the_option_leaves_it_whole():
    args = (torch.randn(8, 16),)
    plan = autopar.plan(Gated(), "2x2", cluster="free-links", args=args)
    (op,) = (op for op in plan.graph.ops if op.target.startswith("discovery"))
    assert any("S(" in str(one) for one in plan.assignment.strategies[op.name].signatures)
    assert "discovery.gated.default" in plan.explain() and "S(1) S(0) -> S(1)" in plan.explain()
    whole = autopar.plan(Gated(), "2x2", cluster="free-links", args=args, unknown_ops="whole")
    assert {str(one) for one in whole.assignment.strategies[op.name].signatures} == {"B B -> B"}
    assert whole.discovered == {}
    with pytest.raises(autopar.AutoparError, match='unknown_ops= expects "discover" or "whole"'):
        autopar.plan(Gated(), "2x2", cluster="free-links", args=args, unknown_ops="guess")


def stepped() -> tuple[int, float]:
    """On a rank: how many of the parameters are split, and how far the gradients are from those of one device."""
    torch.manual_seed(0)
    x = torch.randn(8, 16, dtype=torch.float64)
    alone, model = Gated().double(), Gated().double()
    model.load_state_dict(alone.state_dict())
    alone(x).backward()
    model = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), args=(x,), cluster="free-links")
    model(x).backward()
    apart = [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in zip(model.parameters(), alone.parameters())]
    return sum(any(one.is_shard() for one in p.placements) for p in model.parameters()), max(apart)


@pytest.mark.multirank
def test_ranks_compute_what_one_device_does(ranks4: Ranks):
    for num_split, apart in ranks4.run(stepped):
        assert num_split == 5 and apart < 1e-12
