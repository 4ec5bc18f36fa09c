import json

import pytest

from autopar.answers.compare_plans import compare
from autopar.answers.comparison_text import copies, format_comparison
from autopar.cli import main
from tests.answers.asked_plans import FILE, asked


def test_a_plan_does_not_differ_from_itself():
    plan = asked("dp=2,tp=2").plan
    found = compare(plan, plan)
    assert not found.rows and not found.followed and found.num_unmatched == (0, 0)
    assert "No difference: a tie" in format_comparison(found)


def test_one_block_that_differs_is_one_row_and_so_are_all_blocks():
    ask = asked("dp=2,tp=2")
    all_blocks = ask.again(pins={f"blocks.{n}.2.bias": "BB" for n in range(4)} | {"head.bias": "S(0)B"})
    found = compare(ask.plan, all_blocks)
    assert {row.name: len(row.copies) for row in found.rows}["head.bias"] == 1
    assert all(len(row.copies) in (1, 3, 4) for row in found.rows)


def test_versions_of_a_model_with_stages_and_without_are_compared():
    found = compare(asked("dp=2,tp=2").plan, asked("pp=2,dp=2", depth=5).plan)
    assert found.facts["mesh"] == ("dp=2,tp=2", "pp=2,dp=2") and found.num_unmatched[1] > 0
    assert sum(b - a for a, b in found.terms_s.values()) == pytest.approx(found.step_s[1] - found.step_s[0], abs=1e-9)


def test_numbers_of_copies_are_ranges():
    assert copies(tuple(f"h.{n}.x.0" for n in (3, 0, 1, 2))) == "4 (0-3)"
    assert copies(("a.0.b.1", "a.1.b.0")) == "2"


def test_the_command_compares_files_and_refuses_those_of_another_model(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    asked("dp=2,tp=2").plan.save(tmp_path / "a.json")
    asked("pp=2,dp=2").plan.save(tmp_path / "b.json")
    target, files = f"{tmp_path}/net.py", [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["diff", *files, "--model", f"{target}:build", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx([asked("dp=2,tp=2").plan.step_s, asked("pp=2,dp=2").plan.step_s])
    assert main(["diff", *files, "--model", f"{target}:deeper"]) == 2
    assert "model" in capsys.readouterr().err
