"""The graph of a model that loops over a set is the same in every process."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.ir.folding.order_free_ops import order_free_ops
from autopar.ir.print_graph import fingerprint
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

KINDS = ("full", "sliding", "chunked", "global")


class Kinds(nn.Module):
    """Positions of each kind of layer, made in the order of a collection, read in that of the layers."""

    def __init__(self, kinds: object) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in KINDS])
        for number, kind in enumerate(KINDS):
            self.register_buffer(kind, torch.full((4,), 1.0 + number))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(len(x), device=x.device).unsqueeze(1)
        made = {kind: ((positions * getattr(self, kind)).cos() * 2, x.sin().sum(-1)) for kind in self.kinds}
        for layer, kind in zip(self.layers, KINDS):
            scale, shift = made[kind]
            x = layer(x) * scale + shift.unsqueeze(1)
        return x.square().mean()


def graph_of(kinds: object):
    torch.manual_seed(0)
    model = Kinds(kinds)
    return trace(model, (torch.randn(3, 4),), {}), model


def test_graphs_differ_in_no_name() -> None:
    (one, model), (other, _) = graph_of(KINDS), graph_of(KINDS[::-1])
    assert fingerprint(one) == fingerprint(other)
    assert [(op.name, op.target, op.inputs, op.outputs) for op in one.ops] == [
        (op.name, op.target, op.inputs, op.outputs) for op in other.ops
    ]
    assert order_free_ops(one) == one
    state, x = dict(model.named_parameters()) | dict(model.named_buffers()), torch.randn(3, 4)
    inputs = {item.value.name: state.get(item.fqn, x) for item in other.inputs if item.kind != "constant"}
    (loss,), _ = run(other, inputs)
    torch.testing.assert_close(loss, model(x))


def test_a_loop_over_a_set_in_processes_with_other_hashes() -> None:
    code = (
        "from autopar.ir.print_graph import fingerprint;"
        " from tests.ir.folding.test_order_free_ops import KINDS, graph_of; print(fingerprint(graph_of(set(KINDS))[0]))"
    )
    root = str(Path(__file__).parents[3])
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(prints) == 1 and len(prints.pop().strip()) == 64
