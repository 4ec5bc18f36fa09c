"""Convolutions whose groups are split over ranks: the op itself with fewer groups."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autopar.ir.graph import resolve
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import no_collectives, num_ranks
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.torch_compat import OpOverload


def convolution(op: OpOverload, *args: Any, channel_groups: Sequence[Axis], **kwargs: Any) -> torch.Tensor:
    """`op` on this rank's whole groups of channels."""
    bound = {argument.name: value for argument, value in zip(op._schema.arguments, args)} | kwargs
    return op(**bound | {"groups": bound["groups"] // num_ranks(channel_groups)})


TARGETS = (
    "aten.conv1d.default",
    "aten.conv1d.padding",
    "aten.conv2d.default",
    "aten.conv2d.padding",
    "aten.conv3d.default",
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)

LOCAL_OPS = {target: LocalOp(partial(convolution, resolve(target)), no_collectives) for target in TARGETS}
