"""`join`: the process group of a generation of ranks, which meets no other generation's."""

import os
import time
import uuid

import torch
import torch.distributed as dist

_POLL_S = 0.02


def join() -> None:
    """Join the ranks that torchrun started together; without torchrun, a world of this process alone.

    torchrun may keep one store for all its restarts, in which the addresses of ranks that have ended are left: a rank
    that finds one of those waits in vain. So each generation has a prefix of its own.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:
        return dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    store, rank, world_size = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(agreed_prefix(store, rank, world_size), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)


def agreed_prefix(store: dist.Store, rank: int, world_size: int) -> str:
    """A name that the ranks alive now agree on, and no others before them, whatever those left in `store`.

    Each rank shows a name of its own, new each time; under that name it finds what the first rank chose. The first rank
    goes on answering until all have said that they know: what it answered to a name left by the dead nobody reads.
    """
    place = f"autopar/elastic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world_size}"
    own = uuid.uuid4().hex
    if rank:
        store.set(f"{place}/rank/{rank}", own)
        chosen = store.get(f"{place}/answer/{own}").decode()  # waits
        store.add(f"{place}/{chosen}/known", 1)
        return f"{place}/{chosen}"
    answered: dict[int, str] = {}
    while store.add(f"{place}/{own}/known", 0) < world_size - 1:
        for other in range(1, world_size):
            if store.check([key := f"{place}/rank/{other}"]):
                name = store.get(key).decode()
                if answered.get(other) != name:
                    store.set(f"{place}/answer/{name}", own)
                    answered[other] = name
        time.sleep(_POLL_S)
    return f"{place}/{own}"
