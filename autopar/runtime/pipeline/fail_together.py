"""When one rank fails within a step, all end soon, and each says the first cause.

Nothing in a pipeline meets often enough for an error to be exchanged: its ranks wait for one another in receives that
only end when a connection breaks. gloo breaks those of a process that ends, and no others: a rank that raises and lives
on leaves its peers waiting, and neither abort, shutdown nor destroying a group, on either side, ends a wait that has
begun (torch 2.13). So
  * the rank that fails says so in the store first, then raises: the first cause is known whatever breaks next;
  * a rank whose connection breaks raises PeerFailed with that cause. If nobody has said any, somebody died without a
    word: every rank of the step answers, and who does not is named;
  * a rank that is still inside its wait some seconds after the first cause was said ends its process, as the cause says
    in its output.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from autopar.errors import AutoparError, PeerFailed
from autopar.runtime.rank_agreement import is_from_backend
from autopar.torch_compat import default_store

POLL_S = 0.5  # how often a rank in a step looks whether another one has failed
ANSWER_S = 1.5  # after a connection broke: time for a cause to be posted, and for the living to answer
STUCK_S = 3.0  # after that: time for a rank's waits to break by themselves
EXIT_CODE = 1
STORE_DIED = "the process that holds the store of the process groups died, as a rule that of rank 0"


@dataclass
class Meeting:
    """Where the ranks of a model's steps hear of one another's failures. `place`: its keys in the store, the same on
    every rank and no other model's; `ranks`: global ranks. `heard`: the first cause, as far as this rank knows, once it
    is over.
    """

    place: str
    ranks: Sequence[int]
    is_over: bool = False
    heard: str = ""

    def post(self, cause: str) -> str:
        """The first cause that anybody has posted: `cause`, if nobody has. Everybody is asked to answer."""
        first = default_store().compare_set(f"{self.place}/cause", "", cause).decode()
        self.ask()
        return first

    def ask(self) -> None:
        """Ask all ranks whether they live."""
        default_store().set(f"{self.place}/asked", "")

    def is_asked(self) -> bool:
        """Whether somebody has failed or asks who has."""
        return default_store().check([f"{self.place}/asked"])

    def listen(self) -> str:
        """The first cause that anybody has posted, or ""."""
        key = f"{self.place}/cause"
        if not self.heard and default_store().check([key]):
            self.heard = default_store().get(key).decode()
        return self.heard

    def answer(self) -> None:
        """Say that this rank lives."""
        default_store().set(f"{self.place}/lives/{dist.get_rank()}", "")

    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if not default_store().check([f"{self.place}/lives/{rank}"])]


@contextmanager
def failing_together(meeting: Meeting) -> Iterator[None]:
    """Within it, an error of this rank reaches all ranks of the meeting, and theirs this one, as PeerFailed.

    After a failure the meeting is over: tensors are under way that nobody will receive. Entering it again is an
    AutoparError.
    """
    if meeting.is_over:
        raise AutoparError(
            f"a step of this model failed before ({meeting.heard}); its ranks are not in step any more: start them anew"
        )
    is_left = threading.Event()
    threading.Thread(target=_watch, args=(meeting, is_left), name="autopar-watch", daemon=True).start()
    try:
        yield
    except BaseException as error:
        meeting.is_over = True
        if isinstance(error, RuntimeError) and is_from_backend(error):
            raise PeerFailed(f"rank {dist.get_rank()} waited for another rank: {_cause_of_break(meeting)}") from error
        _tell(meeting, f"rank {dist.get_rank()} failed first, {type(error).__name__}: {error}")
        raise
    finally:
        is_left.set()


def _tell(meeting: Meeting, cause: str) -> None:
    """Post this rank's error and give the others the time to hear of it: the store may end with this process."""
    with suppress(RuntimeError):  # of the store
        meeting.heard = meeting.post(cause)
        meeting.answer()
        deadline = time.monotonic() + ANSWER_S
        while meeting.silent() and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)


def _cause_of_break(meeting: Meeting) -> str:
    """The first cause, given that a connection of this rank broke."""
    with suppress(RuntimeError):  # of the store
        meeting.ask()
        meeting.answer()
        deadline = time.monotonic() + ANSWER_S
        while not meeting.listen() and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)
        if not meeting.heard:
            meeting.heard = meeting.post(
                f"rank {', '.join(map(str, meeting.silent()))} died, without a word, or left the step"
            )
    return meeting.heard or STORE_DIED


def _watch(meeting: Meeting, is_left: threading.Event) -> None:
    """Answer when somebody asks, and end this process if it then is stuck."""
    is_asked = False
    while not is_asked and not is_left.wait(POLL_S):
        try:
            is_asked = meeting.is_asked()
            if is_asked:
                meeting.listen()
                meeting.answer()
        except dist.DistError:  # the store's process is gone
            is_asked = True
        except RuntimeError:  # a store without peers, of simulated ranks
            return
    if is_asked and not is_left.wait(ANSWER_S + STUCK_S):
        with suppress(RuntimeError):
            meeting.listen()
        _exit(meeting.heard or STORE_DIED)


def _exit(cause: str) -> None:
    text = f"autopar: rank {dist.get_rank()} ends, as nothing else interrupts its wait for another rank: {cause}\n"
    os.write(sys.stderr.fileno(), text.encode())
    os._exit(EXIT_CODE)
