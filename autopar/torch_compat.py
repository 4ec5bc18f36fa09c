"""Everything of torch that is not public, in one place, each with why there is no public way.

`tests/test_torch_compat.py` calls all of it; seen to pass with torch 2.11.0, 2.12.0 and 2.13.0, but for
`RECEIVED_MEMBERS`, which 2.11 has not (`has_pipeline_stages`).
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.stage import _RecvInfo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.export._trace import _ignore_backend_decomps
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, disable_proxy_modes_tracing
from torch.jit._state import _python_cu as scripted
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _of_modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

__all__ = [
    "CONNECTION_FAILED",
    "MEMBERS",
    "PIPELINE_MEMBERS",
    "RECEIVED_MEMBERS",
    "STAGE_FAILED",
    "CheckpointWrapper",  # the class of a wrapped module, by which it is known; torch documents it in tutorials
    "EagerDispatchMode",  # as TorchDispatchMode, without torch's guard of each call against being compiled
    "FSDPParam",  # by which fully_shard takes a parameter; of one that is sharded already its error does not say so
    "FakeTensor",  # what torch.export calls modules with; torch.export has no name for it
    "FakeTensorMode",  # torch.export takes its fake tensors from an active one
    "FlatParamHandle",  # as FSDPParam, of FullyShardedDataParallel
    "FunctionApply",
    "HigherOrderOperator",  # targets of exported nodes are instances of it and of OpOverload
    "OpOverload",
    "RecordingMode",  # sees each op above autograd, as torch.export does, which alone may
    "StorageInfo",  # where in a file of a checkpoint an item is; torch's own reader of files wants no other class
    "StorageWeakRef",  # whether two tensors share memory, without keeping it
    "TorchDispatchMode",  # sees each op below autograd; torch documents it, under this private path
    "as_in_export",  # models ask torch whether they are exported, and ops are seen above autograd by its dispatcher
    "as_torch_does",
    "before",
    "below_autograd",
    "compute_without_rule",  # ops that torch has no layouts for raise errors of its own
    "default_store",  # the key-value store that `init_process_group` made from its `init_method`
    "dict_version",  # changes with each write to a dict; Python shows it to C alone, torch.compile watches modules so
    "disable_proxy_modes_tracing",  # torch.export does not record the calls inside
    "fake_tensor",  # made of what is known of it: an op on fake tensors takes ten times as long
    "forget_meshes",
    "function_modes",
    "functions_applied_by",
    "handle_dtensor_ops",  # torch computes some of each rank's part alone; rules of others are public, these are not
    "has_hooks_of_all_modules",
    "has_pipeline_stages",
    "has_step_hooks",
    "hooks_of_all_modules",
    "is_autocast_wrapper",
    "is_in_backward",
    "is_legacy_batchedtensor",  # a gradient of is_grads_batched=True, which is refused by name
    "is_traceable_wrapper_subclass",  # whether a tensor, or its type, has plain tensors inside, as DTensor has
    "is_traceable_wrapper_subclass_type",
    "is_wrapped_by_torch_compile",  # the class of what torch.compile returns is in no public module
    "local_of_caller",
    "module_of_caller",
    "num_groups",
    "over_all_gradients",  # what a gradient of a stage refuses; clip_grad_norm_ asks nobody whether it has all
    "peek_interpreter_stack",  # None, but inside torch.func, which is refused by name
    "pytree",  # of exported programs, the only registry torch.export reads; the public one is not in all torch versions
    "register_fake_backend",  # torch documents the backend "fake", and registers it in a file of its tests
    "root_of",
    "scripted",  # the functions that were scripted or traced; what they were optimized to hides their ops
    "stage_backward",  # the backward of torch's pipeline stages; predicting their memory runs it
    "wants_grouped_state",  # as wants_whole_state
    "wants_one_graph",  # to refuse it by name
    "wants_whole_state",  # whether a state dict is made for one of all stages
    "watch_saved",  # files of parts, which torch writes and reads without asking whose they are
    "without_dispatch_modes",  # a check between ranks is no part of the model's step: who counts that must not see it
    "without_function_modes",
]

# Members of torch's objects that torch does not document, which the package reads or writes where it needs them; why.
_FLASH = ("", "_backward", "_for_cpu", "_for_cpu_backward")
MEMBERS = {
    "_parameters": "the tables of a module: named_parameters() leaves out what is tied and what is None",
    **dict.fromkeys(("_buffers", "_modules"), "as _parameters"),
    "_non_persistent_buffers_set": "which buffers state_dict leaves out; a module only tells by leaving them out",
    "_compiled_call_impl": "whether a module was compiled in place by module.compile()",
    "_call_impl": "a call with hooks that tracing does not take for a call of another module",
    "_check_input_dim": "whether a batch norm was given what it expects, as its own forward asks",
    **dict.fromkeys(("_flat_weights", "_flat_weights_names", "_flat_weight_refs"), "parameters of recurrent modules"),
    "_expr": "the symbol that an export gives the size of an argument, before it is replaced by an equal one",
    "_base": "the tensor that a view is of, for autograd",
    "_is_view": "whether autograd takes a tensor for a view, which detach_() refuses",
    "_version": "how often a tensor was written to; autograd checks what it saved by it",
    "_cdata": "identity of a storage: two Python objects may stand for one",
    "_forward_hooks": "which hooks a module has; torch only adds and removes them",
    **dict.fromkeys(("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"), "as _forward_hooks"),
    "_post_accumulate_grad_hooks": "as _forward_hooks, of tensors",
    "_scaled_dot_product_efficient_attention": "fused kernels, of which only the private ops say what they keep",
    **{f"_scaled_dot_product_flash_attention{x}": "as above, and joins blocks by sums of rows" for x in _FLASH},
    "_amp_foreach_non_finite_check_and_unscale_": "the op by which GradScaler looks at all gradients at once",
    "_foreach_norm": "the op by which clip_grad_norm_ looks at all gradients at once",
    "_local_scalar_dense": "the op that reads a tensor as a number: item(), float(), bool()",
    "_spec": "layout of a DTensor, for another; DTensor.from_local checks and differentiates, 0.3 ms for each gradient",
    "_schema": "argument names and aliases of an op",
    "_opoverload": "the op that torch.library.custom_op made",
    "_make_wrapper_subclass": "a tensor with a shape and a device and without content",
    "_get_fsdp_state": "how fully_shard stores a module's parameters; its methods only change it",
    **dict.fromkeys(("_fsdp_param_group", "_auto_reshard_after_forward"), "as _get_fsdp_state"),
    **dict.fromkeys(("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"), "masks that transformers drops"),
    "_debug_flush_compilation_cache": "drops what torch optimized a scripted function to; it has no other way back",
    "_type": "class of a script object, by which the arguments of collectives are told from others",
}
# Fields of torch's PipelineStage and of what it receives: torch makes all buffers before the first step and keeps them.
PIPELINE_MEMBERS = ("args_recv_info", "grad_recv_info", "fwd_cache", "bwd_cache")
RECEIVED_MEMBERS = ("buffer", "is_root_arg", "tensor_meta")
# What the error of a pipeline stage says around that of its module, which is its cause.
STAGE_FAILED = "ailed to run"
# gloo raises plain RuntimeErrors, which its sources' names give away (`tests/runtime/test_faults.py` sees to it).
CONNECTION_FAILED = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket closed")


class EagerDispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` without the guard against torch.compile, an eighth of the time of a call without data."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RecordingMode(ProxyTorchDispatchMode):
    """Within `as_in_export`, each op above autograd gives what `record(op, args, kwargs)` does.

    torch takes no other modes there, and `disable_proxy_modes_tracing` suspends it.
    """

    def __init__(self, record: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self._record = record

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of an `EagerDispatchMode`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisablePythonDispatcher():  # ops within ops take a third of the time without it
            return self._record(func, args, kwargs or {})


def fake_tensor(mode: FakeTensorMode, strided: tuple, dtype: torch.dtype, base: torch.Tensor | None, at: int) -> Any:
    """A fake tensor of the CPU with this (shape, strides), in memory of its own or in that of `base` from `at` on."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(*strided, dtype=dtype, device="meta")
        if base is not None:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), at, *strided)
        return FakeTensor(mode, meta, torch.device("cpu"))


