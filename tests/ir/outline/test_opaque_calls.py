"""What stands in for a module changes nothing of what the model around it does; where nothing can, the model is
exported as a whole.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
from autopar.ir.outline.export_once import export_outline
from autopar.ir.outline.identical_modules import find_alike
from autopar.ir.print_graph import format_graph
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model
from tests.ir.outlines import assert_equal, both

LAYERS = 6


class Block(nn.Module):
    """Enough modules to be worth while."""

    def __init__(self, width=4, p=0.0):
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(p)) for _ in range(3))
        )
        self.norm = nn.BatchNorm1d(width)
        self.index, self.scale, self.seen = 0, 1.0, 0

    def forward(self, x):
        return x + self.norm(self.inner(x))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack(base=Stack, block=Block):
    model = base(*(block() for _ in range(LAYERS)))
    for i, layer in enumerate(model.blocks):
        layer.index = i
    return model


X = torch.randn(3, 4, requires_grad=True)


def test_buffers_written_in_each_block():
    assert_equal(stack(), (X,), {}, calls=LAYERS)
    model = stack().double()
    assert_same_as_model(trace(model, (X.double(),), {}), model, (X.double(),), {})


class FifthTwice(Stack):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(2 * x if i == 5 else x)
        return x


class LastFirst(Stack):
    def forward(self, x):
        return super().forward(self.blocks[-1](x))


class FirstAdded(Stack):
    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first


class Fewer(Stack):
    def forward(self, x):
        for block in self.blocks[: LAYERS - 2]:
            x = block(x)
        return x


class WrittenBetween(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x[0] = 0
        return x.relu_()


@pytest.mark.parametrize(
    "base, calls", [(FifthTwice, 6), (LastFirst, 7), (FirstAdded, 6), (Fewer, 4), (WrittenBetween, 6)]
)
def test_what_is_around_the_blocks_counts(base, calls):
    assert_equal(stack(base).eval(), (X,), {}, calls=calls)


def test_a_block_with_another_rate_is_another_kind():
    blocks = [Block(p=0.1) for _ in range(LAYERS)]
    blocks[3] = Block(p=0.2)
    assert_equal(Stack(*blocks), (X,), {}, calls=LAYERS - 1)


def test_blocks_with_an_empty_list():
    """Which is false, as None is, but a module."""
    blocks = [Block() for _ in range(LAYERS)]
    for block in blocks:
        block.more, block.none = nn.ModuleList(), None
    assert_equal(Stack(*blocks), (X,), {}, calls=LAYERS)


def test_weights_shared_by_blocks():
    model = stack()
    model.blocks[2].inner[0][0].weight = model.blocks[5].inner[1][0].weight
    assert_equal(model, (X,), {}, calls=LAYERS)
    _, graph, _ = both(model, (X,), {})
    shared = next(item for item in graph.inputs if item.fqn == "blocks.2.inner.0.0.weight")
    assert shared.aliases == ("blocks.5.inner.1.0.weight",)


def test_weights_shared_inside_a_block():
    model = stack()
    model.blocks[4].inner[0][0].weight = model.blocks[4].inner[1][0].weight
    assert_equal(model, (X,), {}, calls=LAYERS - 1)


def test_frozen_blocks():
    model = stack()
    model.blocks[:3].requires_grad_(False)
    assert_equal(model, (X,), {}, calls=0)  # three of each kind are too few
    model = Stack(*(Block() for _ in range(10)))
    model.blocks[:5].requires_grad_(False)
    assert_equal(model, (X,), {}, calls=10, bodies=2)


class Numbered(Block):
    def forward(self, x):
        return super().forward(x) * (self.index + 1)


class FifthScaled(Block):
    def forward(self, x):
        return super().forward(x) * 2 if self.index == 5 else super().forward(x)


class Counting(Block):
    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Viewing(Block):
    def forward(self, x):
        return super().forward(x).T.T[:]


class Part(Block):
    def forward(self, x):
        return x[:, :]


class Logging(Block):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(x)
        return super().forward(x)


@pytest.mark.parametrize("block, calls", [(Numbered, 0), (FifthScaled, 0), (Counting, 0), (Viewing, 6), (Part, 0)])
def test_blocks_that_are_no_functions_of_their_arguments(block, calls):
    assert_equal(stack(block=block).eval(), (X,), {}, calls=calls)


def test_writing_to_an_argument():
    class Apart(Stack):
        def forward(self, x):
            return super().forward(x + 1)

    assert_equal(stack(Apart, InPlace).eval(), (X,), {}, calls=0)


def test_lists_kept_by_blocks():
    with pytest.raises(
        TraceError, match=r"test_opaque_calls.py:\d+: the forward keeps state in attribute blocks.0.log"
    ):
        export_outline(stack(block=Logging).eval(), (X,), {})


def test_hooks():
    model = stack().eval()
    model.blocks[3].register_forward_hook(lambda module, args, output: output * 2)
    assert_equal(model, (X,), {}, calls=LAYERS - 1)
    model = stack().eval()
    for block in model.blocks:
        block.inner[0][0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert all("blocks.0" not in group.members for group in find_alike(model, least_saved=1))


class Penalised(Stack):
    def forward(self, x):
        return super().forward(x).sum() + sum(p.square().sum() for p in self.parameters())


class Peeking(Stack):
    def forward(self, x):
        return super().forward(x) * self.blocks[2].inner[0][0].weight.sum()


class Asking(Stack):
    def forward(self, x):
        try:
            x = x * self.blocks[2].norm.weight
        except Exception:
            x = x * 7
        return super().forward(x)


@pytest.mark.parametrize("base", [Penalised, Peeking, Asking])
def test_models_that_look_inside_their_blocks(base):
    assert_equal(stack(base).eval(), (X,), {}, calls=0)


class Frozen(Stack):
    def forward(self, x):
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x


def test_blocks_without_gradient():
    assert_equal(stack(Frozen).eval(), (X,), {}, calls=0)


class Unused(Stack):
    def forward(self, x):
        self.blocks[3](x)
        return super().forward(x)


def test_a_block_whose_result_is_not_used():
    """It still writes its buffers."""
    assert_equal(stack(Unused), (X,), {}, calls=LAYERS + 1)


class Nested(nn.Module):
    """Stages of blocks, and a stage is worth more than a block."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(stack() for _ in range(4))
        self.last = stack()

    def forward(self, x):
        for stage in self.stages:
            x = stage(x).relu()
        return self.last.blocks[0](x)


