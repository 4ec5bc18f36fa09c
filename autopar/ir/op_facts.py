"""`OP_FACTS`: the properties of ops by name, for any tensors and any split.

Other lists of targets are about other properties and stay in their modules: which sums pass through an op (`sbp.rules`,
each with its proof), which of its arguments are sizes of the whole tensor (`sbp.localize`), which of its numbers copies
of a block may differ in (`ir.folding.fold`), which calls do nothing where they return their input
(`ir.export.from_fx`), and what spmd_types has no entry for (`verify.check_placements`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from autopar.ir.attention.balanced import is_balanced
from autopar.ir.attention.index_functions import share_seen
from autopar.ir.graph import Op, Value, arguments_of, resolve
from autopar.ir.guards.guard_ops import GUARDED
from autopar.ir.loops.body import body_called

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

ATTENTION, FLEX_ATTENTION = "aten.scaled_dot_product_attention", "autopar.flex_attention"
# Backward of fused attention runs 5 products for the 2 of forward (Dao, FlashAttention-2, 2023, section 4.1).
ATTENTION_BACKWARD_RATIO = 2.5


def _first_two(op: Op) -> tuple[Value, ...]:
    return op.inputs[:2]


def _second_and_third(op: Op) -> tuple[Value, ...]:
    return op.inputs[1:3]


def _all_inputs(op: Op) -> tuple[Value, ...]:
    return op.inputs


@dataclass(frozen=True, slots=True)
class Product:
    """The facts of an op that sums products.

    flops: of one forward run, from the local shapes of all inputs and outputs. operands: the factors, of which each
    that needs a gradient costs backward one more product; in `Op.inputs` an activation stands before its weight.
    backward_ratio: the flops of backward over those of forward where they are known otherwise, else 0. bias: position
    in `Op.args` of what is added to the product, -1 if nothing is. weight: "always" if the second operand is a weight,
    "maybe" if only the graph tells, "" if people split none: tensor-parallel plans pair products that have a weight,
    and zero-bubble schedules may delay the gradient of what is always one.
    """

    flops: Callable[[Op, Shapes, Shapes], float]
    operands: Callable[[Op], tuple[Value, ...]] = _first_two
    backward_ratio: float = 0.0
    bias: int = -1
    weight: str = ""

    @property
    def is_of_matrices(self) -> bool:
        """Whether it is one product of matrices, or a batch of them, whose rows are the last dims of its tensors."""
        return self.flops in (_matmul, _addmm)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """product: None for all else, which is taken to move bytes only. is_lookup: reads those rows of its first input
    that the others name. is_norm: divides its first input by its spread, and multiplies that by a weight if it has one.
    ends_region: no tensor-parallel region of a hand plan goes through it, as it mixes all of a
    hidden dim or does not follow one dim.
    """

    product: Product | None = None
    is_lookup: bool = False
    is_norm: bool = False
    ends_region: bool = False


def _matmul(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * inputs[0][-1]


def _addmm(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * inputs[1][-1]


def _einsum(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    left = arguments_of(op)["equation"].replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(left, inputs):
        named = letters.replace("...", "")
        free = len(shape) - len(named)
        start = letters.find("...")
        split = start if start >= 0 else len(letters)
        sizes.update(zip(named[:split], shape))
        sizes.update(zip(named[split:], shape[split + free :]))
        sizes.update({f"...{free - i}": size for i, size in enumerate(shape[split : split + free])})
    return 2.0 * math.prod(sizes.values()) if len(inputs) > 1 else 0.0


def _conv(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    arguments = arguments_of(op)
    is_transposed = "transpose" in op.target or bool(arguments.get("transposed"))
    return 2.0 * math.prod(inputs[0] if is_transposed else outputs[0]) * math.prod(inputs[1][1:])


def _attention(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    query, value, arguments = inputs[0], inputs[2], arguments_of(op)
    num_queries, num_keys = op.inputs[0].shape[-2], op.inputs[2].shape[-2]  # a rank sees all keys, if not at once
    seen = 1.0
    if arguments["is_causal"]:  # half of the scores; of parts of the queries the last, which all wait for, sees more
        is_even = arguments["dropout_p"] == 0 and is_balanced(num_queries, num_keys, query[-2])
        seen = 0.5 if is_even else 1 - 0.5 * query[-2] / num_keys
    return 2.0 * math.prod(query[:-1]) * num_keys * seen * (query[-1] + value[-1])


def _flex_attention(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    query, value, arguments = inputs[0], inputs[2], arguments_of(op)
    shapes = tuple(op.inputs[slot.index].shape for slot in arguments["captured"])
    num_queries, num_keys = op.inputs[0].shape[-2], op.inputs[2].shape[-2]  # a rank sees all keys, if not at once
    seen = share_seen(arguments["functions"], shapes, num_queries, num_keys, num_queries // query[-2])
    return 2.0 * math.prod(query[:-1]) * num_keys * seen * (query[-1] + value[-1])


def _inner(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * (inputs[0][-1] if inputs[0] else 1)


def _tensordot(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * math.prod(inputs[0][dim] for dim in arguments_of(op)["dims_self"])


def _recurrent(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Flops of a recurrent op: each weight of each layer and direction is used for each step of each sample."""
    weights = [shape for shape, value in zip(inputs, op.inputs) if value in _recurrent_weights(op)]
    return 2.0 * math.prod(inputs[0][:-1]) * sum(map(math.prod, weights))


