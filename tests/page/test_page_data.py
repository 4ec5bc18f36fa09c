"""The content of a page: the figures of the plan, each once, and as text whatever a name has in it."""

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.answers.scaling import ScalingPoint
from autopar.answers.step_terms import step_terms
from autopar.cli import main, page_option
from autopar.cli.page_option import write_plan_page
from autopar.errors import AutoparError
from autopar.page import write_page
from autopar.page.block_tree import ModelBlock, block_tree
from autopar.page.leaves import leaves
from autopar.page.page_data import num_bytes, plan_page, sweep_page
from autopar.page.plan_view import TICKS, plan_view
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import plans_of_points
from autopar.plans.plan import Plan
from tests.page.page_cases import DEPTH, NAUGHTY, model, page, planned
from tests.planner.cases import hand_made

STAGED = "pp=2,dp=2"


def parts_of(plan):
    return [plan] if isinstance(plan, Plan) else plan.stages


def within(block: ModelBlock) -> Iterator[ModelBlock]:
    yield block
    for inside in block.blocks:
        yield from within(inside)


def plans() -> list:
    kinds = [("llama", "zero3"), ("gpt2", "megatron"), ("vgg13", "ddp")]
    return [*(hand_made(*each) for each in kinds), planned("dp=2,tp=2"), planned(STAGED)]


@pytest.mark.parametrize("number", range(5))
def test_leaves_and_blocks_have_all_seconds_of_the_plan(number: int) -> None:
    plan = plans()[number]
    found = tuple(leaves(plan))
    for phase in ("forward", "backward"):
        expected = sum(getattr(part.costs, f"compute_{phase}_s") for part in parts_of(plan))
        assert sum(leaf.seconds.get(phase, 0.0) for leaf in found) == pytest.approx(expected)
        expected = sum(part.costs.communication_s(phase) for part in parts_of(plan))
        rows = [row for leaf in found for row in leaf.collectives if row.phase == phase]
        assert sum(row.time_s for row in rows) == pytest.approx(expected)
    root = block_tree(found)
    assert root.time_s == pytest.approx(sum(leaf.time_s for leaf in found))
    in_blocks = Counter[str]()
    for block in within(root):
        if block.leaf:
            in_blocks[block.leaf.kind, block.names[0]] += block.times
    assert in_blocks == Counter((leaf.kind, leaf.name) for leaf in found)


def test_copies_that_are_alike_are_one_block() -> None:
    root = block_tree(leaves(hand_made("llama", "zero3")))
    layers = [block for block in within(root) if len(block.names) > 1]
    assert layers, "no layers are folded"
    (blocks,) = [block for block in plan_view("", planned("dp=2,tp=2")).root.blocks if block.names == ("blocks",)]
    assert sorted(name for copies in blocks.blocks for name in copies.names) == sorted(map(str, range(DEPTH)))
    assert len(blocks.blocks) < DEPTH


def test_the_timeline_and_the_memory_are_those_of_the_plan() -> None:
    for plan in plans():
        view = plan_view("", plan)
        ends = [lane.starts[-1] + lane.lengths[-1] for lane in view.timeline.lanes]
        assert max(ends) == pytest.approx(TICKS, rel=1e-5)
        for lane in view.timeline.lanes:
            assert len(lane.labels) == len(lane.kinds) == len(lane.starts) == len(lane.lengths)
            assert list(lane.starts) == sorted(lane.starts)
        for curve in view.curves:
            held = plan.memory_bytes[curve.rank]
            assert max(map(sum, curve.bytes)) <= held and max(curve.states) < len(curve.bytes)
            column = curve.kinds.index("activations")
            expected = view.ranks[curve.rank].estimate_bytes["activations"]
            assert max(row[column] for row in curve.bytes) == expected
        assert sum(view.terms.values()) == pytest.approx(plan.step_s) and view.terms == step_terms(plan)


# The sweep of plans in stages adds up the times of blocks, which tiny layers take otherwise together.
@pytest.mark.parametrize(("mesh", "precision"), [("dp=2,tp=2", 1e-6), (STAGED, 0.2)])
def test_hand_plans_beside_the_plan_cost_what_its_table_says(mesh: str, precision: float) -> None:
    plan, content = planned(mesh), page(mesh)
    assert {row.name for row in content.compared} == {"this plan", *plan.hand} and len(content.views) > 3
    for row in content.compared[1:]:
        assert row.view is not None and content.views[row.view].name == row.name
        assert (row.step_s, row.memory_bytes) == (
            pytest.approx(plan.hand[row.name].step_s, rel=precision),
            pytest.approx(plan.hand[row.name].memory_bytes, rel=1e-6),
        )


def test_a_hand_plan_in_stages_that_is_not_made_as_it_cost_has_costs_alone() -> None:
    plan = planned(STAGED)
    first, *others = plan.hand
    named = {"pp=2,<b>,1f1b,m=8": HAND, "pp=3,ddp,1f1b,m=8": HAND, "ddp": HAND}
    claimed = {name: plan.hand[name] for name in others} | {first: replace(plan.hand[first], step_s=1.0)} | named
    made = dict(plans_of_points(replace(plan, hand=claimed)))
    assert sorted(made) == sorted(others) and len(others) > 3
    for name, by_hand in made.items():
        assert str(by_hand.schedule.name) in name and by_hand.found_by == f"hand plan {name}"
    whole = plans_of_points(replace(plan, is_from_file=True))
    assert {name for name, _ in whole} == set(plan.hand)


