"""Functions of torch and losses that models of libraries do not call."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import DP_TP, FREE, PP, Numbers, Run, case
from tests.journey.cases.layers import WITH_STAGES, layered, stepped
from tests.journey.stack import BATCH, WIDTH

Function = Callable[[torch.Tensor], torch.Tensor]


class Applied(nn.Module):
    """`function` of what a layer gives, scaled."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * self.function(self.linear(x))


def each(run: Run, functions: dict[str, Function], *shape: int) -> Numbers:
    """Losses and gradients of each of them."""
    found = {}
    for name, function in functions.items():
        made = layered(run, lambda function=function: Applied(function), *shape)
        found |= {f"{name} {key}": x for key, x in made.items()}
    return found


def attended(x: torch.Tensor, **options: object) -> torch.Tensor:
    heads = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(2)


MASK = torch.tensor([[0.0, -1e4, 0.0], [0.0, 0.0, -1e4], [0.5, 0.0, 0.0]])


@case()
def attention_by_function(run: Run) -> Numbers:
    """F.scaled_dot_product_attention: is_causal, masks of booleans and numbers, scale, enable_gqa"""

    def grouped(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 2)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads, heads[:, :2], heads[:, 2:], enable_gqa=True)
        return found.transpose(1, 2).flatten(2)

    functions = {
        "causal": lambda x: attended(x, is_causal=True),
        "masked": lambda x: attended(x, attn_mask=MASK == 0),
        "biased": lambda x: attended(x, attn_mask=MASK, scale=0.3),
        "grouped": grouped,
    }
    return each(run, functions, 3, WIDTH)


PRODUCTS: dict[str, Function] = {
    "einsum of two": lambda x: torch.einsum("bid,bjd->bij", x, x) @ x,
    "einsum of three": lambda x: torch.einsum("bid,bjd,bje->bie", x, x, x) / 8,
    "einsum with dots": lambda x: torch.einsum("...id,...jd->...ij", x, x).softmax(-1) @ x,
    "einsum of a diagonal": lambda x: x + torch.einsum("bii->bi", x @ x.mT)[..., None],
    "bmm": lambda x: torch.bmm(torch.bmm(x, x.mT), x) / 8,
    "baddbmm": lambda x: torch.baddbmm(x, x @ x.mT, x, beta=0.5, alpha=0.1),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(WIDTH, WIDTH) / 8, dims=([2], [1])),
    "outer": lambda x: (x[..., :, None] * x[..., None, :]).mean(-1),
    "inner": lambda x: torch.linalg.vecdot(x, x, dim=-1)[..., None] * x / 8,
    "cross": lambda x: torch.cat([torch.linalg.cross(x[..., :3], x[..., 3:6]), x[..., :5]], -1),
}


@case(on=(DP_TP, FREE, PP))
def products(run: Run) -> Numbers:
    """torch.einsum of several forms, bmm, baddbmm, tensordot, vecdot, cross"""
    return each(run, PRODUCTS, 4, WIDTH)


SCANS: dict[str, Function] = {
    "cumsum": lambda x: x.cumsum(1) / 4,
    "cumprod": lambda x: x.tanh().cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "cummax": lambda x: x.cummax(1).values,
    "sort": lambda x: x.sort(-1, descending=True).values,
    "argsort": lambda x: x.gather(1, x.detach().argsort(1)),
    "topk": lambda x: F.pad(x.topk(3, -1).values, (0, WIDTH - 3)),
    "kthvalue": lambda x: x - x.kthvalue(2, -1, keepdim=True).values,
    "median": lambda x: x - x.median(-1, keepdim=True).values,
    "flip and roll": lambda x: x.flip(1) + x.roll((1, 2), (1, 2)),
    "diff": lambda x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "deviation": lambda x: (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True) + 1),
    "norms": lambda x: F.normalize(x, dim=-1) + x / (1 + torch.linalg.matrix_norm(x)[:, None, None]),
    "quantile": lambda x: x - torch.quantile(x, 0.7, dim=-1, keepdim=True),
}


@case(on=(DP_TP, FREE, PP))
def scans_and_orders(run: Run) -> Numbers:
    """cumsum, cumprod, cummax, sort, topk, median, roll, diff, logsumexp, quantile of one sample each"""
    return each(run, SCANS, 4, WIDTH)


def _indices(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1]).flip(0)


