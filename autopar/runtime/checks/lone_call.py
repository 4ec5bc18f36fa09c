"""A rank that alone needs a new program, or asks for the whole state, learns soon that the others will not come.

Ranks load a program together, so that a rank whose module was changed alone waits for the others, which meanwhile run
the program of before and wait for that rank in its collectives. Every rank looks once in a while, in a thread of its
own, whether another one waits for a call that this rank has made already, and posts it in the store. In the same way a
rank that alone gathers the state (`if rank == 0:`) is told once another one has begun a further call and stays in it.
"""

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from autopar import store_threads
from autopar.errors import AutoparError, RankMismatch
from autopar.torch_compat import default_store

POLL_S = 1.0
STILL_S = 5.0  # a rank that has begun no call for so long does not make calls of its own before it comes


@dataclass
class Calls:
    """The calls of a module on this rank: `num_begun`, and `num_passed` of them that ran a program loaded before.
    `num_gathered`: whole states that were asked for.
    """

    num_begun: int = 0
    num_passed: int = 0
    num_gathered: int = 0
    is_watched: bool = field(default=False, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)

    def begin(self) -> None:
        """A call begins. AutoparError in a fork of the rank's process, whose collectives nobody answers."""
        self._check_process()
        self.num_begun += 1

    def begin_gathering(self) -> None:
        """The whole state is asked for. AutoparError as of a call."""
        self._check_process()
        self.num_gathered += 1

    def _check_process(self) -> None:
        """AutoparError if this is not the process whose module this is."""
        if (here := os.getpid()) != self.process:
            raise AutoparError(
                f"a compiled model was used in process {here}, a fork (a worker of a DataLoader, multiprocessing) of"
                f" the rank's process {self.process}: its collectives would wait there for ranks that do not come. Call"
                " it in the rank's own process, on batches of the loader; or give the worker a model as written for one"
                " device, with the weights of model.full_state_dict()"
            )

    def passed(self, runtime: "Meets") -> None:
        """The present call runs a program that this rank has; from the first such call on a thread looks for lone
        ranks.
        """
        self.num_passed = self.num_begun
        if not self.is_watched:
            self.is_watched = True
            store_threads.start(_watch, weakref.ref(runtime), name="autopar-calls")

    def wait_at(self, place: str) -> None:
        """Say in the store that this rank waits at `place`, in its present call."""
        default_store().set(f"{place}/waits", str(self.num_begun))

    def check_others(self, place: str, reason: str) -> None:
        """RankMismatch if another rank will not come to `place`; `reason`: `reason_to_load` of this rank."""
        if default_store().check([f"{place}/passed"]):
            rank = default_store().get(f"{place}/passed").decode()
            raise RankMismatch(
                f"rank {dist.get_rank()} needs a new program for this call, and rank {rank} runs the one of before:"
                f" {reason} (check=False turns this off)"
            )


def reason_to_load(changed: str, arguments: Any) -> str:
    """Why a rank needs a new program, and what to do where no other does. `changed`: what of its module; `arguments`:
    those of the call, as they are described.
    """
    if changed:
        return f"the module changed on this rank ({changed}); change it on every rank"
    return (
        f"this rank was called otherwise, with {arguments}; call the model alike on every rank, pad each rank's rows to"
        " the same length"
    )


class Meets(Protocol):
    """A runtime whose ranks meet to load programs."""

    name: str
    calls: Calls

    def next_place(self) -> str:
        """The key in the store under which all ranks meet next to load a program."""
        ...


def next_gathering(runtime: Meets) -> str:
    """The key under which all ranks meet next to gather the state."""
    return f"autopar/{runtime.name}/full_state_dict/{runtime.calls.num_gathered + 1}"


def _watch(reference: "weakref.ref[Meets]") -> None:
    """Tell ranks that wait for this one that it does not come."""
    num_begun, still_s = 0, 0.0
    while (runtime := reference()) is not None:
        calls = runtime.calls
        num_begun, still_s = calls.num_begun, still_s + POLL_S if calls.num_begun == num_begun else 0.0
        try:
            _tell(runtime.next_place, calls.num_passed)
            if still_s >= STILL_S:
                _tell(functools.partial(next_gathering, runtime), num_begun - 1)
        except (RuntimeError, ValueError):  # the process group or the process that holds its store is gone
            return
        del runtime, calls
        if store_threads.ends_within(POLL_S):
            return


def _tell(next_place: Callable[[], str], last_passed: int) -> None:
    """Post that this rank does not come to the next place, if another one waits there in a call up to `last_passed`."""
    store, place = default_store(), next_place()
    if store.check([f"{place}/waits"]) and not store.check([f"{place}/passed"]):
        call = int(store.get(f"{place}/waits"))
        if last_passed >= call and next_place() == place:
            store.set(f"{place}/passed", str(dist.get_rank()))
