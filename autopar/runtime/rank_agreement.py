"""Agreement of the ranks of a mesh before the first collective of the model, and propagation of errors to all ranks."""

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, PeerFailed, RankMismatch, warn, warner
from autopar.ir.folding.structure import structure_of
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint, format_graph
from autopar.runtime.checks.lone_call import Calls
from autopar.runtime.seeded_rng import peek_seed
from autopar.torch_compat import CONNECTION_FAILED, default_store

KEY_PARTS = (
    "arguments",
    "structures of arguments",
    "models, or modes (train or eval)",
    "default dtypes",
    "states of autocast",
    "grad modes",
    "placements of DTensor arguments",
)
LONG_S = 10.0  # a rank that waits longer for others says for whom
MOST_NAMED = 8  # ranks in a message
NUM_SAMPLES = 64  # entries of each tensor that are compared bit by bit, besides the sum of all

Result = TypeVar("Result")


@contextmanager
def peers_alive() -> Iterator[None]:
    """Say that a peer failed where the backend only says that a connection broke."""
    try:
        yield
    except RuntimeError as error:
        if not is_from_backend(error):
            raise
        raise PeerFailed(
            f"rank {dist.get_rank()} waited for another rank, which failed or died; its error is the cause, look at its"
            f" output first (here the backend said: {str(error).splitlines()[0]})"
        ) from error


def is_from_backend(error: RuntimeError) -> bool:
    """Whether a process group's backend raised it: a connection broke or timed out."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in CONNECTION_FAILED)


def gather(mesh: DeviceMesh, item: Any) -> list[Any]:
    """`item` of every rank of the mesh, row-major; any picklable object."""
    items = [item]
    for axis in reversed(range(mesh.ndim)):
        rows: list[Any] = [None] * mesh.size(axis)
        with peers_alive(), warnings.catch_warnings():
            # torch's own pickles of argument structures, read back, warn of what torch calls deprecated
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")
            dist.all_gather_object(rows, items, group=mesh.get_group(axis))
        items = [entry for row in rows for entry in row]
    return items


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the rank whose word counts."""
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def from_first(mesh: DeviceMesh, item: Any) -> Any:
    """The first rank's `item`, on every rank."""
    box = [item]
    for axis in range(mesh.ndim):
        with peers_alive():
            dist.broadcast_object_list(box, group=mesh.get_group(axis), group_src=0)
    return box[0]


