"""Process groups for ranks that share one GPU, which NCCL refuses: what is sent goes through the host and gloo.

Tensors, streams and memory are those of the GPU, and each collective is issued and waited for as ever. So this shows
whether programs compute the right numbers on a GPU, and how much memory a rank takes, but no times of links.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "shared_gpu"


class _Received(dist.Work):
    """A receive: `wait` puts what has come into the tensor on the GPU."""

    def __init__(self, work: Any, tensor: torch.Tensor, host: torch.Tensor) -> None:
        super().__init__()
        self._work, self._tensor, self._host = work, tensor, host

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._tensor.copy_(self._host)
        return True


class SharedGpu(dist.ProcessGroup):
    """The group. A collective is over when it returns, so that its work has nothing left to wait for."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _set_group_desc(self, text: str) -> None:
        """Nobody asks for it."""

    def _done(self, work: Any, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Any:
        """The work of a collective once `tensors` have the results that are on `hosts`."""
        work.wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)
        return work

    def allreduce(self, tensors, opts=None):
        hosts = _on_host(tensors)
        return self._done(self._gloo.allreduce(hosts, opts or dist.AllreduceOptions()), tensors, hosts)

    def allreduce_coalesced(self, tensors, opts=None):
        works = [self.allreduce([x], opts) for x in tensors]
        return works[-1]

    def broadcast(self, tensors, opts=None):
        hosts = _on_host(tensors)
        return self._done(self._gloo.broadcast(hosts, opts or dist.BroadcastOptions()), tensors, hosts)

    def scatter(self, outputs, inputs, opts):
        hosts = _on_host(outputs)
        return self._done(self._gloo.scatter(hosts, [_on_host(row) for row in inputs], opts), outputs, hosts)

    def gather(self, outputs, inputs, opts):
        hosts = [_on_host(row) for row in outputs]
        work = self._gloo.gather(hosts, _on_host(inputs), opts)
        return self._done(work, [x for row in outputs for x in row], [x for row in hosts for x in row])

    def allgather(self, outputs, inputs, opts=None):
        hosts = _on_host(outputs[0])
        return self._done(self._gloo.allgather([hosts], _on_host(inputs)), outputs[0], hosts)

    def _allgather_base(self, output, given, opts=None):
        host = output.cpu()
        return self._done(self._gloo._allgather_base(host, given.cpu()), [output], [host])

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._allgather_base(output, given) for output, given in zip(outputs, inputs)]
        return works[-1]

    def _reduce_scatter_base(self, output, given, opts=None):
        host = output.cpu()
        work = self._gloo._reduce_scatter_base(host, given.cpu(), opts or dist.ReduceScatterOptions())
        return self._done(work, [output], [host])

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        works = [self._reduce_scatter_base(output, given, opts) for output, given in zip(outputs, inputs)]
        return works[-1]

    def alltoall_base(self, output, given, output_sizes, input_sizes, opts=None):
        host = output.cpu()
        work = self._gloo.alltoall_base(host, given.cpu(), output_sizes, input_sizes)
        return self._done(work, [output], [host])

    # as torch calls them from 2.13 on
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        torch.cuda.synchronize()
        return self._gloo.barrier(dist.BarrierOptions())

    def send(self, tensors, target, tag=0):
        return self._gloo.send(_on_host(tensors), target, tag)

    def recv(self, tensors, source, tag=0):
        hosts = [torch.empty_like(x, device="cpu") for x in tensors]
        return _Received(self._gloo.recv(hosts, source, tag), tensors[0], hosts[0])


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.cpu() for x in tensors]


def _make(options: Any, _: Any = None) -> SharedGpu:
    return SharedGpu(options.store, options.group_rank, options.group_size, options.timeout)


def start(rank: int, num_ranks: int, init_method: str) -> None:
    """Join a world of ranks that take turns on the GPUs there are."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cuda"])
    dist.init_process_group(BACKEND, init_method=init_method, rank=rank, world_size=num_ranks)
