"""What of each value is in memory from forward to backward, and what only while a recomputed region is run again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.activations.autograd_footprint import Footprint
from autopar.ir.graph import Graph
from autopar.sbp.assignment import Use, uses_of

Regions = tuple[tuple[str, ...], ...]  # each the names of consecutive ops, see `Assignment.recomputed`
NOWHERE = -1  # number of no region


@dataclass(frozen=True, slots=True)
class Saving:
    """What becomes of a value at one of its conversions (`assignment.conversions`), which is made in region number
    `region`.

    From forward to backward: is_saved: what is made is kept. is_entering: what it is made of is kept, for it is made
    again in its region. is_held: what it is made of is in memory anyhow. While its region is run again:
    is_saved_inside, is_held_inside. The same of what waits on the host, for offloaded region `moved_in`, the first to
    want it: is_moved, is_source_moved, is_source_on_host (or stays, as inputs).
    """

    region: int
    is_saved: bool
    is_entering: bool
    is_held: bool
    is_saved_inside: bool
    is_held_inside: bool
    moved_in: int = NOWHERE
    is_moved: bool = False
    is_source_moved: bool = False
    is_source_on_host: bool = False


def region_of_ops(regions: Regions) -> dict[str, int]:
    """Number of the region of every op that is in one."""
    return {name: number for number, region in enumerate(regions) for name in region}


def savings(
    graph: Graph, known: Mapping[str, Footprint], regions: Regions = (), offloaded: Regions = ()
) -> dict[str, tuple[Saving, ...]]:
    """For each value that is read a saving for each of its conversions. known: footprint of each op, by name.

    A value is converted where it is first read, a parameter before all regions unless it is regathered. What enters a
    region is kept as it is outside; its inside is kept only while the region runs again. What ops in `offloaded`
    regions keep is on the host; what others keep too is there twice.
    """
    moved_in = region_of_ops(offloaded)
    found = _savings(graph, known, regions, frozenset(moved_in))
    if not offloaded:
        return found
    on_host = _savings(graph, known, regions, frozenset(op.name for op in graph.ops) - moved_in.keys())
    parameters, uses = {item.value.name for item in graph.of_kind("parameter")}, uses_of(graph)
    merged = {}
    for name, of_value in found.items():
        places = [moved_in.get(use.user, NOWHERE) for use in uses[name]]
        first = next((place for place in places if place != NOWHERE), NOWHERE)
        each = [first] if len(of_value) == 1 else [first, *places]
        pairs = zip(of_value, on_host[name], each)
        merged[name] = of_value if name in parameters else tuple(_with_moved(*pair) for pair in pairs)
    return merged


def _with_moved(own: Saving, on_host: Saving, place: int) -> Saving:
    if not (on_host.is_saved or on_host.is_entering):
        return own
    return replace(
        own,
        moved_in=place,
        is_moved=on_host.is_saved,
        is_source_moved=on_host.is_entering,
        is_source_on_host=on_host.is_held,
    )


def _savings(
    graph: Graph, known: Mapping[str, Footprint], regions: Regions, away: frozenset[str]
) -> dict[str, tuple[Saving, ...]]:
    """As `savings`, but what is kept from forward to backward by the ops `away` does not count."""
    places = region_of_ops(regions)
    made_in = {value.name: places.get(op.name, NOWHERE) for op in graph.ops for value in op.outputs}
    parameters, inputs = ({item.value.name for item in items} for items in (graph.of_kind("parameter"), graph.inputs))
    through = _saved_through_views(graph, known)
    readings = {
        name: [
            Reading(
                places.get(use.user, NOWHERE),
                _is_saved(use, known) or (name in inputs and use in through),
                use.user not in away,
            )
            for use in uses
        ]
        for name, uses in uses_of(graph).items()
    }
    elsewhere = {
        name: [one for one in found if one.place not in (NOWHERE, made_in.get(name, NOWHERE))]
        for name, found in readings.items()
    }
    saved = {
        n for n, found in readings.items() if any(one.is_saved and one.counts and one.place == NOWHERE for one in found)
    }
    saved |= {name for name, found in elsewhere.items() if any(one.counts for one in found)}
    wanted = {name for name, found in readings.items() if elsewhere[name] or any(one.is_saved for one in found)}
    outside = _held_values(graph, known, saved, away | places.keys())
    inside = outside | _held_values(graph, known, wanted, frozenset())
    return {
        name: (
            _of_parameter(found)
            if name in parameters
            else _of_value(found, made_in.get(name, NOWHERE), name in outside, name in inside)
        )
        for name, found in readings.items()
    }


@dataclass(frozen=True, slots=True)
class Reading:
    """By an op in region `place`, which saves what it reads or not; whether what it keeps outside of regions counts."""

    place: int
    is_saved: bool
    counts: bool


def _of_parameter(readings: Sequence[Reading]) -> tuple[Saving, ...]:
    """Converted before all regions: there it is kept, as what enters. Regathered, it is made in its one reader's
    region.
    """
    each = [
        Saving(
            one.place, one.is_saved or one.place != NOWHERE, False, True, one.is_saved and one.place != NOWHERE, True
        )
        for one in readings
    ]
    if len(each) == 1:
        return tuple(each)
    first = Saving(NOWHERE, any(one.is_saved for one in each), False, True, False, True)
    return first, *each


def _of_value(readings: Sequence[Reading], made_in: int, is_held: bool, is_held_inside: bool) -> tuple[Saving, ...]:
    """Of an activation, buffer, constant or argument, made in region `made_in`."""
    first = readings[0].place
    enters = first not in (NOWHERE, made_in)
    # read elsewhere: by an op that saves it, or where it enters another region
    is_saved = any(one.counts and (one.is_saved if one.place == NOWHERE else one.place != first) for one in readings)
    is_saved_inside = first != NOWHERE and any(one.is_saved and one.place == first for one in readings)
    main = Saving(first, is_saved, enters and readings[0].counts, is_held, is_saved_inside, enters or is_held_inside)
    if len(readings) == 1:
        return (main,)
    return main, *(
        Saving(
            one.place,
            one.is_saved and one.counts and one.place == NOWHERE,
            False,
            True,
            one.is_saved and one.place != NOWHERE,
            True,
        )
        for one in readings
    )


def _is_saved(use: Use, known: Mapping[str, Footprint]) -> bool:
    return use.user in known and use.slot in known[use.user].saved_inputs


def _saved_through_views(graph: Graph, known: Mapping[str, Footprint]) -> set[Use]:
    """Readings by ops whose results share the memory of what they read, and are saved by others: so a parameter is kept
    as it was gathered where a product saves it transposed. Of what ops make the view itself counts, see `_held_values`.
    """
    found: set[Use] = set()
    kept = {op.inputs[slot].name for op in graph.ops for slot in known[op.name].saved_inputs}
    for op in reversed(graph.ops):
        for value, alias in zip(op.outputs, known[op.name].alias_of):
            if alias >= 0 and value.name in kept:
                found.add(Use(op.name, alias))
                kept.add(op.inputs[alias].name)
    return found


def _held_values(graph: Graph, known: Mapping[str, Footprint], saved: set[str], apart: frozenset[str]) -> set[str]:
    """Values whose memory is there until backward even if none of their readers saves it: inputs, what ops save of
    their results, views of those and of what a reader keeps. saved: values that a reader keeps. apart: ops that keep
    nothing of theirs.
    """
    held = {item.value.name for item in graph.inputs}
    for op in graph.ops:
        found = known[op.name]
        for index, value in enumerate(op.outputs):
            alias = found.alias_of[index]
            is_view_of_held = alias >= 0 and (op.inputs[alias].name in held or op.inputs[alias].name in saved)
            if is_view_of_held or (index in found.saved_outputs and op.name not in apart):
                held.add(value.name)
    return held


def inside_shares(
    graph: Graph,
    known: Mapping[str, Footprint],
    regions: Regions,
    found: Mapping[str, tuple[Saving, ...]],
    num_waiting: int = 0,
    nums: Sequence[int] = (),
) -> list[float]:
    """How often to count each region's inside: so that the sum is the inside of one, or of all as often as
    `Training.num_waiting` says.

    One region is run again at a time. Those whose inside is largest when nothing is split, the copies of a block, share
    the count: so it is a sum over ops and conversions, which a table can hold, and exact where the copies are laid out
    alike. Where the gradients of weights are made later, all that the regions hold once they have run again waits for
    these (`runtime.saved_tensors.recompute`). nums: how many regions each of these stands for, by default itself.
    """
    if not regions:
        return []
    if num_waiting:
        return [float(num_waiting)] * len(regions)
    places = region_of_ops(regions)
    sizes = [0] * len(regions)
    for op in graph.ops:
        if op.name in places:
            saved = sum(op.outputs[index].num_bytes for index in known[op.name].saved_outputs)
            sizes[places[op.name]] += saved + known[op.name].internal_bytes
    values = {value.name: value for op in graph.ops for value in op.outputs}
    for name in found.keys() & values.keys():
        for saving in found[name]:
            if saving.is_saved_inside and not saving.is_held_inside:
                sizes[saving.region] += values[name].num_bytes
    largest = [size == max(sizes) for size in sizes]
    num_largest = sum(num * is_one for num, is_one in zip(nums or [1] * len(sizes), largest))
    return [is_one / num_largest for is_one in largest]
