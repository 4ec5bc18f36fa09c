"""Rules of ops that treat samples one by one: of matrices, signals, planes that are sampled, and recurrent cells.

Proof of the splits: what an op makes of one index of a leading dim depends on that index of its inputs alone; an input
without that dim is used by all, and its gradient is a sum over the parts: R. Transforms are linear: P -> P.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from autopar.ir.graph import Op, Slot, arguments_of
from autopar.sbp.placement import P, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.rules._dims import dim_of, keeps_sums, other_dims
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]


def leading(**own_dims: int) -> Rule:
    """The rule of an op on the last `own_dims` of each named tensor, for each index of the dims before."""

    def rule(op: Op) -> Iterator[Signature]:
        lead: dict[str, tuple[int, ...]] = {}
        for name, num_own in own_dims.items():
            tensor = optional_tensor(op, name)
            if tensor is not None:
                lead[name] = tensor.shape[: len(tensor.shape) - num_own]
        shape = max(lead.values(), key=len)
        if any(other not in (shape, ()) for other in lead.values()):
            return  # broadcast to one another
        for dim in range(len(shape)):
            placed = {name: S(dim) for name, own in lead.items() if own}
            yield from signature(op, placed, (S(dim),) * len(op.outputs))

    return rule


def solved(op: Op) -> Iterator[Signature]:
    """linalg_solve: a system for each index of the leading dims, and for each column; linear in the right sides."""
    of, sides = tensor_of(op, "A").shape, tensor_of(op, "B").shape
    is_vector = len(sides) == 1 or sides == of[:-1]  # as torch tells the two
    lead = sides[: len(sides) - (1 if is_vector else 2)]
    for dim in range(len(lead)) if of[:-2] in (lead, ()) else ():
        yield from signature(op, {"B": S(dim)} | ({"A": S(dim)} if of[:-2] else {}), S(dim))
    if not is_vector and arguments_of(op)["left"]:
        yield from signature(op, {"B": S(len(sides) - 1)}, S(len(op.outputs[0].shape) - 1))
    yield from signature(op, {"B": P}, P)


def transform(op: Op) -> Iterator[Signature]:
    """Fourier transforms: every dim that is not transformed, and pending sums."""
    shape, bound = op.inputs[0].shape, arguments_of(op)
    dims: Any = bound["dim"]
    if dims is None:
        sizes = bound.get("s")
        dims = tuple(range(len(shape)))[-len(sizes) :] if sizes else tuple(range(len(shape)))
    for dim in other_dims(len(shape), *((dims,) if isinstance(dims, int) else dims)):
        yield Signature((S(dim),), (S(dim),))
    if keeps_sums(op):
        yield Signature((P,), (P,))


def signal(op: Op) -> Iterator[Signature]:
    """Stft and istft: the batch, which all signals but a single one have; the window is used by all."""
    is_complex = op.inputs[0].dtype.is_complex
    if len(op.inputs[0].shape) > 1 + is_complex:
        yield from signature(op, {"self": S(0)}, S(0))


def weight_norm(op: Op) -> Iterator[Signature]:
    """_weight_norm: g * v / |v|, with a norm for each index of `dim`."""
    shape, dim = tensor_of(op, "v").shape, dim_of(arguments_of(op)["dim"], len(tensor_of(op, "v").shape))
    if tensor_of(op, "g").shape[dim : dim + 1] == shape[dim : dim + 1]:
        yield from signature(op, {"v": S(dim), "g": S(dim)}, S(dim))


def looked_up(op: Op) -> Iterator[Signature]:
    """Searchsorted and isin: each element in the whole list; of rows of lists, each in its own."""
    bound = arguments_of(op)
    names = [name for name in ("sorted_sequence", "self") if name in bound] or ["test_elements", "elements"]
    if not all(isinstance(bound[name], Slot) for name in names):
        return
    where, what = (tensor_of(op, name).shape for name in names)
    if len(where) == 1 or names[0] == "test_elements":
        for dim in range(len(what)):
            yield from signature(op, {names[1]: S(dim)}, S(dim))
    else:
        for dim in range(len(what) - 1):
            both = dict.fromkeys((*names, "sorter"), S(dim))
            yield from signature(op, {name: both[name] for name in both if name in bound}, S(dim))


def bilinear(op: Op) -> Iterator[Signature]:
    """B.. i, b.. j, o i j (+ o) -> b.. o: the batch, and the features of the output."""
    ndim = len(tensor_of(op, "input1").shape)
    for dim in range(ndim - 1):
        yield from signature(op, {"input1": S(dim), "input2": S(dim)}, S(dim))
    yield from signature(op, {"weight": S(0), "bias": S(0)}, S(ndim - 1))


def affine_grid(op: Op) -> Iterator[Signature]:
    """affine_grid_generator: n, and linear in theta."""
    yield from signature(op, {"theta": P}, P)


def other_than(*names: str) -> Rule:
    """The rule of a view-like op on one tensor, which acts on the dims in these arguments."""

    def rule(op: Op) -> Iterator[Signature]:
        shape, bound = op.inputs[0].shape, arguments_of(op)
        dims = [bound[name] for name in names]
        acted = [d for item in dims for d in ((item,) if isinstance(item, int) else item or range(len(shape)))]
        for dim in other_dims(len(shape), *acted):
            yield Signature((S(dim),) * len(op.inputs), (S(dim),) * len(op.outputs))
        if len(op.inputs) == 1 and keeps_sums(op):
            yield Signature((P,), (P,) * len(op.outputs))

    return rule


def mirrored(op: Op) -> Iterator[Signature]:
    """Fliplr acts on dim 1 alone."""
    for dim in other_dims(len(op.inputs[0].shape), 1):
        yield Signature((S(dim),), (S(dim),))
    yield Signature((P,), (P,))


def cell(op: Op) -> Iterator[Signature]:
    """A step of a recurrent cell: the samples, with the weights used by all."""
    if len(tensor_of(op, "input").shape) == 2:
        states = arguments_of(op)["hx"]
        placed = S(0) if isinstance(states, Slot) else (S(0),) * len(states)
        yield from signature(op, {"input": S(0), "hx": placed}, (S(0),) * len(op.outputs))


def dot(op: Op) -> Iterator[Signature]:
    """Vdot and dot: a sum over the only dim; linear in each factor."""
    yield Signature((S(0), S(0)), (P,))
    yield Signature((P, R), (P,))
    yield Signature((R, P), (P,))


_TRANSFORMS = (
    *("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"),
    *("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"),
)

RULES: Mapping[str, Rule] = {
    **{f"aten.fft_{name}.default": transform for name in _TRANSFORMS},
    **{f"aten.linalg_{name}.default": leading(A=2) for name in ("det", "inv", "slogdet", "qr", "svdvals", "lu_factor")},
    **{f"aten.linalg_{name}.default": leading(self=2) for name in ("eigvalsh", "eigvals", "eigh", "eig", "cholesky")},
    "aten.linalg_matrix_power.default": leading(self=2),
    "aten.linalg_solve_triangular.default": leading(self=2, B=2),
    "aten.linalg_solve.default": solved,
    "aten.cholesky_solve.default": leading(self=2, input2=2),
    "aten.logdet.default": leading(self=2),
    "aten.inverse.default": leading(self=2),
    "aten.matrix_exp.default": leading(self=2),
    "aten.grid_sampler.default": leading(input=3, grid=3),
    "aten.grid_sampler_2d.default": leading(input=3, grid=3),
    "aten.cdist.default": leading(x1=2, x2=2),
    "aten.im2col.default": leading(self=3),
    "aten.col2im.default": leading(self=2),
    "aten.channel_shuffle.default": leading(self=3),
    "aten.max_unpool2d.default": leading(self=2, indices=2),
    "aten.stft.default": signal,
    "aten.stft.center": signal,
    "aten.istft.default": signal,
    "aten._weight_norm.default": weight_norm,
    "aten.searchsorted.Tensor": looked_up,
    "aten.isin.Tensor_Tensor": looked_up,
    "aten.bilinear.default": bilinear,
    "aten.affine_grid_generator.default": affine_grid,
    "aten.linalg_cross.default": other_than("dim"),
    "aten.fft_fftshift.default": other_than("dim"),
    "aten.fft_ifftshift.default": other_than("dim"),
    "aten.rot90.default": other_than("dims"),
    "aten.fliplr.default": mirrored,
    "aten.lstm_cell.default": cell,
    "aten.gru_cell.default": cell,
    "aten.rnn_tanh_cell.default": cell,
    "aten.rnn_relu_cell.default": cell,
    "aten.vdot.default": dot,
}
