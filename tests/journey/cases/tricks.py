"""Tricks inside models: memories, mixtures, scales, losses with parameters, ops that couple the rows of a batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from tests.journey.case import FORWARD, SETTINGS, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

ON = SETTINGS
ALONE = FORWARD


def three_steps(run: Run, model: nn.Module, *args: Any) -> Numbers:
    """Losses, parameters and buffers of three steps of SGD with momentum."""
    args, found = args or batch(), {}
    model = run.compile(model, args=args)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model) | run.buffers(model)


class Quantised(Stack):
    """A codebook whose entries follow the means of what they were nearest to."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        chosen = F.one_hot(torch.cdist(hidden, self.codes).argmin(1), 6).to(hidden.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.lerp_((chosen.T @ hidden + self.codes) / (chosen.sum(0)[:, None] + 1), 0.1)
        quantised = chosen @ self.codes
        commitment = (hidden - quantised.detach()).square().mean()
        return (hidden + (quantised - hidden).detach() - y).square().mean() + 0.25 * commitment


@case(on=ALONE)
def codebook_of_averages(run: Run) -> Numbers:
    """VQ-VAE: a codebook in buffers that forward moves to the means of the batch, straight-through"""
    return three_steps(run, Quantised())


class Centred(Stack):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.register_buffer("center", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        loss = -((y - self.center).softmax(-1) * hidden.log_softmax(-1)).sum(-1).mean()
        self.center = self.center * 0.9 + hidden.detach().mean(0, keepdim=True) * 0.1
        return loss


@case(on=ALONE)
def centre_of_outputs(run: Run) -> Numbers:
    """DINO's centre: a buffer of the batch's mean that the next loss subtracts"""
    return three_steps(run, Centred())


class Contrasted(Stack):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, two = F.normalize(self.body(x), dim=-1), F.normalize(y, dim=-1)
        scores = self.logit_scale.exp().clamp(max=100) * one @ two.T
        labels = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


@case(on=ALONE)
def scores_of_all_pairs(run: Run) -> Numbers:
    """CLIP's loss: scores of all pairs of the batch, a temperature that is a parameter without dims"""
    return three_steps(run, Contrasted())


class Scaled(Block):
    """LayerScale, and stochastic depth that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-2 * torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1.0)
        return x + self.gamma * self.down(F.gelu(self.up(x))) * keep.div_(1.0)


@case(on=ON)
def layer_scale(run: Run) -> Numbers:
    """timm's DropPath (x.new_empty(shape).bernoulli_(keep).div_(keep)) with nothing dropped, and LayerScale"""
    return three_steps(run, Stack(Scaled))


class Mixed(Stack):
    """Experts chosen by the largest scores, weighted, and a loss that balances them."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        scores = self.gate(hidden).softmax(-1)
        weights, chosen = scores.topk(2)
        mask = F.one_hot(chosen, 4).to(hidden.dtype)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        mixed = ((mask * weights[..., None]).sum(1)[..., None] * outputs).sum(1)
        balance = 4 * (mask.sum(1).mean(0) * scores.mean(0)).sum()
        return (mixed - y).square().mean() + 0.01 * balance


@case(on=ALONE)
def experts_by_masks(run: Run) -> Numbers:
    """A mixture of experts by top-k and masks, with a balancing loss over the batch"""
    return three_steps(run, Mixed())


@case(on=ALONE)
def rows_moved(run: Run) -> Numbers:
    """x.flip(0), x.roll(1, 0), x[::2], x[[3, 1, 0]] and torch.cat of parts of the batch"""

    class Moved(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            moved = h.flip(0) + h.roll(1, 0) + torch.cat([h[4:], h[:4]]) + h[[3, 1, 0, 2, 7, 7, 5, 4]]
            return (moved - y).square().mean() + h[::2].mean() * h[1::2].abs().sum()

    return three_steps(run, Moved())


@case(on=ALONE)
def statistics_of_the_batch(run: Run) -> Numbers:
    """x.std(0), quantile, median, norm and logsumexp over the batch, cummax, renorm"""

    class Measured(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            parts = [h.std(0).mean(), torch.quantile(h, 0.3, dim=0).sum()]
            parts += [h.median(0).values.sum(), torch.linalg.vector_norm(h), h.logsumexp(0).mean()]
            parts += [h.cummax(0).values.mean(), h.renorm(2, 0, 0.5).square().sum(), h.var(), h.amax(0).sum()]
            return (h - y).square().mean() + 0.01 * torch.stack(parts).sum()

    return three_steps(run, Measured())


@case(on=ALONE, refused="torch.cov.*cannot be traced.*looks at the values of a tensor")
def covariances(run: Run) -> Numbers:
    """torch.cov of the batch"""

    class Whitened(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) + torch.cov(self.body(x).T).square().sum()

    return three_steps(run, Whitened())


@case(on=ALONE)
def rows_chosen_by_labels(run: Run) -> Numbers:
    """scatter_reduce and index_add of rows by class: means of classes (prototypes), and a supervised contrast"""

    class Prototypes(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            sums = torch.zeros(3, WIDTH).index_add(0, labels, h)
            counts = torch.zeros(3).scatter_add(0, labels, torch.ones(len(labels)))
            means = sums / counts.clamp(min=1)[:, None]
            same = (labels[:, None] == labels[None]) & ~torch.eye(len(labels), dtype=torch.bool)
            scores = (h @ h.T).masked_fill(torch.eye(len(labels), dtype=torch.bool), float("-inf")).log_softmax(-1)
            contrast = -scores.masked_fill(~same, 0).sum() / same.sum().clamp(min=1)
            return F.cross_entropy(-torch.cdist(h, means), labels) + 0.1 * contrast

    return three_steps(run, Prototypes(), torch.randn(BATCH, WIDTH), torch.arange(BATCH) % 3)


@case(on=ON)
def weighted_by_uncertainty(run: Run) -> Numbers:
    """Two losses weighted by parameters without dims: exp(-s) * loss + s"""

    class Weighted(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            losses = (h - y).square().mean(), (h - y).abs().mean()
            return sum((-s).exp() * loss + s for s, loss in zip(self.logs, losses))

    return three_steps(run, Weighted())


@case(on=ON)
def focal_loss(run: Run) -> Numbers:
    """A focal loss and a Dice loss written by hand: reduction="none", gather, sums over all"""

    class Focal(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            each = F.cross_entropy(h, labels, reduction="none")
            focal = ((1 - torch.exp(-each)) ** 2 * each).mean()
            p, wanted = h.softmax(-1), F.one_hot(labels, WIDTH).to(h.dtype)
            return focal + (1 - (2 * (p * wanted).sum(1) + 1) / (p.sum(1) + wanted.sum(1) + 1)).mean()

    return three_steps(run, Focal(), torch.randn(BATCH, WIDTH), torch.arange(BATCH) % WIDTH)


@case(on=ALONE)
def ratio_over_the_batch(run: Run) -> Numbers:
    """A Dice loss whose sums are over the whole batch, and a masked mean: sum(loss * mask) / mask.sum()"""

    class Dice(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            p, wanted, mask = self.body(x).sigmoid(), (y > 0).to(x.dtype), (x[:, :1] > 0).to(x.dtype)
            dice = 1 - (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)
            return dice + ((p - wanted).square() * mask).sum() / (mask.sum() * WIDTH).clamp(min=1)

    return three_steps(run, Dice())


@case(on=ON)
def normalised_over_tokens(run: Run) -> Numbers:
    """(loss * mask).sum() / mask.sum() with a mask among the arguments, other counts in each row"""

    class Masked(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            each = self.body(x).square().mean(-1)
            return (each * mask).sum() / mask.sum()

    mask = (torch.arange(6)[None] < (torch.arange(BATCH)[:, None] % 6 + 1)).float()
    return three_steps(run, Masked(), torch.randn(BATCH, 6, WIDTH), mask)


@case(on=ON)
def penalty_inside(run: Run) -> Numbers:
    """The norms of all weights are added to the loss inside forward, and of the last block's by name"""

    class Penalised(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            penalty = sum(p.square().sum() for p in self.blocks[2].parameters())
            return super().forward(x, y) + 0.01 * penalty

    return three_steps(run, Penalised())


@case(on=ON)
def positive_weights(run: Run) -> Numbers:
    """parametrize.register_parametrization(softplus) before compile, and a symmetric weight"""

    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softplus(x)

    model = Stack()
    for block in model.blocks:
        parametrize.register_parametrization(block.up, "weight", Positive())
    return three_steps(run, model)


@case(on=ALONE)
def activations_exchanged(run: Run) -> Numbers:
    """All nn.ReLU replaced by nn.GELU by name after a step: setattr of each parent found by named_modules"""

    class Activated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(x)))

    args = batch()
    model = run.compile(Stack(Activated), args=args)
    before = run.step(model, *args)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.ReLU):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, nn.GELU())
    model.zero_grad()
    return {"before": before, "after": run.step(model, *args)} | run.gradients(model)