INDEXED: dict[str, Function] = {
    "gather": lambda x: x.gather(-1, (x.detach() > 0).long()),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, x.detach().argmax(-1, keepdim=True), 1.0) * x,
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(
        1, torch.zeros_like(x, dtype=torch.long), x, "amax", include_self=False
    ),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 0, 2, 3]), x),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([1]), x[:, :1] * 2),
    "index_select": lambda x: x.index_select(1, _indices(x)),
    "listed": lambda x: x[:, [3, 0, 1, 1]],
    "take_along_dim": lambda x: torch.take_along_dim(x, x.detach().argmax(-1, keepdim=True), -1) + x,
    "masked_fill": lambda x: x.masked_fill(x.detach() > 0.5, 0.0).masked_fill(torch.eye(4, WIDTH).bool(), -1.0),
    "where": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "triangles": lambda x: x.tril() - 0.5 * x.triu(1),
    "one hot": lambda x: F.one_hot(x.detach().argmax(-1), WIDTH) * x,
    "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 0.5])),
    "repeated": lambda x: x.repeat_interleave(2, 1)[:, ::2] + x.repeat(1, 2, 1)[:, 2:6] + x.tile(2)[..., :WIDTH],
    "diagonals": lambda x: x + torch.diag_embed(x.diagonal(dim1=1, dim2=2)).sum(-1, keepdim=True),
    "unfolded": lambda x: x.unfold(1, 2, 2).mean(-1).repeat(1, 2, 1),
}


@case(on=(DP_TP, FREE, PP))
def indices_and_masks(run: Run) -> Numbers:
    """gather, scatter, scatter_reduce, index_add, index_copy, masked_fill, where, one_hot, bucketize, tile, unfold"""
    return each(run, INDEXED, 4, WIDTH)


@case(refused={PP: WITH_STAGES})
def places_of_what_is_not_zero(run: Run) -> Numbers:
    """The mean of x[x.nonzero(as_tuple=True)] in forward: a shape that depends on values"""
    return each(run, {"nonzero": lambda x: x + x[(x > 0).nonzero(as_tuple=True)].mean()}, WIDTH)


COMPLEX: dict[str, Function] = {
    "fft2": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 0.5).real,
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho").conj(), n=WIDTH, norm="ortho"),
    "shifted": lambda x: torch.fft.fftshift(torch.fft.fft(x), dim=-1).abs(),
    "polar": lambda x: torch.view_as_real(torch.polar(x[..., :4].abs(), x[..., 4:])).flatten(-2),
    "rotary": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * torch.arange(4.0))
    ).flatten(-2),
    "spectrum": lambda x: (
        torch.stft(x.flatten(0, 1), 4, 2, window=torch.ones(4), return_complex=True).abs().mean((1, 2)).view(-1, 4, 1)
        * x
    ),
}


@case()
def complex_numbers_and_spectra(run: Run) -> Numbers:
    """torch.fft.fft2, rfft, fftshift, stft, polar, and rotary positions by complex numbers"""
    return each(run, COMPLEX, 4, WIDTH)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x[..., :4] @ x[..., :4].mT / 8 + 2 * torch.eye(4)


LINEAR_ALGEBRA: dict[str, Function] = {
    "solve": lambda x: torch.linalg.solve(_square(x), x),
    "inverse": lambda x: torch.linalg.inv(_square(x)) @ x,
    "cholesky": lambda x: torch.linalg.cholesky(_square(x)) @ x,
    "determinant": lambda x: torch.linalg.slogdet(_square(x)).logabsdet[:, None, None] * x,
    "singular values": lambda x: torch.linalg.svdvals(x)[..., None] * x,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(_square(x))[..., None] * x,
    "matrix_exp": lambda x: torch.linalg.matrix_exp(0.1 * _square(x)) @ x,
    "power": lambda x: torch.linalg.matrix_power(0.3 * _square(x), 3) @ x,
    "trace": lambda x: torch.einsum("bii->b", _square(x))[:, None, None] * x,
}


@case()
def linear_algebra(run: Run) -> Numbers:
    """torch.linalg: solve, inv, cholesky, slogdet, svdvals, eigvalsh, matrix_exp of each sample"""
    return each(run, LINEAR_ALGEBRA, 4, WIDTH)


