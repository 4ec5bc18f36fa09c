"""A process group around gloo that keeps NCCL's rules, and raises where one is broken.

Tensors lie on the device and are contiguous, `bool` is not summed, and all ranks of a group issue the same collectives
in the same order. What is sent between two ranks is recorded and judged afterwards (`Traffic`): NCCL runs what a
communicator is given one after the other, and a send ends only when its receive has begun, so that two ranks that both
send first wait for each other for ever.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.device.emulated import NAME, content_of, install, is_on_device

BACKEND = "nccl_rules"
NOT_OF_NCCL = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


class RuleBroken(AssertionError):
    """NCCL would fail or hang here, or compute nonsense."""


@dataclass(frozen=True)
class Transfer:
    """A send from `source` to `target`, ranks of the world, as one of them issued it."""

    source: int
    target: int
    num_bytes: int


@dataclass
class Traffic:
    """What this rank issued point to point: (communicator, the transfers that it starts together)."""

    launches: list[tuple[str, tuple[Transfer, ...]]] = field(default_factory=list)
    batch: list[tuple[str, Transfer]] | None = None
    warm: set[str] = field(default_factory=set)  # groups whose communicator of all ranks has been made

    def add(self, group: str, transfer: Transfer) -> None:
        """A transfer of its own goes by a communicator of the two ranks; those of a batch by that of the group."""
        if self.batch is not None:
            self.batch.append((group, transfer))
        else:
            pair = sorted((transfer.source, transfer.target))
            self.launches.append((f"{group}:{pair[0]}:{pair[1]}", (transfer,)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """As between ncclGroupStart and ncclGroupEnd."""
        self.batch = []
        try:
            yield
        finally:
            batch, self.batch = self.batch, None
        groups = {group for group, _ in batch}
        for group in sorted(groups):
            if group not in self.warm:
                raise RuleBroken(f"a batch is the first use of group {group}: its other ranks do not take part")
            self.launches.append((group, tuple(transfer for one, transfer in batch if one == group)))


traffic = Traffic()


def stuck(of_ranks: Sequence[Sequence[tuple[str, tuple[Transfer, ...]]]]) -> str:
    """What waits for ever if a communicator runs its launches one after the other; "" if nothing does.

    `of_ranks`: the launches of each rank. All the peers of a launch must have come to theirs before any of it ends.
    """
    queues: dict[tuple[int, str], list[list[Transfer]]] = {}
    for rank, launches in enumerate(of_ranks):
        for communicator, transfers in launches:
            queues.setdefault((rank, communicator), []).append(list(transfers))
    is_moving = True
    while is_moving:
        is_moving = False
        for (rank, communicator), queue in queues.items():
            for transfer in [*queue[0]] if queue else []:
                peer = transfer.source if transfer.target == rank else transfer.target
                other = queues.get((peer, communicator), [])
                if other and transfer in other[0]:
                    queue[0].remove(transfer)
                    other[0].remove(transfer)
                    is_moving = True
            for each in (queue, *(q for (_, name), q in queues.items() if name == communicator)):
                while each and not each[0]:
                    each.pop(0)
    left = [f"rank {rank} in {queue[0]} of {name}" for (rank, name), queue in queues.items() if queue]
    return "; ".join(left[:4])


class NcclRules(dist.ProcessGroup):
    """The group. Of gloo it is given copies on the host, which come back when the work is done."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._number, self._name = 0, ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def _set_group_desc(self, text: str) -> None:
        """Nobody asks for it."""

    def _begin(self, kind: str, tensors: Sequence[torch.Tensor], *, reduces: Any = None) -> list[torch.Tensor]:
        """The memory of the tensors of a collective, after all ranks were found to issue the same."""
        contents = [self._checked(kind, x) for x in tensors]
        if reduces is not None and any(x.dtype == torch.bool for x in contents):
            raise RuleBroken(f"{kind} of bool: NCCL has no sums of bool")
        traffic.warm.add(self.group_name)
        self._number += 1
        said = f"{kind} {[(tuple(x.shape) if kind != 'alltoall' else x.numel(), str(x.dtype)) for x in contents]}"
        own = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7])
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        self._gloo.allgather([digests], [torch.tensor([own])]).wait()
        if any(int(x) != own for x in digests):
            raise RuleBroken(
                f"collective {self._number} of group {self.group_name} on this rank is {said}, not so on all"
            )
        return contents

    def _checked(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        if not is_on_device(x):
            raise RuleBroken(f"{kind} of a tensor on {x.device}, {x.dtype}{list(x.shape)}: NCCL takes those of the GPU")
        content = content_of(x)
        if not content.is_contiguous():
            raise RuleBroken(f"{kind} of a tensor that is not contiguous: {x.dtype}{list(x.shape)}, {x.stride()}")
        if content.dtype in NOT_OF_NCCL or content.is_complex():
            raise RuleBroken(f"{kind} of {x.dtype}, which NCCL does not have")
        return content

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._gloo.allreduce(self._begin("allreduce", tensors, reduces=opts.reduceOp), opts)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._gloo.allreduce_coalesced(self._begin("allreduce", tensors, reduces=opts.reduceOp), opts)

    def broadcast(self, tensors, opts=None):
        return self._gloo.broadcast(self._begin("broadcast", tensors), opts or dist.BroadcastOptions())

    def scatter(self, outputs, inputs, opts):
        contents = self._begin("scatter", outputs)
        return self._gloo.scatter(contents, [[self._checked("scatter", x) for x in row] for row in inputs], opts)

    def gather(self, outputs, inputs, opts):
        contents = self._begin("gather", inputs)
        return self._gloo.gather([[self._checked("gather", x) for x in row] for row in outputs], contents, opts)

    def allgather(self, outputs, inputs, opts=None):
        sent = self._begin("allgather", [*inputs, *outputs[0]])
        return self._gloo.allgather([sent[1:]], sent[:1])

    def _allgather_base(self, output, given, opts=None):
        output, given = self._begin("allgather_base", [output, given])
        return self._gloo._allgather_base(output, given)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._allgather_base(output, given) for output, given in zip(outputs, inputs)]
        return works[-1]

    def _reduce_scatter_base(self, output, given, opts=None):
        output, given = self._begin("reduce_scatter", [output, given], reduces=True)
        return self._gloo._reduce_scatter_base(output, given, opts or dist.ReduceScatterOptions())

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._reduce_scatter_base(output, given, opts) for output, given in zip(outputs, inputs)]
        return works[-1]

    def alltoall_base(self, output, given, output_sizes, input_sizes, opts=None):
        output, given = self._begin("alltoall", [output, given])
        return self._gloo.alltoall_base(output, given, output_sizes, input_sizes)

    # as torch calls them from 2.13 on
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        self._begin("barrier", [])
        if opts is not None and opts.device is not None and opts.device.type != NAME:
            raise RuleBroken(f"a barrier on {opts.device}")
        return self._gloo.barrier(dist.BarrierOptions())

    def send(self, tensors, target, tag=0):
        contents = [self._checked("send", x) for x in tensors]
        self._record(self.rank(), target, contents)
        return self._gloo.send(contents, target, tag)

    def recv(self, tensors, source, tag=0):
        contents = [self._checked("recv", x) for x in tensors]
        self._record(source, self.rank(), contents)
        return self._gloo.recv(contents, source, tag)

    def _record(self, source: int, target: int, contents: Sequence[torch.Tensor]) -> None:
        ranks = dist.get_process_group_ranks(self)
        num_bytes = sum(x.numel() * x.itemsize for x in contents)
        traffic.add(self.group_name, Transfer(ranks[source], ranks[target], num_bytes))


def _make(options: Any, _: Any = None) -> NcclRules:
    return NcclRules(options.store, options.group_rank, options.group_size, options.timeout)


def start(rank: int, num_ranks: int, init_method: str) -> None:
    """Join a world whose only groups keep NCCL's rules, with a device that is not the host."""
    install()
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=[NAME])
    batched = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
        with traffic.together():
            return batched(ops)

    dist.batch_isend_irecv = batch_isend_irecv
    dist.init_process_group(BACKEND, init_method=init_method, rank=rank, world_size=num_ranks)