def test_stages_of_blocks():
    _, graph, whole = both(Nested().eval(), (X,), {})
    assert format_graph(graph) == format_graph(whole)


class Scaled(Block):
    def forward(self, x, scale=1.0, mask=None, extra=()):
        y = super().forward(x) * scale
        return {"x": y if mask is None else y * mask, "mask": mask, "kept": [y + e for e in extra], "scale": scale}


class Passing(Stack):
    def forward(self, x, mask):
        sizes = 0.0
        kept = []
        for i, block in enumerate(self.blocks):
            found = block(x, mask=mask, scale=2.0 if i < 3 else 3.0, extra=(mask, x))
            x, mask, kept, sizes = found["x"], found["mask"], found["kept"], sizes + found["scale"]
        return x, mask, kept, sizes


def test_structured_arguments_and_results():
    assert_equal(stack(Passing, Scaled).eval(), (X, torch.ones(3, 4)), {}, calls=LAYERS, bodies=2)


def test_errors_are_those_of_the_model():
    class Broken(Block):
        def forward(self, x):
            return super().forward(x[:, :3])

    with pytest.raises(TraceError, match=r"test_opaque_calls\.py"):
        trace(stack(block=Broken), (X,), {})


def test_kinds_are_told_apart():
    model = Stack(*(Block() for _ in range(8)))
    for i, block in enumerate(model.blocks):
        block.index = i
    model.blocks[1].eval()
    model.blocks[2].inner[1][2].p = 0.25
    model.blocks[3].norm.eps = 1e-3
    model.blocks[4].norm.running_mean = torch.zeros(4, dtype=torch.float64)
    model.blocks[5].extra = F.relu
    group = find_alike(model, least_saved=12)[0]
    assert group.members == ("blocks.0", "blocks.6", "blocks.7") and group.numbers == (("", "index"),)