class Judged(nn.Module):
    """A layer and a loss function of what it gives."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, width), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y)


def judged(run: Run, losses: dict[str, Callable], y: torch.Tensor) -> Numbers:
    found = {}
    for name, loss in losses.items():
        made = stepped(run, Judged(loss), torch.randn(BATCH, WIDTH), y)
        found |= {f"{name} {key}": x for key, x in made.items()}
    return found


@case(refused={PP: WITH_STAGES})
def loss_that_looks_at_values(run: Run) -> Numbers:
    """F.gaussian_nll_loss, which raises an error if a variance is negative"""
    loss = lambda x, y: F.gaussian_nll_loss(x, y, x.square() + 0.1)  # noqa: E731
    return judged(run, {"gaussian": loss}, torch.rand(BATCH, WIDTH))


OF_CLASSES: dict[str, Callable] = {
    "weighted": nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, WIDTH), label_smoothing=0.1),
    "ignored": nn.CrossEntropyLoss(ignore_index=3),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "likelihood": lambda x, y: F.nll_loss(x.log_softmax(-1), y, weight=torch.linspace(0.5, 2, WIDTH)),
    "margin": nn.MultiMarginLoss(),
    "focal": lambda x, y: ((1 - (p := x.softmax(-1).gather(1, y[:, None]))) ** 2 * -p.log()).mean(),
}


@case(refused={PP: WITH_STAGES})
def losses_of_classes(run: Run) -> Numbers:
    """Cross-entropy with weights and ignored classes, likelihood, margin and focal losses"""
    return judged(run, OF_CLASSES, torch.randint(WIDTH, (BATCH,)))


OF_FLAGS: dict[str, Callable] = {
    "logits": nn.BCEWithLogitsLoss(pos_weight=torch.linspace(1, 3, WIDTH)),
    "weighted": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=y + 0.5),
    "soft margin": nn.SoftMarginLoss(),
    "many labels": nn.MultiLabelSoftMarginLoss(),
    "dice": lambda x, y: 1 - (2 * (x.sigmoid() * y).sum(-1) / (x.sigmoid() + y).sum(-1)).mean(),
}


@case(refused={PP: WITH_STAGES})
def losses_of_flags(run: Run) -> Numbers:
    """BCE with logits and pos_weight, BCE with weights, soft margin, several labels, Dice"""
    return judged(run, OF_FLAGS, torch.randint(2, (BATCH, WIDTH)).float())


class Spelled(nn.Module):
    """A loss of sequences without alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_steps: torch.Tensor, num_labels: torch.Tensor):
        logits = self.linear(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, labels, num_steps, num_labels, zero_infinity=True)


@case(refused={PP: WITH_STAGES})
def loss_of_sequences(run: Run) -> Numbers:
    """nn.CTCLoss with lengths of steps and labels"""
    labels, lengths = torch.randint(1, 6, (BATCH, 3)), torch.tensor([1, 2, 3, 3, 2, 1, 2, 3])
    return stepped(run, Spelled(), torch.randn(BATCH, 7, WIDTH), labels, torch.full((BATCH,), 7), lengths)


DROPOUTS: dict[str, Function] = {
    "alpha": lambda x: F.alpha_dropout(x, 0.5, True),
    "feature": lambda x: F.dropout2d(x[:, None], 0.5, True)[:, 0],
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "leaky": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "noise": lambda x: x + torch.randn_like(x),
    "attention": lambda x: attended(x, dropout_p=0.5),
}


@case(refused={PP: WITH_STAGES})
def dropouts_with_seeds(run: Run) -> Numbers:
    """Alpha and feature dropout, rrelu, gumbel_softmax, dropout_p of attention: repeated by the seed"""
    found = {}
    x = torch.randn(BATCH, 4, WIDTH)
    for name, function in DROPOUTS.items():
        model = run.compile(Applied(function), args=(x,))
        outputs = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            outputs.append(run.whole(model(x)).detach())
        found[f"{name} same"] = (outputs[0] == outputs[1]).all().float()
        found[f"{name} other"] = (outputs[0] != outputs[2]).any().float()
    return found


class OldNorms(nn.Module):
    """Norms of weights as hooks, which torch calls deprecated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@case(refused={PP: WITH_STAGES})
def norms_of_weights_by_hooks(run: Run) -> Numbers:
    """torch.nn.utils.weight_norm and spectral_norm, by forward pre-hooks"""
    return layered(run, OldNorms, WIDTH)


@case(tolerance=1e-3, refused={PP: WITH_STAGES})
def pairs_of_the_batch(run: Run) -> Numbers:
    """The batch's mean subtracted, and a contrastive loss over all pairs of the batch"""

    def contrastive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = F.normalize(x - x.mean(0), dim=-1), F.normalize(y, dim=-1)
        return F.cross_entropy(x @ y.T / 0.1, torch.arange(len(x)))

    return judged(run, {"contrastive": contrastive}, torch.randn(BATCH, WIDTH))


ACTIVATIONS = (
    *(nn.GLU, nn.PReLU, nn.Softplus, nn.Hardswish, nn.Mish, nn.LogSigmoid, nn.CELU, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardshrink, nn.Softshrink, nn.SELU, nn.Hardtanh, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU),
)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.activations = nn.ModuleList(kind() for kind in ACTIVATIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return sum(each(x)[..., :WIDTH] for each in self.activations) / len(self.activations)


@case()
def activations_of_all_kinds(run: Run) -> Numbers:
    """nn.GLU, PReLU, Softplus, Mish, CELU, ... of one tensor"""
    return layered(run, Activated, WIDTH)