def test_a_page_has_the_views_that_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = planned(STAGED), tmp_path / "page.html"
    write_plan_page(str(path), "", {"this plan": plan}, model(), PlanRequest(), lambda _: None)
    views = content_of(read(path.read_text()))["views"]
    assert [view["name"] for view in views[1:]] == list(plan.hand)
    of_two = [sum(sizes) for sizes in zip(*(num_bytes([view]) for view in page(STAGED).views[:2]))]
    for name, most in zip(("MOST_BYTES", "MOST_JSON_BYTES"), of_two):
        with monkeypatch.context() as patch:
            patch.setattr(page_option, name, most + 500)
            write_plan_page(str(path), "", {"this plan": plan}, model(), PlanRequest(), lambda _: None)
        content = content_of(read(path.read_text()))
        assert len(content["views"]) == 2 and len(content["compared"]) == 1 + len(plan.hand)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        self.text[attributes.get("id") or tag] = self.text.get(attributes.get("id") or tag, "") + data


def content_of(elements: Elements) -> dict[str, Any]:
    return json.loads(gzip.decompress(base64.b64decode(elements.text["content"])))


def read(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    return elements


def test_a_name_of_a_module_ends_no_element_and_begins_none() -> None:
    titled = plan_page("</title><script>alert(2)</script>", page("dp=2,tp=2").views, {"</script><script>": HAND})
    text = write_page.page_html(titled)
    elements = read(text)
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    assert len(scripts) == 2 + 6 and "alert(2)</script>" not in text.split("</head>")[0].split("<title>")[0]
    content = content_of(elements)
    assert content["title"].startswith("</title>") and NAUGHTY in json.dumps(content)
    assert "</script><script>" in [row["name"] for row in content["compared"]]


HAND = planned("dp=2,tp=2").hand["ddp"]


def test_a_page_has_all_that_it_needs_and_runs_nothing_else() -> None:
    text = write_page.page_html(page(STAGED))
    elements = read(text)
    assert not [attributes for _, attributes in elements.tags if {"src", "href", "srcset"} & attributes.keys()]
    (policy,) = [
        attributes["content"] for tag, attributes in elements.tags if tag == "meta" and "http-equiv" in attributes
    ]
    assert policy.startswith("default-src 'none'")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 6 and policy.endswith("script-src " + " ".join(f"'sha256-{each}'" for each in hashes))
    own = "".join(scripts[1:]) + re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert not re.search(r"https?:|innerHTML|insertAdjacent|document\.write|eval\(|fetch\(|@import|url\(", own)
    assert "Apache License" in elements.text["licences"] and "MIT License" in elements.text["licences"]


def test_the_page_of_a_sweep_has_a_view_for_each_plan() -> None:
    good = ScalingPoint("m", "h100", 4, 8, 0, "dp=4", 1.0, 0.9, 8.0, 0.0, 0.5, 1e9)
    bad = ScalingPoint("m", "h100", 8, 8, 0, error="does not fit <b>")
    content = sweep_page("m", [(bad, None), (good, page(STAGED).views[0])])
    told = json.loads(content.as_json())
    assert [point["view"] for point in told["points"]] == [None, 0] and told["points"][0]["figures"]["mfu"] is None
    assert told["points"][1]["gap"] == pytest.approx(0.1) and told["points"][1]["scaling"] == 1.0
    assert "error" in told["points"][0]["figures"] and len(write_page.page_html(content)) < 5e6


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(AutoparError, match=r"--html .*there is no folder"):
        write_page.can_write(str(tmp_path / "none" / "page.html"), "--html")
    with pytest.raises(AutoparError, match=r"expected the name of a file"):
        write_page.can_write(str(tmp_path), "--html")
    write_page.can_write(str(path), "--html")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.plans.serialise.os.fsync", full)
    with pytest.raises(AutoparError, match="No space left"):
        write_page.write_page(str(path), page(STAGED))
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"] and path.read_text() == "before"


def test_no_page_is_written_of_a_plan_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(8, 8),), {}\n"
    )
    plan, html = tmp_path / "net.plan.json", tmp_path / "page.html"
    command = ["explain", f"{tmp_path}/net.py:build", "--mesh", "2", "--cluster", "cpu"]
    assert main([*command, "--save", str(plan), "--html", str(html)]) == 0
    assert "</html>" in html.read_text()
    html.unlink()
    for broken, reason in (
        (plan.read_text()[:-300], "cut off"),
        (re.sub(r'"format": \d+', '"format": 99', plan.read_text()), "has format 99"),
        (plan.read_text().replace('"adamw"', '"sgd"'), "checksum|damaged|edited"),
    ):
        plan.write_text(broken)
        capsys.readouterr()
        assert main([*command, "--plan", str(plan), "--html", str(html)]) == 2
        assert re.search(f"error: .*({reason})", capsys.readouterr().err) and not html.exists()


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", STAGED])
def test_a_notebook_shows_the_plan_in_short(mesh: str) -> None:
    plan = planned(mesh)
    found = replace(plan, found_by="<script>alert(1)</script>", is_from_file=True)
    text = found._repr_html_()
    assert "<script" not in text and "&lt;script&gt;" in text and "not verified" in text
    assert ("bubble" in text) == mesh.startswith("pp") and len(plan._repr_html_()) < 5000
    elements = read(text)
    assert {tag for tag, _ in elements.tags} <= {"div", "b", "table", "tr", "th", "td"}
