"""`best_plans`: the best plans that differ in their mesh, their stages, or in which parameters are split."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.answers.questions import Asked
from autopar.answers.step_terms import AnyPlan, changes, memory_terms, step_terms
from autopar.errors import AutoparError
from autopar.explain.common_text import table
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import I, Layout, S, format_layout
from autopar.units import format_bytes, format_seconds

# The most classes of parameters, largest first, whose layouts make plans differ, and the least share of all bytes that
# such a class has.
_MOST_CLASSES, _LEAST_SHARE = 6, 0.02
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
    """The best plan and the best ones after it that split one of the largest parameters over other axes, fastest first.

    `others`: the best plans on other meshes, among which they are ranked, too. The ranking is that of Lawler (1972, "A
    procedure for computing the k best solutions"): what is left after taking out a plan is cut into parts, in each of
    which one more parameter, with its copies, is split as in that plan and the next one is not; the best plan of each
    part is searched. So it is as exact as each search.
    """
    named = _classes(asked)
    branches = [_Branch(asked.request, asked.plan), *(_Branch(asked.request, plan) for plan in others)]
    ranked = list[Alternative]()
    while branches and len(ranked) < count:
        best = min(branches, key=lambda branch: branch.plan.step_s)
        branches.remove(best)
        ranked.append(Alternative(best.plan, _told(asked, best.plan, named)))
        branches += _parts(asked, best, named)
    return Ranking(tuple(ranked))


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
        alike = {name: _split_alike(stored[name], len(asked.shapes[name])) for name in here}
        request = replace(branch.request, excluded=_more(excluded, {name: texts for name, (texts, _) in alike.items()}))
        with suppress(AutoparError):  # no such plan, or none that fits
            yield _Branch(request, asked.planner(request, branch.plan.mesh))
        excluded = _more(excluded, {name: texts for name, (_, texts) in alike.items()})


def _more(excluded: Mapping[str, tuple[str, ...]], added: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {**excluded, **{name: (*excluded.get(name, ()), *texts) for name, texts in added.items()}}


def _split_alike(layout: Layout, ndim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of all layouts of a tensor of `ndim` dims, split on the same axes as `layout`, and of all others."""
    alike: dict[bool, list[str]] = {True: [], False: []}
    for other in product((I, *map(S, range(ndim))), repeat=len(layout)):
        alike[_split_axes(other) == _split_axes(layout)].append(format_layout(other))
    return tuple(alike[True]), tuple(alike[False])


def _split_axes(layout: Layout) -> tuple[bool, ...]:
    return tuple(placement.kind == "S" for placement in layout)


def _stored(plan: AnyPlan) -> dict[str, Layout]:
    """Input -> its stored layout."""
    parts = (plan,) if isinstance(plan, Plan) else plan.stages
    return {name: layout for part in parts for name, layout in part.assignment.layouts.items()}


def _told(asked: Asked, plan: AnyPlan, named: Mapping[str, tuple[str, ...]]) -> str:
    texts = [_shape(plan)] if _shape(plan) != _shape(asked.plan) else []
    before, after = (_by_axis(asked.plan), _by_axis(plan))
    for fqn, names in named.items():
        pairs = dict.fromkeys((before.get(name, ""), after.get(name, "")) for name in names)
        texts += [f"{fqn}: {b or 'whole'}, not {a or 'whole'}" for a, b in pairs if a != b]
    return "\n".join(texts)


def _shape(plan: AnyPlan) -> str:
    return f"mesh {plan.mesh}" + ("" if isinstance(plan, Plan) else f"; {plan.schedule}")


def _by_axis(plan: AnyPlan) -> dict[str, str]:
    """Input -> the axes that split it, as "split on dp and tp"; "" if it is whole."""
    mesh = (plan if isinstance(plan, Plan) else plan.stages[0]).mesh
    split = {
        name: [axis for axis, p in zip(mesh.axis_names, each) if p.kind == "S"] for name, each in _stored(plan).items()
    }
    return {name: f"split on {' and '.join(axes)}" if axes else "" for name, axes in split.items()}


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