@case(on=ON)
def float64_inside(run: Run) -> Numbers:
    """x.double() for a sum, float32 weights, a buffer in float64 and integers among the buffers"""

    class Precise(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((WIDTH,), 0.5, dtype=torch.float64))
            self.register_buffer("order", torch.arange(WIDTH).flip(0), persistent=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.body(x)[:, self.order].double() * self.scale
            return (h - y).square().mean().float()

    return three_steps(run, Precise())


@case(on=ALONE, tolerance=2e-2)  # as far as bfloat16 rounds: one device is 0.7 % from float64
def halves_after_compile(run: Run) -> Numbers:
    """model.bfloat16() of one block before compile, its input and output cast by hooks"""

    model = Stack()
    model.blocks[1].bfloat16()
    model.blocks[1].register_forward_pre_hook(lambda module, given: (given[0].bfloat16(),))
    model.blocks[1].register_forward_hook(lambda module, given, out: out.float())
    args = batch()
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | {
        name: x.float() for name, x in run.gradients(model).items() if ".1." not in name
    }


@case(on=ALONE)
def images_in_channels_last(run: Run) -> Numbers:
    """model.to(memory_format=torch.channels_last), images too, squeeze and excite, global pooling"""

    class Excited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)
            self.up, self.head = nn.Conv2d(4, WIDTH, 1), nn.Linear(WIDTH, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = F.silu(self.conv(x))
            x = x * self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()
            return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels, label_smoothing=0.1)

    model = Excited().to(memory_format=torch.channels_last)
    images = torch.randn(BATCH, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    return three_steps(run, model, images, torch.arange(BATCH) % 5)


@case(on=ALONE)
def route_by_name(run: Run) -> Numbers:
    """nn.ModuleDict, whose entry a text among the arguments names: model(x, "a"), then model(x, "b")"""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 1)})

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.heads[name](x).square().mean()

    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Routed())
    return {name: run.step(model, x, name) for name in ("a", "b")} | run.gradients(model)


@case(on=ALONE)
def complex_weights(run: Run) -> Numbers:
    """A parameter of complex numbers between two Fourier transforms (a filter of frequencies)"""

    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH) - y).square().mean()

    args = batch()
    model = run.compile(Filtered(), args=args)
    loss = run.step(model, *args)
    return {"loss": loss} | {name: torch.view_as_real(x) for name, x in run.gradients(model).items()}


@case(on=ON)
def layers_shared_by_depth(run: Run) -> Numbers:
    """ALBERT: one block called four times, with a scale of each depth from a parameter's rows"""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.scales = Block(), nn.Parameter(torch.rand(4, WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for scale in self.scales:
                x = self.block(x * scale)
            return (x - y).square().mean()

    return three_steps(run, Shared())
