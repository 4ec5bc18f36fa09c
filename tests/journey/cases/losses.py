"""Losses of torch: in forward, with stages too, and by loss_fn= and train_step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import FORWARD, PP, SETTINGS, Numbers, Run, case
from tests.journey.cases.tricks import three_steps
from tests.journey.stack import BATCH, WIDTH, Stack

ON = SETTINGS
Loss = Callable[..., torch.Tensor]


class Judged(Stack):
    """The loss is inside."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        return self.loss(self.body(x), y)


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def inside(run: Run, losses: Mapping[str, Loss], y: Any) -> Numbers:
    """Loss and gradients of each, in the model's own forward."""
    found = {}
    for name, loss in losses.items():
        x = torch.randn(BATCH, WIDTH)
        model = run.compile(Judged(loss), args=(x, y))
        made = {"loss": run.step(model, x, y)} | run.gradients(model)
        found |= {f"{name} {key}": value for key, value in made.items()}
    return found


def outside(run: Run, losses: Mapping[str, Loss], y: Any) -> Numbers:
    """The same by loss_fn= and train_step."""
    found = {}
    for name, loss in losses.items():
        x, model = torch.randn(BATCH, WIDTH), Outputs()
        if run.setting == "one device":
            value = loss(model(x), y)
            value.backward()
        else:
            model = run.compile(model, args=(x, y), loss_fn=loss)
            value = model.train_step(x, y)
        made = {"loss": value.detach()} | run.gradients(model)
        found |= {f"{name} {key}": value for key, value in made.items()}
    return found


OF_NUMBERS: dict[str, Loss] = {
    "huber": nn.HuberLoss(delta=0.5),
    "smooth": nn.SmoothL1Loss(beta=0.3),
    "absolute": nn.L1Loss(),
    "summed": nn.SmoothL1Loss(reduction="sum"),
    "by hand": lambda x, y: nn.HuberLoss(reduction="none")(x, y).sum(-1).mean(),
}


@case(on=ON)
def huber_and_smooth(run: Run) -> Numbers:
    """nn.HuberLoss, nn.SmoothL1Loss and nn.L1Loss with all reductions"""
    return inside(run, OF_NUMBERS, torch.randn(BATCH, WIDTH))


@case(on=ON, peers=False)
def huber_and_smooth_by_loss_fn(run: Run) -> Numbers:
    """The same by loss_fn="""
    return outside(run, OF_NUMBERS, torch.randn(BATCH, WIDTH))


OF_DISTRIBUTIONS: dict[str, Loss] = {
    "batch mean": lambda x, y: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(-1), y),
    "mean": lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="mean"),
    "logs": lambda x, y: nn.KLDivLoss(reduction="batchmean", log_target=True)(x.log_softmax(-1), y.log()),
    "distilled": lambda x, y: 4 * F.kl_div((x / 2).log_softmax(-1), (y / 2).softmax(-1), reduction="batchmean"),
    "soft labels": nn.CrossEntropyLoss(),
}


@case(on=ON)
def divergences(run: Run) -> Numbers:
    """nn.KLDivLoss with reductions "batchmean", "mean" and log_target, distillation, cross-entropy of soft labels"""
    return inside(run, OF_DISTRIBUTIONS, torch.rand(BATCH, WIDTH).softmax(-1))


@case(on=ON, peers=False)
def divergences_by_loss_fn(run: Run) -> Numbers:
    """The same by loss_fn="""
    return outside(run, OF_DISTRIBUTIONS, torch.rand(BATCH, WIDTH).softmax(-1))


OF_COUNTS: dict[str, Loss] = {
    "rates": nn.PoissonNLLLoss(),
    "plain": lambda x, y: F.poisson_nll_loss(x.exp(), y, log_input=False),
    "full": nn.PoissonNLLLoss(full=True, reduction="sum"),
}


@case(on=ON)
def counts(run: Run) -> Numbers:
    """nn.PoissonNLLLoss of logarithms and of rates, with Stirling's term"""
    return inside(run, OF_COUNTS, torch.randint(5, (BATCH, WIDTH)).float())


@case(on=ON, peers=False)
def counts_by_loss_fn(run: Run) -> Numbers:
    """The same by loss_fn="""
    return outside(run, OF_COUNTS, torch.randint(5, (BATCH, WIDTH)).float())


