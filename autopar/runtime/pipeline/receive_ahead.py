"""`Inbox` and `Outbox`: what a rank's stages receive and send back, beside computing."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.distributed as dist

from autopar.sbp.in_flight import timed
from autopar.schedule.timeline import Action

Post = Callable[[Action], Sequence[dist.Work]]


class Inbox:
    """The receives of a rank's stages in a step, of values or of gradients; `order`: the actions that need them.

    The neighbour sends in the same order. One receive is posted ahead: the first when the rank begins to compute, each
    other one when the computation that needs the one before begins. So it takes one more buffer, and arrives beside
    computing.
    """

    def __init__(self, order: Iterable[Action], post: Post) -> None:
        self.post, self._left = post, deque(order)
        self._posted: tuple[Action, Sequence[dist.Work]] | None = None
        self._is_begun = False

    def begin(self) -> None:
        """Post the first receive, if that is not done."""
        if not self._is_begun:
            self._is_begun = True
            self._post_next()

    def take(self, stage: int, microbatch: int) -> None:
        """Wait for what `stage` receives for `microbatch`, if anything, and post the next receive."""
        if self._posted is not None and self._posted[0][1:] == (stage, microbatch):
            _wait(self._posted[1])
            self._post_next()

    def _post_next(self) -> None:
        self._posted = None
        if self._left:
            action = self._left.popleft()
            self._posted = action, self.post(action)


class Outbox:
    """The gradients that a rank's stages send back in a step, each kept until it has surely arrived.

    `posted_by`: as in `simulate.posted_by`, of this rank. A rank that waited for an arrival any earlier might wait for
    a rank that waits for it.
    """

    def __init__(self, posted_by: Mapping[int, int]) -> None:
        self.posted_by, self._index = posted_by, -1
        self._due: dict[int, list[dist.Work]] = {}  # by the index of the action that waits for them

    def begin_action(self) -> None:
        """Begin the next action of the rank, after what has surely been received by then."""
        self._index += 1
        _wait(self._due.pop(self._index, []))

    def put(self, sends: Iterable[dist.Work]) -> None:
        """Keep the sends of this action's gradient."""
        self._due.setdefault(self.posted_by.get(self._index, -1), []).extend(sends)

    def end(self) -> None:
        """Wait for all that is left."""
        for sends in self._due.values():
            _wait(sends)
        self._due.clear()


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        timed(work.wait)
