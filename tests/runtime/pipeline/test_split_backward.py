"""The two parts of a backward, beside a whole one."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.pipeline.split_backward import backward_of_inputs


def own(x: torch.Tensor) -> torch.Tensor:
    """As generated programs read weights."""
    return torch.ops.aten.alias.default(x)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gathered(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two weights come out of one node, as of a bucket, and the ops that read them are not next to each other."""
    first, last = torch.cat(w[:2]).split(4)
    return ((((x @ own(first)).tanh() @ own(w[2])).tanh() @ own(last)).tanh().sum(),)


def used_again(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight is used before and behind others, and in a value of weights alone that several ops read."""
    bias = w[0] * w[2]
    x = ((x @ own(w[0])).tanh() @ own(w[1])).tanh() + own(bias)
    return (((x @ own(w[0])).tanh() @ own(w[2]) + own(bias)).tanh().sum(),)


def of_weights_alone(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.addcmul(x, own(w[0]), own(w[1])).tanh().sum(), (w[0] * w[2]).sum()


def in_one_sum(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All weights have the same gradient, which is also sent on."""
    return ((x + own(w[0]) + own(w[1]) + own(w[2]) + own(w[0])).tanh().sum(),)


def without_views(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((((x @ w[0]).tanh() @ w[1]).tanh() @ w[0]).sum() + w[2].sum(),)


def a_view(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The loss is a view, as one of a batch of one is."""
    return ((x @ own(w[0]) @ own(w[1])).tanh().sum().view(1)[0] + (own(w[2])).sum(),) + (
        (x @ own(w[0])).sum()[None][0],
    )


@pytest.mark.parametrize("model", [gathered, used_again, of_weights_alone, in_one_sum, without_views, a_view])
def test_equal_to_a_whole_backward(model) -> None:
    torch.manual_seed(0)
    w, times, num = [random(4, 4) for _ in range(3)], [0, 0, 0], 3
    for index, weight in enumerate(w):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: times.__setitem__(index, times[index] + 1))
    total = [torch.zeros(4, 4, dtype=torch.float64) for _ in w]
    for _ in range(num):  # microbatches
        x = random(4, 4)
        truth = torch.autograd.grad(sum(model(w, x)), [x, *w], materialize_grads=True, allow_unused=True)
        total = [sum_ + gradient for sum_, gradient in zip(total, truth[1:])]
        (found,), left = backward_of_inputs(list(model(w, x)), None, [x])
        torch.testing.assert_close(found, truth[0])
        assert (left is None) == (model is without_views)
        if left is not None:
            left.run()
    assert times == [num] * 3, "each gradient is added once a microbatch: hooks count them"
    for weight, gradient in zip(w, total):
        torch.testing.assert_close(weight.grad, gradient)


def test_what_is_between_two_uses_of_a_weight_is_not_run_again() -> None:
    runs: list[int] = []

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            runs.append(1)
            return gradient

    torch.manual_seed(0)
    weight, x = random(4), random(4)
    _, left = backward_of_inputs([(Between.apply(x * own(weight)) * own(weight)).sum()], None, [x])
    assert left is not None
    left.run()
    assert len(runs) == 1


def test_memory_is_freed_on_the_way() -> None:
    torch.manual_seed(0)
    weights, x = [random(4, 4) for _ in range(4)], random(4, 4)
    made: list[StorageWeakRef] = []
    alive: list[int] = []
    y = x
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: alive.append(sum(not one.expired() for one in made)))
        y = (y @ own(weight)).tanh()
        made.append(StorageWeakRef(y.untyped_storage()))
    outputs = [y.sum()]
    del y
    gc.disable()
    try:
        _, left = backward_of_inputs(outputs, None, [x])
        assert left is not None
        left.run()
    finally:
        gc.enable()
    assert alive == [3, 2, 1, 0]
