"""`join`: the process group of a generation of ranks, which meets no other generation's."""

import os
import time
import uuid
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.elastic.heartbeat import Heartbeat
from autopar.errors import AutoparError

_POLL_S = 0.02
_MOST_S = 300.0  # between the first rank's start and the last one's


def join() -> Heartbeat | None:
    """Join the ranks that torchrun started together; without torchrun, a world of this process alone. What is given
    back ends this process if another rank is cut off.

    torchrun may keep one store for all its restarts, in which the addresses of ranks that have ended are left: a rank
    that finds one of those waits in vain. So each generation has a prefix of its own. No environment variable names it:
    the agent of a node whose own ranks failed counts a restart, one that starts them anew since another node left does
    not (torch 2.13).

    AutoparError if they do not come within minutes.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return None
    store, rank, world_size = next(dist.rendezvous("env://"))
    prefix = agreed_prefix(store, rank, world_size)
    alive = None
    if world_size > 1:
        alive = Heartbeat(store, prefix, rank, world_size, os.environ["MASTER_ADDR"], os.getpid())
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world_size)
    return alive


def agreed_prefix(store: dist.Store, rank: int, world_size: int, *, timeout_s: float = _MOST_S) -> str:
    """A name that the ranks alive now agree on, and no others before them, whatever those left in `store`.

    Each rank shows a name of its own, new each time; under that name it finds what the first rank chose, and says that
    it knows. What the first rank answered to a name left by the dead nobody reads. A first rank that another one has
    replaced may answer too, until it sees that; so the one that all ranks know says that they may go.

    AutoparError if they have not all come after `timeout_s`, or this first rank was replaced.
    """
    place, own = f"autopar/elastic/{world_size}", uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    met = _first_to_meet(store, place, own, world_size) if rank == 0 else _other_to_meet(store, place, own, rank)
    while not (chosen := met()):
        if time.monotonic() > deadline:
            raise AutoparError(
                f"rank {rank} waited {timeout_s:g} s for the other {world_size - 1} ranks that torchrun started;"
                " look at the output of those that ended, or at the nodes that do not answer"
            )
        time.sleep(_POLL_S)
    return f"{place}/{chosen}"


def _first_to_meet(store: dist.Store, place: str, own: str, world_size: int) -> Callable[[], str]:
    store.set(first := f"{place}/rank/0", own)
    answered: dict[int, str] = {}
    known = [f"{place}/{own}/known/{other}" for other in range(1, world_size)]

    def met() -> str:
        if _get(store, first) != own:
            raise AutoparError("rank 0 was replaced before the other ranks had come: newer ones are the job")
        for other in range(1, world_size):
            if store.check([key := f"{place}/rank/{other}"]) and answered.get(other) != (name := _get(store, key)):
                number = store.add(f"{place}/answers/{name}", 1)
                store.set(f"{place}/answer/{name}/{number}", own)
                answered[other] = name
        if not all(store.check([key]) for key in known):
            return ""
        store.set(f"{place}/{own}/go", "")
        return own

    return met


def _other_to_meet(store: dist.Store, place: str, own: str, rank: int) -> Callable[[], str]:
    store.set(f"{place}/rank/{rank}", own)
    known: list[str] = []

    def met() -> str:
        if len(known) < store.add(f"{place}/answers/{own}", 0):
            known.append(_get(store, f"{place}/answer/{own}/{len(known) + 1}"))  # waits until it is written
            store.set(f"{place}/{known[-1]}/known/{rank}", "")
        return next((name for name in known if store.check([f"{place}/{name}/go"])), "")

    return met


def _get(store: dist.Store, key: str) -> str:
    return store.get(key).decode()
