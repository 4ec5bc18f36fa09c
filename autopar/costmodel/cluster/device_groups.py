"""Clusters of groups of devices that differ: how they are joined, written and read, and what each group sees.

Ranks are those of the first group, then those of the second, and so on; the outermost mesh axis spans all groups.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

from autopar.costmodel.cluster.hardware import VERSION, Cluster, DeviceGroups, LinkLevel, level_of
from autopar.costmodel.cluster.measured_terms import group_rate

_HOW = "write e.g. '8 v100-25g + 8 p100', or '8 v100-25g + 8 p100 over 3.1GB/s' to say what joins the groups"
# The most groups of which all orders are tried.
_MOST_REORDERED = 3
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def joined(members: Sequence[tuple[int, Cluster]], link: LinkLevel | None = None, name: str = "") -> Cluster:
    """The cluster of several groups of devices, (number, their cluster) each.

    `link`: what joins a device of one group to one of another; by default the slowest of the groups' outermost links.
    ValueError for fewer than two groups, no devices, a group with fewer than are asked for, or one without links to
    others.
    """
    if len(members) < 2 or any(one.groups is not None for _, one in members):
        raise ValueError(f"a cluster of groups has two of them or more, each of one kind of devices; {_HOW}")
    for number, (count, one) in enumerate(members):
        if type(count) is not int or count < 1 or count > one.num_devices:
            raise ValueError(
                f"group {number + 1}, {one.name!r}: expected a number of devices from 1 to {one.num_devices:.0f}, found"
                f" {count!r}"
            )
        if link is None and one.num_devices == count:
            raise ValueError(
                f"group {number + 1}, {count} {one.name!r}, has no links to other groups: its links join its own"
                f" {count} devices alone; say what joins the groups, 'over 3.1GB/s' or \"link\" in JSON"
            )
    if len(kinds := sorted({one.device_type for _, one in members})) > 1:
        raise ValueError(f"ranks of one program run on one type of device, found groups of {' and '.join(kinds)}")
    outermost = [one.levels[-1] for _, one in members]
    slowest = link or LinkLevel(
        0, max(map(_send_latency_s, outermost)), min(one.bandwidth_bytes_per_s for one in outermost)
    )
    name = name or _name_of(members)
    kept = tuple((count, one) for count, one in members)
    source = "; ".join(f"{count} {one.name}: {one.source}" for count, one in kept)
    return replace(members[0][1], name=name, source=source, groups=DeviceGroups(kept, replace(slowest, size=0)))


def _send_latency_s(level: LinkLevel) -> float:
    """Of a send between two devices, its fixed cost included."""
    return level.latency_s + group_rate(level.group_rates, "p2p", 2).base_latency_s


@lru_cache(maxsize=64)
def seen_by(cluster: Cluster, group: int) -> Cluster:
    """The cluster with the figures of the devices of a group; its links end where the group does, and are followed by
    the one that joins the groups.
    """
    assert cluster.groups is not None, "a cluster of groups"
    count, own = cluster.groups.members[group]
    levels = (*_within(own.levels, count), cluster.groups.link)
    between = f"groups joined by {cluster.groups.link.bandwidth_bytes_per_s / 1e9:.3g} GB/s a device"
    source = f"of {own.name}: {own.source}; {between}"
    return replace(own, name=cluster.name, levels=levels, source=source, groups=replace(cluster.groups, seen=group))


def orders(cluster: Cluster) -> tuple[Cluster, ...]:
    """The cluster, and with its groups in each other order along the ranks; alone if it has more than a few groups, or
    was reordered itself.

    >>> from autopar.costmodel.cluster.load_cluster import load_cluster
    >>> [one.name for one in orders(load_cluster("8 v100-25g + 4 p100"))]
    ['8 v100-25g + 4 p100', '4 p100 + 8 v100-25g']
    """
    groups = cluster.groups
    if groups is None or groups.reordered_from or len(groups.members) > _MOST_REORDERED:
        return (cluster,)
    found = [cluster]
    for members in permutations(groups.members):
        if all(one.groups is None or one.groups.members != members for one in found):
            found.append(_reordered(joined(members, groups.link, _in_order(cluster, members)), cluster.name))
    return tuple(found)


def _in_order(cluster: Cluster, members: Sequence[tuple[int, Cluster]]) -> str:
    """The name of the cluster with its groups in this order: the text that names it, where it is named by its groups.

    >>> from autopar.costmodel.cluster.load_cluster import load_cluster
    >>> orders(load_cluster("8 v100 + 4 p100 over 3GB/s"))[1].name
    '4 p100 + 8 v100 over 3GB/s'
    """
    assert cluster.groups is not None, "a cluster of groups"
    names, over, link = cluster.name.partition(" over ")
    if names.split() != _name_of(cluster.groups.members).split():
        return f"{cluster.name}: {_name_of(members)}"
    return _name_of(members) + over + link


def _reordered(cluster: Cluster, name: str) -> Cluster:
    """The cluster as one whose groups lie in another order in the cluster called `name`; "": they do not."""
    assert cluster.groups is not None, "a cluster of groups"
    return replace(cluster, groups=replace(cluster.groups, reordered_from=name))


def _name_of(members: Sequence[tuple[int, Cluster]]) -> str:
    return " + ".join(f"{count} {one.name}" for count, one in members)


@lru_cache(maxsize=64)
def ways_across(groups: DeviceGroups) -> tuple[Cluster, ...]:
    """The links as each group sees them: a collective across groups waits for the slowest."""
    whole = replace(groups.members[0][1], groups=groups)
    return tuple(replace(seen_by(whole, group), groups=None) for group in range(len(groups.members)))


def ranks_of(cluster: Cluster, size: int) -> tuple[range, ...]:
    """The indices of each group's ranks on the outermost mesh axis, of this size; ValueError if a group has no whole
    number of them.

    >>> from autopar.costmodel.cluster.load_cluster import load_cluster
    >>> ranks_of(load_cluster("8 v100-25g + 4 p100"), 6)
    (range(0, 4), range(4, 6))
    """
    assert cluster.groups is not None, "a cluster of groups"
    counts = [count for count, _ in cluster.groups.members]
    if any(count * size % sum(counts) for count in counts):
        least = sum(counts) // math.gcd(*counts)
        fitting = [str(more) for more in range(least, sum(counts) + 1, least) if sum(counts) % more == 0]
        raise ValueError(
            f"the outermost axis of the mesh has {size} ranks, which are no whole number of ranks for each of the"
            f" groups of {' and '.join(map(str, counts))} devices; a rank of it, or a stage, has devices of one group:"
            f" take an axis of {' or '.join(fitting)} ranks, or leave devices out"
        )
    ends = [sum(counts[: number + 1]) * size // sum(counts) for number in range(len(counts))]
    return tuple(range(end - count * size // sum(counts), end) for end, count in zip(ends, counts))


def cluster_of_rank(cluster: Cluster, rank: int, num_ranks: int) -> Cluster:
    """The cluster of the devices of a rank of the pipeline: of its group; `cluster` if all devices are alike, or there
    is one rank, which has all.
    """
    if cluster.groups is None or num_ranks == 1:
        return cluster
    group = next(number for number, ranks in enumerate(ranks_of(cluster, num_ranks)) if rank in ranks)
    return cluster.groups.members[group][1]


def parse_groups(text: str, load: Callable[[str], Cluster]) -> Cluster | None:
    """The cluster of groups that `text` names; None if it names no groups, ValueError if they are malformed.

    `load`: a group's cluster by name or file.
    """
    if "+" not in text:
        return None
    parts, _, rate = text.partition(" over ")
    members = []
    for part in parts.split("+"):
        match = re.fullmatch(r"\s*([1-9][0-9]{0,8})\s+(\S.*?)\s*", part)
        if match is None:
            return None if not re.match(r"\s*[0-9]+\s", text) else _refuse(text)
        members.append((int(match[1]), load(match[2])))
    if not rate:
        return joined(members)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(B|bit)/s\s*", rate)
    if match is None or not float(match[1]):
        return _refuse(text)
    bandwidth = float(match[1]) * _SCALES[match[2]] / (8 if match[3] == "bit" else 1)
    latency = max(_send_latency_s(one.levels[-1]) for _, one in members)
    return joined(members, LinkLevel(0, latency, bandwidth), name=text)


def groups_from(fields: Mapping[str, Any], load: Callable[[Any], Cluster]) -> Cluster:
    """The cluster of groups of a JSON object; `load`: a group's cluster, of its name or object. ValueError for what is
    malformed.
    """
    if unknown := set(fields) - {"version", "name", "groups", "link", "reordered_from"}:
        raise ValueError(f"a cluster of groups has a name, groups and a link, found {sorted(unknown)[0]!r}")
    if fields.get("version", VERSION) != VERSION:
        raise ValueError(f"a cluster of another version: expected {VERSION}, found {fields['version']!r}")
    try:
        members = [(each["num_devices"], load(each["cluster"])) for each in fields["groups"]]
        link = level_of({"size": 0, **fields["link"]}) if fields.get("link") is not None else None
    except (TypeError, KeyError) as error:
        raise ValueError(
            f'groups are objects with "num_devices" and "cluster", the link one with "latency_s" and'
            f' "bandwidth_bytes_per_s"; found {error!r}'
        ) from error
    name, other = fields.get("name", ""), fields.get("reordered_from", "")
    if type(name) is not str or type(other) is not str:
        raise ValueError(f"expected text as name and reordered_from, found {name!r} and {other!r}")
    cluster = joined(members, link, name)
    cluster = _reordered(cluster, other)
    seen_by(cluster, 0)  # checks the link's figures
    return cluster


def _refuse(text: str) -> Cluster:
    raise ValueError(f"not a cluster of groups: {text!r}; {_HOW}")


def _within(levels: tuple[LinkLevel, ...], count: int) -> tuple[LinkLevel, ...]:
    """The link levels of the first `count` devices; of a node that they do not fill as many as divide them."""
    found, rest = [], count
    for number, level in enumerate(levels):
        size = rest if number == len(levels) - 1 or not level.size else math.gcd(rest, level.size)
        if size > 1:
            found.append(replace(level, size=size))
        rest //= size
    return tuple(found)
