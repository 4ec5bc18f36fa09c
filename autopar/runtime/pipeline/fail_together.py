"""Joint failure of a pipeline's ranks: when one fails within a step, all end soon, and each reports the first cause.

The ranks of a pipeline have no collective in which to exchange an error: they wait for one another in receives that end
only when a connection breaks. gloo breaks the connections of a process that ends, and no others: a rank that raises and
lives on leaves its peers waiting, and neither abort, shutdown nor destroying a group, on either side, ends a wait that
has begun (torch 2.13). So
  * the rank that fails posts the error in the store before it raises: the first cause is known whatever breaks next;
  * a rank whose connection breaks raises PeerFailed with that cause. If none is posted, a rank died without posting:
    every rank of the step answers, and those that do not are named;
  * a rank that still waits some seconds after the first cause was posted prints the cause and ends its process.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from autopar import store_threads
from autopar.errors import AutoparError, PeerFailed
from autopar.runtime.rank_agreement import is_from_backend
from autopar.torch_compat import default_store

POLL_S = 0.5  # interval at which a rank in a step checks whether another one has failed
ANSWER_S = 1.5  # after a broken connection: time for a cause to be posted, and for living ranks to answer
STUCK_S = 3.0  # after that: time for a rank's waits to break by themselves
EXIT_CODE = 1
STORE_DIED = "the process that holds the store of the process groups died, as a rule that of rank 0"


@dataclass
class Meeting:
    """The exchange of failures among the ranks of a model's steps, by keys in the store.

    `place`: prefix of its keys, the same on every rank and unique to the model; `ranks`: global ranks. `heard`: the
    first cause that this rank knows, once the meeting is over.
    """

    place: str
    ranks: Sequence[int]
    is_over: bool = False
    heard: str = ""

    def post(self, cause: str) -> str:
        """Post `cause` unless another rank has posted one, ask all ranks to answer, and return the first cause."""
        first = default_store().compare_set(f"{self.place}/cause", "", cause).decode()
        self.ask()
        return first

    def ask(self) -> None:
        """Ask all ranks to answer."""
        default_store().set(f"{self.place}/asked", "")

    def is_asked(self) -> bool:
        """Whether a rank has asked all to answer."""
        return default_store().check([f"{self.place}/asked"])

    def listen(self) -> str:
        """The first cause that a rank has posted, or ""."""
        key = f"{self.place}/cause"
        if not self.heard and default_store().check([key]):
            self.heard = default_store().get(key).decode()
        return self.heard

    def answer(self) -> None:
        """Record that this rank is alive."""
        default_store().set(f"{self.place}/lives/{dist.get_rank()}", "")

    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if not default_store().check([f"{self.place}/lives/{rank}"])]


@contextmanager
def failing_together(meeting: Meeting) -> Iterator[None]:
    """A context in which an error of one rank of the meeting is raised on all others as PeerFailed.

    After a failure the meeting is over, since tensors are in flight that no rank will receive. Entering it again is an
    AutoparError.
    """
    if meeting.is_over:
        raise AutoparError(
            f"a step of this model failed before ({meeting.heard}); its ranks are not in step any more: start them anew"
        )
    is_left = threading.Event()
    store_threads.start(_watch, meeting, is_left, name="autopar-watch")
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
    """Post this rank's error and give the others time to read it: the store may end with this process."""
    with suppress(RuntimeError):  # raised by the store
        meeting.heard = meeting.post(cause)
        meeting.answer()
        deadline = time.monotonic() + ANSWER_S
        while meeting.silent() and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)


def _cause_of_break(meeting: Meeting) -> str:
    """The first cause, or the ranks that do not answer, after a connection of this rank broke."""
    with suppress(RuntimeError):  # raised by the store
        meeting.ask()
        meeting.answer()
        deadline = time.monotonic() + ANSWER_S
        while not meeting.listen() and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)
        if not meeting.heard:
            silent = ", ".join(map(str, meeting.silent()))
            meeting.heard = meeting.post(
                f"rank {silent} died, without a word, or left the step" if silent else "a message did not come in time"
            )
    return meeting.heard or STORE_DIED


def _watch(meeting: Meeting, is_left: threading.Event) -> None:
    """Answer when a rank asks, and end this process if it is stuck after that."""
    is_asked = False
    while not is_asked and not is_left.wait(POLL_S):
        try:
            is_asked = meeting.is_asked()
            if is_asked:
                meeting.listen()
                meeting.answer()
        except dist.DistError:  # the store's process has ended
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
