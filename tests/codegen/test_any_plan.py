"""Any valid plan is right, not only a chosen one: drawn graphs under drawn strategies, stored, kept and output layouts."""

from collections import Counter
from random import Random

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.codegen.lower import lower
from autopar.codegen.program import Convert, UseTogether
from autopar.sbp import rules
from autopar.sbp.redistribute import CONVERSIONS
from tests.codegen.any_plan import MESHES, Example, all_gradients_arrive, differences, draw_example, is_stable
from tests.codegen.random_ops import FAMILIES

NUM_EXAMPLES = 900
ROLES = {"batch", "channel_groups", "elements", "experts", "mean", "normalized", "queries", "reduced", "rows", "tokens", "vocab"}


def test_any_plan_computes_what_one_device_does_and_issues_what_is_priced() -> None:
    pytest.importorskip("transformers.integrations.moe")
    seen: Counter[str] = Counter()

    @hypothesis.settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.integers(0, 2**32), st.integers(1, 6))
    def check(seed: int, num_calls: int) -> None:
        example = draw_example(Random(seed), num_calls)
        numbers, collectives = differences(example)
        if numbers and not is_stable(example):
            seen["unstable"] += 1
            return
        assert not numbers + collectives, "\n".join([*numbers, *collectives, *map(str, example.graph.ops), str(example.assignment)])
        seen.update(_features(example))

    check()
    _check_covered(seen)


def _features(example: Example) -> set[str]:
    """What of the compiler the example needs."""
    signatures = [signature for strategy in example.assignment.strategies.values() for signature in strategy.signatures]
    found = {f"role {signature.role}" for signature in signatures if signature.role}
    found |= {f"family {family}" for family in FAMILIES if any(op.target in getattr(rules, family).RULES for op in example.graph.ops)}
    found |= {f"mesh {example.mesh.shape}"} | ({"all collectives"} if all_gradients_arrive(example.graph) else set())
    found |= {"buffers"} if example.graph.mutations else set()
    steps = lower(example.graph, example.mesh, example.assignment).steps
    found |= {f"{step.src.kind} -> {step.dst.kind}" for step in steps if isinstance(step, Convert)}
    return found | {"together" for step in steps if isinstance(step, UseTogether)}


def _check_covered(seen: Counter[str]) -> None:
    """The examples must not all be of one kind."""
    wanted = {f"family {family}" for family in FAMILIES} | {f"role {role}" for role in ROLES} | {f"mesh {shape}" for shape in MESHES}
    wanted |= {f"{src} -> {dst}" for src, dst in CONVERSIONS} | {"buffers", "together"}
    assert not [feature for feature in sorted(wanted) if seen[feature] < 3], seen
    assert seen["all collectives"] > NUM_EXAMPLES / 2
    assert seen["unstable"] < NUM_EXAMPLES / 50
