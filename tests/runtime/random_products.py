"""How to draw a product: every call of the rule family matmul."""

import torch

from tests.runtime.random_graphs import Builder

EQUATIONS = "bhqd,bhkd->bhqk bqd,bkd->bqk qd,dk->qk bqk,kd->bqd bhq,bhk,bhd->qkd q,k->qk bqd->bd bqd->dqb qq->q"


def product(b: Builder) -> None:
    m, k, n, batch = b.size(), b.size(), b.size(), b.shape(b.draw.randint(0, 2))
    match b.draw.randrange(13):
        case 0 | 1 | 2:
            x = b.some(1)
            b.call("linear.default", x, b.tensor(n, x.value.shape[-1]), b.optional(n))
        case 3:
            b.call("matmul.default", b.tensor(*batch, m, k), b.tensor(*batch[b.draw.randint(0, len(batch)) :], k, n))
        case 4:
            b.call(
                "matmul.default",
                *b.draw.choice([(b.tensor(k), b.tensor(*batch, k, n)), (b.tensor(*batch, m, k), b.tensor(k))]),
            )
        case 5:
            added = b.tensor(*b.draw.choice([(n,), (m, 1), (m, n), (1, n)]))
            b.call(
                "addmm.default",
                added,
                b.tensor(m, k),
                b.tensor(k, n),
                beta=b.draw.choice([1, 0.5]),
                alpha=b.draw.choice([1, -2]),
            )
        case 6:
            h = b.size()
            b.call(
                "baddbmm.default",
                b.tensor(*b.draw.choice([(h, m, n), (n,), (h, 1, n)])),
                b.tensor(h, m, k),
                b.tensor(h, k, n),
            )
        case 7:
            b.call("bmm.default", b.tensor(4, m, k), b.tensor(4, k, n))
        case 8:
            b.call("mm.default", b.tensor(m, k), b.tensor(k, n))
        case 9:
            _einsum(b)
        case 10:
            _vectors(b, k, m)
        case 11:
            b.call("tensordot.default", b.tensor(m, k, 2), b.tensor(2, n, k), [1, 2], [2, 0])
        case 12:
            _grouped(b, k, n)


def _einsum(b: Builder) -> None:
    sizes = {letter: b.size() for letter in "bhqkd"}
    equation = b.draw.choice(EQUATIONS.split())
    shapes = [tuple(sizes[letter] for letter in term) for term in equation.split("->")[0].split(",")]
    b.call("einsum.default", equation, tuple(b.tensor(*shape) for shape in shapes))


def _grouped(b: Builder, k: int, n: int) -> None:
    """Rows of several experts; some may have none."""
    import transformers.integrations.moe  # noqa: F401 - defines the op

    rows, experts = b.draw.choice([4, 8, 6]), b.draw.choice([2, 4, 8, 3])
    ends = sorted(b.draw.choices(range(rows + 1), k=experts - 1)) + [rows]
    b.call(
        "transformers.grouped_mm_fallback.default",
        b.tensor(rows, k),
        b.tensor(experts, k, n),
        b.input(torch.tensor(ends), "argument"),
    )


def fused(b: Builder) -> None:
    """A product whose columns are cut in sections, or seen as several rows of heads of which each is selected."""
    sizes = b.draw.choice([(4, 4), (4, 4, 4), (8, 4, 4), (2, 2, 2), (8, 8, 4), (4, 2)])
    x, n = b.some(1, 3), sum(sizes)
    weight = b.input(torch.randn(n, x.value.shape[-1], dtype=torch.float64).requires_grad_(), "parameter")
    y = b.call("linear.default", x, weight, b.optional(n))
    y, dim = b.call("tanh.default", y) if b.chance() else y, len(y.value.shape) - 1
    if len(set(sizes)) == 1 and b.chance():
        rows = b.call("reshape.default", y, (*y.value.shape[:-1], len(sizes), 2, sizes[0] // 2))
        for index in range(len(sizes)):
            b.call("select.int", rows, dim, index)
    elif b.chance():
        b.outputs("split_with_sizes.default", y, sizes, dim)
    else:
        for index in range(len(sizes)):
            b.call("slice.Tensor", y, dim, sum(sizes[:index]), sum(sizes[: index + 1]))


def _vectors(b: Builder, k: int, m: int) -> None:
    match b.draw.randrange(5):
        case 0:
            b.call("mv.default", b.tensor(m, k), b.tensor(k))
        case 1:
            b.call("dot.default", b.tensor(k), b.tensor(k))
        case 2:
            b.call("outer.default", b.tensor(k), b.tensor(m))
        case 3:
            b.call("inner.default", b.tensor(m, k), b.tensor(2, k))
        case 4:
            b.call("addmv.default", b.tensor(m), b.tensor(m, k), b.tensor(k))