@contextmanager
def as_in_export() -> Iterator[None]:
    """Inside, torch tells models that they are exported, and which backends are on, as in an export; a `RecordingMode`
    sees their ops.
    """
    with _compiling_state_context(), _ignore_backend_decomps(), enable_python_dispatcher():
        yield


FunctionApply = Callable[..., Any]  # what a class's own `apply` does, given its arguments


@contextmanager
def functions_applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, `Function.apply(*args)` of every custom `torch.autograd.Function` is `apply(original, cls, *args)`.

    Patched is the class behind `Function`, whose `apply` asks it: `reverse = Reversed.apply`, bound long before, is
    seen too.
    """
    behind: Any = _SingleLevelFunction  # its own base has the method

    def applied(cls: type[torch.autograd.Function], *args: Any) -> Any:
        return apply(super(behind, cls).apply, cls, *args)

    behind.apply = classmethod(applied)
    try:
        yield
    finally:
        del behind.apply


def below_autograd() -> AbstractContextManager[None]:
    """A context in which autograd records no op, as inside a kernel. Unlike no_grad it leaves rules of views alone."""
    return torch._C._AutoDispatchBelowAutograd()


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which no `TorchFunctionMode` and no `__torch_function__` sees the calls."""
    return torch._C.DisableTorchFunction()


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """The active `TorchFunctionMode`s, outermost first."""
    return _get_current_function_mode_stack()


