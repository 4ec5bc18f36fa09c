"""Rules of normalisations.

Each computes a statistic over some dims and scales by it. A dim outside them splits plainly, and parameters without
that dim get a gradient from every slice: R. A dim inside them needs the statistic of all ranks (a role with inner
collectives); the slices of the output then follow from slices of the input and of the parameters.
"""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import I, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.signature import Signature

CHANNELS = ("weight", "bias", "running_mean", "running_var")  # arguments with one number per channel


def layer_norm(op: Op) -> Iterator[Signature]:
    """layer_norm and rms_norm: statistics over the last dims."""
    arguments = arguments_of(op)
    rank = len(tensor_of(op, "input").shape)
    num_batch = rank - len(arguments["normalized_shape"])
    parameters = [name for name in ("weight", "bias") if name in arguments]
    for dim in range(num_batch):
        yield from signature(op, {"input": S(dim)}, S(dim))
    for dim in range(num_batch, rank):
        placed = dict.fromkeys(parameters, S(dim - num_batch))
        yield from signature(op, {"input": S(dim), **placed}, S(dim), role="normalized")


def group_norm(op: Op) -> Iterator[Signature]:
    """Statistics of each sample and group of channels: the batch splits plainly, channels by whole groups.

    The latter changes the number of groups (role "channel_groups").
    """
    num_groups = arguments_of(op)["num_groups"]
    yield from signature(op, {"input": S(0)}, S(0))
    if num_groups > 1:
        placed = {"input": S(1), "weight": S(0), "bias": S(0)}
        yield from signature(op, placed, S(1), role="channel_groups", num_units=num_groups)


def batch_norm(op: Op) -> Iterator[Signature]:
    """Batch norm with one output: it reads running statistics (evaluation) or keeps none.

    `batch_norm_functional` is the one that returns new running statistics.
    """
    arguments = arguments_of(op)
    if arguments["training"] and optional_tensor(op, "running_mean") is not None:
        return  # it writes to its arguments, which no op of a graph does
    yield from signature(op, {"input": S(0)}, S(0), role="batch" if arguments["training"] else "")
    yield from signature(op, {"input": S(1), **dict.fromkeys(CHANNELS, S(0))}, S(1))


def batch_norm_functional(op: Op) -> Iterator[Signature]:
    """Statistics of each channel over the batch.

    The outputs but the first have a number for each channel, no gradient.
    """
    if not arguments_of(op)["training"]:
        return  # its statistics are then empty
    rest = len(op.outputs) - 1
    yield from signature(op, {"input": S(0), "running_mean": I, "running_var": I}, (S(0),) + (I,) * rest, role="batch")
    yield from signature(op, {"input": S(1), **dict.fromkeys(CHANNELS, S(0))}, (S(1),) + (S(0),) * rest)


def instance_norm(op: Op) -> Iterator[Signature]:
    """Statistics of each sample and channel; running statistics, which average over samples, only whole."""
    if optional_tensor(op, "running_mean") is None:
        yield from signature(op, {"input": S(0), "weight": R, "bias": R}, S(0))
        yield from signature(op, {"input": S(1), "weight": S(0), "bias": S(0)}, S(1))


RULES = {
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": layer_norm,
    "aten.group_norm.default": group_norm,
    "aten.batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
    "aten.instance_norm.default": instance_norm,
}
