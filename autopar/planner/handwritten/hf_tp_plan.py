"""The tensor-parallel plan of a transformers model (`_tp_plan`), in terms of `Structure`."""

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.sbp.analysis.megatron_pairs import Structure, base_name, product_slots, with_kinds

# transformers.integrations.tensor_parallel.ALL_PARALLEL_STYLES -> kind of the module's product or lookup.
_KINDS = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "embedding_rowwise": "vocabulary",
}
_GATHERED = {"colwise_rep", "colwise_gather_output"}
# Styles that need no kind, since they follow: modules that all ranks run whole, sums of gradients, sums over experts.
_FOLLOWS = {"replicate", "replicated_with_grad_allreduce", "moe_tp_experts"}


def hf_styles(model: nn.Module) -> dict[str, str]:
    """FQN of a module or parameter, with "*" for numbers -> style.

    PlanError if the model has no plan, or one with a style that is not supported.
    """
    styles = dict(getattr(model, "_tp_plan", None) or {})
    if not styles:
        raise PlanError(
            f"hand plan 'hf': {type(model).__name__} has no tensor-parallel plan (_tp_plan) of its own; take megatron"
            " instead"
        )
    unknown = {name: style for name, style in styles.items() if style not in _KINDS and style not in _FOLLOWS}
    if unknown:
        name, style = next(iter(unknown.items()))
        known = ", ".join(sorted(_KINDS | dict.fromkeys(_FOLLOWS)))
        raise PlanError(f"hand plan 'hf': {name} has style {style!r}, expected one of {known}; take megatron instead")
    return styles


def hf_structure(graph: Graph, structure: Structure, styles: Mapping[str, str]) -> Structure:
    """`structure` with the products and lookups by `styles`; those without a style are whole."""
    kinds, lookups, gathered, weights = {}, set(), set(), weights_of(graph, structure)
    for op in graph.ops:
        style = _style(styles, weights.get(op.name, "")) or _style(styles, op.module)
        if op.name in structure.kinds:
            kinds[op.name] = _KINDS.get(style, "whole")
        if base_name(op) == "embedding" and _KINDS.get(style) == "vocabulary":
            lookups.add(op.name)
        if style in _GATHERED:
            gathered.update(value.name for value in op.outputs)
    if not lookups and not any(kind != "whole" for kind in kinds.values()):
        named = ", ".join(styles)
        raise PlanError(
            f"hand plan 'hf': none of {named} is a module of the traced model; trace the model itself, not a wrapper"
        )
    return replace(with_kinds(structure, graph, kinds), vocabulary=frozenset(lookups), gathered=frozenset(gathered))


def _style(styles: Mapping[str, str], fqn: str) -> str:
    """The style of a name, which has numbers of its own or stands for all."""
    return styles.get(fqn) or styles.get(generic(fqn), "")


def generic(fqn: str) -> str:
    """The FQN with "*" for the numbers of layers, as transformers has it."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", fqn)


def weights_of(graph: Graph, structure: Structure) -> dict[str, str]:
    """Product -> FQN of its weight."""
    origin, fqns = {item.value.name: item.fqn for item in graph.of_kind("parameter")}, {}
    for op in graph.ops:
        if slots := product_slots(op, structure.from_parameters):
            fqns[op.name] = origin.get(op.inputs[slots[1]].name, "")
        elif len(op.inputs) == 1 and op.inputs[0].name in origin:
            origin.update((value.name, origin[op.inputs[0].name]) for value in op.outputs)
    return fqns
