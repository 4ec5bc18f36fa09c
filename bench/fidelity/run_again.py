"""Which ops a library runs again in backward where it keeps the results of some ops of a block and not of others."""

from collections.abc import Collection, Iterator

from autopar.ir.op_facts import ATTENTION, FLEX_ATTENTION, facts_of, family
from autopar.plans.plan import Plan

# Every second product and all that is no product (torchtitan's selective checkpointing "op": its policy keeps the
# results of attention and of each second `mm`); attention alone (Korthikanti et al., "Reducing Activation Recomputation
# in Large Transformer Models", 2022: Megatron's "selective").
OTHER_PRODUCTS, ATTENTION_ALONE = "every second product", "attention"
SELECTIVE = (OTHER_PRODUCTS, ATTENTION_ALONE)


def run_again(stage: Plan, which: str) -> frozenset[str]:
    """Names of the ops that run again, of a stage all of whose blocks would."""
    return frozenset(name for name, is_again in _each(stage, which) if is_again)


def kept_results(stage: Plan, which: str) -> frozenset[str]:
    """Names of the products in its blocks whose results are kept instead."""
    names = {name for name, is_again in _each(stage, which) if not is_again}
    return frozenset(op.name for op in stage.graph.ops if op.name in names and facts_of(op.target).product)


def _each(stage: Plan, which: str) -> Iterator[tuple[str, bool]]:
    position = stage.graph.position
    for region in stage.assignment.recomputed:
        yield from _of_block(sorted(region, key=position.__getitem__), stage, which)


def _of_block(region: Collection[str], stage: Plan, which: str) -> Iterator[tuple[str, bool]]:
    num = 0
    for name in region:
        op = stage.graph.ops[stage.graph.position[name]]
        is_attention = family(op.target) in (ATTENTION, FLEX_ATTENTION)
        num += bool(facts_of(op.target).product) and not is_attention
        if which == ATTENTION_ALONE:
            yield name, is_attention
        else:
            yield name, not is_attention and (not facts_of(op.target).product or num % 2 == 0)
