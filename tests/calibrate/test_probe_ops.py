"""Ops are timed on operands that were not just read, with results kept, as in a step of training."""

import torch

from autopar.calibrate import probe_ops
from autopar.calibrate.probe_ops import probe, time_op

CPU = torch.device("cpu")


def _addresses_of_calls(monkeypatch, op, budget_s):
    """(address of the first operand, that of the result) of each call in a row while `op` is timed."""
    seen, kept, call = [], [], probe_ops.call

    def noted(op, tensors):
        results = call(op, tensors)
        seen.append((tensors[0].data_ptr(), results[0].data_ptr()))
        return results

    monkeypatch.setattr(probe_ops, "call", noted)
    monkeypatch.setattr(probe_ops, "call_s", lambda work, *_: kept.append(work()) or len(seen))
    return time_op(op, CPU, budget_s), seen


def test_calls_in_a_row_read_other_operands_and_keep_their_results(monkeypatch):
    timed, seen = _addresses_of_calls(monkeypatch, probe("aten.add.Tensor", [(256, 512)] * 2), budget_s=60.0)
    row = seen[2:18]  # behind those that find how many are in a row
    assert len({operand for operand, _ in row}) == len({result for _, result in row}) == len(row) == 16
    assert timed.forward_s == len(seen[:18]) / 16 and timed.backward_s > 0


def test_ops_that_take_longer_than_a_trial_are_called_alone(monkeypatch):
    _, seen = _addresses_of_calls(monkeypatch, probe("aten.add.Tensor", [(256, 512)] * 2), budget_s=0.0)
    assert len({operand for operand, _ in seen}) == 1
