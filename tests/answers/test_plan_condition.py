"""Conditions on a plan's figures, beside Python's own reading of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.answers.plan_condition import FIGURES, parse_condition, why_failed
from autopar.cli import main
from autopar.errors import AutoparError

VALUES = {"step_ms": 420.0, "gap": 0.02, "memory_gib": 60.0, "bound_ms": 411.6}
SIDES = st.sampled_from([*VALUES, "420", "2%", "0.5", "1e2", "60."])
COMPARISONS = st.tuples(SIDES, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), SIDES).map(" ".join)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


@given(CONDITIONS)
def test_conditions_hold_as_python_reads_them(text):
    assert parse_condition(text).holds(VALUES) == eval(text.replace("2%", "0.02"), {}, dict(VALUES))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at character 1: expected a number or one of step_ms.* found its end"),
        ("step_ms", "at character 8: expected one of <= .* found its end"),
        ("step_ms >", "at character 10: expected a number .* found its end"),
        ("speed > 3", "at character 1: .*step_ms, bound_ms.* found 'speed > 3'"),
        ("step_ms > 3 gap > 1", "at character 13: expected and, or, or the end"),
        ("(step_ms > 3", "at character 13: expected '\\)'"),
        ("step_ms = 3", "at character 9: expected one of"),
        ("__import__('os')", "at character 1"),
        ("step_ms > 1; gap > 2", "at character 12: expected a figure"),
        ("step_ms > 1e999", "expected a finite number"),
        ("(" * 1000, "at most 50 parentheses"),
        ("3 < gap > 2", "expected and, or, or the end"),
    ],
)
def test_the_place_of_what_is_no_condition_is_told(text, words):
    with pytest.raises(AutoparError, match=words):
        parse_condition(text)


def test_what_failed_is_told_with_its_figures():
    given = SimpleNamespace(state_on_host=frozenset({"a", "b"}))
    plan: Any = SimpleNamespace(
        step_s=0.431,
        lower_bound_s=0.42,
        gap=0.0255,
        peak_bytes=(3 * 2**30, 6 * 2**30),
        fullest_bytes=(6 * 2**30, 8 * 2**30),
        assignment=given,
    )
    assert why_failed(parse_condition("step_ms > 420 or gap > 5%"), plan) == "step_ms 431 > 420"
    assert why_failed(parse_condition("gap > 2% and memory_share >= 75%"), plan) == (
        "gap 2.55% > 2% and memory_share 75.00% >= 75%"
    )
    assert why_failed(parse_condition("memory_gib > 6 or step_ms > 500"), plan) == ""
    assert FIGURES["parameters_on_host"](plan) == 2


def test_the_command_ends_with_status_1(capsys, tmp_path):
    path = tmp_path / "tiny_net.py"
    path.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),), {}\n", encoding="utf-8"
    )
    command = ["explain", f"{path}:build", "--mesh", "dp=2", "--cluster", "cpu", "--fail-if"]
    assert main([*command, "step_ms > 1000000"]) == 0
    assert main([*command, "step_ms >= 0 or gap > 2%"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("failed: step_ms ")
    with pytest.raises(SystemExit, match="2"):
        main([*command, "step_ms >"])
    assert "at character 10" in capsys.readouterr().err
