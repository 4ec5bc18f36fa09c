"""The printed graph, and what its fingerprint depends on."""

import torch
from torch import nn

from autopar.ir.print_graph import fingerprint, format_graph
from autopar.ir.trace import trace


class Small(nn.Module):
    def __init__(self, width=4, power=2):
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.power = power
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        y = self.linear(x) ** self.power
        return y.softmax(-1), torch.arange(3), "label"


class SmallElsewhere(Small):
    def forward(self, x):
        return super().forward(x)


def test_text():
    graph = trace(Small(), (torch.randn(2, 4),), {})
    lines = format_graph(graph).splitlines()
    assert [line.partition("  # ")[0] for line in lines] == [
        "%linear_weight: f32[4, 4]",
        "%linear_bias: f32[4]",
        "%count: i64[]",
        "%x: f32[2, 4]",
        "%arange: i64[3]",
        "once %arange: i64[3] = aten.arange.default(3)",
        "%add: i64[] = aten.add.Tensor(%count, 1)",
        "%linear: f32[2, 4] = aten.linear.default(%x, %linear_weight, %linear_bias)",
        "%pow_1: f32[2, 4] = aten.pow.Tensor_Scalar(%linear, 2)",
        "%softmax: f32[2, 4] = aten.softmax.int(%pow_1, 1)",
        "count <- %add",
        "return (%softmax, %arange, 'label')",
    ]
    comments = [line.partition("  # ")[2] for line in lines]
    assert comments[0] == "parameter linear.weight" and comments[2] == "buffer count" and comments[3] == "argument x"
    assert comments[7].startswith("linear test_print_graph.py:")


def test_fingerprint_is_stable_and_tells_graphs_apart():
    x = torch.randn(2, 4)
    same = {fingerprint(trace(model, (x,), {})) for model in (Small(), Small(), SmallElsewhere())}
    assert len(same) == 1
    others = {
        fingerprint(trace(Small(width=5), (x,), {})),
        fingerprint(trace(Small(power=3), (x,), {})),
        fingerprint(trace(Small(), (torch.randn(3, 4),), {})),
        fingerprint(trace(Small().double(), (x.double(),), {})),
        fingerprint(trace(nn.Sequential(Small()), (x,), {})),
    }
    assert len(others | {*same}) == 6


def test_fingerprint_of_a_tensor_that_is_read_both_once_and_by_the_forward():
    class Orders(nn.Module):
        def __init__(self, order):
            super().__init__()
            self.order = order

        def forward(self, x):
            order = torch.tensor(self.order)
            return x[order] + x[order.flip(0)]

    x = torch.ones(3, 4)
    assert fingerprint(trace(Orders([2, 0, 1]), (x,), {})) == fingerprint(trace(Orders([2, 0, 1]), (x,), {}))
