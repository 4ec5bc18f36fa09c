"""A stage for torch's schedules, with static shapes, buffers of minimal live ranges, and a clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from autopar.runtime.pipeline.lanes import Lanes
from autopar.runtime.pipeline.receive_ahead import Inbox, Outbox
from autopar.runtime.pipeline.split_backward import WeightPart, backward_of_inputs
from autopar.sbp.in_flight import timed
from autopar.schedule.orders import Schedule
from autopar.schedule.timeline import Action, Span

Waited = Callable[[float], None]
# (number of the microbatch, what it receives) -> what the stage sends, of the last one the microbatch's loss alone
Work = Callable[[int, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Wire:
    """One rank's part of a boundary tensor; if `needs_grad`, its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def example(self) -> torch.Tensor:
        """A tensor without data, from which torch learns the shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.needs_grad)


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage of this rank with its boundary tensors.

    `receives` equals `sends` of the previous stage, in the same order; the last stage "sends" the loss, a scalar.
    """

    index: int
    receives: tuple[Wire, ...]
    sends: tuple[Wire, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """The receives of all stages of a rank in a step, and the gradients that they send back.

    `waited`: called with the seconds of each wait, if somebody measures them.
    """

    values: Inbox
    gradients: Inbox
    back: Outbox
    device: torch.device
    waited: Waited | None = None

    def begin_action(self, inbox: Inbox, stage: int, microbatch: int) -> None:
        """Begin the rank's next action, when what `stage` takes from `inbox` is there; `waited` is told how long that
        took.
        """
        start_s = 0.0 if self.waited is None else now_s(self.device)
        self.values.begin(), self.gradients.begin()  # before the first action, receives are posted
        self.back.begin_action()
        inbox.take(stage, microbatch)
        if self.waited is not None:
            self.waited(now_s(self.device) - start_s)


class _NumberedBody(nn.Module):
    """The module that torch calls, after the number of the microbatch has been set."""

    def __init__(self, sends: tuple[Wire, ...]) -> None:
        super().__init__()
        self.sends = sends
        self.microbatch = 0
        self.work: Work | None = None

    def __call__(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Without hooks of all modules, as FlopCounterMode's: this is no module of the model."""
        assert self.work is not None, "a stage is run within a step"
        outputs = self.work(self.microbatch, received)
        return tuple(_checked(x, wire) for x, wire in zip(outputs, self.sends))


def _checked(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    assert x.shape == wire.shape and x.dtype == wire.dtype, (
        f"the stage makes {x.dtype}{list(x.shape)}, the next one expects {wire}"
    )
    return sendable(x) if wire.needs_grad else sendable(x).detach()


def sendable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of a view: torch detaches sent tensors in place after the backward, which views do not allow."""
    return x.clone(memory_format=torch.contiguous_format) if x._is_view() else x.contiguous()


class RunningStage(PipelineStage):
    """torch's stage, with each buffer allocated when its microbatch is received and freed after its backward."""

    def __init__(self, stage: LocalStage, schedule: Schedule, lanes: Lanes, device: torch.device) -> None:
        self.running = _NumberedBody(stage.sends)
        receives = tuple(wire.example() for wire in stage.receives)
        sends = tuple(wire.example() for wire in stage.sends)
        super().__init__(
            self.running,
            stage.index,
            schedule.num_stages,
            device,
            input_args=receives,
            output_args=sends,
            group=lanes.group,
        )
        self.spans: list[Span] = []
        self.is_timed = False
        self.lanes, self.rank_of = lanes, schedule.rank_of
        # Pending sends of values by microbatch, which this class waits for: torch's schedules would wait for them
        # before they compute on, or keep all sent tensors until the end of the step.
        self._ahead: dict[int, list[dist.Work]] = {}
        self.transfers = Transfers(Inbox((), self.post), Inbox((), self.post), Outbox({}), device)

    def begin(self, work: Work, transfers: Transfers, *, is_timed: bool) -> None:
        """Start a step with `work`; `transfers`: those of all stages of this rank."""
        self.running.work, self.transfers, self.is_timed = work, transfers, is_timed
        self.spans = []

    def end(self) -> None:
        """Wait for all sends of values, and drop the step's work."""
        _wait([send for sends in self._ahead.values() for send in sends])
        self._ahead.clear()
        self.running.work = None

    def post(self, action: Action) -> list[dist.Work]:
        """Begin to receive what this stage needs for `action`."""
        _, stage, microbatch = action
        is_forward = action.kind == "F"
        _make_buffers((self.args_recv_info if is_forward else self.grad_recv_info)[microbatch], self.device)
        receives = super().get_fwd_recv_ops(microbatch) if is_forward else super().get_bwd_recv_ops(microbatch)
        sender = self.rank_of(stage - 1 if is_forward else stage + 1)
        group = self.lanes.by("F" if is_forward else "B", sender)
        return _begun(dist.irecv(receive.tensor, receive.peer, group=group) for receive in receives)

    # torch is told that there is nothing to receive or send: it would wait for it before it computes on.
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._ahead[fwd_chunk_id] = self._isend("F", super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.transfers.back.put(self._isend("B", super().get_bwd_send_ops(bwd_chunk_id)))
        return []

    def _isend(self, kind: str, sends: Sequence[dist.P2POp]) -> list[dist.Work]:
        group = self.lanes.by(kind, self.rank_of(self.stage_index)) if sends else None
        return _begun(dist.isend(send.tensor, send.peer, group=group) for send in sends)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.running.microbatch = fwd_chunk_id
        self.transfers.begin_action(self.transfers.values, self.stage_index, fwd_chunk_id)
        run = super().forward_one_chunk
        return self._timed("F", fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        run, kind = super().backward_one_chunk, "B" if full_backward else "I"
        self.transfers.begin_action(self.transfers.gradients, self.stage_index, bwd_chunk_id)
        _wait(self._ahead.pop(bwd_chunk_id, []))  # has arrived, since its gradient came back
        self._timed(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward))
        # A gradient may be expanded or transposed, which no backend sends.
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in self.bwd_cache[bwd_chunk_id])
        if full_backward:
            self._release(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.transfers.back.begin_action()
        run = super().backward_weight_one_chunk
        self._timed("W", bwd_chunk_id, lambda: run(bwd_chunk_id, last_backward=last_backward))
        self._release(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """A whole backward, or a part of it; torch keeps what the "input" part returns as `param_groups`."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            return backward_of_inputs(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            )
        left: WeightPart | None = bwd_kwargs["param_groups"]
        if left is not None:
            left.run()
        return (), None

    def _release(self, microbatch: int) -> None:
        for received in (*self.args_recv_info[microbatch], *self.grad_recv_info[microbatch]):
            received.buffer = None

    def _timed(self, kind: str, microbatch: int, run: Callable[[], Any]) -> Any:
        if not self.is_timed:
            return run()
        start_s = now_s(self.device)
        result = run()
        self.spans.append(Span(Action(kind, self.stage_index, microbatch), start_s, now_s(self.device)))
        return result


def _begun(works: Iterable[dist.Work | None]) -> list[dist.Work]:
    return [work for work in works if work is not None]  # None from a rank outside the group


def _wait(sends: Sequence[dist.Work]) -> None:
    for send in sends:
        timed(send.wait)


def _make_buffers(received: Sequence[Any], device: torch.device) -> None:
    for item in received:
        if not item.is_root_arg and item.tensor_meta is not None:
            item.buffer = torch.empty(item.tensor_meta.shape, dtype=item.tensor_meta.dtype, device=device)


def now_s(device: torch.device) -> float:
    """The time in seconds, on this process's clock, at which the device has finished all work launched so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
