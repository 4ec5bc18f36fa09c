"""Plans' files as chance or malice leave them, and what a plan that is read from one must be able to do."""

import ast
import builtins
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import nn

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.costmodel.evaluate import evaluate
from autopar.errors import MeshError, PlanError
from autopar.explain.explain_plan import plan_json, plan_trace
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph, Value
from autopar.ir.trace import trace
from autopar.mesh import Devices, Mesh, parse_mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.plans import serialise, staged_plan
from autopar.plans.plan import Plan, plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.load_program import compile_source, namespace
from tests.planner.cases import CPU, MESH, by_hand, hand_made, traced
from tests.runtime.any_plan import Example, differences

EVIL = "harm()"  # what text from a file must never come to: a call of this builtin
CODE = [
    EVIL,
    f"b,) = self.axes; {EVIL} #",
    f"x\n    {EVIL}\n    #",
    f"'); {EVIL}; ('",
    f"{{{EVIL}}}",
    f"b;{EVIL}",
    f"b) ;{EVIL} #",
] + ["__import__('os').system('true')"]
TEXTS = (
    [
        "",
        " ",
        "\x00",
        "\x1b[2J\x07",
        "\n",
        "\ud800",
        "\u202e",
        "é",
        "class",
        "S(0)",
        "S(9)B",
        "BB",
        "B*P",
        "S(99999999999999999999)",
    ]
    + ["a" * 5000, "../x", "/dev/null", "B -> B", "S(0) B* -> S(0) [role]", "-> P", "pp", "dp", "self", "1f1b"]
    + ["zero-bubble", "adam", "h100"]
)
NUMBERS = [0, 1, -1, 2, 3, 4, 7, 1.5, -0.0, 1e-320, 1e308, 10**30, 10**400, 2**31, 2**63, math.inf, -math.inf, math.nan]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": 0}, {"a": {"b": []}}]


class Tied(nn.Module):
    """An embedding that is the head too, a grouped convolution, a norm and a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Case:
    """A plan's text, what it is read with, and an open mesh of as many devices."""

    text: str
    graph: Graph
    mesh: Mesh

    @property
    def content(self) -> dict[str, Any]:
        return {key: x for key, x in json.loads(self.text).items() if key != "checksum"}


@functools.cache
def cases() -> tuple[Case, ...]:
    """Plans with and without stages, with every choice that a file can hold."""
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    graph = trace(skeleton(Tied().double()), (tokens,), {})
    options = {"cluster": "cpu", "args": (tokens,), "time_limit_s": 0.0}
    found = [autopar.plan(Tied().double(), "dp=2,tp=2", **options)]
    for schedule, mesh in (
        ("1f1b", "pp=2,dp=2"),
        ("zero-bubble", "pp=2,a=2,b=1"),
        ("interleaved", "pp=2,dp=2"),
        (None, "dp=2,tp=2"),
    ):
        found.append(autopar.plan(Tied().double(), mesh, num_microbatches=4, schedule=schedule, **options))
    texts = [Case(plan.dumps(), graph, parse_mesh(str(plan.mesh))) for plan in found]
    return (*texts, *(Case(plan.dumps(), traced("mlp"), MESH) for plan in (hand_made("mlp"), _with_all_choices())))


def _with_all_choices() -> Plan:
    """Parameters gathered again, ops recomputed and offloaded, state on the host, and claims."""
    graph, assignment = traced("mlp"), by_hand("mlp", "zero3")
    names = [op.name for op in graph.ops]
    host = frozenset(item.value.name for item in graph.of_kind("parameter")[:2])
    assignment = replace(assignment, recomputed=(tuple(names[:3]),), offloaded=(tuple(names[:4]),), state_on_host=host)
    hand = {"ddp": serialise.HandCosts(1.0, 2**20)}
    plan = plan_of(graph, assignment, MESH, CPU)
    return replace(plan, lower_bound_s=1e-6, found_by="search", hand=hand, peak_bytes=(2**20,))


