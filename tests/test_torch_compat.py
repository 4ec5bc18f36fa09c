"""What is not public in torch does what it is used for, in each version of torch that is allowed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.errors import AutoparError
from autopar.ir.sizes.size_range import conditions_on_sizes
from autopar.mesh import Mesh
from autopar.planner.handwritten.fake_ranks import fake_ranks
from autopar.runtime.checks.dtensor_ops import handle_scalars_and_random_ops
from autopar.runtime.pipeline import run_schedule
from autopar.schedule.orders import Schedule
from autopar.torch_compat import pytree
from bench.simulated import one_rank_of


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


def test_function_transforms() -> None:
    seen = list[bool]()

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_compat.peek_interpreter_stack() is not None)
        return x * x

    for transform in (torch.func.grad, torch.vmap, torch.func.jacfwd, lambda function: function):
        transform(square)(torch.ones(()) if transform is not torch.vmap else torch.ones(2))
    assert seen == [True, True, True, False]


def test_ops() -> None:
    with Ops() as ops:
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in ops.seen and all(isinstance(op, torch_compat.OpOverload) for op in ops.seen)
    assert isinstance(torch.ops.higher_order.cond, torch_compat.HigherOrderOperator)


def test_ops_above_autograd() -> None:
    layer, x, seen = nn.Linear(3, 3), torch.ones(2, 3), list[str]()

    def record(func, args, kwargs):
        seen.append(str(func))
        return func(*args, **kwargs)

    with torch_compat.as_in_export(), torch_compat.RecordingMode(record):
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting()
        y = F.dropout(layer(x), 0.5)
        with torch_compat.disable_proxy_modes_tracing():
            torch.sin(x)
    assert seen == ["aten.linear.default", "aten.dropout.default"] and y.requires_grad
    assert not torch.compiler.is_compiling()


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


class Asked(nn.Linear):
    answers: ClassVar[list[bool]] = []

    @property
    def _initialize_hook(self) -> None:
        self.answers.append(torch_compat.wants_one_graph())
        raise AttributeError


def test_who_compiles_to_one_graph() -> None:
    for fullgraph in (True, False):
        torch.compile(Asked(2, 2), backend="eager", fullgraph=fullgraph)
    assert Asked.answers == [True, False] and not hasattr(Asked(2, 2), "_initialize_hook")
    assert Asked.answers[-1] is False


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
    with torch_compat.FakeTensorMode() as mode:
        x = torch.ones(6)
        part = torch_compat.fake_tensor(mode, ((2, 2), (1, 2)), x.dtype, x, 1)
    assert part.device.type == "cpu" and part.stride() == (1, 2) and part.storage_offset() == 1
    assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
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


def test_backward_of_a_stage() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    (gone,) = torch_compat.stage_backward([x * weight], [torch.ones(2)], [x])
    assert gone.tolist() == [3.0, 3.0] and weight.grad.tolist() == [1.0, 1.0]


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


def test_members_of_modules() -> None:
    module, recurrent = nn.Linear(2, 2), nn.LSTM(2, 2)
    assert list(module._parameters) == ["weight", "bias"] and module._modules == {} == module._buffers
    module.register_buffer("mask", torch.ones(2), persistent=False)
    assert module._non_persistent_buffers_set == {"mask"}
    assert torch.equal(module._call_impl(torch.zeros(2)), module.bias) and module._compiled_call_impl is None
    assert recurrent._flat_weights_names[0] == "weight_ih_l0"
    assert recurrent._flat_weights[0] is recurrent.weight_ih_l0 is recurrent._flat_weight_refs[0]()


def test_writes_to_dicts_are_counted() -> None:
    module = nn.BatchNorm1d(2)
    handle = module.register_forward_hook(lambda *_: None)

    def versions() -> list[int]:
        return [torch_compat.dict_version(x) for x in (vars(module), module._buffers, module._forward_hooks)]

    for write, position in (
        (lambda: setattr(module, "eps", 0.5), 0),
        (lambda: delattr(module, "momentum"), 0),
        (lambda: setattr(module, "running_mean", torch.ones(2)), 1),
        (handle.remove, 2),
    ):
        before = versions()
        assert versions() == before
        write()
        assert [i for i, (x, y) in enumerate(zip(before, versions())) if x != y] == [position]


def test_members_of_tensors() -> None:
    x = torch.ones(4)
    view, version = x[:2], x._version
    view.add_(1)
    assert view._base is x and view._is_view() and x._base is None and x._version == version + 1
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata != torch.ones(4).untyped_storage()._cdata
    shared = torch_compat.StorageWeakRef(x.untyped_storage())
    assert shared == torch_compat.StorageWeakRef(view.untyped_storage()) and not shared.expired()
    del x, view
    assert shared.expired()


def test_hooks_of_a_module_and_a_tensor() -> None:
    module, x = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    assert not (module._forward_hooks or module._forward_pre_hooks)
    assert not (module._backward_hooks or module._backward_pre_hooks)
    assert not (x._backward_hooks or x._post_accumulate_grad_hooks)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    x.register_hook(lambda _: None)
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
    assert len(module._backward_hooks) == len(module._backward_pre_hooks) == 1
    assert len(x._backward_hooks) == len(x._post_accumulate_grad_hooks) == 1


def test_members_of_ops() -> None:
    assert torch.ops.aten._scaled_dot_product_flash_attention.default
    assert torch.ops.aten._scaled_dot_product_efficient_attention.default
    given, ends = ["query", "key", "value"], ["logsumexp", "dropout_p", "is_causal", "attn_mask", "scale"]
    sizes, of_random = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"], ["philox_seed", "philox_offset", "scale"]
    of_gpu = ["grad_out", *given, "out", *ends[:1], *sizes, *ends[1:3], *of_random]
    for kernel, names in (
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, [*given, *ends[1:]]),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, ["grad_out", *given, "out", *ends]),
        (torch.ops.aten._scaled_dot_product_flash_attention_backward, of_gpu),
    ):
        assert [argument.name for argument in kernel.default._schema.arguments] == names
    assert [argument.name for argument in torch.ops.aten.add_.Tensor._schema.arguments] == ["self", "other", "alpha"]
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert torch.library.custom_op("compat::f", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")._opoverload


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the cause")


def test_stages_of_pipelines(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        x = torch.ones(2, 2, device="meta")
        stage = PipelineStage(Failing(), 0, 1, torch.device("cpu"), input_args=(x,), output_args=(x,))
        assert all(hasattr(stage, name) for name in torch_compat.PIPELINE_MEMBERS)
        with pytest.raises(RuntimeError, match=torch_compat.STAGE_FAILED) as caught:
            ScheduleGPipe(stage, 1).step(torch.ones(2, 2))
        assert isinstance(caught.value.__cause__, ValueError)
        assert "ProcessGroup" in str(dist.group.WORLD.boxed()._type())
        received = stage.args_recv_info[0][0]
        has_all = all(hasattr(received, name) for name in torch_compat.RECEIVED_MEMBERS)
        assert has_all == torch_compat.has_pipeline_stages()
    finally:
        dist.destroy_process_group()


def test_pipelines_are_refused_where_torch_has_no_stages_for_them(monkeypatch) -> None:
    monkeypatch.setattr(run_schedule, "has_pipeline_stages", lambda: False)
    with pytest.raises(AutoparError, match=r"torch 2\.12 or newer"):
        run_schedule.StageRunner(Schedule("1f1b", 2, 2, 2), (), object(), torch.device("cpu"))


def test_ops_of_dtensors(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        assert torch_compat.root_of(mesh["b"]) == mesh == torch_compat.root_of(mesh)
        op = torch.ops.aten._local_scalar_dense.default
        x = distribute_tensor(torch.tensor(3.0), mesh["b"], [Replicate()])
        torch_compat.handle_dtensor_ops({op: lambda *_: 5.0})
        assert x.item() == 5
        with torch_compat.as_torch_does(op):
            assert x.item() == 3
        assert x.item() == 5
    finally:
        handle_scalars_and_random_ops()
        dist.destroy_process_group()


def test_batch_norms_look_at_their_input() -> None:
    with pytest.raises(ValueError):
        nn.BatchNorm2d(3)._check_input_dim(torch.ones(2, 3))


def test_the_ops_that_look_at_all_gradients() -> None:
    arguments = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default._schema.arguments
    assert [one.name for one in arguments] == ["self", "found_inf", "inv_scale"]
    assert torch.ops.aten._foreach_norm.Scalar([torch.ones(4)])[0] == 2.0


def test_a_dtensor_made_of_a_layout() -> None:
    with one_rank_of(Mesh((4,), ("dp",))) as mesh:
        like = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        made = DTensor(torch.zeros(2, 3), like._spec, requires_grad=False)
    assert made.shape == like.shape == (8, 3) and made.placements == like.placements and not made.to_local().any()


def test_step_hooks_of_others() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert not torch_compat.has_step_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert torch_compat.has_step_hooks(optimizer)


def test_every_member_is_here() -> None:
    """What the package touches of torch's objects is listed, and what is listed is touched here."""
    known, touched = {"_replace", "_C", "_getframe", *torch_compat.MEMBERS}, []
    for path in sorted(Path(torch_compat.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            known |= set(_defined(node))
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                touched.append((path, node.lineno, node.attr))
    strange = [one for one in touched if one[2] not in known and one[0].name != "torch_compat.py"]
    assert not strange, f"of torch? {strange}"
    masks = pytest.importorskip("transformers.masking_utils")
    assert masks._ignore_causal_mask_sdpa(None, 4, 4, 0, 0) and masks._ignore_bidirectional_mask_sdpa(None, 4)
    assert DTensor._make_wrapper_subclass(DTensor, (2, 3), dtype=torch.float16).shape == (2, 3)
    assert not any(function._debug_flush_compilation_cache() for function in torch_compat.scripted.get_functions())
    assert [name for name in torch_compat.MEMBERS if f".{name}" not in Path(__file__).read_text()] == []


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def test_how_fully_shard_stores_a_module() -> None:
    with fake_ranks(Mesh((4,), ("dp",))) as mesh:  # which register the backend "fake"
        model: Any = nn.Sequential(torch_compat.CheckpointWrapper(nn.Linear(4, 4, device="meta")))
        state = dist.fsdp.fully_shard(model, mesh=mesh)._get_fsdp_state()
    assert state._auto_reshard_after_forward and state._fsdp_param_group.post_forward_mesh_info is not None
    assert [p.sharded_param for p in state._fsdp_param_group.fsdp_params][1] is model[0].bias


def test_what_torch_compile_wraps_is_known() -> None:
    module = nn.Linear(2, 2)
    wrapped = torch.compile(module, backend="eager")
    assert torch_compat.is_wrapped_by_torch_compile(wrapped)
    assert not torch_compat.is_wrapped_by_torch_compile(module)


def test_conditions_on_sizes() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y if x.shape[0] % 2 else x - y

    auto = {0: torch.export.Dim.AUTO}
    program = torch.export.export(Decides(), (torch.ones(5), torch.ones(5)), dynamic_shapes=(auto, auto), strict=False)
    x, y = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    conditions, ranges = conditions_on_sizes(x)
    symbols = [each.shape[0].node._expr for each in (x, y)]
    assert len(set(symbols)) == 2 and set(symbols) <= set(ranges)
    assert x.shape[0].node.expr == y.shape[0].node.expr

    def hold(*sizes: int) -> bool:
        values = {symbol: symbol.subs(symbol, size) for symbol, size in zip(symbols, sizes)}
        return all(bool(condition.xreplace(values)) for condition in conditions)

    assert hold(7, 7) and not hold(6, 6) and not hold(7, 9)
