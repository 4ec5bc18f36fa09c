"""Packed sequences of any lengths have the numbers of one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autopar.errors import AutoparError
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

SAMPLES, STEPS, FEATURES = 5, 6, 4
LENGTHS = {"mixed": [6, 2, 4, 1, 6], "all": [6] * SAMPLES, "sorted": [6, 5, 3, 3, 1]}


class Layer(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool = True, **options: object) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn = kind(FEATURES, 3, batch_first=batch_first, **options).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        packed = PackedSequence(packed.data.tanh(), *packed[1:])
        out, ends = self.rnn(packed)
        out, ends = self.rnn(pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=False), ends)
        padded, found = pad_packed_sequence(out, batch_first=True, padding_value=0.5, total_length=STEPS + 1)
        states = ends if isinstance(ends, tuple) else (ends,)
        weighted = [x * torch.linspace(0, 1, x.numel()).to(x).view(x.shape) for x in (padded, *states)]
        return sum((x.sum() for x in weighted), found.sum())


MODELS = {
    "LSTM, both ways, two layers": lambda: Layer(nn.LSTM, bidirectional=True, num_layers=2),
    "LSTM, no bias": lambda: Layer(nn.LSTM, bias=False, batch_first=False),
    "GRU, both ways": lambda: Layer(nn.GRU, bidirectional=True),
    "RNN": lambda: Layer(nn.RNN, num_layers=2),
    "RNN of relu": lambda: Layer(nn.RNN, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(SAMPLES, STEPS, FEATURES, dtype=torch.float64)
    graph = trace(model, (x, torch.tensor(LENGTHS["mixed"])), {})
    for lengths in map(torch.tensor, LENGTHS.values()):
        values = dict(model.named_parameters()) | {"x": x, "lengths": lengths}
        inputs = {
            item.value.name: values[item.fqn or item.value.name] for item in graph.inputs if item.kind != "constant"
        }
        found = run(graph, inputs)[0][0]
        truth = model(x, lengths)
        torch.testing.assert_close(found, truth)
        parameters = list(model.parameters())
        for mine, own in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(truth, parameters)):
            torch.testing.assert_close(mine, own)


class Longest(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return F.relu(pad_packed_sequence(packed, batch_first=True)[0]).sum()


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5, 5], [6, 6, 0, 6, 6], [6, 7, 6, 6, 6]])
def test_lengths_for_which_torch_gives_other_shapes_or_an_error_are_refused(lengths: list[int]) -> None:
    x = torch.randn(SAMPLES, STEPS, FEATURES)
    graph = trace(Longest(), (x, torch.tensor([6, 2, 4, 1, 6])), {})
    values = {"x": x, "lengths": torch.tensor(lengths)}
    with pytest.raises(AutoparError, match=r"test_packed_sequences.py:\d+.*pack"):
        run(graph, {item.value.name: values[item.value.name] for item in graph.of_kind("argument")})
