"""Any valid plan is right, not only a chosen one: drawn graphs under drawn strategies, stored, kept and output
layouts.
"""

from collections import Counter
from dataclasses import replace
from random import Random, SystemRandom

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from autopar.codegen.lower import lower
from autopar.codegen.program import Convert, ConvertTogether
from autopar.mesh import Mesh
from autopar.sbp import rules
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I, Placement, S
from autopar.sbp.redistribute import CONVERSIONS
from tests.runtime.any_plan import (
    MESHES,
    Example,
    all_gradients_arrive,
    differences,
    draw_example,
    is_stable,
    run_on_gloo,
)
from tests.runtime.as_priced import has_uneven_parts
from tests.runtime.random_graphs import Builder
from tests.runtime.random_ops import FAMILIES
from tests.runtime.random_products import fused
from tests.workers import Ranks

NUM_EXAMPLES, NUM_FRESH, NUM_FUSED = 600, 1000, 40
ROLES = {
    "batch",
    "channel_groups",
    "elements",
    "experts",
    "mean",
    "normalized",
    "queries",
    "reduced",
    "rows",
    "tokens",
    "vocab",
}


def test_any_plan_computes_what_one_device_does_and_issues_what_is_priced() -> None:
    pytest.importorskip("transformers.integrations.moe")
    seen: Counter[str] = Counter()

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(st.integers(0, 2**32), st.integers(1, 6))
    def check(seed: int, num_calls: int) -> None:
        seen.update(_checked(draw_example(Random(seed), num_calls)))

    check()
    _check_covered(seen)


def test_any_plan_of_fused_projections() -> None:
    """Sections on any axes, of stored, kept and recomputed values in any layouts."""
    families, num_in_sections = {"fused": fused, "pointwise": FAMILIES["pointwise"]}, 0
    for seed in range(NUM_FUSED):
        draw = Random(seed)
        example = draw_example(draw, 2, families=families)
        offered = annotate(example.graph, example.mesh).strategies
        chosen = dict(example.assignment.strategies)
        for name, found in offered.items():
            in_sections = [one for one in found if any(p.sections for each in one.signatures for p in each.inputs)]
            chosen[name] = draw.choice(in_sections) if in_sections and draw.random() < 0.8 else chosen[name]
            num_in_sections += bool(in_sections)
        _checked(replace(example, assignment=replace(example.assignment, strategies=chosen)))
    assert num_in_sections > NUM_FUSED / 4


def test_any_plan_that_nobody_drew_before() -> None:
    """Of `make test-full`: whether a change lands is not left to chance."""
    pytest.importorskip("transformers.integrations.moe")
    first = SystemRandom().randrange(2**32)
    for seed in range(first, first + NUM_FRESH):
        print(f"draw_example(Random({seed}), {1 + seed % 6})")  # pytest shows it of a test that fails
        _checked(draw_example(Random(seed), 1 + seed % 6))


def _checked(example: Example) -> set[str]:
    """The features of the example, which must be right; of an unstable one numbers may be anything."""
    numbers, collectives = differences(example)
    is_unstable = bool(numbers) and not is_stable(example)
    wrong = collectives if is_unstable else [*numbers, *collectives]
    assert not wrong, "\n".join([*wrong, *map(str, example.graph.ops), str(example.assignment)])
    return {"unstable"} if is_unstable else _features(example)


@pytest.mark.multirank
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_any_plan_on_processes(shape: tuple[int, ...], ranks4: Ranks) -> None:
    seeds, num_calls = tuple(range(20)), 5
    pytest.importorskip("transformers.integrations.moe")
    found = ranks4.run(run_on_gloo, seeds, num_calls, shape)
    for seed, of_ranks in zip(seeds, zip(*found)):
        example = draw_example(Random(seed), num_calls, (shape,))
        numbers, collectives = differences(example, dict(of_ranks))
        assert not collectives and (not numbers or not is_stable(example)), (seed, numbers, collectives)


