"""A rank that alone needs a new program learns at once that the others will not come to load it.

Ranks load a program together, so that a rank whose module was changed alone waits for the others, which meanwhile run
the program of before and wait for that rank in its collectives. Every rank looks once in a while, in a thread of its
own, whether another one waits for a call that this rank has made already, and posts it in the store.
"""

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from autopar.errors import RankMismatch
from autopar.torch_compat import default_store

POLL_S = 1.0


@dataclass
class Calls:
    """The calls of a module on this rank: `num_begun`, and `num_passed` of them that ran a program loaded before."""

    num_begun: int = 0
    num_passed: int = 0
    is_watched: bool = field(default=False, repr=False)

    def passed(self, runtime: "Meets") -> None:
        """The present call runs a program that this rank has; from the first such call on a thread looks for lone
        ranks.
        """
        self.num_passed = self.num_begun
        if not self.is_watched:
            self.is_watched = True
            threading.Thread(target=_watch, args=(weakref.ref(runtime),), name="autopar-calls", daemon=True).start()

    def wait_at(self, place: str) -> None:
        """Say in the store that this rank waits at `place`, in its present call."""
        default_store().set(f"{place}/waits", str(self.num_begun))

    def check_others(self, place: str, changed: str) -> None:
        """RankMismatch if another rank will not come to `place`; `changed`: what changed in this rank's module."""
        if default_store().check([f"{place}/passed"]):
            rank = default_store().get(f"{place}/passed").decode()
            what = f"the module changed on this rank ({changed})" if changed else "this rank was called otherwise"
            raise RankMismatch(
                f"rank {dist.get_rank()} needs a new program for this call, and rank {rank} runs the one of before:"
                f" {what}; change the module on every rank, and call it alike (check=False turns this off)"
            )


class Meets(Protocol):
    """A runtime whose ranks meet to load programs."""

    calls: Calls

    def next_place(self) -> str:
        """The key in the store under which all ranks meet next."""
        ...


def _watch(reference: "weakref.ref[Meets]") -> None:
    """Tell ranks that wait for this one that it does not come."""
    while (runtime := reference()) is not None:
        place = runtime.next_place()
        try:
            store = default_store()
            if store.check([f"{place}/waits"]) and not store.check([f"{place}/passed"]):
                call = int(store.get(f"{place}/waits"))
                if runtime.calls.num_passed >= call and runtime.next_place() == place:
                    store.set(f"{place}/passed", str(dist.get_rank()))
        except (RuntimeError, ValueError):  # the process group or the process that holds its store is gone
            return
        del runtime
        time.sleep(POLL_S)
