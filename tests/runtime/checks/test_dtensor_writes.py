"""What is written to a DTensor through a view, at indices or from a plain tensor is what one device has."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.checks.dtensor_writes import handle_writes
from tests.workers import Ranks, device_mesh

LAYOUTS = ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()])


def setting(place: object, value: object) -> Callable[[torch.Tensor], None]:
    """`x[place] = value`."""
    return lambda x: x.__setitem__(place, value)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "a row": setting(0, 0.0),
    "a row by another": lambda x: x.__setitem__(0, x[5]),
    "an entry": setting((-1, -1), 7),
    "a column": setting((slice(None), 1), 2.0),
    "rows with a step": setting(slice(1, None, 2), 3.0),
    "a block": setting((slice(1, 4), slice(2, 5)), 5.0),
    "no row": setting(slice(0, 0), 1.0),
    "listed rows": setting([0, 2], 4.0),
    "listed entries": setting((torch.tensor([0, 2]), torch.tensor([1, 5])), 4.0),
    "rows at indices, scaled": lambda x: x.__setitem__(torch.tensor([0, 6]), x[torch.tensor([6, 0])] * 2),
    "where a mask is": lambda x: x.__setitem__(x > 0.2, 0.0),
    "where a plain mask is": setting(torch.arange(48).view(8, 6) % 5 == 0, 0.5),
    "a row of .data": lambda x: x.data[3].zero_(),
    "a view of a view": lambda x: x.view(-1)[5:13].view(2, 4)[1].mul_(3),
    "a transposed row": lambda x: x.T[2].add_(1),
    "an unsqueezed row": lambda x: x.unsqueeze(0)[0, 4].detach().fill_(2),
    "a diagonal": lambda x: x.diagonal().sub_(1),
    "the diagonal of a square": lambda x: x[:6].fill_diagonal_(3.0),
    "a chunk": lambda x: x.chunk(3)[1].clamp_(max=0),
    "a split column": lambda x: x.split([2, 4], 1)[1].div_(2),
    "rows one after the other": lambda x: torch.stack([row.div_(row.norm()) for row in x]),
    "a narrow part by nn.init": lambda x: nn.init.constant_(x.narrow(0, 3, 2), 9.0),
    "a plain tensor": lambda x: x.copy_(torch.arange(48.0).view(8, 6)),
    "a plain row, broadcast": lambda x: x.mul_(torch.arange(6.0)),
    "a part by a plain tensor": lambda x: x[:3].copy_(torch.arange(18.0).view(3, 6)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 0, 7]), torch.ones(3, 6)),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(8, 1, dtype=torch.long), 3.0),
    "tril_": lambda x: x.tril_(),
    "renorm_": lambda x: x.renorm_(2, 0, 0.5),
    "eye_": nn.init.eye_,
    "full with out=": lambda x: torch.full((8, 6), 2.0, out=x),
    "several rows at once": lambda x: torch._foreach_mul_([x[0], x[3], x[4:, 1]], 2.0),
    "copies at once": lambda x: torch._foreach_copy_([x, x[2]], [x * 2, x[7] * 1]),
    "rows of lists at once": lambda x: torch._foreach_lerp_([x[1], x[2]], [x[5] * 1, x[6] * 1], 0.5),
    "a row after another write": lambda x: (lambda row: (x.mul_(2), row.add_(1)))(x[4]),
    "a row of a view of before": lambda x: (lambda flat, row: (row.fill_(3), flat[6:9].mul_(2)))(x.view(-1), x[1]),
}


def whole() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).view(8, 6).sin()


def written(name: str) -> list[torch.Tensor]:
    """On each rank, all of what the tensor is in each layout after the write."""
    handle_writes()
    found = []
    for layout in LAYOUTS:
        x = distribute_tensor(whole(), device_mesh((2, 2), ("a", "b")), layout).requires_grad_()
        torch.manual_seed(0)
        with torch.no_grad():
            WRITES[name](x)
        assert isinstance(x, DTensor) and list(x.placements) == layout
        found.append(x.detach().full_tensor())
    return found


@pytest.mark.multirank
def test_a_write_is_that_of_one_device(ranks4: Ranks) -> None:
    for name, write in WRITES.items():
        write(expected := whole())
        for number, found in enumerate(x for rank in ranks4.run(written, name) for x in rank):
            assert torch.equal(found, expected), (name, LAYOUTS[number % len(LAYOUTS)])


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "listed rows": lambda x: x[[5, 0, 2]],
    "rows and columns": lambda x: x[torch.tensor([5, 0]), torch.tensor([1, 1])],
    "where a mask is": lambda x: x[x > 0],
    "rows of a mask": lambda x: x[x[:, 0] > 0],
    "index_select": lambda x: x.index_select(1, torch.tensor([4, 4])),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: torch.unique((4 * x).round()),
    "median": lambda x: x.median(),
    "histc": lambda x: torch.histc(x, 5, -1, 1),
    "kthvalue": lambda x: x.kthvalue(2, 0).values,
    "a row that is written later": lambda x: (lambda row: (x.mul_(2), row)[1])(x[4]),
    "a view that is written through another": lambda x: (lambda flat: (x[4].mul_(2), flat[20:30])[1])(x.view(-1)),
    "a row of what is detached, later": lambda x: (lambda row: (x.add_(1), row * 2)[1])(x.detach()[0]),
    "a part of a split, later": lambda x: (lambda part: (x[:, 2].zero_(), part)[1])(x.split(3)[1]),
    "allclose": lambda x: torch.tensor([torch.allclose(x, x + 1e-9), torch.allclose(x, x + 1)]),
}


def read(name: str) -> list[torch.Tensor]:
    handle_writes()
    mesh = device_mesh((2, 2), ("a", "b"))
    made = [READS[name](distribute_tensor(whole(), mesh, layout)) for layout in LAYOUTS]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in made]


@pytest.mark.multirank
def test_a_read_is_that_of_one_device(ranks4: Ranks) -> None:
    for name, function in READS.items():
        for found in (x for rank in ranks4.run(read, name) for x in rank):
            assert torch.equal(found, function(whole())), name


def turned() -> None:
    handle_writes()
    x = distribute_tensor(whole(), device_mesh((2, 2), ("a", "b")), LAYOUTS[0])
    for turn in (lambda: x.t_(), lambda: x.transpose_(0, 1)):
        with pytest.raises(AutoparError, match=r"another shape in place: expected x.t\(\)"):
            turn()


@pytest.mark.multirank
def test_a_tensor_that_is_turned_in_place_is_refused(ranks4: Ranks) -> None:
    """Some ranks raised torch's error, the others waited for them."""
    ranks4.run(turned)