def _features(example: Example) -> set[str]:
    """What of the compiler the example needs."""
    signatures = [signature for strategy in example.assignment.strategies.values() for signature in strategy.signatures]
    found = {f"role {signature.role}" for signature in signatures if signature.role}
    found |= {
        f"family {family}"
        for family in FAMILIES
        if any(op.target in getattr(rules, family).RULES for op in example.graph.ops)
    }
    found |= {f"mesh {example.mesh.shape}"} | ({"all collectives"} if all_gradients_arrive(example.graph) else set())
    found |= ({"buffers"} if example.graph.mutations else set()) | ({"split"} if example.is_split else set())
    found |= {"uneven"} if has_uneven_parts(example.graph, example.assignment, example.mesh.shape) else set()
    steps = lower(example.graph, example.mesh, example.assignment).steps
    for step in steps:
        if isinstance(step, Convert):
            kinds = f"{step.src.kind} -> {step.dst.kind}"
            found |= {kinds, f"{kinds} jointly"} if len(step.axes) > 1 else {kinds}
    for step in steps:
        if isinstance(step, ConvertTogether):
            again = ", again" if step.number >= 0 else ""
            found |= {"together", f"{step.src[0].kind} -> {step.dst[0].kind} together{again}"}
    return found


def _check_covered(seen: Counter[str]) -> None:
    """The examples must not all be of one kind."""
    wanted = (
        {f"family {family}" for family in FAMILIES}
        | {f"role {role}" for role in ROLES}
        | {f"mesh {shape}" for shape in MESHES}
    )
    wanted |= {f"{src} -> {dst}" for src, dst in CONVERSIONS} | {"buffers", "together", "split", "uneven"}
    wanted |= {"S -> I together"}  # S -> R, and again: tests/runtime/saved_tensors/test_regather.py
    assert not [feature for feature in sorted(wanted) if not seen[feature]], seen
    assert all(seen[f"{src} -> {dst} jointly"] for src, dst in CONVERSIONS), seen
    assert seen["all collectives"] > NUM_EXAMPLES / 2
    assert seen["unstable"] < NUM_EXAMPLES / 50


def test_a_gathered_tensor_can_be_viewed_as_complex_numbers() -> None:
    b = _Certain(Random(0))
    b.call("view_as_complex.default", b.input(torch.randn(4, 2, dtype=torch.float64).requires_grad_(), "parameter"))
    _check(b, stored=S(1), read=I)


def test_conjugated_numbers_are_sent_as_such() -> None:
    b = _Certain(Random(0))
    x = b.call("view_as_complex.default", b.input(torch.randn(4, 2, dtype=torch.float64).requires_grad_(), "parameter"))
    b.call("conj.default", x)
    b.call("imag.default", b.call("conj.default", x))
    _check(b, stored=I, read=S(0))


def test_a_reader_without_gradient_has_no_backward() -> None:
    b = _Certain(Random(0))
    x = b.input(torch.randn(4, 6, dtype=torch.float64).requires_grad_(), "parameter")
    b.call("argmax.default", x, 1)
    b.call("tanh.default", x)
    example = _check(b, stored=S(1), read=S(0))
    assert all_gradients_arrive(example.graph)


def test_a_bucket_that_is_read_after_the_next_one_is_gathered_again_once() -> None:
    _checked(draw_example(Random(2156289251), 6))  # a GRU's weights, in a bucket with those of an op before another's


def test_attention_around_a_ring_of_what_conversions_leave_in_columns() -> None:
    _checked(draw_example(Random(770000405), 6))


def test_a_bucket_of_parameters_without_elements() -> None:
    _checked(draw_example(Random(770003070), 1))


def test_a_graph_without_ops_is_priced() -> None:
    example = draw_example(Random(2679501324), 1)  # its output is a parameter
    assert not example.graph.ops and example.graph.outputs
    _checked(example)


def test_a_graph_without_outputs_runs() -> None:
    assert _check(_Certain(Random(0)), stored=I, read=I).graph.outputs == ()


class _Certain(Builder):
    """Draws nothing: no call without gradient, only the last values leave."""

    def chance(self, probability: float = 0.5) -> bool:
        return False


def _check(b: Builder, *, stored: Placement, read: Placement) -> Example:
    """All inputs stored in one placement, read by all ops in another, and whole outputs; on two ranks."""
    graph, mesh = b.graph(), Mesh((2,), ("a",))
    strategies = {
        name: next(s for s in found if all(p == read for p in s.signatures[0].inputs))
        for name, found in annotate(graph, mesh).strategies.items()
    }
    whole = {value.name: (I,) for value in graph.outputs}
    assignment = Assignment(strategies, {item.value.name: (stored,) for item in graph.inputs}, {}, whole)
    cotangents = {i: torch.randn(v.shape, dtype=v.dtype) for i, v in enumerate(graph.outputs) if v.needs_grad}
    example = Example(graph, b.values, cotangents, mesh, assignment)
    assert differences(example) == ([], [])
    return example
