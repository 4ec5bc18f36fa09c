"""The table of op facts against the ops themselves: a forgotten entry fails here."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from autopar.ir.graph import resolve
from autopar.ir.op_facts import OP_FACTS, PERMUTATIONS, RESHAPES, facts_of, family, is_view
from autopar.sbp.rules import attention, conv, matmul, recurrent
from tests.sbp.samples import calls

SAMPLES = calls()


@pytest.mark.parametrize(
    "rules", [matmul, conv, attention, recurrent], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_every_rule_of_a_product_has_its_flops_and_operands(rules) -> None:
    """What has none is priced as an op that only moves bytes."""
    without = {target for target in rules.RULES if facts_of(target).product is None}
    assert without <= {"aten.outer.default"}, (
        "these need a row with a Product in ir/op_facts.py"
    )  # that adds nothing up


def views_of(target: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(input, result) wherever a sample of the op gives a result in the memory of an input."""
    for args, kwargs in SAMPLES[target]:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for result in pytree.tree_leaves(resolve(target)(*args, **kwargs)):
            if isinstance(result, torch.Tensor):
                pairs = ((x, result) for x in given)
                yield from (
                    pair for pair in pairs if pair[0].untyped_storage()._cdata == result.untyped_storage()._cdata
                )


def is_reshape(source: torch.Tensor, result: torch.Tensor) -> bool:
    same = source.numel() == result.numel() and source.shape != result.shape
    return same and torch.equal(source.reshape(-1), result.reshape(-1))


def is_permutation(source: torch.Tensor, result: torch.Tensor) -> bool:
    dims = [sorted(zip(x.shape, x.stride())) for x in (source, result)]
    return dims[0] == dims[1] and source.stride() != result.stride()


def test_views_are_those_that_share_memory() -> None:
    """That of a reshape is in the same order, that of a permutation has the same dims in another."""
    found = {target: list(views_of(target)) for target in SAMPLES}
    assert not {target for target, pairs in found.items() if pairs and not is_view(target)}
    kept = {target: pairs for target, pairs in found.items() if pairs and pairs[0][0].dtype == pairs[0][1].dtype}
    assert {target for target, pairs in kept.items() if any(is_reshape(*pair) for pair in pairs)} == RESHAPES & set(
        kept
    )
    permuted = {target for target, pairs in kept.items() if any(is_permutation(*pair) for pair in pairs)}
    conjugated = {"aten.mH.default", "aten.matrix_H.default"}  # permutations of real numbers only
    assert permuted - conjugated == PERMUTATIONS & set(kept)


@pytest.mark.parametrize("name", sorted(name for name in OP_FACTS if name.startswith("aten.")))
def test_a_bias_is_where_the_schema_has_it(name: str) -> None:
    packet = getattr(torch.ops.aten, name.removeprefix("aten."))
    product = OP_FACTS[name].product
    arguments = [argument.name for argument in getattr(packet, packet.overloads()[0])._schema.arguments]
    if product is None or name == "aten._grouped_mm":  # torch has no kernel for its bias
        return
    added = "self" if "add" in name else "bias"
    assert product.bias == (arguments.index(added) if added in arguments else -1)


def test_family() -> None:
    assert family("aten.conv2d.padding") == "aten.conv2d"