def places(item: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or index) of everything inside."""
    waiting = [item]
    while waiting:
        item = waiting.pop()
        for key, value in _items(item):
            yield item, key
            waiting += [value] if isinstance(value, dict | list) else []


def any_value(draw: Random, like: Any) -> Any:
    if isinstance(like, str) and draw.random() < 0.5:
        return draw.choice(
            [
                like + draw.choice(TEXTS),
                like[: len(like) // 2],
                like.replace("B", "S(0)"),
                like.replace("S(0)", "S(1)"),
                like.replace("P", "B"),
                like.replace("B", "B*", 1),
                like * 2,
            ]
        )
    if isinstance(like, int | float) and not isinstance(like, bool) and draw.random() < 0.4:
        return draw.choice([like + 1, like - 1, like * 2, -like, str(like), float(like), like * 10**6])
    if draw.random() < 0.05:
        return nested(draw.choice([10, 100_000]))
    return draw.choice(draw.choice([CODE, TEXTS, NUMBERS, OTHERS]))


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(min(depth, 500)):
        found = [found]
    return found


def change_value(draw: Random, content: Any) -> None:
    where, key = draw.choice(list(places(content)))
    where[key] = any_value(draw, where[key])


def change_head(draw: Random, content: Any) -> None:
    """As `change_value`, but not one of the many strategies and layouts."""
    few = {
        key: value
        for key, value in content.items()
        if key not in ("strategies", "layouts", "kept", "outputs", "stages")
    }
    where, key = draw.choice(list(places(few)))
    (content if where is few else where)[key] = any_value(draw, where[key])


def remove(draw: Random, content: Any) -> None:
    where, key = draw.choice(list(places(content)))
    del where[key]


def rename(draw: Random, content: Any) -> None:
    where, key = draw.choice([place for place in places(content) if isinstance(place[0], dict)])
    where[draw.choice([*CODE, *TEXTS, f"{key}_", *map(str, where)])] = where.pop(key)


def add(draw: Random, content: Any) -> None:
    where, key = draw.choice(list(places(content)))
    if isinstance(where, list):
        where.insert(key, draw.choice([where[key], any_value(draw, where[key])]))
    else:
        where[draw.choice([*CODE, *TEXTS])] = draw.choice([where[key], any_value(draw, where[key])])


def swap(draw: Random, content: Any) -> None:
    """Two fields, often of one object."""
    one, key = draw.choice(list(places(content)))
    other, place = draw.choice(
        [(one, other) for other, _ in _items(one)] if draw.random() < 0.7 else list(places(content))
    )
    one[key], other[place] = other[place], one[key]


def _items(item: Any) -> list[tuple[Any, Any]]:
    return list(item.items() if isinstance(item, dict) else enumerate(item))


def name_with_code(draw: Random, content: Any) -> None:
    """A name that a plan may have, but for what it says."""
    name = draw.choice([*CODE, *CODE, *TEXTS])
    where = draw.choice(["mesh", "mesh", "mesh", "name", "source", "found_by", "hand"])
    if where == "mesh":
        axes = content["mesh"]["axis_names"]
        axes[draw.randrange(len(axes))] = name
    elif where == "hand":
        content["hand"] = {name: {"step_s": 1.0, "memory_bytes": 1}}
    else:
        (content["cluster"] if where in content["cluster"] else content)[where] = name


def take_from_another(draw: Random, content: Any) -> None:
    """A field of the same name from another plan."""
    other = json.loads(draw.choice(cases()).text)
    key = draw.choice(sorted(set(other) & set(content)))
    content[key] = other[key]


def change_layout(draw: Random, content: Any) -> None:
    """Another layout or strategy that stands elsewhere in the plan: often a valid one."""
    part = draw.choice(content["stages"]) if content.get("stages") else content
    key = draw.choice(["strategies", "layouts", "kept", "outputs"])
    if isinstance(part, dict) and isinstance(part.get(key), dict) and part[key]:
        names = list(part[key])
        one = draw.choice(names)
        part[key][one] = json.loads(json.dumps(part[key][draw.choice(names)]))
        if key == "strategies" and draw.random() < 0.5 and part[key][one]:
            part[key][one][0] = part[key][one][-1]


def change_regions(draw: Random, content: Any) -> None:
    part = draw.choice(content["stages"]) if content.get("stages") else content
    names = list(part["strategies"])
    first = draw.randrange(len(names))
    region = names[first : first + draw.randrange(1, 5)]
    part[draw.choice(["recomputed", "offloaded"])] = draw.choice(
        [[region], [region, names[first + 4 :]], [list(reversed(region))]]
    )
    part[draw.choice(["regathered", "state_on_host"])] = draw.sample(list(part["layouts"]), 2)


STRUCTURAL: tuple[Callable[[Random, Any], None], ...] = (
    change_value,
    change_head,
    change_head,
    remove,
    rename,
    add,
    swap,
    take_from_another,
    change_layout,
    change_layout,
    change_regions,
    name_with_code,
    name_with_code,
)


def mutated(draw: Random, case: Case) -> str | bytes:
    """The text with bytes or fields changed; fields with a checksum that is right again."""
    if draw.random() < 0.15:
        return _other_bytes(draw, case.text)
    content, unchanged = case.content, case.text
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            draw.choice(STRUCTURAL)(draw, content)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
            continue  # the change before left nothing for this one
    try:
        text = serialise.signed(content)
    except (RecursionError, TypeError, ValueError):  # what JSON cannot hold: parts within themselves, numbers as keys
        text = unchanged
    if draw.random() < 0.02:
        text = text.replace(": ", ": " + "[" * 100_000, 1)
    if draw.random() < 0.02:
        text = text.replace('"format"', '"format": 2, "format"', 1)
    return text


def _other_bytes(draw: Random, text: str) -> bytes:
    found = bytearray(text.encode())
    for _ in range(draw.choice((1, 1, 4))):
        at, end = sorted(draw.choices(range(len(found) + 1), k=2))
        end = min(end, at + draw.choice((1, 10, 1000)))
        piece = draw.choice(
            [b"", b"\xff", b"\x00", b"9" * 5000, b"[" * 20_000, bytes([draw.randrange(256)]), bytes(found[at:end]) * 2]
        )
        found[at:end] = piece
    return bytes(found)


class Watch:
    """While it is entered: whether text was run that should not be, a file was opened for writing, or a process
    started.
    """

    def __init__(self) -> None:
        self.is_on, self.seen = False, []
        builtins.harm = lambda: self.seen.append("harm")
        sys.addaudithook(self._audit)

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False

    def _audit(self, event: str, args: tuple) -> None:
        if not self.is_on:
            return
        is_written = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if is_written or event.startswith(
            ("os.system", "subprocess.", "socket.connect", "os.remove", "os.rename", "os.exec", "shutil.")
        ):
            self.seen.append(f"{event} {args[:2]}")


def read(text: str | bytes, case: Case, mesh: Mesh | Devices) -> Plan | StagedPlan | None:
    """The plan; None if it is refused as plans are. A file that is no text is refused by `serialise.read` in the same
    way.
    """
    try:
        return staged_plan.loads(text if isinstance(text, str) else text.decode(), case.graph, mesh)
    except UnicodeDecodeError:
        return None
    except (PlanError, MeshError) as error:
        assert str(error).isprintable() and len(str(error)) < 2000, f"an error shows what a file holds: {error!r}"
        return None


def check(plan: Plan | StagedPlan, case: Case, *, is_run: bool) -> None:
    """Everything that a plan just made passes. is_run: the generated program too, on tensors without data."""
    again = staged_plan.loads(plan.dumps(), case.graph, plan.mesh)
    assert again.dumps() == plan.dumps() and again == plan
    assert plan.is_from_file and math.isfinite(plan.step_s) and 0 <= plan.lower_bound_s <= plan.step_s
    text = plan.explain()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert not plan.lower_bound_s or "From the plan's file" in text
    json.dumps(plan_json(plan), allow_nan=False)
    plan_trace(plan)
    for stage in plan.stages if isinstance(plan, StagedPlan) else (plan,):
        assert stage.costs == evaluate(
            stage.graph, stage.assignment, stage.mesh, stage.cluster, training=stage.training
        )
        own = stage.costs.memory_bytes  # the transient is less what is not there with it
        assert all(math.isfinite(x) and (x >= 0 or kind == "transient") for kind, x in own.items())
        assert math.isfinite(stage.step_s) and stage.step_s >= 0 and stage.costs.total_memory_bytes >= 0
        source = emit(lower(stage.graph, stage.mesh, stage.assignment, is_split=isinstance(plan, StagedPlan)))
        assert all(isinstance(node, ast.FunctionDef) for node in ast.parse(source).body)
        assert not {"harm", "__import__"} & {getattr(node, "id", "") for node in ast.walk(ast.parse(source))}
        compile_source(source, namespace())
    if is_run:
        assert all(peak > 0 for peak in rank_peaks(plan))
        _compare_with_one_device(
            plan.stages if isinstance(plan, StagedPlan) else (plan,), is_split=isinstance(plan, StagedPlan)
        )


def _compare_with_one_device(plans: Sequence[Plan], *, is_split: bool) -> None:
    """Each program computes on its ranks, which are threads, what its graph computes on one device, and issues what is
    priced.
    """
    torch.manual_seed(0)
    for plan in plans:
        values = {item.value.name: _content(item.value) for item in plan.graph.inputs}
        cotangents = {
            i: torch.randn(value.shape, dtype=value.dtype)
            for i, value in enumerate(plan.graph.outputs)
            if value.needs_grad
        }
        named = replace(plan.graph, inputs=tuple(replace(item, fqn=item.value.name) for item in plan.graph.inputs))
        example = Example(named, values, cotangents, plan.mesh, plan.assignment, is_split)
        numbers, collectives = differences(example)
        assert not numbers + collectives, "\n".join([*numbers, *collectives])


def _content(value: Value) -> torch.Tensor:
    return (
        torch.randn(value.shape, dtype=value.dtype)
        if value.dtype.is_floating_point
        else torch.randint(0, 16, value.shape)
    )