def hooks_of_all_modules(kind: str) -> tuple[dict[int, Callable[..., Any]], ...]:
    """The hooks that `register_module_forward_hook`, or functions like it of another `kind`, were given."""
    return getattr(_of_modules, f"_global_{kind}_hooks"), getattr(_of_modules, f"_global_{kind}_pre_hooks")


def has_hooks_of_all_modules() -> bool:
    """Whether `register_module_forward_hook` or a function like it was called."""
    return bool(_of_modules._has_any_global_hook())


def is_autocast_wrapper(function: Any) -> bool:
    """Whether `function` is `torch.autocast(...)(f)`, or a decorator around one; torch marks what it returns."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if hasattr(function, "__script_unsupported"):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def module_of_caller() -> str:
    """The name of the module whose code called the function that asks: who reads a property."""
    return sys._getframe(2).f_globals.get("__name__", "")


def local_of_caller(name: str) -> Any:
    """The local variable `name` of the code that called the function that asks; None if it has none."""
    return sys._getframe(2).f_locals.get(name)


def is_wrapped_by_torch_compile(module: torch.nn.Module) -> bool:
    """Whether torch.compile returned `module`, around another one."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes a second
    return frames is not None and isinstance(module, frames.OptimizedModule)


def wants_one_graph() -> bool:
    """Whether torch.compile(fullgraph=True) asks a module whether it is lazy; read from its frame."""
    frame = sys._getframe(2)
    context = getattr(frame.f_locals.get("self"), "dynamo_ctx", None)
    return frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and getattr(context, "fullgraph", False)


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread; torch.utils.checkpoint asks the same way."""
    return torch._C._current_graph_task_id() != -1


def num_groups() -> int:
    """The number of process groups that this process knows; torch names a group that only its members make by it."""
    return len(_world.pg_names)


def over_all_gradients() -> tuple[Any, Any]:
    """The functions by which torch's clip_grad_norm_ and GradScaler look at all gradients of an optimizer at once."""
    return torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether more than the package's own hook runs around a step; torch only adds and removes hooks."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any(own) or len(_global_optimizer_pre_hooks) > 1 or bool(_global_optimizer_post_hooks)


