"""`with_starts`: each prefetched bucket of parameters is started when the one before it arrives."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.codegen.program import AnyStep, ConvertTogether, OffloadedRegion, StartGather, flat


def with_starts(steps: Sequence[AnyStep], regathered: Collection[int]) -> list[AnyStep]:
    """`steps` with the start of each prefetched bucket behind the arrival of the one before, that of the first where it
    arrives; `regathered`: the numbers of the buckets that backward gathers again.
    """
    arrivals = [step for step in flat(steps) if isinstance(step, ConvertTogether) and step.is_prefetched]
    following, earlier = dict[int, StartGather](), -1  # number of a bucket -> the start behind it
    before = -1
    for arrival in arrivals:
        is_again = arrival.number in regathered
        following[before] = StartGather(arrival, earlier if is_again else -1)
        before, earlier = arrival.number, arrival.number if is_again else earlier
    return list(_started(steps, following, arrivals[0].number if arrivals else -1))


def _started(steps: Sequence[AnyStep], following: Mapping[int, StartGather], first: int) -> Iterator[AnyStep]:
    for step in steps:
        if isinstance(step, OffloadedRegion):
            yield replace(step, steps=tuple(_started(step.steps, following, first)))
            continue
        number = step.number if isinstance(step, ConvertTogether) and step.is_prefetched else None
        if number == first:
            yield following[-1]
        yield step
        if number in following:
            yield following[number]