def gaussian(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mean, variance = x.chunk(2, -1)
    return nn.GaussianNLLLoss(full=True)(mean, y, F.softplus(variance))


@case(on=ON, refused={PP: "cannot be run on microbatches"})
def gaussian_likelihood(run: Run) -> Numbers:
    """nn.GaussianNLLLoss, which raises an error if a variance is negative"""
    return inside(run, {"gaussian": gaussian}, torch.randn(BATCH, WIDTH // 2))


@case(on=ON)
def gaussian_likelihood_by_hand(run: Run) -> Numbers:
    """The same written out: log(variance) + (mean - y)^2 / variance"""

    def by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, variance = x.chunk(2, -1)
        variance = F.softplus(variance).clamp(min=1e-6)
        return 0.5 * (variance.log() + (mean - y) ** 2 / variance).mean()

    return inside(run, {"gaussian": by_hand}, torch.randn(BATCH, WIDTH // 2))


def pairs(loss: Loss) -> Loss:
    """Of the two halves of each output."""
    return lambda x, y: loss(*x.chunk(2, -1), y)


OF_PAIRS: dict[str, Loss] = {
    "cosine": pairs(nn.CosineEmbeddingLoss(margin=0.2)),
    "hinge": lambda x, y: F.hinge_embedding_loss(F.pairwise_distance(*x.chunk(2, -1)), y),
    "similar": lambda x, y: (F.cosine_similarity(*x.chunk(2, -1)) - y).square().mean(),
    "ranking": lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], y, margin=0.3),
}


@case(on=ON)
def losses_of_pairs(run: Run) -> Numbers:
    """nn.CosineEmbeddingLoss, nn.HingeEmbeddingLoss and nn.MarginRankingLoss of two halves, labels 1 and -1"""
    return inside(run, OF_PAIRS, torch.randint(2, (BATCH,)).float() * 2 - 1)


@case(on=ON, peers=False)
def losses_of_pairs_by_loss_fn(run: Run) -> Numbers:
    """The same by loss_fn="""
    return outside(run, OF_PAIRS, torch.randint(2, (BATCH,)).float() * 2 - 1)


class Triplets(Stack):
    """One model of an anchor, what is like it and what is not."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, anchor: torch.Tensor, like: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(anchor), self.body(like), self.body(other))


@case(on=FORWARD)
def triplets(run: Run) -> Numbers:
    """nn.TripletMarginLoss, with swap, and TripletMarginWithDistanceLoss of three calls of the same layers"""
    losses = {
        "plain": nn.TripletMarginLoss(margin=2.0),
        "swapped": nn.TripletMarginLoss(margin=2.0, swap=True, p=1),
        "cosine": nn.TripletMarginWithDistanceLoss(
            distance_function=lambda x, y: 1 - F.cosine_similarity(x, y), margin=0.5
        ),
    }
    found = {}
    for name, loss in losses.items():
        args = tuple(torch.randn(BATCH, WIDTH) for _ in range(3))
        model = run.compile(Triplets(loss), args=args)
        made = {"loss": run.step(model, *args)} | run.gradients(model)
        found |= {f"{name} {key}": value for key, value in made.items()}
    return found


OF_LABELS: dict[str, Loss] = {
    "several": nn.MultiLabelMarginLoss(),
    "several summed": nn.MultiLabelMarginLoss(reduction="sum"),
}


@case(on=ON)
def margins_of_several_labels(run: Run) -> Numbers:
    """nn.MultiLabelMarginLoss, labels up to the first -1"""
    y = torch.full((BATCH, WIDTH), -1)
    y[:, 0], y[::2, 1] = torch.arange(BATCH) % WIDTH, (torch.arange(BATCH)[::2] + 3) % WIDTH
    return inside(run, OF_LABELS, y)


OF_CLASSES: dict[str, Loss] = {
    "margin": nn.MultiMarginLoss(p=2, margin=0.5),
    "weighted": nn.NLLLoss(weight=torch.linspace(0.5, 2, WIDTH)),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=3),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "each": lambda x, y: nn.CrossEntropyLoss(reduction="none")(x, y).square().mean(),
}


@case(on=FORWARD, peers=False)
def classes_by_loss_fn(run: Run) -> Numbers:
    """Losses of classes by loss_fn=: margins, class weights, label smoothing with ignored classes, a sum, none"""
    return outside(run, OF_CLASSES, torch.randint(WIDTH, (BATCH,)))


@case(on=FORWARD, peers=False)
def sequences(run: Run) -> Numbers:
    """nn.CTCLoss inside forward"""
    loss = nn.CTCLoss(zero_infinity=True)
    lengths = torch.tensor([1, 2, 3, 3, 2, 1, 2, 3])

    class Spelled(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, num_labels: torch.Tensor) -> torch.Tensor:
            logits = self.body(x).log_softmax(-1).transpose(0, 1)
            return loss(logits, labels, torch.full((BATCH,), logits.shape[0]), num_labels)

    args = torch.randn(BATCH, 7, WIDTH), torch.randint(1, 6, (BATCH, 3)), lengths
    model = run.compile(Spelled(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def sequences_outside(run: Run) -> Numbers:
    """nn.CTCLoss of what the model returned"""
    x, labels, lengths = torch.randn(BATCH, 7, WIDTH), torch.randint(1, 6, (BATCH, 3)), torch.arange(BATCH) % 3 + 1
    model = run.compile(Outputs(), args=(x,))
    logits = run.whole(model(x)).log_softmax(-1).transpose(0, 1)
    loss = nn.CTCLoss()(logits, labels, torch.full((BATCH,), 7), lengths)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=FORWARD)
def losses_outside(run: Run) -> Numbers:
    """Huber, Gaussian, Poisson, cosine and triplet losses of what the model returned"""
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    model = run.compile(Outputs(), args=(x,))
    losses: dict[str, Loss] = {
        "huber": lambda out: F.huber_loss(out, y),
        "gaussian": lambda out: F.gaussian_nll_loss(out, y, out.square() + 0.1),
        "poisson": lambda out: F.poisson_nll_loss(out, y.abs()),
        "cosine": lambda out: F.cosine_embedding_loss(out, y, torch.ones(BATCH)),
        "triplet": lambda out: F.triplet_margin_loss(out, y, y.flip(0)),
    }
    found = {}
    for name, loss in losses.items():
        model.zero_grad()
        value = loss(run.whole(model(x)))
        value.backward()
        made = {"loss": value.detach()} | run.gradients(model)
        found |= {f"{name} {key}": one for key, one in made.items()}
    return found


@case()
def loss_by_focal_with_parameters(run: Run) -> Numbers:
    """F.cross_entropy of cosine scores and a margin, whose class centres are parameters of the model (ArcFace)"""

    class Margin(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.centres)).clamp(-0.99, 0.99)
            wanted = F.one_hot(labels, 5).bool()
            return F.cross_entropy(4 * torch.where(wanted, (cosine.acos() + 0.3).cos(), cosine), labels)

    return three_steps(run, Margin(), torch.randn(BATCH, WIDTH), torch.arange(BATCH) % 5)
