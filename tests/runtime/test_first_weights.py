"""Weights that differ between ranks: those of the first rank are taken, as under DistributedDataParallel."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import autopar
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


class Odd(nn.Module):
    """Tied parameters, buffers of dtypes that backends lack, one of them used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("is_kept", torch.rand(8) > 0.5)
        self.register_buffer("phase", torch.randn((), dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) * self.is_kept * self.scale
        return self.head(x).square().mean()


TOKENS = torch.arange(8)


def trained(model: nn.Module, step: object) -> list[torch.Tensor]:
    """The losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(step(model).detach())
        optimizer.step()
    return losses


def forward_and_backward(model: nn.Module) -> torch.Tensor:
    loss = model(TOKENS)
    loss.backward()
    return loss


def of_first(model: nn.Module) -> nn.Module:
    """A copy of the first rank's model, on every rank."""
    box = [model]
    dist.broadcast_object_list(box, src=0)
    return copy.deepcopy(box[0])


def same_as_first(mesh_shape: tuple[int, ...], names: tuple[str, ...], where: str) -> None:
    torch.manual_seed(100 + dist.get_rank())
    with torch.device(where if dist.get_rank() else "cpu"):
        model = Odd()
    alone = of_first(model)
    model = autopar.compile(model, device_mesh(mesh_shape, names), args=(TOKENS,), cluster="free-links")
    assert_close(
        torch.stack([*trained(model, forward_and_backward)]), torch.stack(trained(alone, forward_and_backward))
    )
    buffers = {name: x.full_tensor() for name, x in model.named_buffers() if hasattr(x, "full_tensor")}
    assert_close(buffers, {name: x for name, x in alone.named_buffers() if name in buffers})
    assert torch.equal(torch.as_tensor(model.phase.to("cpu")), alone.phase)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_model_of_unseeded_ranks_trains_as_that_of_the_first_rank(ranks4: Ranks, where: str) -> None:
    ranks4.run(same_as_first, (2, 2), ("dp", "tp"), where)


def stages_as_first() -> None:
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))
    alone, x = of_first(model), torch.linspace(-1, 1, 32).view(4, 8)
    loss_fn = nn.MSELoss()
    model = autopar.compile(
        model, device_mesh((2, 2), ("pp", "dp")), args=(x, x), cluster="cpu", loss_fn=loss_fn, num_microbatches=2
    )
    losses = trained(model, lambda m: m.train_step(x, x))

    def step(m: nn.Module) -> torch.Tensor:
        loss = loss_fn(m(x), x)
        loss.backward()
        return loss

    assert_close(torch.stack(losses), torch.stack(trained(alone, step)))


def test_stages_of_unseeded_ranks_train_as_the_model_of_the_first_rank(ranks4: Ranks) -> None:
    ranks4.run(stages_as_first)


def new_head_as_first() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.linspace(-1, 1, 32).view(4, 8)
    model = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), args=(x,), cluster="free-links")
    torch.manual_seed(dist.get_rank())
    model[1] = head = nn.Linear(8, 4)
    expected = of_first(head)(x @ model[0].weight.full_tensor().T + model[0].bias.full_tensor())
    assert_close(torch.as_tensor(model(x)), expected)


def test_module_put_in_later_has_the_content_of_the_first_rank(ranks4: Ranks) -> None:
    ranks4.run(new_head_as_first)


def bad_check() -> None:
    with pytest.raises(autopar.AutoparError, match="check= expects True, False or \"strict\", found 'never'"):
        autopar.compile(nn.Linear(2, 2), device_mesh((4,), ("dp",)), check="never")


def test_unknown_check_is_refused(ranks4: Ranks) -> None:
    ranks4.run(bad_check)