def written_by_each_rank() -> torch.Tensor:
    handle_writes()
    x = distribute_tensor(whole(), device_mesh((2, 2), ("a", "b")), LAYOUTS[0])
    own = torch.full((5, 6), float(torch.distributed.get_rank()))
    x[3:].copy_(own)
    assert (own == torch.distributed.get_rank()).all()
    return x.full_tensor()


@pytest.mark.multirank
def test_of_plain_tensors_that_differ_the_first_ranks_is_taken(ranks4: Ranks) -> None:
    expected = whole()
    expected[3:] = 0
    assert all(torch.equal(found, expected) for found in ranks4.run(written_by_each_rank))


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0).abs_().sqrt_(),
    "mean": lambda x: x.mean().add_(1.0),
    "largest": lambda x: x.max().sub_(7.0),
    "norm": lambda x: x.norm().clamp_(max=1.0),
    "filled": lambda x: x.sum().fill_(3.0),
    "at an index": lambda x: x.sum(0).index_fill_(0, torch.tensor([1]), -1.0),
    "another of the same memory": lambda x: (total := x.square().sum(), total.detach().sqrt_())[0],
}


def written_to_summands(name: str) -> torch.Tensor:
    handle_writes()
    x = distribute_tensor(whole(), device_mesh((2, 2), ("a", "b")), [Shard(0), Shard(1)])
    return SUMS[name](x).full_tensor()


@pytest.mark.multirank
@pytest.mark.parametrize("name", SUMS)
def test_writes_to_sums_over_ranks_are_those_of_one_device(ranks4: Ranks, name: str) -> None:
    expected = SUMS[name](whole())
    assert all(torch.allclose(found, expected) for found in ranks4.run(written_to_summands, name))


def negative_norm() -> str:
    handle_writes()
    x = distribute_tensor(whole(), device_mesh((4,), ("a",)), [Shard(0)])
    try:
        x.norm().neg_()
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.multirank
def test_a_norm_that_becomes_negative_is_refused(ranks4: Ranks) -> None:
    assert all("call x.full_tensor() first" in error for error in ranks4.run(negative_norm))


def stepped_by_other_parts() -> str:
    handle_writes()
    mesh = device_mesh((2, 2), ("a", "b"))
    p, g = (distribute_tensor(whole(), mesh, layout) for layout in LAYOUTS[:2])
    momentum = torch.zeros_like(p)
    options = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False}
    try:
        torch._fused_sgd_([p], [g], [momentum], **options, maximize=False, is_first_step=True)
    except AutoparError as error:
        return str(error)
    return "not refused"


@pytest.mark.multirank
def test_fused_updates_of_parts_that_lie_otherwise_are_refused(ranks4: Ranks) -> None:
    for told in ranks4.run(stepped_by_other_parts):
        assert "_fused_sgd_" in told and "expects tensors that lie alike" in told and "Shard(dim=1)" in told


def attention_of_parts() -> list[torch.Tensor]:
    """The largest error of attention outside of a model, and of its gradient, for each layout."""
    handle_writes()
    mesh, given = device_mesh((2, 2), ("a", "b")), torch.linspace(-3, 3, 120).sin().view(2, 2, 5, 6)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.scaled_dot_product_attention(x.requires_grad_(), x * 2, x + 1)
        (y * y).sum().backward()
        return y.detach(), x.grad

    expected = run(given.clone())
    found = [run(distribute_tensor(given.clone(), mesh, layout)) for layout in LAYOUTS]
    return [(x.full_tensor() - y).abs().max() for each in found for x, y in zip(each, expected)]


@pytest.mark.multirank
def test_attention_of_parts_is_answered_at_once(ranks4: Ranks) -> None:
    for errors in ranks4.run(attention_of_parts, timeout_s=60):
        assert max(errors) < 1e-5
