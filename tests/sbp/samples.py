"""Small calls of every op of the rule families pointwise, cast, view, reduce, index and create; sizes divide by 2 or
3.
"""

from collections.abc import Iterator
from typing import Any

import torch

from autopar.ir.graph import resolve
from autopar.sbp.rules import pointwise

Call = tuple[tuple[Any, ...], dict[str, Any]]
T = torch.Tensor


def f64(*shape: int) -> T:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def positive(*shape: int) -> T:
    """Within (0.1, 0.9), where every function is smooth."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def ints(*shape: int, high: int = 3) -> T:
    return torch.randint(high, shape)


def mask(*shape: int) -> T:
    return torch.rand(shape) < 0.5


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def calls() -> dict[str, list[Call]]:
    """By target; tensors are drawn anew at each call of this function."""
    rows = [*_pointwise(), *_cast(), *_view(), *_view_pieces(), *_reduce(), *_index(), *_create()]
    found = {f"aten.{name}": list(given) for name, *given in rows}
    return {target: list(_by_schema(target)) for target in pointwise.RULES if target not in found} | found


_SHAPES = [((4, 6), (6,), (4, 1)), ((2, 1, 6), (4, 1), (1, 4, 6))]  # broadcast both ways
_INTEGER_OPS = ("aten.bitwise", "aten.__")


def _by_schema(target: str) -> Iterator[Call]:
    """Broadcast calls of a pointwise op, its arguments made from their types; optional numbers keep their defaults."""
    for shapes in _SHAPES:
        free, args, kwargs = iter(shapes), [], {}
        for argument in resolve(target)._schema.arguments:
            keeps_default = argument.has_default_value() and "Tensor" not in str(argument.type)
            value = (
                argument.default_value if keeps_default else _argument(target, str(argument.type), argument.name, free)
            )
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        yield tuple(args), kwargs


def _argument(target: str, kind: str, name: str, shapes: Iterator[tuple[int, ...]]) -> Any:
    is_integer = target.startswith(_INTEGER_OPS)
    if "Tensor" not in kind:
        return {"Optional[str]": None, "int": 2}.get(kind, 2 if is_integer else 0.5)
    if name in ("condition", "mask"):
        return mask(*next(shapes))
    if name == "value":
        return f64()
    return ints(*next(shapes)) if is_integer or ("ldexp" in target and name == "other") else positive(*next(shapes))


def _pointwise() -> Iterator[tuple[Any, ...]]:
    """Those a schema does not tell enough about, or that have no derivative."""
    a, b, c = positive(4, 6), positive(6), torch.randn(4, 6, dtype=torch.complex128, requires_grad=True)
    for name in ("clamp", "clip"):
        yield f"{name}.default", call(a, 0.3), call(a, None, 0.6)
    for name in ("imag", "_conj"):
        yield f"{name}.default", call(c)
    yield "conj.default", call(c)
    yield "copy.default", call(a.detach(), b.detach())
    yield "heaviside.default", call(a.detach(), b.detach())
    yield "floor_divide.default", call(a.detach(), b.detach())
    yield "floor_divide.Scalar", call(a.detach(), 0.5)
    yield "remainder.Scalar_Tensor", call(0.5, a.detach())
    yield "where.ScalarOther", call(mask(4, 6), b, 0.0), call(mask(4, 1), b, 2.0)
    yield "where.ScalarSelf", call(mask(4, 6), 0, b), call(mask(6), 2.0, a)
    yield "masked_fill.Scalar", call(a, mask(6), 0), call(a, mask(4, 1), -1.0)
    yield "div.Tensor_mode", call(a, b, rounding_mode="floor"), call(a, b, rounding_mode=None)
    yield "mul.Tensor", call(a, b), call(ints(4, 6), b), call(mask(4, 6), a), call(a, f64())
    yield "add.Tensor", call(a, b), call(a, b, alpha=2), call(a, f64()), call(ints(4, 6), ints(6))
    yield "prelu.default", call(f64(2, 4, 3), f64(4)), call(f64(2, 4), f64(1))
    yield "glu.default", call(f64(4, 6)), call(f64(4, 6), 0)
    yield "bucketize.Tensor", call(a.detach(), torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64))


def _cast() -> Iterator[tuple[Any, ...]]:
    yield "to.dtype", call(f64(4, 6), torch.float64), call(ints(4), torch.float64), call(f64(4), torch.int64)
    yield "to.device", call(f64(4, 6), torch.device("cpu"), torch.float64)
    yield "to.dtype_layout", call(ints(4, 6), dtype=torch.float64)
    yield "to.other", call(f64(4, 6), f64(3))
    yield "type_as.default", call(f64(4, 6), f64(4, 2)), call(ints(4, 6), f64(3))
    yield "_to_copy.default", call(ints(4, 6), dtype=torch.float64)
    for name in ("clone", "detach", "contiguous", "alias", "lift_fresh_copy"):
        yield f"{name}.default", call(f64(4, 6)), call(f64())


def _view() -> Iterator[tuple[Any, ...]]:
    sizes = [
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((2, 6, 4), (12, 1, 2, 2)),
        ((4, 1, 6), (4, 6)),
        ((1, 1), ()),
        ((6, 4), (4, 6)),
    ]
    sizes += [((4, 6), (-1, 3)), ((2, 2, 6), (2, 2, 3, 2))]
    yield "reshape.default", *(call(f64(*src), dst) for src, dst in sizes)
    yield "view.default", *(call(f64(*src), dst) for src, dst in sizes)
    yield "_unsafe_view.default", call(f64(4, 6), (2, 2, 6))
    yield "view_as.default", call(f64(4, 6), f64(2, 2, 6))
    yield "flatten.using_ints", call(f64(2, 4, 6), 1), call(f64(2, 4, 6), 0, 1), call(f64(4))
    yield "unflatten.int", call(f64(4, 6), 1, (2, 3)), call(f64(4, 6), -1, (-1, 3)), call(f64(4, 6), 0, (2, 2))
    yield "ravel.default", call(f64(4, 6))
    yield "unsqueeze.default", call(f64(4, 6), 1), call(f64(4, 6), -1), call(f64(4), 0)
    yield "squeeze.default", call(f64(4, 1, 6))
    yield "squeeze.dim", call(f64(4, 1, 6), 1), call(f64(4, 1, 6), 0), call(f64(4, 1), -1)
    yield "squeeze.dims", call(f64(4, 1, 6, 1), (1, -1)), call(f64(4, 1, 6), (0, 1))
    yield "transpose.int", call(f64(4, 6, 2), 0, -1), call(f64(4, 6), 1, 1)
    yield "permute.default", call(f64(4, 6, 2), (2, 0, 1)), call(f64(4, 6, 2), (-1, 1, 0))
    yield "t.default", call(f64(4, 6)), call(f64(4))
    for name in ("mT", "mH", "matrix_H"):
        yield f"{name}.default", call(f64(4, 6) if name == "matrix_H" else f64(2, 4, 6))
    yield "numpy_T.default", call(f64(4, 6))
    for name in ("movedim", "moveaxis"):
        yield f"{name}.int", call(f64(4, 6, 2), 0, 2)
        yield f"{name}.intlist", call(f64(4, 6, 2), (0, 1), (1, 2))
    yield "swapaxes.default", call(f64(4, 6, 2), 0, 2)
    yield "swapdims.default", call(f64(4, 6, 2), 0, 1)
    yield (
        "expand.default",
        call(f64(4, 1, 6), (4, 2, 6)),
        call(f64(6), (4, -1)),
        call(f64(), (4,)),
        call(f64(4, 1), (2, -1, 6)),
    )
    yield "broadcast_to.default", call(f64(4, 1), (4, 6))
    yield "expand_as.default", call(f64(4, 1), f64(2, 4, 6))
    yield "repeat.default", call(f64(4, 1, 6), (2, 1, 2, 1)), call(f64(4, 6), (1, 2)), call(f64(6), (4, 1))
    yield "repeat_interleave.self_int", call(f64(4, 6), 2, 1), call(f64(4, 6), 3, 0, output_size=12), call(f64(4, 6), 2)


def _view_pieces() -> Iterator[tuple[Any, ...]]:
    yield (
        "slice.Tensor",
        call(f64(4, 6), 1, 1, 4),
        call(f64(4, 6), 0, 0, 2**63 - 1),
        call(f64(4, 6), 0, None, 4),
        call(f64(4, 6), 1, -2),
    )
    yield "narrow.default", call(f64(4, 6), 1, 1, 4), call(f64(4, 6), 0, 0, 4)
    yield "split.Tensor", call(f64(4, 6), 2, 1), call(f64(4, 6), 4, -1)
    yield "split.sizes", call(f64(4, 6), (2, 4), 1)
    yield "split_with_sizes.default", call(f64(4, 6), (2, 4), 1)
    yield "chunk.default", call(f64(4, 6), 3, 1)
    yield "tensor_split.sections", call(f64(4, 6), 4, 1)
    yield "tensor_split.indices", call(f64(4, 6), (1, 4), 1)
    yield "flip.default", call(f64(4, 6, 2), (0, 2))
    yield "unfold.default", call(f64(4, 6), 1, 3, 2)
    yield "roll.default", call(f64(4, 6), (1,), (0,)), call(f64(4, 6), (3,)), call(f64(4, 6, 2), (1, 1), (0, 2))
    yield "select.int", call(f64(4, 6, 2), 1, 3), call(f64(4, 6), -2, -1)
    yield "unbind.int", call(f64(4, 3, 6), 1), call(f64(2, 4))
    yield "diagonal.default", call(f64(4, 6, 2)), call(f64(4, 6, 2), 1, 0, 2)
    yield "tril.default", call(f64(2, 4, 6)), call(f64(4, 6), 1)
    yield "triu.default", call(f64(2, 4, 6), -1)
    yield "diag_embed.default", call(f64(2, 4))
    yield "view_as_real.default", call(torch.randn(4, 6, dtype=torch.complex128, requires_grad=True))
    yield "view_as_complex.default", call(f64(4, 6, 2))
    yield "pixel_shuffle.default", call(f64(2, 8, 4, 4), 2)
    yield "pixel_unshuffle.default", call(f64(2, 2, 4, 4), 2)
    pads = [
        call(f64(4, 6), (1, 2)),
        call(f64(4, 6), (0, 0, 1, 0), "constant", 2.0),
        call(f64(2, 4, 6), (1, 1), "reflect"),
    ]
    yield "pad.default", *pads, call(f64(2, 4, 6), (1, 1), "replicate")
    yield "constant_pad_nd.default", call(f64(4, 6), (1, 2)), call(f64(4, 6), (0, -1), 1.0)
    for name in ("cat", "concat", "concatenate"):
        yield (
            f"{name}.default",
            call([f64(4, 6), f64(4, 2)], 1),
            call([f64(4, 6), f64(2, 6)], -2),
            call([f64(0), f64(4, 6)], 0),
        )
    yield "stack.default", call([f64(4, 6), f64(4, 6)], 1), call([f64(4), f64(4)])
    yield "slice_scatter.default", call(f64(4, 6), f64(4, 2), 1, 1, 3)
    yield "select_scatter.default", call(f64(4, 6, 2), f64(4, 2), 1, 3)


def _reduce() -> Iterator[tuple[Any, ...]]:
    for name in ("sum", "mean", "max", "min", "prod", "std", "var", "any", "all", "median"):
        yield f"{name}.default", call(mask(4, 6) if name in ("any", "all") else f64(4, 6)), call(f64())
    for name in ("max", "min", "median", "any", "all"):
        yield f"{name}.dim", call(f64(4, 6, 2), 1), call(f64(4, 6), -1, True)
    for name in ("std", "var"):
        yield f"{name}.dim", call(f64(4, 6, 2), (1,)), call(f64(4, 6), (-1, 0))
    for name in ("std", "var", "std_mean", "var_mean"):
        yield f"{name}.correction", call(f64(4, 6, 2), (0, 2), correction=0), call(f64(4, 6), (-1,), keepdim=True)
    for name in ("any", "all"):
        yield f"{name}.dims", call(f64(4, 6, 2), (0, 2)), call(f64(4, 6))
    for name in ("amax", "amin"):
        yield f"{name}.default", call(f64(4, 6, 2), (1,)), call(f64(4, 6), (-1,), True), call(f64(4, 6))
    for name in ("argmax", "argmin"):
        yield f"{name}.default", call(f64(4, 6)), call(f64(4, 6), 1), call(f64(4, 6), -2, True)
    sums = [call(f64(4, 6, 2), (0, -1)), call(f64(4, 6), (1,), True), call(f64(4, 6), ())]
    yield "sum.dim_IntList", *sums, call(mask(4, 6), (0,)), call(ints(4, 6), (0,))
    yield "mean.dim", call(f64(4, 6, 2), (0, -1)), call(f64(4, 6), (1,), True), call(f64(4, 6), None)
    yield "nansum.default", call(f64(4, 6, 2), (0, -1)), call(f64(4, 6), (1,), True), call(f64(4, 6))
    yield "nanmean.default", call(f64(4, 6, 2), (0, -1)), call(f64(4, 6))
    yield "count_nonzero.default", call(mask(4, 6)), call(ints(4, 6), 1)
    yield "count_nonzero.dim_IntList", call(ints(4, 6), (0,))
    yield "histc.default", call(f64(4, 6).detach(), 4, -1, 1), call(f64(4, 6).detach(), 4)
    yield "prod.dim_int", call(f64(4, 6), 1)
    yield "aminmax.default", call(f64(4, 6), dim=1), call(f64(4, 6))
    yield "linalg_vector_norm.default", call(f64(4, 6), 2, (-1,), True), call(f64(4, 6))
    yield "norm.Scalar", call(f64(4, 6))
    yield "norm.ScalarOpt_dim", call(f64(4, 6), 2, (1,))
    yield "cumsum.default", call(f64(4, 6), 1), call(f64(), 0)
    pairs = [call(f64(4, 6), f64(4, 6), 1), call(f64(4, 6, 2), f64(6, 2), 0), call(f64(4, 1, 6), f64(1, 2, 6), -1)]
    yield "cosine_similarity.default", *pairs
    distances = [call(f64(4, 6), f64(4, 6)), call(f64(4, 2, 6), f64(2, 6), 1.0, 1e-6, True)]
    yield "pairwise_distance.default", *distances
    for name in ("cumprod", "cummax", "cummin", "logcumsumexp"):
        yield f"{name}.default", call(f64(4, 6), 1)
    yield "topk.default", call(f64(4, 6), 2), call(f64(4, 6), 3, 0)
    yield "kthvalue.default", call(f64(4, 6, 2), 2, 1), call(f64(4, 6), 1, -1, True)
    for name in ("sort", "argsort"):
        yield f"{name}.default", call(f64(4, 6)), call(f64(4, 6), 0, True)
        yield f"{name}.stable", call(f64(4, 6), stable=True, dim=0)


def _index() -> Iterator[tuple[Any, ...]]:
    yield "index_select.default", call(f64(4, 6), 1, ints(4)), call(f64(4, 6), 0, ints())
    yield (
        "gather.default",
        call(f64(4, 6), 1, ints(4, 2)),
        call(f64(4, 6), 0, ints(2, 6)),
        call(f64(4, 6), 1, ints(2, 2)),
    )
    yield (
        "take_along_dim.default",
        call(f64(4, 6), ints(1, 2), 1),
        call(f64(4, 6), ints(4, 2), 1),
        call(f64(4, 6), ints(4)),
    )
    yield (
        "scatter.src",
        call(f64(4, 6), 1, _distinct(4, 2), f64(4, 2)),
        call(f64(4, 6), 0, _distinct(6, 2).T, f64(2, 6)),
    )
    yield "scatter.value", call(f64(4, 6), 1, ints(4, 2), 0), call(f64(4, 6), 1, ints(4, 2), 2.0)
    yield "scatter.reduce", call(f64(4, 6).detach(), 1, ints(4, 2), f64(4, 2).detach(), reduce="add")
    yield "scatter_reduce.two", call(f64(4, 6), 1, ints(4, 2), f64(4, 2), "amax")
    yield "scatter_add.default", call(f64(4, 6), 1, ints(4, 2), f64(4, 2)), call(f64(4), 0, ints(6), f64(6))
    yield "index_copy.default", call(f64(4, 6), 1, torch.tensor([0, 2]), f64(4, 2))
    yield "index_add.default", call(f64(4, 6), 1, ints(2), f64(4, 2)), call(f64(4, 6), 0, ints(6), f64(6, 6), alpha=2)
    yield "index_fill.int_Scalar", call(f64(4, 6), 1, ints(2), 0), call(f64(4, 6), 1, ints(2), 1.5)
    x, i = f64(4, 6, 2, 3), ints(4, 1)
    places = [
        [None, i],
        [i, ints(6)],
        [None, ints(6, high=2), ints(6, high=2)],
        [i, None, ints(1, 6, high=2)],
        [i, None, None, ints(2)],
    ]
    yield "index.Tensor", *(call(x, at) for at in places), call(f64(4, 6), [mask(4)])
    yield (
        "index_put.default",
        call(f64(4, 6), [torch.tensor([0, 2])], f64(2, 6)),
        call(f64(4, 6), [None, torch.tensor([1, 3])], f64(4, 1)),
        call(f64(4, 6), [ints(2, 2)], f64(2, 6), True),
        call(f64(4, 6, 2), [ints(4), None, ints(4, high=2)], f64(6), True),
        call(f64(4, 6), [mask(4)], f64()),
    )


def _distinct(rows: int, count: int) -> T:
    """Places without repeats: what a scatter writes must not depend on order."""
    return torch.stack([torch.randperm(3)[:count] for _ in range(rows)])


def _create() -> Iterator[tuple[Any, ...]]:
    yield "zeros_like.default", call(f64(4, 6))
    yield "ones_like.default", call(f64(4, 6))
    yield "full_like.default", call(f64(4, 6), 3.0), call(f64(4, 6), 0)
    yield "empty_like.default", call(f64(4, 6))
    yield "fill.Scalar", call(f64(4, 6), 3.0)
    yield "zeros.default", call((4, 6))
    yield "ones.default", call((4, 6))
    yield "full.default", call((4, 6), 3.0)
    for name in ("empty.memory_format", "rand.default", "randn.default"):
        yield name, call((4, 6))
    yield "new_zeros.default", call(f64(4, 6), (4, 2))
    yield "new_ones.default", call(f64(4, 6), (6,))
    yield "new_full.default", call(f64(4, 6), (2, 4), 3.0)
    yield "new_empty.default", call(f64(4, 6), (4, 6))
