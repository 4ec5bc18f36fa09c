"""`compare`: two plans side by side: their time and memory by term, and each decision in which they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.answers.plan_rows import PlanRow, plan_rows, without_numbers
from autopar.answers.step_terms import AnyPlan, changes, memory_terms, step_terms
from autopar.plans.plan import Plan
from autopar.units import format_bytes

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A decision of which two plans differ, once for all copies of a block that differ alike.

    `name`: of the tensor, or the module and the op, with "*" for the numbers of copies; `copies`: FQNs of the tensors
    or modules. `before`, `after`: the layouts; "" where a plan has no such op. `changes_s`: term -> seconds of a step,
    after less before, of all copies.
    """

    name: str
    copies: tuple[str, ...]
    before: str
    after: str
    changes_s: Mapping[str, float]

    @property
    def change_s(self) -> float:
        """Seconds of a step, after less before."""
        return sum(self.changes_s.values())


@dataclass(frozen=True)
class Comparison:
    """Two plans, `names`, side by side.

    `facts`: what they are plans of -> (before, after). `terms_s`, `memory_bytes`: term -> (before, after), whose sums
    are the steps and the estimates. `rows`: the decisions that differ, by the size of their change. `followed`: ops and
    tensors with the same decision whose time differs all the same, as for a collective between it and another one, if
    both plans are for one mesh and cluster. `num_same`: the number of decisions that do not differ; `num_unmatched`: of
    the ops and tensors that one model has and the other has not.
    """

    names: tuple[str, str]
    facts: Mapping[str, tuple[str, str]]
    step_s: tuple[float, float]
    terms_s: Mapping[str, tuple[float, float]]
    memory_bytes: Mapping[str, tuple[float, float]]
    rows: tuple[ChangedRow, ...]
    followed: tuple[ChangedRow, ...]
    num_same: int
    num_unmatched: tuple[int, int] = (0, 0)

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain dicts, lists, strings and numbers."""
        return asdict(self)


def compare(before: AnyPlan, after: AnyPlan, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """The plans side by side, which may be for two meshes, clusters or versions of a model."""
    rows = plan_rows(before), plan_rows(after)
    shared = rows[0].keys() & rows[1].keys()
    differ = [key for key in rows[1] if key in shared and _differ(rows[0][key], rows[1][key])]
    is_one = (before.mesh, before.cluster, before.fingerprint) == (after.mesh, after.cluster, after.fingerprint)
    same = [key for key in rows[1] if key in shared and not _differ(rows[0][key], rows[1][key])]
    follow = [key for key in same if is_one and changes(rows[0][key].seconds, rows[1][key].seconds)]
    ranked = [tuple(sorted(_grouped(*rows, keys), key=lambda row: -abs(row.change_s))) for keys in (differ, follow)]
    return Comparison(
        names=names,
        facts={what: (a, b) for (what, a), b in zip(_facts(before).items(), _facts(after).values())},
        step_s=(before.step_s, after.step_s),
        terms_s=_paired(step_terms(before), step_terms(after)),
        memory_bytes=_paired(memory_terms(before), memory_terms(after)),
        rows=ranked[0],
        followed=ranked[1],
        num_same=len(shared) - len(differ),
        num_unmatched=(len(rows[0]) - len(shared), len(rows[1]) - len(shared)),
    )


def _differ(one: PlanRow, other: PlanRow) -> bool:
    have_stages = one.stage >= 0 and other.stage >= 0
    return one.layout != other.layout or (have_stages and one.stage != other.stage)


def _grouped(before: Mapping[Key, PlanRow], after: Mapping[Key, PlanRow], keys: list[Key]) -> Iterator[ChangedRow]:
    groups: dict[tuple, list[Key]] = {}
    for key in keys:
        module, name, number = key
        have_stages = before[key].stage >= 0 and after[key].stage >= 0
        texts = tuple(_text(rows[key], have_stages) for rows in (before, after))
        groups.setdefault((without_numbers(module), without_numbers(name), number, *texts), []).append(key)
    for (module, name, number, first, second), members in groups.items():
        seconds: dict[str, float] = {}
        for key in members:
            for term, change in changes(before[key].seconds, after[key].seconds).items():
                seconds[term] = seconds.get(term, 0.0) + change
        if len(members) == 1:
            module, name, _ = members[0]
        label = f"{module} {name}{f' ({number + 1})' if number else ''}".strip()
        yield ChangedRow(label, tuple(module or name for module, name, _ in members), first, second, seconds)


def _text(row: PlanRow, have_stages: bool) -> str:
    return f"stage {row.stage}; {row.layout}" if have_stages else row.layout


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in dict.fromkeys((*before, *after))}


def _facts(plan: AnyPlan) -> dict[str, str]:
    """The model, mesh and options of a plan, as text."""
    schedule = "none" if isinstance(plan, Plan) else str(plan.schedule)
    limit = plan.memory_limit_bytes
    return {
        "model": plan.fingerprint[:12],
        "mesh": str(plan.mesh),
        "cluster": plan.cluster.name,
        "optimizer": plan.training.described,
        "schedule": schedule,
        "memory limit": "none" if limit == float("inf") else format_bytes(limit),
        "found by": plan.found_by or "not said",
    }
