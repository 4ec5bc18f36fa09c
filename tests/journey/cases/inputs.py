"""What models are called with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.journey.case import DP, FORWARD, PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Stack, batch

WORDS = 16


class Called(Stack):
    """A stack whose forward takes what `loss` of its subclass says."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, y = self.pair(*args, **kwargs)
        return (self.body(x) - y).square().mean()

    def pair(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a subclass says what the model is called with")


def called(run: Run, model: nn.Module, *args: Any, **kwargs: Any) -> Numbers:
    """Loss and gradients of a step of the model, compiled for a call like this."""
    model = run.compile(model, args=args, kwargs=kwargs)
    return {"loss": run.step(model, *args, **kwargs)} | run.gradients(model)


@case()
def keywords(run: Run) -> Numbers:
    """model(x=x, y=y)"""
    x, y = batch()
    return called(run, Stack(), x=x, y=y)


@case()
def keywords_in_another_order(run: Run) -> Numbers:
    """Keywords in another order than when it was compiled"""
    x, y = batch()
    model = run.compile(Stack(), kwargs={"x": x, "y": y})
    return {"loss": run.step(model, y=y, x=x)} | run.gradients(model)


@case()
def positional_and_keyword(run: Run) -> Numbers:
    """model(x, y=y)"""
    x, y = batch()
    return called(run, Stack(), x, y=y)


class Defaults(Called):
    def pair(self, x, y=None, scale=2.0):
        return x * scale, x if y is None else y


@case()
def defaults_left_out(run: Run) -> Numbers:
    """Arguments with defaults that are left out"""
    return called(run, Defaults(), batch()[0])


@case()
def none_given(run: Run) -> Numbers:
    """None for an optional tensor"""
    return called(run, Defaults(), batch()[0], None)


@case()
def numbers_given(run: Run) -> Numbers:
    """A number among the arguments"""
    return called(run, Defaults(), *batch(), scale=0.5)


@case()
def another_number_at_the_second_call(run: Run) -> Numbers:
    """Another number at the second call: the model is traced again"""
    args = batch()
    model = run.compile(Defaults(), args=args, kwargs={"scale": 0.5})
    first = run.step(model, *args, scale=0.5)
    return {"first": first, "second": run.step(model, *args, scale=3.0)} | run.gradients(model)


class Mapped(Called):
    def pair(self, batch):
        return batch["x"], batch["y"]


@case()
def mapping(run: Run) -> Numbers:
    """A dict of tensors"""
    x, y = batch()
    return called(run, Mapped(), {"x": x, "y": y})


class Nested(Called):
    def pair(self, pairs):
        (first, [second]), y = pairs
        return first + second, y["y"]


@case()
def nested_containers(run: Run) -> Numbers:
    """Lists, tuples and dicts within one another"""
    x, y = batch()
    return called(run, Nested(), ((x, [2 * x]), {"y": y}))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Named(Called):
    def pair(self, pair):
        return pair.x, pair.y


@case()
def named_tuple(run: Run) -> Numbers:
    """A named tuple"""
    return called(run, Named(), Pair(*batch()))


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


@case(peers=False)
def data_class(run: Run) -> Numbers:
    """A dataclass of tensors"""
    return called(run, Named(), Record(*batch()))


class Collected(Called):
    def pair(self, **batch):
        return batch["x"], batch["y"]


@case()
def collected_keywords(run: Run) -> Numbers:
    """forward(self, **batch)"""
    x, y = batch()
    return called(run, Collected(), x=x, y=y)


class Listed(Called):
    def pair(self, *tensors):
        return sum(tensors[:-1]), tensors[-1]


@case()
def any_number_of_tensors(run: Run) -> Numbers:
    """forward(self, *tensors)"""
    x, y = batch()
    return called(run, Listed(), x, x.flip(0), y)


@case()
def one_tensor_twice(run: Run) -> Numbers:
    """The same tensor as two arguments"""
    x, _ = batch()
    return called(run, Stack(), x, x)


@case()
def transposed(run: Run) -> Numbers:
    """A tensor that is not contiguous"""
    x, y = batch()
    return called(run, Stack(), x.t().contiguous().t(), y)


@case()
def expanded(run: Run) -> Numbers:
    """A tensor that is an expanded view"""
    x, y = batch()
    return called(run, Stack(), x[:1].expand(BATCH, WIDTH), y)


class Words(Called):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def pair(self, words, y):
        return self.embedding(words), y


@case()
def tokens(run: Run) -> Numbers:
    """Integers that an embedding looks up"""
    return called(run, Words(), torch.randint(WORDS, (BATCH,)), batch()[1])


class Masked(Called):
    def pair(self, x, y, mask):
        return x.masked_fill(mask, 0.0), y


@case()
def mask(run: Run) -> Numbers:
    """A boolean mask"""
    return called(run, Masked(), *batch(), torch.rand(BATCH, WIDTH) > 0.5)


class Tempered(Called):
    def pair(self, x, y, temperature):
        return x / temperature, y


@case()
def scalar_tensor(run: Run) -> Numbers:
    """A tensor without dims"""
    return called(run, Tempered(), *batch(), torch.tensor(2.0))


class Labelled(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), labels)


