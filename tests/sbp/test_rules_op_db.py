"""Every row of the rule table against the op itself: on our own samples, and on those of torch's op database."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from autopar.ir.graph import resolve
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.rules import RULES, cast, create, index, pointwise, reduce, view
from tests.sbp.rulecheck import check_rule, make_op
from tests.sbp.samples import Call, calls

HERE = [target for family in (pointwise, cast, view, reduce, index, create) for target in family.RULES]
FROM_DATABASE = 3  # samples an op, smallest shapes of each kind first
MAX_ELEMENTS = 2000
# random draws, memory of no meaning, and gradients of ties that depend on the order of elements
UNREPEATABLE = ("dropout", "bernoulli", "rand", "empty", "native_batch_norm")
UP_TO_A_PHASE = ("linalg_eig.",)  # of whose vectors the database's own losses are the sizes; torch refuses others


def exercise(target: str, call: Call, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Check all signatures of one call on each number of ranks; how many there are, and how many divided on one of
    them.
    """
    op, inputs = make_op(target, *call[0], **call[1])
    return len(signatures_of(op)), len(check_rule(op, inputs, ranks))


@pytest.fixture(scope="module")
def own_calls() -> dict[str, list[Call]]:
    torch.manual_seed(0)
    return calls()


def test_every_row_has_a_sample(own_calls: dict[str, list[Call]]) -> None:
    assert [target for target in HERE if not own_calls.get(target)] == []


@pytest.mark.parametrize("target", [target for target in HERE if not any(part in target for part in UNREPEATABLE)])
def test_own_samples(own_calls: dict[str, list[Call]], target: str) -> None:
    torch.manual_seed(0)
    for call in own_calls[target]:
        total, divided = exercise(target, call, (2, 3))
        assert total == divided, f"{target}: a signature of {call} is never exercised"


def test_unwritten_memory_has_the_shape_of_the_part() -> None:
    op, _ = make_op("aten.new_empty.default", torch.empty(4, 6), (4, 2))
    assert {str(signature) for signature in signatures_of(op)} >= {"B -> S(0)", "S(0) -> S(0)", "S(1) -> B", "P -> B"}


@lru_cache(maxsize=1)
def database() -> dict[str, list[object]]:
    """OpInfos by the aten names under which they may be called."""
    from torch.testing._internal.common_methods_invocations import op_db  # torch's own samples of its ops

    found = defaultdict(list)
    for info in op_db:
        names = {info.aten_name, info.name.split(".")[-1], *(alias.name for alias in info.aliases)}
        for name in names:
            found[name].append(info)
    return found


def database_calls(target: str) -> Iterator[Call]:
    """Samples that this overload accepts and for which it gives what the op gives."""
    for info in database()[target.split(".")[1]]:
        dtype = torch.float64 if info.supports_dtype(torch.float64, "cpu") else torch.int64
        if not info.supports_dtype(dtype, "cpu"):
            continue
        samples = itertools.islice(
            info.sample_inputs("cpu", dtype, requires_grad=dtype == torch.float64 and info.supports_autograd), 40
        )
        for sample in samples:
            args = (sample.input, *sample.args)
            if _is_small(args) and not sample.kwargs.get("dropout_p") and _accepts(target, args, sample.kwargs):
                yield args, sample.kwargs


def _is_small(args: tuple[object, ...]) -> bool:
    return all(arg.numel() <= MAX_ELEMENTS for arg in args if isinstance(arg, torch.Tensor))


def _accepts(target: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    takes = [str(argument.type) for argument in resolve(target)._schema.arguments]
    if any(isinstance(arg, torch.Tensor) and "Tensor" not in kind for arg, kind in zip(args, takes)):
        return False  # torch would read the tensor as a number
    try:
        result = resolve(target)(*args, **kwargs)
    except Exception:  # another overload's sample: torch refuses it in many ways
        return False
    return all(isinstance(item, torch.Tensor) for item in (result if isinstance(result, (list, tuple)) else (result,)))


@pytest.mark.slow
def test_op_database() -> None:
    """Also the rules of other families, as far as the database calls their overloads as the graph does."""
    torch.manual_seed(0)
    checked: dict[str, int] = {}
    for target in RULES:
        if any(part in target for part in (*UNREPEATABLE, *UP_TO_A_PHASE)):
            continue
        for call in itertools.islice(database_calls(target), FROM_DATABASE):
            checked[target] = checked.get(target, 0) + exercise(target, call, (2, 3, 5))[1]
    assert len(checked) > 200, f"only {len(checked)} targets met a sample"
