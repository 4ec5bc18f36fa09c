"""Rules of pooling and resizing, which treat each plane of the last dims by itself."""

from collections.abc import Callable, Iterator

from autopar.ir.graph import Op
from autopar.sbp.placement import P, R, S
from autopar.sbp.signature import Signature


def _planes(num_spatial: int, is_linear: bool = False) -> Callable[[Op], Iterator[Signature]]:
    """The rule of an op on planes of `num_spatial` dims: batch and channel dims split, in all outputs.

    Averages are linear: P -> P.
    """

    def rule(op: Op) -> Iterator[Signature]:
        for dim in range(len(op.inputs[0].shape) - num_spatial):
            yield Signature((S(dim),), (S(dim),) * len(op.outputs))
        if is_linear:
            yield Signature((P,), (P,))

    return rule


def _averages_backward(num_spatial: int) -> Callable[[Op], Iterator[Signature]]:
    """The rule of the backward of an average, from the gradient and the planes, of which it reads the size alone."""

    def rule(op: Op) -> Iterator[Signature]:
        for dim in range(len(op.inputs[0].shape) - num_spatial):
            yield Signature((S(dim), S(dim)), (S(dim),))
        yield Signature((P, R), (P,))

    return rule


RULES = {
    "aten.max_pool1d.default": _planes(1),
    "aten.max_pool1d_with_indices.default": _planes(1),
    "aten.max_pool2d.default": _planes(2),
    "aten.max_pool2d_with_indices.default": _planes(2),
    "aten.max_pool3d.default": _planes(3),
    "aten.adaptive_max_pool1d.default": _planes(1),
    "aten.adaptive_max_pool2d.default": _planes(2),
    "aten.adaptive_max_pool3d.default": _planes(3),
    "aten.avg_pool1d.default": _planes(1, is_linear=True),
    "aten.avg_pool2d.default": _planes(2, is_linear=True),
    "aten.avg_pool3d.default": _planes(3, is_linear=True),
    "aten.adaptive_avg_pool1d.default": _planes(1, is_linear=True),
    "aten.adaptive_avg_pool2d.default": _planes(2, is_linear=True),
    "aten.adaptive_avg_pool3d.default": _planes(3, is_linear=True),
    "aten.avg_pool2d_backward.default": _averages_backward(2),
    "aten.avg_pool3d_backward.default": _averages_backward(3),
    "aten._adaptive_avg_pool2d_backward.default": _averages_backward(2),
    "aten._adaptive_avg_pool3d_backward.default": _averages_backward(3),
    "aten.upsample_nearest1d.vec": _planes(1, is_linear=True),
    "aten.upsample_nearest2d.vec": _planes(2, is_linear=True),
    "aten.upsample_linear1d.vec": _planes(1, is_linear=True),
    "aten.upsample_bilinear2d.vec": _planes(2, is_linear=True),
    "aten.upsample_bicubic2d.vec": _planes(2, is_linear=True),
    "aten._upsample_bicubic2d_aa.vec": _planes(2, is_linear=True),
    "aten._upsample_bilinear2d_aa.vec": _planes(2, is_linear=True),
    "aten._upsample_nearest_exact1d.vec": _planes(1, is_linear=True),
    "aten._upsample_nearest_exact2d.vec": _planes(2, is_linear=True),
    "aten._upsample_nearest_exact3d.vec": _planes(3, is_linear=True),
    "aten.upsample_nearest3d.vec": _planes(3, is_linear=True),
    "aten.upsample_trilinear3d.vec": _planes(3, is_linear=True),
}
