"""The pass that recognises masks of attention by their values, where they follow from no input of the model.

transformers writes them [batch, 1, tokens, tokens] while a model is exported: they take that memory, and rule out the
fused kernel that needs no mask. A mask that leaves all scores is dropped, an exactly causal one becomes `is_causal`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autopar.ir.call_args import call, fill, takes_device
from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of, resolve
from autopar.ir.op_facts import ATTENTION, family, is_random

_EXPANDS = ("aten.expand.default", "aten.broadcast_to.default")
# Elementwise, though torch has no tag for it.
_UNTAGGED = ("aten.__and__.", "aten.__or__.", "aten.__xor__.")
# Most elements of a mask that are computed to see what it is, which takes a second; larger ones stay.
_MOST = 2**28
_SMALL = 2**24  # tensors of at most as many elements are computed for all samples, and remembered


def recognise_masks(graph: Graph) -> Graph:
    """`graph` with each such mask of `scaled_dot_product_attention` in its simplest form."""
    masks = _Masks({value.name: op for op in graph.ops for value in op.outputs}, graph.constants)
    return replace(graph, ops=tuple(_rewritten(op, masks) for op in graph.ops))


def _rewritten(op: Op, masks: "_Masks") -> Op:
    if family(op.target) != ATTENTION:
        return op
    arguments = arguments_of(op)
    slot = arguments["attn_mask"]
    if slot is None or arguments["is_causal"] or op.inputs[slot.index].dtype != torch.bool:
        return op
    kind = masks.kind(op.inputs[slot.index], (op.inputs[0].shape[-2], op.inputs[1].shape[-2]))
    return op if kind is None else _without_mask(op, slot.index, is_causal=kind == "causal")


def _without_mask(op: Op, index: int, *, is_causal: bool) -> Op:
    """The call with `is_causal` in place of its mask, input `index`."""
    kept = [Slot(i - (i > index)) if i != index else None for i in range(len(op.inputs))]
    arguments = arguments_of(op) | {"attn_mask": None, "is_causal": is_causal}
    names = [argument.name for argument in resolve(op.target)._schema.arguments if not argument.kwarg_only]
    keywords = {name: arguments[name] for name, _ in op.kwargs if name not in names}
    return replace(
        op,
        args=fill(tuple(arguments[name] if name != "attn_mask" else None for name in names), kept),
        kwargs=tuple((name, fill(value, kept)) for name, value in keywords.items()),
        inputs=tuple(value for i, value in enumerate(op.inputs) if i != index),
    )


@dataclass(frozen=True)
class _Masks:
    """Values by the ops in `made` and the model's `constants`. `kinds`, `contents`: what is known already."""

    made: Mapping[str, Op]
    constants: Mapping[str, torch.Tensor]
    kinds: dict[tuple[str, tuple[int, int]], str | None] = field(default_factory=dict)
    contents: dict[tuple[str, int], torch.Tensor | None] = field(default_factory=dict)

    def kind(self, mask: Value, scores: tuple[int, int]) -> str | None:
        """The kind, "all" or "causal", of a mask that is so for every sample and head; None for others."""
        if (mask.name, scores) not in self.kinds:
            ndim = max(len(mask.shape), 3)  # dim 0 of a mask of two dims is that of the queries
            content = self._of_one_sample(mask, ndim) if math.prod(scores) <= _MOST else None
            self.kinds[mask.name, scores] = None if content is None else _kind_of(content, scores)
        return self.kinds[mask.name, scores]

    def _of_one_sample(self, value: Value, ndim: int) -> torch.Tensor | None:
        """The content of `value` with one row along dim 0, the batch of tensors of `ndim` dims; None if its rows differ
        or it is no constant.

        Of elementwise ops the operands' rows are compared: all samples of a large mask need not be computed.
        """
        key = (value.name, ndim)
        if key in self.contents:
            return self.contents[key]
        content = self._one(value, ndim)
        if content is None or content.numel() <= _SMALL:
            self.contents[key] = content
        return content

    def _one(self, value: Value, ndim: int) -> torch.Tensor | None:
        op = self.made.get(value.name)
        if op is not None and len(op.outputs) == 1 and _acts_on_each_sample(op):
            operands = [self._of_one_sample(operand, ndim) for operand in op.inputs]
            found = [operand for operand in operands if operand is not None]
            if len(found) == len(operands):
                narrow = math.prod(torch.broadcast_shapes(*(x.shape for x in found)))
                return _called(op, found, ndim) if narrow <= _MOST else None
        content = self._whole(value)
        if content is None or content.ndim < ndim or content.shape[0] == 1:
            return content
        return content[:1] if torch.equal(content, content[:1].expand_as(content)) else None

    def _whole(self, value: Value) -> torch.Tensor | None:
        """The whole content of a constant of moderate size."""
        if math.prod(value.shape) > _SMALL:
            return None
        op = self.made.get(value.name)
        if op is None:
            content = self.constants.get(value.name)
            return None if content is None or content.is_meta else content.cpu()
        operands = [self._whole(operand) for operand in op.inputs]
        found = [operand for operand in operands if operand is not None]
        if is_random(op) or len(found) < len(operands):
            return None
        results = call(op, found, **({"device": "cpu"} if takes_device(op) else {}))
        return results[[output.name for output in op.outputs].index(value.name)]


def _acts_on_each_sample(op: Op) -> bool:
    """Whether each row of the result depends on the same rows of the operands alone."""
    if not op.inputs or is_random(op):
        return False
    is_tagged = torch.Tag.pointwise in resolve(op.target).tags
    return is_tagged or op.target in _EXPANDS or op.target.startswith(_UNTAGGED)


def _called(op: Op, operands: list[torch.Tensor], ndim: int) -> torch.Tensor:
    """The result for one sample."""
    if op.target not in _EXPANDS:
        return call(op, operands)[0]
    shape = op.outputs[0].shape
    return operands[0].expand((1, *shape[1:]) if len(shape) == ndim else shape)


def _kind_of(mask: torch.Tensor, scores: tuple[int, int]) -> str | None:
    """The kind of a mask that broadcasts to [.., queries, keys]."""
    if bool(mask.all()):
        return "all"
    if tuple(mask.shape[-2:]) != scores:
        return None
    causal = torch.ones(scores, dtype=torch.bool).tril()
    return "causal" if all(torch.equal(each, causal) for each in mask.reshape(-1, *scores)) else None
