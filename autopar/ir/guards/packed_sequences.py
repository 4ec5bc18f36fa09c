"""Packed sequences, written out on padded ones while a model is exported: their sizes follow from the lengths.

A `PackedSequence` then holds the padded tensor [samples, steps, features], sorted as torch sorts it, and the number of
samples in each step, from which the lengths follow. A recurrent layer computes all steps, and takes what it returns at
the last step of each sample.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from autopar.errors import TraceError
from autopar.ir.export.source_lines import quoted_here
from autopar.ir.graph import resolve
from autopar.ir.guards.guard_ops import NOTE

_CLOSED = 1e4  # of which the sigmoid is 1, and of its negative 0, in each dtype


@contextmanager
def sequences_kept_padded() -> Iterator[None]:
    """Inside, packing gives padded tensors, and recurrent layers take them."""
    # What pack_padded_sequence calls, which models hold by its own name.
    calls = SimpleNamespace(_pack_padded_sequence=_packed, _pad_packed_sequence=_padded)
    with ExitStack() as stack:
        stack.enter_context(patch.object(rnn, "_VF", calls))
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            stack.enter_context(patch.object(kind, "forward", _forward(kind.forward)))
        yield


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    x = x if batch_first else x.transpose(0, 1)
    lengths = lengths.to(x.device)
    resolve(NOTE)([((lengths < 1) | (lengths > x.shape[1])).any()], "Eq(v0, 0)", quoted_here())
    return x, (lengths.unsqueeze(0) > torch.arange(x.shape[1], device=x.device).unsqueeze(1)).sum(1)


def _padded(
    x: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    caller = inspect.currentframe()
    given = caller.f_back.f_locals if caller and caller.f_back else {}
    if given.get("total_length") is None:  # torch then gives as many steps as the longest sample has
        where = f"{quoted_here()}, whose steps are those of the longest sample unless it is given total_length,"
        resolve(NOTE)([batch_sizes[-1] < 1], "Eq(v0, 0)", where)
    lengths = _lengths(batch_sizes, len(x))
    x = torch.where(_is_inside(x, lengths), x, value)
    x = nn.functional.pad(x, (0, 0, 0, total_length - x.shape[1]), value=value)
    return (x if batch_first else x.transpose(0, 1)), lengths


def _lengths(batch_sizes: Tensor, samples: int) -> Tensor:
    """The number of steps of each sample, sorted from the most to the fewest."""
    return (batch_sizes.unsqueeze(0) > torch.arange(samples, device=batch_sizes.device).unsqueeze(1)).sum(1)


def _is_inside(x: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        return _of_packed(self, input, hx) if isinstance(input, PackedSequence) else original(self, input, hx)

    return forward


def _of_packed(layer: Any, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    x, batch_sizes, order, back = packed
    if (layer.dropout and layer.training) or getattr(layer, "proj_size", 0):
        raise TraceError(f"nn.{layer.mode} of packed sequences with dropout or proj_size: give it the padded tensor")
    lengths, ways = _lengths(batch_sizes, len(x)), 2 if layer.bidirectional else 1
    if hx is None:
        zeros = x.new_zeros(layer.num_layers * ways, len(x), layer.hidden_size)
        hx = (zeros, zeros) if layer.mode == "LSTM" else zeros
    else:
        hx = layer.permute_hidden(hx, order)
    ends = []
    for number in range(layer.num_layers):
        made = []
        for way in range(ways):
            place = number * ways + way
            start = tuple(state[place : place + 1] for state in (hx if layer.mode == "LSTM" else (hx,)))
            out, end = _one_way(layer.mode, x, lengths, start, layer.all_weights[place], is_backward=way == 1)
            made.append(out)
            ends.append(end)
        x = torch.cat(made, -1)
    states = tuple(torch.stack(each) for each in zip(*ends))
    hidden = layer.permute_hidden(states if layer.mode == "LSTM" else states[0], back)
    return PackedSequence(x, batch_sizes, order, back), hidden


def _one_way(
    mode: str, x: Tensor, lengths: Tensor, start: Sequence[Tensor], weights: Sequence[Tensor], *, is_backward: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: its output, 0 behind each sample's end, and the states at the ends."""
    if is_backward:
        x = _turned(x, lengths)
    run = getattr(torch, mode.lower())
    options = (weights, len(weights) > 2, 1, 0.0, False, False, True)
    out = run(x, tuple(start), *options)[0] if mode == "LSTM" else run(x, start[0], *options)[0]
    last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, out.shape[-1])
    ends = [out.gather(1, last).squeeze(1)]
    if mode == "LSTM":
        ends.append(_last_cell(x, lengths, start, weights))
    out = torch.where(_is_inside(out, lengths), out, 0.0)
    return (_turned(out, lengths) if is_backward else out), tuple(ends)


def _last_cell(x: Tensor, lengths: Tensor, start: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The cell state of each sample at its end: behind it the input gates are shut and the forget gates open, so that
    the last step has it too.
    """
    size = start[0].shape[-1]
    gates = torch.tensor([-_CLOSED, _CLOSED, 0.0, 0.0], dtype=x.dtype, device=x.device).repeat_interleave(size)
    is_behind = (~_is_inside(x, lengths)).to(x.dtype)
    x = torch.cat([x, is_behind], -1)
    wider = [torch.cat([weights[0], gates.unsqueeze(1)], 1), *weights[1:]]
    return torch.lstm(x, tuple(start), wider, len(weights) > 2, 1, 0.0, False, False, True)[2][0]


def _turned(x: Tensor, lengths: Tensor) -> Tensor:
    """Each sample from its last step to its first."""
    step = (lengths.unsqueeze(1) - 1 - torch.arange(x.shape[1], device=x.device)).clamp(min=0)
    return x.gather(1, step.unsqueeze(-1).expand_as(x))