def meet(mesh: DeviceMesh, place: str, wait_s: float, calls: Calls | None = None, reason: str = "") -> None:
    """Return once every rank of the mesh has come to `place`; RankMismatch after `wait_s` without all of them, or once
    one of them has made this call without coming, if `calls` are counted. `reason`: why this rank comes.

    Counted in the store that set up the process groups: a rank that does not come may be inside a collective of the
    model, and another one on its groups would meet that.
    """
    store = default_store()
    store.set(f"{place}/{dist.get_rank()}", "")
    arrived, pause_s = store.add(place, 1), 0.001
    start, is_told = time.monotonic(), False
    if calls is not None and arrived < mesh.size():
        calls.wait_at(place)
    while arrived < mesh.size():
        if calls is not None:
            calls.check_others(place, reason)
        waited_s = time.monotonic() - start
        if waited_s > wait_s:
            raise RankMismatch(
                f"rank {dist.get_rank()} was called with arguments or in a mode new to it, and {mesh.size() - arrived}"
                f" of the mesh's {mesh.size()} ranks were not within {wait_s:g} s ({_missing(mesh, place)}); call the"
                " same model alike on every rank"
            )
        if waited_s > LONG_S and not is_told:
            is_told = True
            warn(
                f"rank {dist.get_rank()} waits for {_missing(mesh, place)}, which has not called the model yet, or not"
                f" alike; it gives up after {wait_s:g} s"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
        arrived = store.add(place, 0)


def _missing(mesh: DeviceMesh, place: str) -> str:
    """The ranks of the mesh that have not come to `place`, some of them by number."""
    store = default_store()
    ranks = [rank for rank in mesh.mesh.flatten().tolist() if not store.check([f"{place}/{rank}"])]
    return _named(ranks)


def _named(ranks: Sequence[int]) -> str:
    """The text for ranks in a message."""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def all_here(mesh: Any, made: Callable[[Any], DeviceMesh]) -> DeviceMesh:
    """The device mesh that `made` makes of `mesh`, once all of its ranks have called `autopar.compile` as often.

    A rank that waits long says for whom: torch may wait too, where it makes process groups, so that another thread
    looks and tells. Each rank counts its calls in the store that set up the process groups.
    """
    if not dist.is_initialized():
        return made(mesh)
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else range(dist.get_world_size())
    store, place, warn_here = default_store(), "autopar/compile", warner()
    num_calls = store.add(f"{place}/{dist.get_rank()}", 1)

    def tell() -> None:
        if late := [rank for rank in ranks if store.add(f"{place}/{rank}", 0) < num_calls]:
            warn_here(f"rank {dist.get_rank()} waits for {_named(late)} to call autopar.compile")

    timer = threading.Timer(LONG_S, tell)
    timer.daemon = True
    timer.start()
    try:
        found = made(mesh)
        store.add(f"{place}/{dist.get_rank()}", max(gather(found, num_calls)) - num_calls)  # some calls fail before
        return found
    finally:
        timer.cancel()


@dataclass
class OfFirstRank:
    """A value that the first rank sets, where `is_here`, and every rank has after `of_first_rank`."""

    is_here: bool
    value: Any = None


@contextmanager
def of_first_rank(mesh: DeviceMesh, what: str) -> Iterator[OfFirstRank]:
    """A context in which the first rank does the work called `what` for all; if it fails there, every rank raises the
    same error.
    """
    shared, error = OfFirstRank(is_first(mesh)), None
    try:
        yield shared
    except Exception as raised:
        error = _told(what, raised)
    shared.value, told = from_first(mesh, (shared.value, error))
    if told is not None:
        raise error or told


def on_every_rank(mesh: DeviceMesh, what: str, work: Callable[[], Result]) -> Result:
    """`work()` of this rank once every rank has done it; if one fails, every rank raises the error of the first that
    did.
    """
    result, error = _attempt(what, work)
    _raise_first(gather(mesh, error), error)
    return cast(Result, result)  # there is one where there is no error


def _raise_first(errors: Sequence[AutoparError | None], own: AutoparError | None) -> None:
    """Raise the first of the errors of all ranks, if there is any."""
    for rank, failure in enumerate(errors):
        if failure is not None:
            if own is not None and str(own) == str(failure):
                raise own  # with what caused it here
            raise type(failure)(f"rank {rank} of the mesh: {failure}")


def _attempt(what: str, work: Callable[[], Result]) -> tuple[Result | None, AutoparError | None]:
    try:
        return work(), None
    except Exception as error:
        return None, _told(what, error)


def _told(what: str, error: Exception) -> AutoparError:
    """The error as other ranks are told it: AutoparErrors as they are, others as the failure of `what`."""
    if isinstance(error, AutoparError):
        return error
    wrapped = AutoparError(f"{what} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def check_same(mesh: DeviceMesh, item: Any, what: str, remedy: str) -> None:
    """RankMismatch on every rank, naming the first that differs from rank 0, unless `item` is equal on all."""
    _check_equal(gather(mesh, item), what, remedy)


def _check_equal(items: Sequence[Any], what: str, remedy: str) -> None:
    if (different := _first_different(items)) is not None:
        raise RankMismatch(f"rank {different} and rank 0 of the mesh were given different {what}; {remedy}")


def _first_different(items: Sequence[Any]) -> int | None:
    return next((rank for rank, other in enumerate(items) if other != items[0]), None)


def agreed_graph(mesh: DeviceMesh, make: Callable[[], Graph]) -> Graph:
    """A graph that is the same on every rank, if all have got one that computes the same; otherwise every rank raises.

    It is the first rank's where only the order of ops differs, as of a model that loops over a set.
    """
    graph, error = _attempt("tracing", make)
    prints = (None, None) if graph is None else (fingerprint(graph), structure_of(graph))
    reports = gather(mesh, (error, *prints))
    _raise_first([failure for failure, *_ in reports], error)
    if (different := _first_different([made for *_, made in reports])) is not None:
        texts = gather(mesh, format_graph(cast(Graph, graph)).splitlines())
        pairs = zip_longest(texts[different], texts[0], fillvalue="nothing")
        there, first = next(((a, b) for a, b in pairs if a != b), ("another order of ops",) * 2)
        raise RankMismatch(
            f"rank {different} and rank 0 of the mesh were given different models: first `{there}`, on rank 0"
            f" `{first}`; build the same model in the same mode on every rank"
        )
    is_same = len({made for _, made, _ in reports}) == 1
    return cast(Graph, graph) if is_same else from_first(mesh, graph)  # there is one where there is no error


def agree_on_call(mesh: DeviceMesh, key: tuple[Any, ...]) -> None:
    """RankMismatch on every rank unless all are called alike; `key` has the `KEY_PARTS`."""
    keys = gather(mesh, key)
    for number, (what, part) in enumerate(zip(KEY_PARTS, key)):
        padding = ", pad each rank's rows to the same length" if what == "arguments" else ""
        remedy = f"call the same model alike on every rank{padding} (this rank: {part})"
        _check_equal([other[number] for other in keys], what, remedy)


def digest_of(item: Any) -> int:
    """62 bits that are equal for items of equal `repr`, on every rank."""
    return int.from_bytes(hashlib.sha256(repr(item).encode()).digest()[:8]) >> 2


def check_seed(mesh: DeviceMesh) -> None:
    """Random ops need the same random state on every rank."""
    seeds = gather(mesh, peek_seed())
    different = next((rank for rank, seed in enumerate(seeds) if seed != seeds[0]), None)
    if different is not None:
        raise RankMismatch(
            f"the model has random ops (dropout) and rank {different}'s random state differs from rank 0's; call"
            " torch.manual_seed with the same seed on every rank: different parts of a batch get different numbers all"
            " the same"
        )


def check_weights(mesh: DeviceMesh, tensors: Mapping[str, torch.Tensor], remedy: str) -> None:
    """RankMismatch unless `tensors`, by FQN, are equal on every rank, as far as their sum and a sample of their entries
    tell.
    """
    different = _different(mesh, tensors)
    if different:
        name, rank = next(iter(different.items()))
        raise RankMismatch(f"{name} on rank {rank} differs from rank 0's; {remedy}")


def take_from_first(mesh: DeviceMesh, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first rank's content of those of `tensors`, by FQN, that differ between ranks, on the mesh's device.

    The tensors of all ranks have the same names, shapes and dtypes. RankMismatch where the first rank's has no data.
    """
    different = _different(mesh, tensors)
    if absent := [name for name, x in zip(different, from_first(mesh, [tensors[n].is_meta for n in different])) if x]:
        raise RankMismatch(
            f"{absent[0]} on rank {different[absent[0]]} has data, and rank 0's is on the meta device; give rank 0 the"
            " values, or all ranks a model on meta"
        )
    return {name: _from_first(mesh, tensors[name]) for name in different}


def _from_first(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    content = torch.empty(x.shape, dtype=x.dtype, device=mesh.device_type)
    if is_first(mesh):
        content.copy_(x.detach())
    raw = content.view(-1).view(torch.uint8)  # backends lack some dtypes
    for axis in range(mesh.ndim):
        with peers_alive():
            dist.broadcast(raw, group=mesh.get_group(axis), group_src=0)
    return content


def _different(mesh: DeviceMesh, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """FQN of each of `tensors` that is not equal on all ranks -> the first rank whose tensor differs from rank 0's."""
    reports = gather(mesh, {name: _digest(x) for name, x in tensors.items()})
    ranks: dict[str, int] = {}
    for rank, report in enumerate(reports):
        for name in {**report, **reports[0]}:
            if report.get(name) != reports[0].get(name):
                ranks.setdefault(name, rank)
    return ranks


def _digest(x: torch.Tensor) -> str | int:
    if x.is_meta:
        return "no data"
    x = x.detach()
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        x = x.float()  # float8 is promoted to nothing
    places = torch.linspace(0, max(x.numel() - 1, 0), min(x.numel(), NUM_SAMPLES), dtype=torch.float64).long()
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float64))
    return digest_of((total.item(), x.flatten()[places.to(x.device)].tolist()))
