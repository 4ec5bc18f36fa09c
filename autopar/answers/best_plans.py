"""`best_plans`: the best plans that differ in their mesh, their stages, or in which parameters are split."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, TypeVar

from autopar.answers.questions import Asked
from autopar.answers.step_terms import AnyPlan, changes, memory_terms, step_terms
from autopar.errors import AutoparError
from autopar.explain.common_text import table
from autopar.mesh import Mesh
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import I, Layout, S, format_layout
from autopar.units import format_bytes, format_seconds

# The most classes of parameters, largest first, whose layouts make plans differ, and the least share of all bytes that
# such a class has.
_MOST_CLASSES, _LEAST_SHARE = 6, 0.02
T = TypeVar("T")
_MOST_TERMS = 3  # that are told of an alternative


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan among the best. `differs`: what it decides otherwise than the best one, "" for that itself."""

    plan: AnyPlan
    differs: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best plans, fastest first."""

    plans: tuple[Alternative, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """The plans as plain dicts, lists, strings and numbers."""
        return [
            {
                "step_s": each.plan.step_s,
                "terms_s": step_terms(each.plan),
                "memory_bytes": memory_terms(each.plan),
                "differs": each.differs.splitlines(),
            }
            for each in self.plans
        ]

    def __str__(self) -> str:
        return format_alternatives(self.plans)


@dataclass(frozen=True)
class _Branch:
    """Plans within `request` that have not been looked at; `plan` is the best of them."""

    request: PlanRequest
    plan: AnyPlan


def best_plans(asked: Asked, count: int, others: Sequence[AnyPlan] = ()) -> Ranking:
    """The plan asked about and the best ones that split most of a class of large parameters otherwise, fastest first.

    A class is a parameter with those of alike layers. `others`: the best plans on other meshes, among which they are
    ranked, too; of plans with the same stages and as many parts of each class only the fastest is. The ranking is that
    of Lawler (1972, "A procedure for computing the k best solutions"): what is left after taking out a plan is cut into
    parts, in each of which one more class is split as in that plan and the next one is not; the best plan of each part
    is searched. So it is as exact as each search, but for plans in which layers of a class differ.
    """
    named = _classes(asked)
    branches = [_Branch(asked.request, asked.plan), *(_Branch(asked.request, plan) for plan in others)]
    ranked = dict[Any, Alternative]()
    while branches and len(ranked) < count:
        best = min(branches, key=lambda branch: (branch.plan is not asked.plan, branch.plan.step_s))
        branches.remove(best)
        ranked.setdefault(_divided(best.plan, named), Alternative(best.plan, _told(asked, best.plan, named)))
        branches += _parts(asked, best, named)
    return Ranking(tuple(ranked.values()))


def _classes(asked: Asked) -> dict[str, tuple[str, ...]]:
    """FQN of the first parameter of a class -> the values of all, largest in bytes first."""
    sizes, values = Counter[str](), defaultdict[str, list[str]](list)
    fqns = {item.value.name: item.fqn for item in asked.graph.inputs}
    for item in asked.graph.of_kind("parameter"):
        first = fqns[asked.folded.representative[item.value.name]]
        sizes[first] += item.value.num_bytes
        values[first].append(item.value.name)
    least = _LEAST_SHARE * sizes.total()
    return {fqn: tuple(values[fqn]) for fqn, size in sizes.most_common(_MOST_CLASSES) if size >= least}


def _parts(asked: Asked, branch: _Branch, named: Mapping[str, tuple[str, ...]]) -> Iterator[_Branch]:
    stored, excluded = _stored(branch.plan), dict(branch.request.excluded)
    for names in named.values():
        here = [name for name in names if name in stored]
        if not here:
            continue
        usual, ndim = _usual({name: _split_axes(stored[name]) for name in here}, here), len(asked.shapes[here[0]])
        with_usual, _ = _split_alike(usual, ndim)
        request = replace(branch.request, excluded=_more(excluded, dict.fromkeys(here, with_usual)))
        with suppress(AutoparError):  # no such plan, or none that fits
            yield _Branch(request, asked.planner(request, branch.plan.mesh))
        excluded = _more(excluded, {name: _split_alike(_split_axes(stored[name]), ndim)[1] for name in here})


def _usual(ways: Mapping[str, T], names: Sequence[str]) -> T:
    """How most of `names` are split, the first of those if several are as many."""
    return Counter(ways[name] for name in names).most_common(1)[0][0]


def _more(excluded: Mapping[str, tuple[str, ...]], added: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {**excluded, **{name: (*excluded.get(name, ()), *texts) for name, texts in added.items()}}


def _split_alike(axes: tuple[bool, ...], ndim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of all layouts of a tensor of `ndim` dims that are split on these axes and no other, and of all others."""
    alike: dict[bool, list[str]] = {True: [], False: []}
    for other in product((I, *map(S, range(ndim))), repeat=len(axes)):
        alike[_split_axes(other) == axes].append(format_layout(other))
    return tuple(alike[True]), tuple(alike[False])


