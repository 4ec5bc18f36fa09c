"""Generated programs on the device of a GPU, without one: forward on fake tensors on `cuda`, forward and backward on
`meta`, where a tensor of the host raises.
"""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.ir.interpret import run_constants
from autopar.mesh import Mesh
from autopar.peak_memory.device_kernels import without_data
from autopar.peak_memory.dry_run import DryStage, Rank
from autopar.schedule.timeline import Action
from autopar.torch_compat import FakeTensorMode
from tests.planner.cases import by_hand, traced
from tests.zoo import ZOO

MESH = Mesh((2, 2), ("dp", "tp"))
KINDS = ("zero3", "megatron")
everything = pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in ZOO for kind in KINDS])


def program_of(name: str, kind: str) -> Program:
    return lower(traced(name), MESH, by_hand(name, kind))


class StandIns(TorchFunctionMode):
    """The methods that ask for a real device even of fake tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            assert args[0].device == args[1].device, f"a copy from {args[1].device} to {args[0].device}"
            return args[0].zero_()
        if func is torch.Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
            return torch.ops.aten.index.Tensor(args[0], [args[1]])
        return func(*args, **(kwargs or {}))


def forward_on_cuda(program: Program, constants: str = "cuda") -> list[torch.Tensor]:
    """The outputs of the program on fake tensors; the default device is the host, as in a run."""
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            rank = Rank.of(program, (), {}, "cuda")
        if constants != "cuda":
            rank = replace(rank, constants={name: x.to(constants) for name, x in rank.constants.items()})
        with StandIns():
            outputs = rank.run({})
        return [x for x in outputs if isinstance(x, torch.Tensor)]


@everything
def test_forward_on_cuda_meets_no_tensor_of_the_host(name: str, kind: str) -> None:
    outputs = forward_on_cuda(program_of(name, kind))
    assert outputs and all(x.device.type == "cuda" for x in outputs)


def test_a_constant_on_the_host_is_seen() -> None:
    program = program_of("gpt2", "megatron")
    with pytest.raises(RuntimeError, match=r"on the same device|two different devices"):
        forward_on_cuda(program, "cpu")


@pytest.mark.parametrize("name", ZOO)
def test_constants_are_made_on_the_device_that_is_asked_for(name: str) -> None:
    graph = traced(name)  # not within the mode
    with FakeTensorMode():
        made = run_constants(graph, torch.device("cuda"))
    assert all(x.device.type == "cuda" for x in made.values())


@everything
def test_forward_and_backward_on_meta(name: str, kind: str) -> None:
    program = program_of(name, kind)
    with without_data("cuda"):
        rank = Rank.of(program, (), {}, "cuda")
        stage = DryStage(rank)
    stage.forward(Action("F", 0, 0))
    stage.backward(Action("B", 0, 0))
    trained = [x for x in rank.state.values() if x.requires_grad]
    assert trained and all(x.grad is not None and x.grad.is_meta and x.grad.shape == x.shape for x in trained)
