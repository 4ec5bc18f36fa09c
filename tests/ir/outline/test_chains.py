"""Calls one after the other are one op of the exported model, and change nothing of what is traced."""

import pytest
import torch
from torch import nn

from autopar.ir.outline.export_once import export_outline
from tests.ir.outline.test_opaque_calls import LAYERS, Block, Stack, X, stack
from tests.ir.outlines import assert_equal


class AllKept(Stack):
    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return torch.stack(kept)


class FourthKept(Stack):
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 3:
                fourth = x
        return x + fourth, {"kept": fourth}


class ReadAfterwards(Stack):
    """The second result is read when something else has been computed since the last block."""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                second = x
        return (2 * x) * second


class Sized(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block(x) if x.shape[-1] == 4 and x.dtype.is_floating_point and x.requires_grad else x
        return x


class MaskedBetween(Stack):
    def forward(self, x):
        for block in self.blocks:
            mask = torch.ones(3, 1)
            x = block(x) * mask
        return x


class Crossing(Block):
    def forward(self, x, y, z):
        return y + self.inner(x), x * z


class Crossed(Stack):
    def forward(self, x):
        y, z = 2 * x, 3 * x
        for block in self.blocks:
            x, y = block(x, y, z)
        return x, y


@pytest.mark.parametrize(
    ("base", "block", "lengths"),
    [
        (Stack, Block, [6]),
        (AllKept, Block, [1] * 6),
        (FourthKept, Block, [4, 2]),
        (ReadAfterwards, Block, [1] * 6),
        (Sized, Block, [6]),
        (MaskedBetween, Block, [1] * 6),
        (Crossed, Crossing, [6]),
    ],
)
def test_blocks_one_after_the_other_are_one_op(base: type, block: type[nn.Module], lengths: list[int]) -> None:
    model = stack(base, block).eval()
    assert [len(chain.fqns) for chain in export_outline(model, (X,), {}).chains] == lengths
    assert_equal(model, (X,), {}, calls=LAYERS)
