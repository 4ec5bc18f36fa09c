"""Saved activations: the values kept from forward to backward, and those
that exist only while a region is recomputed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.gradients.observed_footprint import Footprint
from autopar.ir.graph import Graph, Use

Regions = tuple[tuple[str, ...], ...]  # each the names of consecutive ops, see `Assignment.recomputed`
NOWHERE = -1  # number of no region


@dataclass(frozen=True, slots=True)
class Saving:
    """The memory of one conversion of a value (`assignment.conversions`), which runs in region number `region`.

    From forward to backward: `is_saved`: its result is saved. `is_entering`: its source is saved as an input of the
    region, which converts it again. `is_held`: its source is in memory for other reasons. While the region is
    recomputed: `is_saved_inside` and `is_held_inside`, likewise. On the host, for the first offloaded region `moved_in`
    that saves it: `is_moved`: the result is offloaded, `is_source_moved`: the source is, `is_source_on_host`: the
    source is on the host for other reasons, or stays on the device as inputs do.
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
    """Name of each op in a region -> number of the region."""
    return {name: number for number, region in enumerate(regions) for name in region}


def savings(
    graph: Graph, known: Mapping[str, Footprint], regions: Regions = (), offloaded: Regions = ()
) -> dict[str, tuple[Saving, ...]]:
    """Name of each value that is read -> the `Saving` of each of its conversions; `known`: op name -> footprint.

    A value is converted at its first reader, a parameter before all regions unless it is regathered. The inputs of a
    region are saved in their layout outside; the values inside are saved only while the region is recomputed. Values
    that ops in `offloaded` regions save are on the host; those that other ops save too are in both places.
    """
    moved_in = region_of_ops(offloaded)
    saved = _savings(graph, known, regions, frozenset(moved_in))
    if not offloaded:
        return saved
    on_host = _savings(graph, known, regions, frozenset(op.name for op in graph.ops) - moved_in.keys())
    parameters, uses = {item.value.name for item in graph.of_kind("parameter")}, graph.uses
    merged = {}
    for name, of_value in saved.items():
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
    """As `savings`, without the values that the ops `away` save from forward to backward."""
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
        for name, uses in graph.uses.items()
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
    """A use of a value by an op in region `place`: whether the op saves
    it, and whether a save outside regions counts.
    """

    place: int
    is_saved: bool
    counts: bool


def _of_parameter(readings: Sequence[Reading]) -> tuple[Saving, ...]:
    """The savings of a parameter, which is converted and saved before
    all regions, regathered in its reader's region.
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
    """The savings of an activation, buffer, constant or argument that region `made_in` produces."""
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
    """Uses by view ops whose results are saved by other ops: so a gathered parameter is kept if a product saves its
    view.

    For activations the view itself counts, see `_held_values`.
    """
    uses: set[Use] = set()
    kept = {op.inputs[slot].name for op in graph.ops for slot in known[op.name].saved_inputs}
    for op in reversed(graph.ops):
        for value, alias in zip(op.outputs, known[op.name].alias_of):
            if alias >= 0 and value.name in kept:
                uses.add(Use(op.name, alias))
                kept.add(op.inputs[alias].name)
    return uses


def _held_values(graph: Graph, known: Mapping[str, Footprint], saved: set[str], apart: frozenset[str]) -> set[str]:
    """Values whose memory exists until backward even if none of their readers saves them.

    These are inputs, results that their ops save, and views of those and of the values `saved` by a reader. `apart`:
    ops whose saved results do not count.
    """
    held = {item.value.name for item in graph.inputs}
    for op in graph.ops:
        footprint = known[op.name]
        for index, value in enumerate(op.outputs):
            alias = footprint.alias_of[index]
            is_view_of_held = alias >= 0 and (op.inputs[alias].name in held or op.inputs[alias].name in saved)
            if is_view_of_held or (index in footprint.saved_outputs and op.name not in apart):
                held.add(value.name)
    return held


def inside_shares(
    graph: Graph,
    known: Mapping[str, Footprint],
    regions: Regions,
    savings_of: Mapping[str, tuple[Saving, ...]],
    num_waiting: int = 0,
    nums: Sequence[int] = (),
) -> list[float]:
    """The weight of each region's inside in the estimate, so that the weighted sum is the inside of one region.

    One region is recomputed at a time. The regions whose inside is largest if nothing is split, the copies of a block,
    share the weight: so the estimate is a sum over ops and conversions, as a table needs, and exact if the copies have
    equal layouts. If the gradients of weights are put off, the recomputed tensors of all regions wait for them
    (`runtime.saved_tensors.recompute`): then every region counts `num_waiting` times. `nums`: the number of regions
    that each one represents, by default 1.
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
    for name in savings_of.keys() & values.keys():
        for saving in savings_of[name]:
            if saving.is_saved_inside and not saving.is_held_inside:
                sizes[saving.region] += values[name].num_bytes
    largest = [size == max(sizes) for size in sizes]
    num_largest = sum(num * is_one for num, is_one in zip(nums or [1] * len(sizes), largest))
    return [is_one / num_largest for is_one in largest]
