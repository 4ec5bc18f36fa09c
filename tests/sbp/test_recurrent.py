"""Recurrent layers on shards against the op itself."""

import pytest
import torch

from autopar.sbp.rules.recurrent import RULES
from tests.sbp.exercise import exercise, f64

LAYERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_batch_is_split(name, batch_first):
    params = [
        p.detach().requires_grad_() for p in LAYERS[name](3, 4, dtype=torch.float64, bidirectional=True).parameters()
    ]
    states = [f64(2, 6, 4) for _ in range(2 if name == "lstm" else 1)]
    hx = states if name == "lstm" else states[0]
    x = f64(6, 5, 3) if batch_first else f64(5, 6, 3)
    found = exercise(f"aten.{name}.input", x, hx, params, True, 1, 0.0, True, True, batch_first)
    assert len(found) == 3


def test_every_rule_is_met_above():
    assert {f"aten.{name}.input" for name in LAYERS} == set(RULES)
