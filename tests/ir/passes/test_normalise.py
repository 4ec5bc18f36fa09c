"""What normal form means, pass by pass, on programs small enough to read."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.graph import Graph, Slot, Value
from autopar.ir.passes.canonicalise import canonicalise
from autopar.ir.trace import trace
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.sbp.placement import S
from tests import zoo
from tests.ir.compare import assert_same_as_model


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x):
        return self.function(self.w, x)


def targets(function, x=None) -> list[str]:
    """The ops of the program after it was checked against the program itself."""
    model, x = Program(function), torch.randn(2, 3, 4) if x is None else x
    graph = trace(model, (x,), {})
    check(graph)
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)
    return [f"{op.target.removeprefix('aten.')}{list(op.args[1:])}" for op in graph.ops]


def check(graph: Graph) -> None:
    """The invariants of Graph."""
    names = [value.name for op in graph.constant_ops for value in op.outputs] + list(graph.constants)
    known = set(names)
    for op in graph.constant_ops:
        assert {value.name for value in op.inputs} <= known
    known = {item.value.name for item in graph.inputs}
    names += [name for name in known if name not in names]
    for op in graph.ops:
        assert {value.name for value in op.inputs} <= known, op
        known |= {value.name for value in op.outputs}
        names += [value.name for value in op.outputs]
        assert all(name.isidentifier() for name in names[-len(op.outputs) :])
    assert len(names) == len(set(names))
    assert {item.name for item in graph.outputs if isinstance(item, Value)} <= known
    assert {value.name for _, value in graph.mutations} <= known


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_invariants(name):
    case = zoo.build(name)
    check(trace(case.model, case.args, case.kwargs))


IDENTITIES = {
    "same shape": lambda w, x: x.view(2, 3, 4).expand(-1, 3, 4).reshape(2, 3, -1),
    "same dtype": lambda w, x: x.to(torch.float32).type_as(x).float().to("cpu"),
    "copies": lambda w, x: x.contiguous().clone().transpose(0, 1).contiguous().transpose(0, 1),
    "dropout": lambda w, x: F.dropout(F.dropout(x, 0.0, True), 0.5, False),
    "all of it": lambda w, x: x[:, :, 0:4],
    "empty cache": lambda w, x: torch.cat([torch.tensor([]), x], dim=-2),
    "there and back": lambda w, x: x.flatten(1).unflatten(1, (3, 4)).unsqueeze(-1).squeeze(-1),
    "disabled autocast": lambda w, x: _without_autocast(x),
}


def _without_autocast(x):
    with torch.autocast("cpu", enabled=False):
        return x.float()


@pytest.mark.parametrize("name", sorted(IDENTITIES))
def test_identities_vanish(name):
    left = [target for target in targets(IDENTITIES[name]) if not target.startswith("permute")]
    assert left == []


def test_one_spelling():
    assert targets(lambda w, x: x.view(-1, 2, 2)) == ["reshape.default[(6, 2, 2)]"]
    assert targets(lambda w, x: x.flatten(0, 1).unsqueeze(0)) == ["reshape.default[(1, 6, 4)]"]
    assert targets(lambda w, x: x.transpose(-1, -2)) == ["permute.default[(0, 2, 1)]"]
    assert targets(lambda w, x: x.movedim(0, -1)) == ["permute.default[(1, 2, 0)]"]
    assert targets(lambda w, x: x[:, 1:, -1]) == ["slice.Tensor[1, 1, 3]", "select.int[2, 3]"]
    assert targets(lambda w, x: x.chunk(2, -1)) == ["split_with_sizes.default[(2, 2), 2]"]
    assert targets(lambda w, x: x.softmax(-1).mean((-1, -2))) == ["softmax.int[2]", "mean.dim[(2, 1)]"]
    assert targets(lambda w, x: x.to(torch.float64, copy=True)) == ["to.dtype[torch.float64]"]


def test_flattened_product_is_linear():
    found = targets(lambda w, x: torch.addmm(w[0], x.view(-1, 4), w).view(2, 3, 4))
    assert [target.split("[")[0] for target in found] == ["select.int", "autopar.turned_linear.default"]
    kept = targets(lambda w, x: torch.mm(x.view(-1, 4), w))
    assert [target.split("[")[0] for target in kept] == ["reshape.default", "mm.default"]


def test_flattened_linear_is_one_of_several_dims():
    flat = lambda w, x: F.linear(x.reshape(6, 4), w).view(2, 3, 4).cos()  # noqa: E731
    assert targets(flat) == ["linear.default[Slot(index=1)]", "cos.default[]"]
    heads = lambda w, x: F.linear(x.reshape(6, 4), w).view(2, 3, 4).cos()  # noqa: E731
    for shape in ((2, 3, 2, 2), (2, 6, 2), (6, 2, 2)):
        assert targets(heads, torch.randn(shape))[0] == "reshape.default[(2, 3, 4)]"
    assert "reshape.default[(6, 4)]" in targets(lambda w, x: F.linear(x.reshape(6, 4), w).view(3, 2, 4).cos())


def test_torchs_attention_keeps_the_batch_in_a_dim_of_its_own():
    model, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(4, 3, 8)
    graph = trace(model, (x,), {})
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)
    assert not [op for op in graph.ops if op.outputs[0].shape[:1] == (12,)]
    assert microbatched(graph, 4).placements[graph.outputs[0].name] == S(0)


def test_tensors_broadcast_together_are_expanded():
    assert targets(lambda w, x: F.mse_loss(x, x + 1)) == ["add.Tensor[1]", "mse_loss.default[Slot(index=1)]"]
    assert "expand.default[(2, 3, 4)]" in targets(lambda w, x: torch.broadcast_tensors(w[:1], x)[0] * x)


OWN_ROWS = {
    "columns": lambda w, x: x[torch.arange(2)[:, None, None, None], torch.arange(3)],
    "columns with dims of their own": lambda w, x: x[torch.arange(2)[:, None, None], torch.tensor([[[2, 0], [1, 1]]])],
    "two": lambda w, x: x[torch.arange(2)[:, None, None], torch.tensor([[0], [2]]), torch.arange(4)[None, :]],
    "transformers": lambda w, x: x[(torch.arange(2) + 0).view(2, 1, 1, 1), torch.arange(3).view(1, 1, 1, 3)],
}
OWN_COLUMNS = {
    "a column for each row": lambda w, x: x[torch.arange(2), torch.tensor([2, 1])],
    "from the end": lambda w, x: x[torch.arange(2), torch.tensor([-1, -3])],
    "one number for each row": lambda w, x: x.sum(-1)[torch.arange(2), torch.tensor([0, -1])],
    "that of the largest": lambda w, x: (x @ w)[torch.arange(2), (x @ w).sum(2).argmax(1)],
    "several for each row": lambda w, x: x[torch.arange(2)[:, None], torch.tensor([[0, 1], [2, 2]])],
    "rows and two columns": lambda w, x: x[torch.arange(2), torch.tensor([0, 1]), torch.tensor([2, 1])],
}
OTHER_ROWS = {
    "another order": lambda w, x: x[torch.tensor([1, 0])[:, None], torch.arange(3)],
    "few": lambda w, x: x[torch.arange(1)[:, None], torch.arange(3)],
    "rows last": lambda w, x: x[torch.arange(2)[None, :], torch.arange(3)[:, None]],
}


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_a_column_for_each_row_is_gathered(name):
    found = targets(OWN_COLUMNS[name])
    assert any(target.startswith("gather.") for target in found) and not any(
        target.startswith("index.") for target in found
    )


@pytest.mark.parametrize("name", [*OWN_ROWS, *OTHER_ROWS])
def test_rows_that_count_themselves_are_not_indexed(name):
    found = targets((OWN_ROWS | OTHER_ROWS)[name])
    index = next(target for target in found if target.startswith("index."))
    assert index.startswith("index.Tensor[(None") == (name in OWN_ROWS)


def test_equal_ops_are_merged_but_not_random_ones():
    assert len(targets(lambda w, x: (x @ w).exp() + (x @ w).exp())) == 3
    assert len(targets(lambda w, x: F.dropout(x @ w, 0.5) + F.dropout(x @ w, 0.5))) == 4


def test_one_and_true_are_not_equal():
    assert len(targets(lambda w, x: torch.add(w, 1) + torch.add(w, 1.0))) == 3


def test_constants_leave_the_program():
    graph = trace(
        Program(lambda w, x: x @ w + torch.arange(4).float().exp() + torch.tensor(2.0)), (torch.randn(2, 4),), {}
    )
    assert [op.target for op in graph.ops] == ["aten.matmul.default", "aten.add.Tensor", "aten.add.Tensor"]
    assert [op.target for op in graph.constant_ops] == ["aten.arange.default", "aten.to.dtype", "aten.exp.default"]
    assert len(graph.of_kind("constant")) == 2 and len(graph.constants) == 1
    assert not any(name == "device" for op in graph.constant_ops for name, _ in op.kwargs)


def test_no_grad_region_cuts_the_gradient():
    def program(w, x):
        with torch.no_grad():
            scale = (x @ w).abs().mean()
        return (x @ w) / scale, (x @ w).detach()

    graph = trace(Program(program), (torch.randn(2, 4),), {})
    assert {op.target: op.is_no_grad for op in graph.ops}["aten.mean.default"]
    assert [item.needs_grad for item in graph.outputs] == [True, False]
    targets(program)


def test_batch_norm_updates_its_buffers():
    case = zoo.build("resnet")
    graph = trace(case.model, case.args, case.kwargs)
    norms = [op for op in graph.ops if op.target == "aten._native_batch_norm_legit_functional.default"]
    assert len(norms) == 9 and len(graph.mutations) == 27
    assert [value.needs_grad for value in norms[0].outputs] == [True, False, False, False, False]
    evaluated = trace(case.model.eval(), case.args, case.kwargs)
    assert not evaluated.mutations and any(op.target == "aten.batch_norm.default" for op in evaluated.ops)


COUNTED_FROM_THE_END = {
    "norm of all dims": lambda w, x: x @ torch._weight_norm(w, w[0, 0], -1),
    "norm of each column": lambda w, x: x @ torch._weight_norm(w, w[:1], 1),
    "cosines of a vector and rows": lambda w, x: F.cosine_similarity(w[0], x, dim=-1),
    "cosines of rows and a vector": lambda w, x: F.cosine_similarity(x, w[0], dim=-1),
    "products of a vector and rows": lambda w, x: torch.linalg.vecdot(w[0], x, dim=-1),
    "cross products of vectors and rows": lambda w, x: torch.linalg.cross(w[None, :1, :3], x[..., :3], dim=-1),
    "a dim beyond those of the input": lambda w, x: (
        torch.ops.aten.select_backward(x[..., 0], x.shape, x.dim() - 1, 1) @ w
    ),
    "a sum of the last dim": lambda w, x: (x @ w).sum(-1) + x.mean((-1, -2), keepdim=True)[..., 0],
}


@pytest.mark.parametrize("name", sorted(COUNTED_FROM_THE_END))
def test_dims_counted_from_the_end_are_those_that_the_op_takes_them_for(name):
    targets(COUNTED_FROM_THE_END[name])


def test_what_becomes_complex_is_in_rows():
    """By a copy that changes no value, or by a result whose strides follow from those of an input."""
    rows = targets(lambda w, x: torch.view_as_real(torch.view_as_complex(x[:, :2].transpose(1, 2).contiguous())))
    assert rows[-3:] == ["contiguous.default[]", "view_as_complex.default[]", "view_as_real.default[]"]
    targets(lambda w, x: torch.view_as_complex(x.transpose(1, 2).contiguous().sin()[..., :2].contiguous()).abs())


def test_a_copy_that_is_called_with_the_same_arguments_keeps_its_own_tensors() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y], -1).reshape(-1)

    graph = trace(Joined(), (torch.randn(2, 3), torch.randn(2, 3)), {})
    (cat, reshape), (x, y) = graph.ops, (item.value for item in graph.inputs)
    copies = [replace(cat, name=f"cat_{number}", inputs=read) for number, read in enumerate([(x, x), (y, x), (y, y)])]
    made = canonicalise(replace(graph, ops=(cat, *copies, reshape)))
    assert [op.inputs for op in made.ops[:-1]] == [(x, y), (x, x), (y, x), (y, y)]
    viewed = replace(reshape, target="aten.view.default", args=(Slot(0), (-1,)))
    others = [replace(viewed, name=f"view_{number}") for number in range(2)]
    assert [op.args for op in canonicalise(replace(graph, ops=(cat, viewed, *others))).ops[1:]] == [reshape.args] * 3
