"""What is not public in torch does what it is used for, in each version of torch that is allowed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.torch_compat import pytree


class Ops(torch_compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_everything_is_named() -> None:
    assert set(torch_compat.__all__) <= set(vars(torch_compat))


def test_ops() -> None:
    with Ops() as ops:
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in ops.seen and all(isinstance(op, torch_compat.OpOverload) for op in ops.seen)
    assert isinstance(torch.ops.higher_order.cond, torch_compat.HigherOrderOperator)


def test_function_modes() -> None:
    assert torch_compat.function_modes() == []
    with Functions() as mode:
        assert torch_compat.function_modes() == [mode]
        torch.add(torch.ones(2), 1)
        mode.seen.clear()
        with torch_compat.without_function_modes():
            torch.add(torch.ones(2), 1)
    assert mode.seen == []


def test_autograd() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    with torch_compat.below_autograd():
        assert torch.is_grad_enabled() and not (x * 2).requires_grad
    y = x * 2
    y.register_hook(lambda _: seen.append(torch_compat.is_in_backward()))
    y.sum().backward()
    assert seen == [True] and not torch_compat.is_in_backward()


def test_hooks_of_all_modules() -> None:
    assert not torch_compat.has_hooks_of_all_modules()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert torch_compat.has_hooks_of_all_modules()
    finally:
        handle.remove()


def test_tensors_without_contents() -> None:
    with torch_compat.FakeTensorMode():
        x = torch.ones(2, device="cuda")
    assert isinstance(x, torch_compat.FakeTensor) and x.device.type == "cuda"
    assert torch_compat.is_traceable_wrapper_subclass_type(torch.distributed.tensor.DTensor)
    assert not torch_compat.is_traceable_wrapper_subclass(torch.ones(2))


def test_what_is_exported_is_a_pytree() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            with torch_compat.disable_proxy_modes_tracing():
                torch.ones(3).sum()
            return {"twice": 2 * x}

    program = torch.export.export(Twice(), (torch.ones(2),))
    assert pytree.tree_unflatten([1], program.call_spec.out_spec) == {"twice": 1}
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [torch.ops.aten.mul.Tensor]


def test_custom_functions_are_seen_however_they_are_called() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    bound, seen = Double.apply, []
    with torch_compat.functions_applied_by(lambda original, cls, *args: seen.append(cls) or original(*args)):
        assert [function(torch.ones(1)).item() for function in (bound, Double.apply)] == [2.0, 2.0]
    assert bound(torch.ones(1)).item() == 2.0 and seen == [Double, Double]


def test_backward_in_two_parts() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    outputs = [x * weight]
    (gone,), groups = torch_compat.stage_backward_input(outputs, [torch.ones(2)], [x], iter([weight]))
    assert gone.tolist() == [3.0, 3.0] and weight.grad is None
    torch_compat.stage_backward_weight(iter([weight]), groups)
    assert weight.grad.tolist() == [1.0, 1.0]
    (gone,) = torch_compat.stage_backward([x * weight], [torch.ones(2)], [x])
    assert gone is not None and weight.grad.tolist() == [2.0, 2.0]


def test_the_store_of_the_process_group(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        store = torch_compat.default_store()
        store.set("key", "value")
        assert store.get("key") == b"value" and store.check(["key"])
    finally:
        dist.destroy_process_group()


def test_what_no_mode_sees() -> None:
    with Ops() as ops, torch_compat.without_dispatch_modes():
        torch.ones(2)
    assert not ops.seen
