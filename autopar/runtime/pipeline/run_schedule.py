"""`StageRunner`: training steps of the stages of one rank, run by the schedules of torch.distributed.pipelining."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autopar.errors import AutoparError
from autopar.runtime.pipeline.lanes import Lanes
from autopar.runtime.pipeline.receive_ahead import Inbox, Outbox
from autopar.runtime.pipeline.torch_stage import LocalStage, RunningStage, Transfers, Waited, Work, now_s, sendable
from autopar.sbp.in_flight import timed
from autopar.schedule.orders import Schedule, arriving, receiving_kinds
from autopar.schedule.simulate import posted_by
from autopar.schedule.timeline import Action, Span, Timeline
from autopar.torch_compat import STAGE_FAILED, has_pipeline_stages

ONE_STAGE_A_RANK = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
SEVERAL_STAGES_A_RANK = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the loss, on every rank, and this rank's timeline if it was timed."""

    loss: torch.Tensor
    spans: tuple[Span, ...]


class StageRunner:
    """The stages of this rank with torch's schedule that runs them.

    `lanes`: of the ranks along the pipeline axis; rank r holds the stages that are r modulo their number. One stage
    needs none: it accumulates gradients over its microbatches.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[LocalStage],
        lanes: Lanes | None,
        device: torch.device,
        loss_dtype: torch.dtype = torch.float32,
    ) -> None:
        if lanes is not None and not has_pipeline_stages():
            raise AutoparError(
                f"a plan with a pipeline needs torch 2.12 or newer, found {torch.__version__}: update torch, or plan"
                " for a mesh without a pipeline axis"
            )
        self.schedule, self.device, self.loss_dtype = schedule, device, loss_dtype
        self.lanes, self.group = lanes, None if lanes is None else lanes.group
        self.take(stages)
        rank = 0 if self.group is None else dist.get_rank(self.group)
        self._arriving = [arriving(schedule, rank, kind) for kind in receiving_kinds(schedule)]
        self._posted_by = posted_by(schedule)[rank] if self.stages else {}
        self._losses: list[torch.Tensor] = []  # of the microbatches of a step, on the rank of the last stage
        self._scale: torch.Tensor | None = None
        self.waited: Waited | None = None  # told how long each wait of this rank's stages takes

    def take(self, stages: Sequence[LocalStage]) -> None:
        """From the next step on run these stages, whose boundary tensors may have other shapes than before."""
        lanes, self.local = self.lanes, tuple(stages)
        of_torch = (RunningStage(stage, self.schedule, lanes, self.device) for stage in stages if lanes is not None)
        self.stages = [] if lanes is None else [*of_torch]
        self._of_number = {stage.stage_index: stage for stage in self.stages}
        self._torch = self._made() if self.stages else None

    def _made(self) -> Any:
        # The losses of microbatches are terms of the whole batch's loss: they are summed, not averaged.
        options: dict[str, Any] = {
            "n_microbatches": self.schedule.num_microbatches,
            "loss_fn": self._scaled_loss,
            "scale_grads": False,
        }
        if self.schedule.name in ONE_STAGE_A_RANK:
            return ONE_STAGE_A_RANK[self.schedule.name](self.stages[0], **options)
        return SEVERAL_STAGES_A_RANK[self.schedule.name]([*self.stages], **options)

    def step(
        self, works: Mapping[int, Work], *, is_timed: bool = False, scale: torch.Tensor | None = None
    ) -> StepResult:
        """Run forward and backward of all microbatches, and add their gradients to those of the leaves.

        `works`: number of a stage -> its work. `scale`: the factor of the loss in backward.
        """
        start_s = self._start() if is_timed else 0.0
        self._scale = scale
        if self._torch is None:
            losses, spans = self._accumulate(works[0], is_timed=is_timed)
            total = torch.stack(losses).sum()
        else:
            total, spans = self._run(works, is_timed=is_timed)
        timed = tuple(Span(action, begin - start_s, end - start_s) for action, begin, end in spans) if is_timed else ()
        return StepResult(total, timed)

    def _run(self, works: Mapping[int, Work], *, is_timed: bool) -> tuple[torch.Tensor, list[Span]]:
        transfers = self._transfers()
        for stage in self.stages:
            stage.begin(works[stage.stage_index], transfers, is_timed=is_timed)
        last = next((stage for stage in self.stages if stage.is_last), None)
        self._losses.clear()
        try:
            # torch requires a target, of which it cuts a part for each microbatch.
            target = torch.arange(self.schedule.num_microbatches) if last is not None else None
            assert self._torch is not None, "this rank is one of a pipeline"
            self._torch.step(target=target, return_outputs=False)
            for stage in self.stages:
                stage.end()
            transfers.back.end()
        except RuntimeError as error:
            raise _own_error(error)  # noqa: B904  it has a cause of its own
        spans = sorted((span for stage in self.stages for span in stage.spans), key=lambda span: span.start_s)
        return self._total(self._losses), spans

    def _transfers(self) -> Transfers:
        values, gradients = (Inbox(order, self._post) for order in self._arriving)
        return Transfers(values, gradients, Outbox(self._posted_by), self.device, self.waited)

    def _post(self, action: Action) -> Sequence[dist.Work]:
        return self._of_number[action.stage].post(action)

    def _scaled_loss(self, outputs: tuple[torch.Tensor, ...], target: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of a microbatch, which is noted, times the scale: torch runs backward of it."""
        loss = outputs[0]
        self._losses.append(loss.detach())
        return loss if self._scale is None else loss * self._scale

    def _total(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The sum of the losses, which the rank of the last stage has, on every rank."""
        total = (
            torch.stack(losses).detach().sum() if losses else torch.zeros((), dtype=self.loss_dtype, device=self.device)
        )
        last = self.schedule.rank_of(self.schedule.num_stages - 1)
        timed(dist.broadcast, total, group=self.group, group_src=last)
        return total

    def forward(self, works: Mapping[int, Work]) -> torch.Tensor:
        """The loss by forward alone; each rank runs one microbatch after the other, so that there is no deadlock."""
        if self.group is None:
            return torch.stack(
                [works[0](microbatch, ())[0] for microbatch in range(self.schedule.num_microbatches)]
            ).sum()
        losses: list[torch.Tensor] = []
        sends: list[dist.Work | None] = []
        for microbatch, stage in product(
            range(self.schedule.num_microbatches), sorted(self.local, key=lambda stage: stage.index)
        ):
            received = tuple(torch.empty(wire.shape, dtype=wire.dtype, device=self.device) for wire in stage.receives)
            for x in received:
                dist.recv(x, group=self.group, group_src=self.schedule.rank_of(stage.index - 1))
            made = works[stage.index](microbatch, received)
            if stage.index == self.schedule.num_stages - 1:
                losses.append(made[0])
                continue
            after = self.schedule.rank_of(stage.index + 1)
            sends += [dist.isend(sendable(x), group=self.group, group_dst=after) for x in made]
        for send in sends:
            if send is not None:
                send.wait()
        return self._total(losses)

    def _accumulate(self, work: Work, *, is_timed: bool) -> tuple[list[torch.Tensor], list[Span]]:
        spans = []
        self._losses.clear()
        for microbatch in range(self.schedule.num_microbatches):
            begin_s = self._clock(is_timed)
            scaled = self._scaled_loss(work(microbatch, ()))
            middle_s = self._clock(is_timed)
            scaled.backward()
            end_s = self._clock(is_timed)
            spans += [
                Span(Action("F", 0, microbatch), begin_s, middle_s),
                Span(Action("B", 0, microbatch), middle_s, end_s),
            ]
        return self._losses, spans

    def _clock(self, is_timed: bool) -> float:
        return now_s(self.device) if is_timed else 0.0

    def _start(self) -> float:
        if self.group is not None:
            dist.barrier(group=self.group)
        return now_s(self.device)


def _own_error(error: RuntimeError) -> BaseException:
    """The error that a stage raised, without torch's wrapper, which lists every argument."""
    is_wrapped = STAGE_FAILED in str(error)
    return error.__cause__ if is_wrapped and error.__cause__ is not None else error


def measured_timeline(step: StepResult, group: dist.ProcessGroup | None) -> Timeline:
    """The timeline of all ranks of the pipeline axis, from their timed steps; their clocks start at a barrier."""
    if group is None:
        return Timeline((step.spans,))
    rows: list[tuple[Span, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(rows, step.spans, group=group)
    return Timeline(tuple(rows))
