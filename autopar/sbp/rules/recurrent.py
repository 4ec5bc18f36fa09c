"""Rules of recurrent layers called as one op."""

from collections.abc import Iterator

from autopar.ir.graph import Op, Slot, arguments_of
from autopar.sbp.placement import Placement, R, S
from autopar.sbp.rules._by_name import signature, tensor_of
from autopar.sbp.signature import Signature


def recurrent(op: Op) -> Iterator[Signature]:
    """aten.lstm, gru, rnn: input [t, b, f] or [b, t, f], states [layers, b, h] -> output alike, states.

    Sequences of the batch are independent, and all use the same parameters: R. Time is sequential; one call holds all
    layers and gates, so its hidden units are not split. With dropout between layers it is one random op and only whole.
    """
    arguments = arguments_of(op)
    is_random = arguments["train"] and arguments["dropout"] > 0
    if len(tensor_of(op, "input").shape) == 3 and not is_random:
        batch = S(0 if arguments["batch_first"] else 1)
        states = arguments["hx"]
        placed: dict[str, Placement | tuple[Placement, ...]] = {
            "input": batch,
            "params": (R,) * len(arguments["params"]),
        }
        placed["hx"] = S(1) if isinstance(states, Slot) else (S(1),) * len(states)
        yield from signature(op, placed, (batch,) + (S(1),) * (len(op.outputs) - 1))


RULES = {
    "aten.lstm.input": recurrent,
    "aten.gru.input": recurrent,
    "aten.rnn_tanh.input": recurrent,
    "aten.rnn_relu.input": recurrent,
}
