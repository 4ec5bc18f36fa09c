"""`PageData`: the content of a page, as its file has it in JSON."""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any

from autopar.answers.scaling import ScalingPoint, efficiency
from autopar.page.block_tree import ModelBlock, block_json
from autopar.page.plan_view import PlanView
from autopar.plans.serialise import HandCosts

FORMAT = 1  # of the JSON, which the page's script reads
# Of the views of a page: packed, beside 0.7 MB of scripts, so that it can be mailed; and as JSON, of which 16.5 MB
# (Llama-3 405B in 128 stages with three hand plans) were ready after 0.9 to 1.7 s in Chromium on an EPYC.
MOST_BYTES, MOST_JSON_BYTES = 4_200_000, 18_000_000


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """A line of the table of plans. `ratio`: of its step to that of the first; `view`: its number, None if only its
    costs are known.
    """

    name: str
    step_s: float
    ratio: float | None
    memory_bytes: int
    fits: bool
    view: int | None


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """A point of a sweep; figures are None where there are none. `view`: the number of its plan's view."""

    figures: Mapping[str, Any]
    gap: float | None
    scaling: float | None
    view: int | None


@dataclass(frozen=True)
class PageData:
    """The content of a page of a plan and others beside it, or of a sweep with the plan of each point."""

    title: str
    views: tuple[PlanView, ...]
    compared: tuple[ComparedPlan, ...] = ()
    points: tuple[SweptPoint, ...] = ()
    format: int = FORMAT
    version: str = ""

    def as_json(self) -> str:
        """The content on one line, without spaces."""
        return json.dumps(self, default=_plain, separators=(",", ":"), allow_nan=False)

    def packed(self) -> str:
        """The content as a page has it: compressed by gzip, in base64."""
        return base64.b64encode(gzip.compress(self.as_json().encode(), mtime=0)).decode()


def num_bytes(views: Sequence[PlanView]) -> tuple[int, int]:
    """The bytes that views take in a page, and as JSON."""
    data = PageData("", tuple(views))
    return len(data.packed()), len(data.as_json())


def plan_page(title: str, views: Sequence[PlanView], hand: Mapping[str, HandCosts]) -> PageData:
    """The page of the first of `views`, beside the others and hand plans of which only costs are known."""
    first, known = views[0], {view.name for view in views}

    def compared(name: str, step_s: float, memory_bytes: int, view: int | None) -> ComparedPlan:
        fits = first.memory_limit_bytes is None or memory_bytes <= first.memory_limit_bytes
        return ComparedPlan(name, step_s, step_s / first.step_s if first.step_s else None, memory_bytes, fits, view)

    rows = [compared(view.name, view.step_s, view.memory_bytes, number) for number, view in enumerate(views)]
    rows += [compared(name, x.step_s, x.memory_bytes, None) for name, x in hand.items() if name not in known]
    rows[1:] = sorted(rows[1:], key=lambda row: row.step_s)
    return PageData(title, tuple(views), tuple(rows), version=version("autopar"))


def sweep_page(title: str, points: Sequence[tuple[ScalingPoint, PlanView | None]]) -> PageData:
    """The page of a sweep: its points, each with the view of its plan if there is one."""
    views = tuple(view for _, view in points if view is not None)
    numbers, alone, swept = iter(range(len(views))), [point for point, _ in points], []
    for point, view in points:
        figures = {name: _number(x) for name, x in ((each.name, getattr(point, each.name)) for each in fields(point))}
        gap = None if point.error else 1 - point.lower_bound_s / point.step_s
        scaling = None if point.error else efficiency(point, alone)
        swept.append(SweptPoint(figures, gap, scaling, None if view is None else next(numbers)))
    return PageData(title, views, points=tuple(swept), version=version("autopar"))


def _number(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _plain(x: Any) -> Any:
    if isinstance(x, ModelBlock):
        return block_json(x)
    if is_dataclass(x):
        return {each.name: getattr(x, each.name) for each in fields(x)}
    if isinstance(x, Mapping):
        return dict(x)
    raise TypeError(f"no JSON for {type(x).__name__}")
