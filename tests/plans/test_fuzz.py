"""Whatever a plan's file holds, it is refused or it is a plan."""

import secrets
from collections import Counter
from random import Random

import pytest

from autopar.mesh import Devices
from tests.plans.fuzz import Watch, cases, check, mutated, read

WATCH = Watch()


def fuzz(seed: int, num_mutations: int, share_run: float) -> Counter[str]:
    """Read so many mutated plans; the seed is in the error, and repeats it."""
    draw, outcomes = Random(seed), Counter()
    for number in range(num_mutations):
        case = draw.choice(cases())
        text, is_run = mutated(draw, case), draw.random() < share_run
        mesh = draw.choice([case.mesh, case.mesh, Devices(case.mesh.num_devices)])
        try:
            with WATCH:
                plan = read(text, case, mesh)
                if plan is not None:
                    check(plan, case, is_run=is_run)
        except BaseException as error:
            shown = text if len(text) < 20_000 else text[:2000]
            raise AssertionError(
                f"seed {seed}, mutation {number} on {mesh}: {type(error).__name__}: {error}\n{shown!r}"
            ) from error
        assert not WATCH.seen, f"seed {seed}, mutation {number}: {WATCH.seen}"
        outcomes["refused" if plan is None else type(plan).__name__] += 1
    return outcomes


def test_the_plans_that_are_mutated_are_plans():
    for case in cases():
        check(read(case.text, case, case.mesh), case, is_run=True)
    kinds = {type(read(case.text, case, case.mesh)).__name__ for case in cases()}
    assert kinds == {"Plan", "StagedPlan"}


def test_mutated_plans_are_refused_or_are_plans():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    outcomes = fuzz(seed, 150, share_run=0.1)
    assert outcomes["refused"] and outcomes["Plan"] + outcomes["StagedPlan"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_mutated_plans_are_refused_or_are_plans(part):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    outcomes = fuzz(seed, 2500, share_run=0.05)
    print(outcomes)
    assert outcomes["refused"] > 1000 < 10 * outcomes["Plan"] and outcomes["StagedPlan"]
