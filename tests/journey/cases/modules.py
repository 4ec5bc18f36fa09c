"""Kinds of modules, and what their forwards do."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.writes import stepped
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


@case()
def tied_weights(run: Run) -> Numbers:
    """One weight for the embedding and the head"""
    args = torch.randint(16, (BATCH,)), torch.randint(16, (BATCH,))
    model = run.compile(Tied(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Shared(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(super().body(x))


@case(on=FORWARD)
def blocks_used_twice(run: Run) -> Numbers:
    """Blocks that are called twice"""
    args = batch()
    model = run.compile(Shared(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def frozen_weights(run: Run) -> Numbers:
    """Weights that are frozen before compile"""
    args, model = batch(), Stack()
    model.blocks[0].requires_grad_(False)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Unused(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


@case()
def weights_without_use(run: Run) -> Numbers:
    """Weights that forward does not use: no gradient"""
    args = batch()
    model = run.compile(Unused(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model) | run.parameters(model)


class BatchNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@case(refused={PP: "cannot be run on microbatches"})
def batch_norm(run: Run) -> Numbers:
    """Batch norm in training: statistics of the whole batch, running means"""
    return stepped(run, BatchNormed)


@case()
def batch_norm_in_eval_mode(run: Run) -> Numbers:
    """Batch norm with its running statistics"""
    args = batch()
    model = run.compile(Stack(BatchNormed).eval(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


@case(refused={PP: "the forward writes buffers"})
def counter(run: Run) -> Numbers:
    """self.calls += 1: a buffer that counts"""
    args = batch()
    model = run.compile(Stack(Counting), args=args)
    return {str(i): run.step(model, *args) for i in range(3)} | run.gradients(model) | run.buffers(model)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh().clone()
        hidden[:, ::2] *= 2
        hidden[:, 0] = 1
        return self.down(hidden).add_(x)


@case()
def written_in_place(run: Run) -> Numbers:
    """x[:, ::2] *= 2, x[:, 0] = 1, add_"""
    return stepped(run, InPlace)


class Scattered(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.detach().sort(-1).indices
        table = torch.zeros_like(x).scatter_(1, order, x)
        return super().forward(table.gather(1, order.flip(1)) + x.cumsum(0) / 10)


@case(peers=False, refused={PP: "cannot be run on microbatches"})
def scattered_and_gathered(run: Run) -> Numbers:
    """sort, scatter_, gather and a cumulative sum over the batch"""
    return stepped(run, Scattered)


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))


@case()
def weight_norm(run: Run) -> Numbers:
    """torch.nn.utils.parametrizations.weight_norm"""
    return stepped(run, Normalised)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))


@case(refused={PP: "the forward writes buffers"})
def spectral_norm(run: Run) -> Numbers:
    """torch.nn.utils.parametrizations.spectral_norm, whose vectors are buffers"""
    return stepped(run, Spectral)


class Sequences(nn.Module):
    """A recurrent or attending layer over a batch of sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()


def sequences(run: Run, layer: nn.Module) -> Numbers:
    x = torch.randn(BATCH, 4, WIDTH)
    model = run.compile(Sequences(layer), args=(x,))
    return {"loss": run.step(model, x)} | run.gradients(model)


@case(on=FORWARD)
def recurrent_layer(run: Run) -> Numbers:
    """nn.GRU of two layers"""
    return sequences(run, nn.GRU(WIDTH, WIDTH, 2, batch_first=True))


@case(on=FORWARD)
def attention_layer(run: Run) -> Numbers:
    """nn.MultiheadAttention"""
    return sequences(run, nn.MultiheadAttention(WIDTH, 4, batch_first=True))


@case(on=FORWARD)
def transformer_layers(run: Run) -> Numbers:
    """nn.TransformerEncoder"""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, dropout=0.0, batch_first=True)
    return sequences(run, nn.TransformerEncoder(layer, 2))


class Teacher(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.body(x) - wanted).square().mean() + 0 * y.sum()


@case()
def teacher_without_gradient(run: Run) -> Numbers:
    """A teacher within the model, under torch.no_grad()"""
    args = batch()
    model = run.compile(Teacher(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def forward_hooks(run: Run) -> Numbers:
    """register_forward_hook and register_forward_pre_hook before compile, which change what they see"""
    args, model = batch(), Stack()
    model.blocks[1].register_forward_hook(lambda module, args, output: 2 * output)
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Mode(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if self.training else 3))


@case(on=FORWARD)
def training_flag(run: Run) -> Numbers:
    """self.training in forward, train() and eval()"""
    args = batch()
    model = run.compile(Stack(Mode), args=args)
    first = run.step(model, *args)
    model.eval()
    second = model(*args).detach()
    model.train()
    return {"first": first, "second": second, "third": run.step(model, *args)} | run.gradients(model)


class Autocast(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@case(tolerance=3e-2)
def autocast_in_forward(run: Run) -> Numbers:
    """torch.autocast within the model"""
    return stepped(run, Autocast)


class Mapped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(super().forward)(x)


@case(peers=False)
def vmap_in_forward(run: Run) -> Numbers:
    """torch.func.vmap in forward"""
    return stepped(run, Mapped)


class Frequencies(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=WIDTH))


@case()
def fourier_transform(run: Run) -> Numbers:
    """torch.fft along the features"""
    return stepped(run, Frequencies)


class Data(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(hidden + hidden.data.tanh())


@case()
def data_of_a_tensor(run: Run) -> Numbers:
    """hidden.data in forward: without gradient"""
    return stepped(run, Data)


class Cached(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return super().forward(x)


@case()
def tensor_kept_as_an_attribute(run: Run) -> Numbers:
    """self.last = x in forward"""
    return stepped(run, Cached)