def _recurrent_weights(op: Op) -> tuple[Value, ...]:
    """The matrices among the parameters of a recurrent op."""
    slots = arguments_of(op)["params"]
    return tuple(value for value in (op.inputs[slot.index] for slot in slots) if len(value.shape) == 2)


def _recurrent_operands(op: Op) -> tuple[Value, ...]:
    return op.inputs[0], _recurrent_weights(op)[0]


def share_of_step(op: Op, outputs: Shapes) -> float:
    """The share of a loop's work that a rank has, by the local shapes of what it carries and gives out."""
    whole = (math.prod(value.shape) for value in op.outputs)
    return min((math.prod(own) / max(1, size) for own, size in zip(outputs, whole)), default=1.0)


def _scan(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    each = 0.0
    for inner in body_called(op.args[3]).ops:
        product, shapes = (
            facts_of(inner.target).product,
            [tuple(v.shape for v in x) for x in (inner.inputs, inner.outputs)],
        )
        each += product.flops(inner, shapes[0], shapes[1]) if product else 0.0
    return op.args[-1] * each * share_of_step(op, outputs)


def _rows(names: str, facts: OpFacts, namespace: str = "aten") -> dict[str, OpFacts]:
    return {f"{namespace}.{name}": facts for name in names.split()}


# By name of the op without its overload; an op that is absent has no fact but those that its schema tells.
OP_FACTS: Mapping[str, OpFacts] = MappingProxyType(
    {
        **_rows("linear", OpFacts(Product(_matmul, bias=2, weight="always"))),
        **_rows("turned_linear", OpFacts(Product(_matmul, bias=2, weight="always")), "autopar"),
        **_rows("mm", OpFacts(Product(_matmul, weight="always"))),
        **_rows("addmm", OpFacts(Product(_addmm, _second_and_third, bias=0, weight="always"))),
        **_rows("matmul bmm _grouped_mm", OpFacts(Product(_matmul, weight="maybe"))),
        **_rows("_scaled_mm", OpFacts(Product(_matmul, bias=4, weight="maybe"))),
        **_rows("grouped_mm_fallback", OpFacts(Product(_matmul, weight="maybe")), "transformers"),
        **_rows(
            "turned_grouped_mm turned_grouped_mm_fallback grouped_linear",
            OpFacts(Product(_matmul, weight="maybe")),
            "autopar",
        ),
        **_rows("baddbmm addmv", OpFacts(Product(_addmm, _second_and_third, bias=0))),
        **_rows("mv dot", OpFacts(Product(_matmul))),
        **_rows("inner", OpFacts(Product(_inner))),
        **_rows("tensordot", OpFacts(Product(_tensordot))),
        **_rows("einsum", OpFacts(Product(_einsum, _all_inputs))),
        **_rows("conv1d conv2d conv3d convolution", OpFacts(Product(_conv, bias=2, weight="always"))),
        **_rows("conv_transpose1d conv_transpose2d conv_transpose3d", OpFacts(Product(_conv, bias=2))),
        **_rows("lstm gru rnn_tanh rnn_relu", OpFacts(Product(_recurrent, _recurrent_operands))),
        ATTENTION: OpFacts(Product(_attention, _all_inputs, ATTENTION_BACKWARD_RATIO)),
        **_rows("flex_attention", OpFacts(Product(_flex_attention, _all_inputs, ATTENTION_BACKWARD_RATIO)), "autopar"),
        # the two products of backward, and forward once more
        **_rows("scan", OpFacts(Product(_scan, _all_inputs, 3.0)), "autopar"),
        **_rows("embedding", OpFacts(is_lookup=True, ends_region=True)),
        **_rows("layer_norm rms_norm group_norm", OpFacts(is_norm=True, ends_region=True)),
        **_rows("batch_norm instance_norm _native_batch_norm_legit_functional", OpFacts(is_norm=True)),
        **_rows("index topk cross_entropy_loss", OpFacts(ends_region=True)),
    }
)
_NO_FACTS = OpFacts()


def _targets(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# Views with the same elements in the same row-major order, by target: overloads of one name differ in this.
RESHAPES = _targets(
    "view.default _unsafe_view.default reshape.default view_as.default reshape_as.default flatten.using_ints"
    " unflatten.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default ravel.default"
)
# Views with the same dims in another order.
PERMUTATIONS = _targets(
    "permute.default transpose.int t.default numpy_T.default mT.default swapaxes.default swapdims.default movedim.int"
    " movedim.intlist moveaxis.int moveaxis.intlist"
)
# Views whose schema does not declare them as such.
_UNDECLARED_VIEWS = _targets("_unsafe_view.default type_as.default conj_physical.default") | {GUARDED}


@lru_cache(maxsize=4096)
def family(target: str) -> str:
    """The target without its overload.

    >>> family("aten.linear.default")
    'aten.linear'
    """
    return target.rsplit(".", 1)[0]


def facts_of(target: str) -> OpFacts:
    """The facts of the op `target` ("aten.linear.default")."""
    return OP_FACTS.get(family(target), _NO_FACTS)


@lru_cache(maxsize=4096)
def is_view(target: str) -> bool:
    """Whether the result may share the memory of an input, or be the input.

    Whether that of one call does so is what `costmodel.activations.autograd_footprint` asks of the op itself. False for
    an op that is not loaded.
    """
    try:
        returns = resolve(target)._schema.returns
    except AttributeError:
        return False
    is_declared = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return is_declared or target in _UNDECLARED_VIEWS


def is_random(op: Op) -> bool:
    """Whether `op` draws random numbers with its arguments.

    Attention does, with dropout, though torch has no tag for it.
    """
    if family(op.target) == ATTENTION:
        return arguments_of(op)["dropout_p"] > 0
    if not _is_seeded(op.target):
        return False
    arguments = arguments_of(op)  # of dropout and of recurrent layers
    return arguments.get("train", True) is not False and arguments.get("dropout", 1.0) > 0


@lru_cache(maxsize=4096)
def _is_seeded(target: str) -> bool:
    """Whether torch says that the op draws random numbers, with some arguments."""
    return torch.Tag.nondeterministic_seeded in resolve(target).tags


@lru_cache(maxsize=1024)
def order_of(target: str, args: tuple[object, ...], ndim: int, **kwargs: object) -> tuple[int, ...]:
    """The dims of the input of one of `PERMUTATIONS` in the order in which its output has them; `args` after the input.

    >>> order_of("aten.transpose.int", (0, 1), 3)
    (1, 0, 2)
    """
    probe = torch.empty(
        tuple(range(2, 2 + ndim)), device="meta"
    )  # all sizes differ, so that they tell where each dim is
    return tuple(size - 2 for size in resolve(target)(probe, *args, **kwargs).shape)
