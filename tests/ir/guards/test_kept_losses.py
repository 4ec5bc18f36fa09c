"""Losses of torch that look at values, as they are exported, beside torch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.guards.kept_losses import ctc_loss
from autopar.ir.run_graph import run
from autopar.ir.trace import trace


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.loss = nn.Parameter(torch.ones(4, dtype=torch.float64)), loss

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.loss(x * self.w, *given)


def compared(loss: Callable[..., Tensor], example: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    model = Model(loss)
    graph = trace(model, example, {})
    arguments = zip(graph.of_kind("argument"), given)
    inputs = {item.value.name: x for item, x in arguments} | {graph.of_kind("parameter")[0].value.name: model.w}
    (found,), _ = run(graph, inputs)
    truth = model(*given)
    torch.testing.assert_close(found, truth)
    one, other = (torch.autograd.grad(x.sum(), model.w)[0] for x in (found, truth))
    torch.testing.assert_close(one, other)


VARIANCES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, y: F.gaussian_nll_loss(x, y, x.square()),
    "full sum": lambda x, y: F.gaussian_nll_loss(x, y, x.abs() + 0.1, full=True, reduction="sum"),
    "a variance of each row": lambda x, y: F.gaussian_nll_loss(x, y, x[:, 0].abs(), reduction="none"),
    "small": lambda x, y: nn.GaussianNLLLoss(eps=0.5)(x, y, x[:, :1].square()),
    "a number": lambda x, y: F.gaussian_nll_loss(x, y, 0.3),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_gaussian_likelihoods(name: str) -> None:
    torch.manual_seed(0)
    example, given = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    compared(VARIANCES[name], tuple(example), tuple(given))


def test_a_negative_variance_names_the_line() -> None:
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    with pytest.raises(AutoparError, match=r"test_kept_losses\.py:\d+: `compared\(lambda"):
        compared(lambda x, y: F.gaussian_nll_loss(x, y, x), (x.abs(), y), (-x.abs(), y))
    with pytest.raises(TraceError, match="var is of incorrect size"):
        trace(Model(lambda x: F.gaussian_nll_loss(x, x, x[:3])), (x,), {})


def spelled(reduction: str) -> Callable[..., Tensor]:
    def loss(x: Tensor, labels: Tensor, steps: Tensor, wanted: Tensor) -> Tensor:
        log_p = x.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, labels, steps, wanted, reduction=reduction, zero_infinity=True)

    return loss


def sentences() -> tuple[Tensor, ...]:
    wanted = torch.randint(0, 4, (6,))  # some of no label, some that do not fit
    steps = torch.randint(2, 8, (6,))
    return torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(1, 4, (6, 3)), steps, wanted


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sequences_of_any_length(reduction: str) -> None:
    torch.manual_seed(1)
    compared(spelled(reduction), sentences(), sentences())


def test_lengths_in_a_list_and_labels_of_all_samples_in_a_row() -> None:
    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), labels, [7] * 3, (2, 3, 1))

    torch.manual_seed(2)
    x, labels = torch.randn(3, 7, 4, dtype=torch.float64), torch.randint(1, 4, (6,))
    compared(loss, (x, labels), (x.flip(0), labels.flip(0)))
    with pytest.raises(TraceError, match=r"give it \[steps, 1, classes\]"):
        ctc_loss(x[0], labels, 7, 6)


COUNTS: dict[str, Callable[..., Tensor]] = {
    "ids": lambda x: x * torch.bincount(x.topk(2, -1).indices.flatten(), minlength=4),
    "a method": lambda x: x / x.argmax(-1).int().bincount(None, 4).clamp(min=1),
    "weights": lambda x: x * torch.bincount(x.argmax(-1), x.detach().sum(-1), minlength=4),
    "weights in float32": lambda x: x * x.argmax(-1).bincount(x.detach().float().amax(-1), minlength=4),
}


@pytest.mark.parametrize("name", COUNTS)
def test_ids_that_a_router_chooses_are_counted(name: str) -> None:
    torch.manual_seed(0)
    example, given = torch.randn(2, 6, 4, dtype=torch.float64)
    compared(COUNTS[name], (example,), (given,))


def test_counts_without_a_number_are_refused_with_the_remedy() -> None:
    with pytest.raises(TraceError, match=r"test_kept_losses\.py:\d+: .*minlength="):
        trace(Model(lambda x: x.argmax(-1).bincount() * x.sum()), (torch.randn(6, 4),), {})


def test_cond_of_a_tensor_is_refused_by_name() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(TraceError, match=r"test_kept_losses\.py:\d+: `.*torch\.cond.* write if"):
        trace(Model(lambda x: torch.cond(x.sum() > 0, torch.sum, torch.mean, (x,))), (x,), {})
    compared(lambda x: torch.cond(len(x) > 3, torch.sum, torch.mean, (x,)), (x,), (x + 1,))
