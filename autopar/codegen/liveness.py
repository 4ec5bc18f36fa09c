"""How long variables live: each is dropped after its last reading, and a region gives what is read after it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.codegen.program import AnyStep, Offload, Region, Release, reads, writes


def with_releases(steps: Sequence[AnyStep], kept_alive: Iterable[str]) -> tuple[AnyStep, ...]:
    """`steps` with the inputs and outputs of regions, and each variable released after its last reading but those
    `kept_alive`: so only what autograd saved stays in memory.
    """
    found: list[AnyStep] = []
    alive = set(kept_alive)  # what is read further on
    for step in reversed(steps):
        step = _closed(step, alive) if isinstance(step, Region | Offload) else step
        ends = (reads(step) | writes(step)) - alive
        if ends and not isinstance(step, Offload):  # which releases its own
            found.append(Release(tuple(sorted(ends))))
        found.append(step)
        alive = (alive | reads(step)) - writes(step)
    return tuple(reversed(found))


def _closed(region: Region | Offload, alive: set[str]) -> Region | Offload:
    """`region` with its releases, what enters it, in the order of reading, and what of it is `alive` afterwards."""
    if isinstance(region, Offload):
        return replace(region, steps=with_releases(region.steps, alive))
    made: dict[str, None] = {}
    entering: dict[str, None] = {}
    for step in region.steps:
        entering.update(dict.fromkeys(name for name in sorted(reads(step)) if name not in made))
        made.update(dict.fromkeys(sorted(writes(step))))
    outputs = tuple(name for name in made if name in alive)
    return replace(region, inputs=tuple(entering), outputs=outputs, steps=with_releases(region.steps, outputs))