@case()
def ignored_labels(run: Run) -> Numbers:
    """Labels of which some are ignored, on each rank others: the mean is over those of the whole batch"""
    labels = torch.tensor([0, 1, -100, -100, 2, 3, 4, -100])
    return called(run, Labelled(), batch()[0], labels)


class Chosen(Stack):
    def forward(self, x: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.mse_loss(self.body(x), y, reduction=reduction)


@case()
def text(run: Run) -> Numbers:
    """A string among the arguments"""
    return called(run, Chosen(), *batch(), "sum")


@case(on=FORWARD)
def input_with_gradient(run: Run) -> Numbers:
    """An input that requires a gradient: x.grad after backward"""
    x, y = batch()
    x.requires_grad_()
    model = run.compile(Stack(), args=(x, y))
    loss = run.step(model, x, y)
    return {"loss": loss, "gradient": x.grad} | run.gradients(model)


@case(on=FORWARD, peers=False)
def tensor_in_parts(run: Run) -> Numbers:
    """A DTensor of which each rank has its rows"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y))
    if run.setting in FORWARD:
        placements = (Shard(0),) * run.mesh.ndim
        x, y = (distribute_tensor(item, run.mesh, placements) for item in (x, y))
    return {"loss": run.step(model, x, y)} | run.gradients(model)


@case()
def double_precision(run: Run) -> Numbers:
    """A model and inputs in float64"""
    return called(run, Stack().double(), *(item.double() for item in batch()))


@case(peers=False, refused={PP: "cannot be"})
def odd_batch(run: Run) -> Numbers:
    """A batch of seven, which no axis divides"""
    return called(run, Stack(), *(item[:7] for item in batch()))


@case()
def another_batch_size(run: Run) -> Numbers:
    """A larger batch at the second call: the model is traced again"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    return {"first": first, "second": run.step(model, *(x.repeat(2, 1) for x in args))} | run.gradients(model)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU()) for _ in range(3)))

    def forward(self, images: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.blocks(images).mean((2, 3)) - y).square().mean()


@case(on=FORWARD)
def images(run: Run) -> Numbers:
    """Images, channels last"""
    images = torch.randn(BATCH, 4, 8, 8).to(memory_format=torch.channels_last)
    return called(run, Images(), images, torch.randn(BATCH, 4))


class Spectrum(Called):
    def pair(self, x, y):
        return torch.view_as_real(x).sum(-1), y


@case()
def complex_numbers(run: Run) -> Numbers:
    """A complex tensor"""
    return called(run, Spectrum(), torch.randn(BATCH, WIDTH, dtype=torch.complex64), batch()[1])


@case(on=(DP,), refused="cannot be called so.*forward takes")
def argument_missing(run: Run) -> Numbers:
    """An argument that forward needs, left out"""
    return called(run, Stack(), batch()[0])


class Asks(Called):
    def pair(self, x, y):
        return (x, y) if x.sum() > 0 else (y, x)


@case()
def branch_on_values(run: Run) -> Numbers:
    """`if x.sum() > 0` in forward"""
    return called(run, Asks(), *batch())


class Counts(Called):
    def pair(self, x, y):
        return x * x.abs().max().item(), y


@case(refused=r"inputs.py:\d+")
def item_of_a_tensor(run: Run) -> Numbers:
    """x.max().item() in forward"""
    return called(run, Counts(), *batch())


class Selects(Called):
    def pair(self, x, y):
        return x, torch.zeros(BATCH, WIDTH) + x[x > 0].sum()


@case()
def boolean_indexing(run: Run) -> Numbers:
    """x[x > 0] in forward: a shape that depends on values"""
    return called(run, Selects(), *batch())
