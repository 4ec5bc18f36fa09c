"""Live ranges of variables: each is released after its last use, and a region outputs the variables used after it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.codegen.program import AnyStep, OffloadedRegion, RecomputedRegion, Release, reads, writes


def with_releases(steps: Sequence[AnyStep], kept_alive: Iterable[str]) -> tuple[AnyStep, ...]:
    """`steps` with the inputs and outputs of regions, and with variables released after their last use.

    Variables in `kept_alive` are not released. So only tensors that autograd saved stay in memory.
    """
    released: list[AnyStep] = []
    alive = set(kept_alive)  # variables that later steps read
    for step in reversed(steps):
        step = _closed(step, alive) if isinstance(step, RecomputedRegion | OffloadedRegion) else step
        ends = (reads(step) | writes(step)) - alive
        if ends and not isinstance(step, OffloadedRegion):  # an OffloadedRegion releases its own variables
            released.append(Release(tuple(sorted(ends))))
        released.append(step)
        alive = (alive | reads(step)) - writes(step)
    return tuple(reversed(released))


def _closed(region: RecomputedRegion | OffloadedRegion, alive: set[str]) -> RecomputedRegion | OffloadedRegion:
    """`region` with its releases, its inputs in the order of their first
    use, and its outputs that are `alive` after it.
    """
    if isinstance(region, OffloadedRegion):
        return replace(region, steps=with_releases(region.steps, alive))
    made: dict[str, None] = {}
    entering: dict[str, None] = {}
    for step in region.steps:
        entering.update(dict.fromkeys(name for name in sorted(reads(step)) if name not in made))
        made.update(dict.fromkeys(sorted(writes(step))))
    outputs = tuple(name for name in made if name in alive)
    return replace(region, inputs=tuple(entering), outputs=outputs, steps=with_releases(region.steps, outputs))