def wants_whole_state() -> str:
    """The function of torch.distributed.checkpoint.state_dict that asks us for a full state dict, by its frame; ""."""
    return _asked_for_state(lambda options: options.full_state_dict)


def wants_grouped_state() -> bool:
    """Whether such a function is asked for an optimizer's state in groups of parameters rather than by name."""
    return bool(_asked_for_state(lambda asked: asked.handle_optim and not asked.flatten_optimizer_state_dict))


def _asked_for_state(asks: Callable[[Any], bool]) -> str:
    frame = sys._getframe(2)
    while frame is not None:
        of_torch = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        if of_torch and (options := frame.f_locals.get("info")) is not None and asks(options):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


_handlers_of_torch: dict[OpOverload, Any] = dict(DTensor._op_dispatcher._custom_op_handlers)


def handle_dtensor_ops(handlers: Mapping[OpOverload, Callable[[OpOverload, tuple, dict], Any]]) -> None:
    """Compute these ops of DTensors by `handler(op, args, kwargs)`, as torch itself does for ops that no rule says."""
    of_torch: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    of_torch.update(handlers)


@contextmanager
def as_torch_does(op: OpOverload) -> Iterator[None]:
    """Inside, `op` of DTensors is not computed by the handler that `handle_dtensor_ops` was given."""
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    if op in _handlers_of_torch:
        handlers[op] = _handlers_of_torch[op]
    try:
        yield
    finally:
        handlers[op] = handler


def compute_without_rule(compute: Callable[[OpOverload, tuple, dict, Exception], Any]) -> None:
    """From now on an op on DTensors whose layouts torch cannot tell (it has no rule, or its rule fails with an error)
    is computed by `compute(op, args, kwargs, error)`.

    torch's C++ calls this member of its dispatcher, which may return the result instead of layouts.
    """
    dispatcher: Any = DTensor._op_dispatcher
    layouts_of = type(dispatcher)._propagate_op_sharding_dispatch_slow_path

    def layouts_or_result(op: OpOverload, args: tuple, kwargs: dict, *rest: Any) -> Any:
        try:
            return layouts_of(dispatcher, op, args, kwargs, *rest)
        except Exception as error:
            return compute(op, args, kwargs, error)

    dispatcher._propagate_op_sharding_dispatch_slow_path = layouts_or_result


def watch_saved(check: Callable[[DTensor, str], None], pickled: Callable[[DTensor], None]) -> None:
    """From now on `check(x, key)` is called before torch.distributed.checkpoint saves or loads a DTensor under `key`,
    and `pickled(x)` before torch.save writes one. The key of a load is read from the frame of the caller.
    """

    def of_load(x: DTensor) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "_create_read_items":
            frame = frame.f_back
        if frame is not None:
            check(x, frame.f_locals["fqn"])

    def of_pickle(x: DTensor, protocol: Any) -> None:
        if sys._getframe(2).f_globals.get("__name__") == "torch.serialization":
            pickled(x)

    before(DTensor, "__create_write_items__", lambda x, fqn, *_: check(x, fqn))
    before(DTensor, "__create_chunk_list__", of_load)
    before(DTensor, "__reduce_ex__", of_pickle)


def before(owner: Any, name: str, ask: Callable[..., None]) -> None:
    """From now on `ask` is given the arguments of each call of `owner.name` before it is made."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (ask(*args), original(*args, **kwargs))[1])


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a slice of, or itself."""
    return mesh._get_root_mesh()


def has_pipeline_stages() -> bool:
    """Whether torch's pipeline stages take part in making buffers, as they do from 2.12 on."""
    return "tensor_meta" in inspect.signature(_RecvInfo).parameters


def register_fake_backend() -> None:
    """Give `init_process_group` the backend "fake", whose collectives exchange nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")


def forget_meshes() -> None:
    """Make DTensor forget the layouts it derived: whose meshes equal those of later ranks and whose groups ended."""
    _clear_sharding_prop_cache()
