"""`GatherBucket`: stored parameters that are gathered together, ahead of their first use or at it.

Gathered ahead, a bucket is two nodes of autograd, made where the gather is started and where it arrives, and joined by
an empty tensor. Autograd runs nodes in the reverse order of their making: in backward the gradients are reduced from
the arrival's node on, while the ops between both are differentiated, and have to be there at the start's.
"""

import torch

from autopar.runtime.rank_agreement import peers_alive
from autopar.sbp.axis import Axis
from autopar.sbp.convert import Extents, begin_together, convert_together, dual
from autopar.sbp.in_flight import Landing, expect, given_back, is_in_turn, taken
from autopar.sbp.placement import Placement


class Unchanged:
    """A stored parameter, and the check that it is not changed between forward and backward."""

    def __init__(self, stored: torch.Tensor) -> None:
        self.stored, self.version = stored, stored._version

    def checked(self) -> torch.Tensor:
        if self.stored._version != self.version:
            raise RuntimeError(
                "a parameter that backward gathers again was changed in place after forward; update it after backward"
            )
        return self.stored.detach()


class GatherBucket:
    """Stored parameters that are gathered with one collective in forward, and again with one in backward.

    `sources`, `targets`: their placements on `axis`, before and after; `sum_in`, `extents`: as in `convert_together`.
    Backward gathers those that it has any use for
    when the first of them is asked for, or before, and hands each out once.
    """

    def __init__(
        self,
        axis: Axis,
        sources: tuple[Placement, ...],
        targets: tuple[Placement, ...],
        *stored: torch.Tensor,
        sum_in: torch.dtype | None = None,
        extents: Extents = (),
    ) -> None:
        self.sum_in, self.extents = sum_in, extents
        self.axis, self.ends, self.stored = axis, list(zip(sources, targets, strict=True)), stored
        self.unchanged = [Unchanged(x) for x in stored]
        self.wanted: set[int] = set()
        self.made: dict[int, torch.Tensor] = {}
        self.num_again = 0  # how often it was gathered again
        self.earlier: GatherBucket | None = None
        self.ticket: torch.Tensor | None = None
        # collectives that are under way
        self.gather: Landing | None = None
        self.gather_again: Landing | None = None
        self.reduction: Landing | None = None

    def started(self, earlier: "GatherBucket | None" = None) -> "GatherBucket":
        """Start to gather, for `converted` to wait for it. When backward has this bucket, it starts to gather `earlier`
        again, whose turn is next.
        """
        self.earlier = earlier
        self.ticket = _Start.apply(self, *self.stored)
        return self

    def converted(self) -> tuple[torch.Tensor, ...]:
        """The gathered parameters, for forward."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            return _Arrival.apply(self, ticket)
        sources, targets = zip(*self.ends, strict=True)
        ends = {"sum_in": self.sum_in, "extents": self.extents}
        return convert_together(self.axis, sources, targets, *self.stored, **ends)

    def gathered(self, number: int) -> torch.Tensor:
        """Parameter `number`, gathered again."""
        if number not in self.made:
            landing, self.gather_again = self.gather_again or self._again(), None
            self.made = dict(zip(sorted(self.wanted), landing(), strict=True))
            if self.earlier is not None:
                self.earlier.begin_again(self.num_again)
        self.unchanged[number].checked()  # it may have been gathered for another backward
        return self.made.pop(number)

    def begin_again(self, num_again: int) -> None:
        """Start to gather again what backward has a use for, unless this is the backward that had it already: of
        `num_again`, by the bucket that follows in forward. An op may read this bucket after those that read that one.
        """
        if self.wanted and self.num_again < num_again:
            self.gather_again = self._again()

    def _again(self) -> Landing:
        wanted = sorted(self.wanted)
        self.num_again += 1
        sources, targets = zip(*(self.ends[one] for one in wanted), strict=True)
        again = (self.unchanged[one].checked() for one in wanted)
        extents = tuple(self.extents[one] for one in wanted) if self.extents else ()
        return begin_together(self.axis, sources, targets, *again, extents=extents, is_async=not is_in_turn())

    def begin_reduction(self, *gradients: torch.Tensor) -> None:
        """Start to reduce the gradients of the gathered parameters.

        Those that are differentiated again are reduced in turn.
        """
        sources, targets = (tuple(map(dual, placements)) for placements in zip(*((b, a) for a, b in self.ends)))
        is_sum = self.sum_in is not None and sources[0].kind == "P"
        own = self.stored[0].dtype
        wide = [x.to(self.sum_in if is_sum else own) for x in gradients]
        if torch.is_grad_enabled():
            reduced = convert_together(self.axis, sources, targets, *wide)
            self.reduction = lambda: reduced
        else:
            self.reduction = begin_together(self.axis, sources, targets, *wide, is_async=not is_in_turn())


class _Start(torch.autograd.Function):
    """Starts to gather a bucket; waits in backward for its gradients."""

    @staticmethod
    def forward(ctx, bucket, *stored):
        sources, targets = zip(*bucket.ends, strict=True)
        how = {"extents": bucket.extents, "is_async": not is_in_turn()}
        bucket.gather = begin_together(bucket.axis, sources, targets, *stored, **how)
        ctx.bucket = bucket
        expect(ctx, stored)
        return stored[0].new_empty(0)

    @staticmethod
    def backward(ctx, *_):
        landing, ctx.bucket.reduction = ctx.bucket.reduction, None
        with peers_alive():
            return None, *given_back(ctx, landing())


class _Arrival(torch.autograd.Function):
    """Waits for a bucket's gather; starts to reduce its gradients in backward."""

    @staticmethod
    def forward(ctx, bucket, ticket):
        landing, bucket.gather = bucket.gather, None
        ctx.bucket = bucket
        expect(ctx, bucket.stored)
        return tuple(x.detach() for x in landing())

    @staticmethod
    def backward(ctx, *gradients):
        ctx.bucket.begin_reduction(*taken(ctx, gradients))
        return None, gradients[0].new_zeros(0)
