"""What masks pick is computed for all rows, and gives the numbers of one device for masks of any number of True."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.guards.add_guards import has_sizes_of_values
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

ROWS, WIDTH = 6, 4


def plain_mean(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[mask].square().mean()


def indexed_twice(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return F.mse_loss((x @ w)[mask], y[mask])


def sums(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    return picked.sum() / mask.sum() + picked.softmax(-1).amax(-1).sum() + picked[:, 1:].norm(dim=1).mean()


def parts_of_a_mask(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return F.l1_loss((x @ w)[:, 1:][mask[:, 1:]], y[:, 1:][mask[:, 1:]], reduction="sum")


def classes(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    logits, wanted = (x @ w)[mask], ids[mask]
    weight = torch.arange(1.0, WIDTH + 1, dtype=x.dtype)
    one = F.cross_entropy(logits, wanted, weight=weight, label_smoothing=0.1)
    return one + F.nll_loss(logits.log_softmax(-1), wanted, ignore_index=0)


def losses_of_each(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    logits, wanted = (x @ w)[mask], ids[mask]
    weight = torch.arange(1.0, WIDTH + 1, dtype=x.dtype)
    one = F.cross_entropy(logits, wanted, weight=weight, label_smoothing=0.1, reduction="none")
    other = F.nll_loss(logits.log_softmax(-1), wanted, ignore_index=0, reduction="none")
    return (
        (one / (1 + y[mask][:, 0].abs())).sum() + one.mean() + (other * x[mask][:, 1]).mean() + (1 - other.exp()).sum()
    )


def parts_written(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    edges = F.pad((x @ w)[mask].softmax(-1).cumsum(-1), (1, 0))
    edges[..., 0] = -3.0
    edges[..., 2:4] = 2.0
    edges[..., -1] = y[mask][:, 0]
    return (edges[..., 1:] - edges[..., :-1]).square().sum(-1).sqrt().mean()


def over_some_dims(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[mask].mean(0).square().sum() + (x @ w)[mask].mean((0, 1), keepdim=True).sum()


def extremes(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[mask].amax(0).sum() + (x @ w)[mask].min() + (x @ w)[mask].logsumexp(0).sum()


def without_missing(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    y = torch.where(mask.unsqueeze(-1), y, torch.nan)
    there = ~y[..., 0].isnan()
    return F.smooth_l1_loss((x @ w)[there], y[there], beta=0.5)


def logarithms(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    p = (x @ w).sigmoid() * mask.unsqueeze(-1)  # 0 where the mask is False
    return (w[0] * p[mask].log()).sum() + (y[mask] / p[mask]).mean()


def written_back(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    out = y.clone()
    out[mask] = (x @ w)[mask].tanh() * 2
    out[mask] += 1
    return out.square().mean()


def added_to_places(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(WIDTH, WIDTH, dtype=x.dtype).index_add(0, ids[mask], (x @ w)[mask])
    return total.square().sum()


def behind_the_mask(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    h = F.layer_norm(F.gelu(x[mask] @ w), (WIDTH,))
    return F.binary_cross_entropy_with_logits(h @ w, y[mask].sigmoid(), pos_weight=w.detach()[0].abs())


def distances(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    """Functions without a gradient where all rows that are not picked are alike, behind a parameter."""
    apart = (x[mask] @ w - y[mask] @ w).square().sum(-1).sqrt()
    return (
        apart.mean()
        + (w[0] * x[mask] - w[0] * y[mask]).sum(-1).abs().log().mean()
        + (apart / (1 + ids[mask]).log1p()).sum()
    )


def counts_of_each(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    each = mask.sum(1, keepdim=True).expand_as(mask)
    return ((x[mask] @ w).square().sum(-1) / each[mask]).sum()


def hard_ones(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    """What a second mask picks of the rows that a first one picks."""
    each = F.cross_entropy((x @ w)[mask], ids[mask], reduction="none")
    hard = each > each.detach().mean()
    easy = (x @ w)[mask][~hard, 1:]
    return each[hard].mean() + each[each <= 1].sum() + easy.square().sum() + (y[mask][hard] @ w).tanh().sum()


def masked_select(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sum(-1).masked_select(mask).square().mean()


def scattered(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    out = y.masked_scatter(mask.unsqueeze(-1), (x @ w)[mask])
    return out.masked_scatter(~mask.unsqueeze(-1).expand_as(y), (y @ w)[~mask]).square().mean()


def of_second_dim(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w).transpose(0, 1)[:, mask[:, 0]].square().mean()


def selected_by_the_model(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    loss = F.cross_entropy((x @ w).flatten(0, 1), ids.flatten(), reduction="none")
    return loss[loss > loss.detach().mean()].mean()


def by_hand(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    return (picked[:, 0] - y[mask][:, 0]).abs().clamp(max=3).sum() + F.one_hot(ids, WIDTH)[mask].sum() * w.sum()


def centerness(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    box = (x @ w)[mask].exp()
    shares = box[:, [0, 2]].amin(-1) / box[:, [0, 2]].amax(-1) * box[:, torch.tensor([[1, 3]])].mean((-1, -2))
    return shares.sqrt().sum() + box.index_select(1, torch.tensor([3, 0, 0])).square().mean()


def farthest_points(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    """Each mask follows from what the one before wrote."""
    far, row = torch.full((ROWS, 5), 1e10, dtype=x.dtype), torch.arange(ROWS)
    point, found = ids[:, 0] % 5, []
    for _ in range(3):
        distance = (x - x[row, point].unsqueeze(1)).square().sum(-1)
        is_nearer = distance < far
        far[is_nearer] = distance[is_nearer]
        point = far.argmax(-1)
        found.append(x[row, point] @ w)
    return torch.stack(found).square().mean()


def inside(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    """A function within bounds, and the identity in the tails, as splines of flows are."""
    h = x @ w
    near = (h > -1) & (h < 1)
    made = torch.zeros_like(h)
    made[~near] = h[~near]
    if torch.any(near):
        picked = h[near]
        if torch.min(picked) < -1 or torch.max(picked) > 1:
            raise ValueError("outside")
        made[near] = F.pad(picked[:, None].sin(), (1, 1)).cumsum(-1)[:, 2]
    return (made * y).mean()


FORWARDS = [
    *(plain_mean, indexed_twice, sums, parts_of_a_mask, classes, over_some_dims, extremes, without_missing),
    *(logarithms, written_back, added_to_places, behind_the_mask, masked_select, scattered, of_second_dim),
    *(parts_written, losses_of_each, distances, counts_of_each, hard_ones),
    *(selected_by_the_model, by_hand, centerness, farthest_points, inside),
]


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)), forward

    def forward(self, x: Tensor, y: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return self.function(x, y, ids, mask, self.w)


def batch(share: float) -> dict[str, Tensor]:
    mask = torch.rand(ROWS, 5) < share
    mask[0, 1] = True
    x, y = torch.randn(2, ROWS, 5, WIDTH, dtype=torch.float64)
    return {"x": x, "y": y, "ids": torch.randint(0, WIDTH, (ROWS, 5)), "mask": mask}


def run_on(graph: Graph, model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    inputs = {item.value.name: model.w for item in graph.of_kind("parameter")}
    inputs |= {item.value.name: given[item.fqn] for item in graph.of_kind("argument")}
    (loss,), _ = run(graph, inputs)
    return loss


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_masks_of_any_number_of_true(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(forward)
    graph = trace(model, (), batch(0.5))
    assert not has_sizes_of_values(graph) and not any("picked" in op.target for op in graph.ops)
    for share in (0.5, 0.1, 0.9, 1.1):
        given = batch(share)
        found, truth = run_on(graph, model, given), model(**given)
        torch.testing.assert_close(found, truth, equal_nan=True)  # of no row, a mean is NaN
        (one,), (other,) = (torch.autograd.grad(loss, model.w) for loss in (found, truth))
        torch.testing.assert_close(one, other, equal_nan=True)


def test_no_row_at_all() -> None:
    model, given = Model(indexed_twice), batch(0.5)
    graph = trace(model, (), given)
    given["mask"] = torch.zeros_like(given["mask"])
    assert run_on(graph, model, given).isnan() and model(**given).isnan()


def test_a_mask_without_any_that_the_model_asked_for_names_the_line() -> None:
    model, given = Model(inside), batch(0.5)
    graph = trace(model, (), given)
    with pytest.raises(AutoparError, match=r"torch\.any\(near\)"):
        run_on(graph, model, given | {"x": given["x"] * 1e6})


def compared_with_one_another(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    return (picked @ picked.mT).square().mean()


def sorted_by_size(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[mask].sort(0)[0][:2].sum()


def branches_on_the_number(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    return picked.mean() if len(picked) > 0 else w.sum()


def divides_by_the_number(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    return picked.sum() / len(picked)


def numbered(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    picked = (x @ w)[mask]
    picked[:, 0] = torch.arange(len(picked))
    return picked.square().mean()


@pytest.mark.parametrize(
    "forward",
    [compared_with_one_another, sorted_by_size, branches_on_the_number, divides_by_the_number, numbered],
    ids=lambda f: f.__name__,
)
def test_rows_that_depend_on_one_another_have_the_number_of_the_example(forward: Callable[..., Tensor]) -> None:
    model, given = Model(forward), batch(0.5)
    graph = trace(model, (), given)
    assert has_sizes_of_values(graph)
    torch.testing.assert_close(run_on(graph, model, given), model(**given))


def classes_that_are_there(x: Tensor, y: Tensor, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    total, kinds = w.sum(), ids[:, 0]
    for kind in range(3):
        chosen = kinds == kind
        if chosen.any():
            total = total + (x @ w)[chosen].mean(0).square().sum()
    return total


def test_a_class_that_is_not_there_is_left_out_as_in_the_example() -> None:
    torch.manual_seed(0)
    model, given = Model(classes_that_are_there), batch(0.5)
    given["ids"][:, 0] = torch.arange(ROWS) % 2  # the mean of class 2 would be NaN
    graph = trace(model, (), given)
    given["ids"][:, 0] = 1 - given["ids"][:, 0]
    torch.testing.assert_close(run_on(graph, model, given), model(**given))
    given["ids"][0, 0] = 2
    with pytest.raises(AutoparError, match=r"if chosen\.any.*another way than for the example"):
        run_on(graph, model, given)
