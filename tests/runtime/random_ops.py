"""How to draw a call of each family of rules; targets beyond the families' core come from the samples of the rule
tests.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from autopar.sbp import rules
from tests.runtime.random_graphs import Builder, Node
from tests.runtime.random_products import product
from tests.sbp.samples import calls

UNREPEATABLE = ("rand", "empty", "bernoulli")  # numbers of no meaning, or drawn
# an argument lends its type or shape; never in a traced graph
ONLY_SHAPES = ("type_as.", "to.other", "expand_as.", "view_as.")

LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy_with_logits"
ELEMENTWISE = "add.Tensor mul.Tensor sub.Tensor tanh.default gelu.default neg.default where.self mul.Scalar"


def conv(b: Builder) -> None:
    rank, groups = b.draw.choice([1, 2, 2, 3]), b.draw.choice([1, 1, 2, 4])
    c, n, o = groups * b.draw.choice([1, 2, 2]), b.draw.choice([1, 2, 4, 8]), groups * b.draw.choice([1, 2, 3])
    spatial = tuple(b.draw.choice([3, 4, 5]) for _ in range(rank))
    x = b.tensor(*((n, c) if b.chance(0.9) else (c,)), *spatial)
    kernel, stride = (b.draw.choice([1, 2, 3]),) * rank, (b.draw.choice([1, 2]),) * rank
    if rank < 3 and b.chance(0.3):
        target = {1: "conv_transpose1d.default", 2: "conv_transpose2d.input"}[rank]
        b.call(target, x, b.tensor(c, o // groups, *kernel), b.optional(o), stride, (0,) * rank, (0,) * rank, groups)
    elif rank < 3 and b.chance(0.25):
        b.call(
            f"conv{rank}d.padding",
            x,
            b.tensor(o, c // groups, *kernel),
            b.optional(o),
            (1,) * rank,
            "same",
            (1,) * rank,
            groups,
        )
    else:
        padding = (b.draw.choice([0, 1]),) * rank
        b.call(
            f"conv{rank}d.default",
            x,
            b.tensor(o, c // groups, *kernel),
            b.optional(o),
            stride,
            padding,
            (1,) * rank,
            groups,
        )


def pool(b: Builder) -> None:
    rank = b.draw.choice([1, 2, 2, 3])
    x = b.tensor(b.draw.choice([2, 4, 8]), b.draw.choice([2, 3, 4]), *([4] * rank))
    window, flags = (2,) * rank, {1: False, 2: False, 3: True}
    options: list[tuple[Any, ...]] = [
        (f"max_pool{rank}d.default", x, window),
        (f"avg_pool{rank}d.default", x, window, (1,) * rank),
        (f"adaptive_avg_pool{rank}d.default", x, (b.draw.choice([1, 2]),) * rank),
    ]
    if not flags[rank]:
        options += [
            (f"adaptive_max_pool{rank}d.default", x, window),
            (f"max_pool{rank}d_with_indices.default", x, window),
        ]
        options += [(f"upsample_nearest{rank}d.vec", x, None, [2.0] * rank)]
        options += [(f"upsample_{'linear1d' if rank == 1 else 'bilinear2d'}.vec", x, None, False, [2.0] * rank)]
    if rank == 2:
        options += [("upsample_bicubic2d.vec", x, None, True, [2.0, 2.0])]
    b.outputs(*b.draw.choice(options))


def norm(b: Builder) -> None:
    match b.draw.randrange(7):
        case 0 | 1:
            x = b.some(1)
            dims = x.value.shape[-b.draw.randint(1, len(x.value.shape)) :]
            if math.prod(dims) > 1:
                b.call("layer_norm.default", x, dims, b.optional(*dims), b.optional(*dims), 1e-2)
        case 2:
            x = b.some(1)
            b.call("rms_norm.default", x, x.value.shape[-1:], b.optional(x.value.shape[-1]), 1e-2)
        case 3:
            groups = b.draw.choice([1, 2, 4])
            c = groups * b.draw.choice([1, 2])
            # torch fails on the gradient of a bias alone
            both = (b.tensor(c), b.tensor(c)) if b.chance(0.7) else (None, None)
            b.call("group_norm.default", b.tensor(b.draw.choice([2, 4, 3]), c, 3), groups, *both, 1e-2)
        case 4:
            x = b.tensor(b.draw.choice([2, 4]), c := b.draw.choice([2, 3, 4]), 4)
            both = (b.tensor(c), b.tensor(c)) if b.chance() else (None, None)
            b.call("instance_norm.default", x, *both, None, None, True, 0.1, 1e-2, False)
        case 5 | 6:
            _batch_norm(b)


def _batch_norm(b: Builder) -> None:
    c = b.draw.choice([2, 4, 3, 8])
    x = b.tensor(b.draw.choice([2, 4, 8, 6]), c, *((3,) if b.chance() else ()))
    weight, bias = b.optional(c), b.optional(c)
    mean, var = (b.input(torch.rand(c, dtype=torch.float64) + 0.5, "buffer") for _ in range(2))
    if b.chance(0.6):
        found = b.outputs("_native_batch_norm_legit_functional.default", x, weight, bias, mean, var, True, 0.3, 1e-2)
        b.mutations += [(mean.value.name, found[3].value), (var.value.name, found[4].value)]
    elif b.chance():
        b.call("batch_norm.default", x, weight, bias, mean, var, False, 0.1, 1e-2, False)
    else:
        b.call("batch_norm.default", x, weight, bias, None, None, True, 0.1, 1e-2, False)


def softmax(b: Builder) -> None:
    x = b.some(1)
    dim = b.draw.randint(-len(x.value.shape), len(x.value.shape) - 1)
    match b.draw.randrange(4):
        case 0 | 1:
            b.call(b.draw.choice(["softmax.int", "_safe_softmax.default"]), x, dim)
        case 2:
            b.call("log_softmax.int", x, dim)
        case 3:
            b.call("logsumexp.default", x, (dim,) if b.chance() else tuple(range(len(x.value.shape))), b.chance())


def attention(b: Builder) -> None:
    n, heads, length, keys, width = (
        b.draw.choice([1, 2, 4]),
        b.draw.choice([2, 4, 8]),
        b.size(),
        b.size(),
        b.draw.choice([2, 4, 3]),
    )
    lead, options = ((n, heads) if b.chance(0.85) else (heads,)), {}
    key_lead = lead
    if len(lead) == 2 and b.chance(0.3):
        key_lead, options = (n, b.draw.choice([1, heads // 2])), {"enable_gqa": True}
    mask, is_causal = None, b.chance(0.4)
    if not is_causal and b.chance(0.5):
        mask = b.tensor(
            *b.draw.choice([(length, keys), (*lead, length, keys), (length, 1), (*[1] * len(lead), 1, keys)])
        )
    qkv = (
        b.tensor(*lead, length, width),
        b.tensor(*key_lead, keys, width),
        b.tensor(*key_lead, keys, b.draw.choice([width, 2])),
    )
    b.call("scaled_dot_product_attention.default", *qkv, mask, 0.0, is_causal, **options)


def embedding(b: Builder) -> None:
    rows, width, ids = b.draw.choice([4, 8, 6]), b.size(), b.ints(*b.shape(b.draw.randint(1, 2)), high=4)
    if b.chance(0.8):
        b.call("embedding.default", b.tensor(rows, width), ids, b.draw.choice([-1, 0, 3]), b.chance(0.2))
    else:
        b.call("one_hot.default", ids, rows)


def loss(b: Builder) -> None:
    reduction = b.draw.choice([0, 1, 2])
    if b.chance(0.6):
        _classes(b, reduction)
        return
    x = b.some(1)
    name = b.draw.choice(LOSSES.split())
    has_hard_target = name in ("soft_margin_loss", "binary_cross_entropy_with_logits")
    y = (
        b.input(torch.rand(x.value.shape, dtype=torch.float64), "argument")
        if has_hard_target
        else b.tensor(*x.value.shape)
    )
    args = (b.constant(*x.value.shape), b.constant(x.value.shape[-1])) if "binary" in name else ()
    b.call(f"{name}.default", x, y, *args, reduction)


def _classes(b: Builder, reduction: int) -> None:
    count, tokens = b.draw.choice([4, 8, 6]), b.draw.choice([2, 4, 8, 3])
    more = (b.draw.choice([2, 3, 4]),) if b.chance(0.3) else ()
    logits, ids = b.tensor(tokens, count, *more), torch.randint(count, (tokens, *more))
    ids.view(-1)[b.draw.randrange(ids.numel())] = -100
    weight = b.input(torch.rand(count, dtype=torch.float64) + 0.5, "frozen") if b.chance(0.3) else None
    if b.chance(0.7):
        target = (
            b.input(ids, "argument") if b.chance(0.85) else b.call("softmax.int", b.tensor(tokens, count, *more), 1)
        )
        b.call("cross_entropy_loss.default", logits, target, weight, reduction, -100, b.draw.choice([0.0, 0.0, 0.1]))
    else:
        b.call("nll_loss_nd.default", b.call("log_softmax.int", logits, 1), b.input(ids, "argument"), weight, reduction)


def random(b: Builder) -> None:
    b.call(
        b.draw.choice(["dropout.default", "feature_dropout.default", "alpha_dropout.default"]), b.some(2), 0.5, False
    )


def recurrent(b: Builder) -> None:
    name, layer = b.draw.choice(
        [("lstm", torch.nn.LSTM), ("gru", torch.nn.GRU), ("rnn_tanh", torch.nn.RNN), ("rnn_relu", torch.nn.RNN)]
    )
    batch, is_first = b.draw.choice([2, 4, 3]), b.chance()
    params = tuple(b.input(p.detach(), "parameter") for p in layer(3, 4, dtype=torch.float64).parameters())
    states = tuple(b.tensor(1, batch, 4) for _ in range(2 if name == "lstm" else 1))
    x = b.tensor(*((batch, 2) if is_first else (2, batch)), 3)
    b.outputs(f"{name}.input", x, states if name == "lstm" else states[0], params, True, 1, 0.0, True, False, is_first)


def view(b: Builder) -> None:
    if b.chance(0.35):
        _sampled("view")(b)
        return
    x = b.some(1)
    shape = x.value.shape
    dim = b.draw.randrange(len(shape))
    match b.draw.randrange(9):
        case 0 | 1:
            b.call("reshape.default", x, _factors(b, math.prod(shape)))
        case 2:
            b.call("permute.default", x, tuple(b.draw.sample(range(len(shape)), len(shape))))
        case 3:
            start = b.draw.randrange(shape[dim])
            b.call("slice.Tensor", x, dim, start, b.draw.randint(start + 1, shape[dim]), b.draw.choice([1, 1, 2]))
        case 4:
            b.outputs("split.Tensor", x, b.draw.randint(1, shape[dim]), dim)
        case 5:
            other = b.tensor(*shape[:dim], b.size(), *shape[dim + 1 :])
            b.call(
                "cat.default",
                tuple(b.draw.sample([x, x, other], b.draw.randint(2, 3))),
                dim - len(shape) if b.chance() else dim,
            )
        case 6:
            edges = tuple(b.draw.choice([0, 0, 1, 2]) for _ in range(2 * b.draw.randint(1, len(shape))))
            b.call("pad.default", x, edges, "constant", b.draw.choice([0.0, 0.0, 1.0]))
        case 7:
            more = tuple(b.draw.choice([1, 2, 4]) for _ in range(b.draw.randint(0, 4 - len(shape))))
            b.call("expand.default", x, more + tuple(b.draw.choice([2, 4, 3]) if n == 1 else n for n in shape))
        case 8:
            b.call("stack.default", (x, b.tensor(*shape)), dim)


def _factors(b: Builder, count: int) -> tuple[int, ...]:
    """A shape of up to four dims with `count` elements."""
    found: list[int] = []
    while count > 1 and len(found) < 3:
        found.append(b.draw.choice([d for d in range(1, count + 1) if count % d == 0]))
        count //= found[-1]
    return (*found, count)


def reduce(b: Builder) -> None:
    if b.chance(0.4):
        _sampled("reduce")(b)
        return
    x = b.some(1)
    dims = tuple(b.draw.sample(range(len(x.value.shape)), b.draw.randint(1, len(x.value.shape))))
    name = b.draw.choice(
        [
            "sum.dim_IntList",
            "mean.dim",
            "amax.default",
            "cumsum.default",
            "sum.default",
            "mean.default",
            "var.correction",
        ]
    )
    if name == "cumsum.default":
        b.call(name, x, dims[0])
    elif name == "var.correction":
        b.call(name, x, dims, correction=0, keepdim=b.chance())
    else:
        b.call(name, x, *(() if name in ("sum.default", "mean.default") else (dims, b.chance())))


def pointwise(b: Builder) -> None:
    if b.chance(0.4):
        _sampled("pointwise")(b)
        return
    x = b.some()
    name = b.draw.choice(ELEMENTWISE.split())
    if name in ("tanh.default", "gelu.default", "neg.default"):
        b.call(name, x)
    elif name == "mul.Scalar":
        b.call("mul.Scalar", x, 0.5)
    else:
        shape = x.value.shape[b.draw.randint(0, len(x.value.shape)) :]
        other = b.tensor(*(n if b.chance(0.8) else 1 for n in shape))
        b.call(
            name,
            *(
                (b.mask(*x.value.shape), x, other)
                if name == "where.self"
                else b.draw.choice([(x, other), (other, x), (x, x)])
            ),
        )


def _sampled(*families: str) -> Callable[[Builder], None]:
    """A call from the rule tests, on values made before where one fits."""

    def recipe(b: Builder) -> None:
        targets = [t for name in families for t in _targets(name)]
        target = b.draw.choice(targets)
        args, kwargs = b.draw.choice(_samples()[target])
        b.outputs(
            target.removeprefix("aten."), *_entered(b, args), **{key: _entered(b, item) for key, item in kwargs.items()}
        )

    return recipe


def _entered(b: Builder, item: Any) -> Any:
    if isinstance(item, (tuple, list)):
        return tuple(_entered(b, part) for part in item)
    return _node(b, item) if isinstance(item, torch.Tensor) else item


def _node(b: Builder, sample: torch.Tensor) -> Node:
    equal = [
        node
        for node in b.nodes
        if node.value.shape == tuple(sample.shape) and node.tensor.dtype == sample.dtype == torch.float64
    ]
    if sample.requires_grad and equal and b.chance(0.7):
        node = b.draw.choice(equal)
        is_positive = float(sample.detach().min()) > 0.0 and float(sample.detach().max()) < 1.0
        return b.call("sigmoid.default", node) if is_positive else node
    kinds = (
        ("parameter", "parameter", "leaf", "frozen", "argument")
        if sample.requires_grad
        else ("argument", "buffer", "constant")
    )
    return b.input(sample, b.draw.choice(kinds))


@cache
def _samples() -> Mapping[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    with torch.random.fork_rng():  # what is drawn must not depend on when this runs first
        torch.manual_seed(0)
        return calls()


@cache
def _targets(family: str) -> tuple[str, ...]:
    found = getattr(rules, family).RULES
    return tuple(
        target
        for target in found
        if target in _samples() and not any(part in target for part in UNREPEATABLE + ONLY_SHAPES)
    )


FAMILIES: Mapping[str, Callable[[Builder], None]] = {
    "attention": attention,
    "cast": _sampled("cast"),
    "conv": conv,
    "create": _sampled("create"),
    "embedding": embedding,
    "index": _sampled("index"),
    "loss": loss,
    "norm": norm,
    "pointwise": pointwise,
    "pool": pool,
    "matmul": product,
    "random": random,
    "recurrent": recurrent,
    "reduce": reduce,
    "softmax": softmax,
    "view": view,
}
WEIGHTS = {"matmul": 3, "view": 3, "pointwise": 3, "norm": 2, "loss": 2, "reduce": 2}