def _split_axes(layout: Layout) -> tuple[bool, ...]:
    return tuple(placement.kind == "S" for placement in layout)


def _stored(plan: AnyPlan) -> dict[str, Layout]:
    """Input -> its stored layout."""
    parts = (plan,) if isinstance(plan, Plan) else plan.stages
    return {name: layout for part in parts for name, layout in part.assignment.layouts.items()}


def _divided(plan: AnyPlan, named: Mapping[str, tuple[str, ...]]) -> Any:
    """The stages, and the numbers of parts of most of each class: plans that share them count as one."""
    parts = _num_parts(plan)
    known = ([name for name in names if name in parts] for names in named.values())
    return _stages(plan), tuple(_usual(parts, names) if names else 0 for names in known)


def _told(asked: Asked, plan: AnyPlan, named: Mapping[str, tuple[str, ...]]) -> str:
    texts = [f"mesh {plan.mesh}{_stages(plan)}"] if _is_elsewhere(asked, plan) else []
    before, after = (_num_parts(asked.plan), _num_parts(plan)) if texts else (_by_axis(asked.plan), _by_axis(plan))
    for fqn, names in named.items():
        known = [name for name in names if name in before and name in after]
        old, new = (_usual(each, known) if known else "" for each in (before, after))
        if old != new:
            texts.append(f"{fqn}{f' and {len(names) - 1} alike' * (len(names) > 1)}: {_split(new)}, not {_split(old)}")
    return "\n".join(texts)


def _is_elsewhere(asked: Asked, plan: AnyPlan) -> bool:
    return plan.mesh != asked.plan.mesh or _stages(plan) != _stages(asked.plan)


def _stages(plan: AnyPlan) -> str:
    return "" if isinstance(plan, Plan) else f"; {plan.schedule}"


def _split(parts: int | str) -> str:
    if isinstance(parts, str):
        return parts
    return "whole" if parts == 1 else f"in {parts} parts"


def _num_parts(plan: AnyPlan) -> dict[str, int]:
    """Input -> into how many parts it is split."""
    mesh = _mesh_of_parts(plan)
    return {
        name: prod(size for size, p in zip(mesh.shape, each) if p.kind == "S") for name, each in _stored(plan).items()
    }


def _by_axis(plan: AnyPlan) -> dict[str, str]:
    """Input -> the axes that split it, as "split on dp and tp"; "whole" if none does."""
    names = _mesh_of_parts(plan).axis_names
    split = {name: [axis for axis, p in zip(names, each) if p.kind == "S"] for name, each in _stored(plan).items()}
    return {name: f"split on {' and '.join(axes)}" if axes else "whole" for name, axes in split.items()}


def _mesh_of_parts(plan: AnyPlan) -> Mesh:
    return (plan if isinstance(plan, Plan) else plan.stages[0]).mesh


def format_alternatives(found: tuple[Alternative, ...]) -> str:
    """A table of plans, each with what it decides otherwise and what that trades."""
    best, lines = found[0].plan, []
    for number, each in enumerate(found, 1):
        traded = [
            f"{'+' if change > 0 else '-'}{format_seconds(abs(change))} {term}"
            for term, change in list(changes(step_terms(best), step_terms(each.plan)).items())[:_MOST_TERMS]
        ]
        memory = format_bytes(sum(memory_terms(each.plan).values()))
        ratio = f"{each.plan.step_s / best.step_s:.3f}"
        lines.append([str(number), format_seconds(each.plan.step_s), ratio, memory, each.differs, "\n".join(traded)])
    return table(lines, ["", "step", "ratio", "memory", "decides otherwise", "trades"])
