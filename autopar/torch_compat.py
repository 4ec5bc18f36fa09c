"""Everything of torch that is not public, in one place, each with why there is no public way.

`tests/test_torch_compat.py` calls all of it; seen to pass with torch 2.11.0, 2.12.0 and 2.13.0, but for
`RECEIVED_MEMBERS`, which 2.11 has not (`has_pipeline_stages`).
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _RecvInfo
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks, _has_any_global_hook
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
    "EagerDispatchMode",  # as TorchDispatchMode, without torch's guard of each call against being compiled
    "FakeTensor",  # what torch.export calls modules with; torch.export has no name for it
    # torch.export takes its fake tensors from an active one; its tensors choose the kernels of their device
    "FakeTensorMode",
    "FunctionApply",
    # targets of exported nodes are instances of it and of OpOverload; torch.ops gives the instances only
    "HigherOrderOperator",
    "OpOverload",
    # whether two tensors share memory, without keeping it; torch's own reductions use it so
    "StorageWeakRef",
    "TorchDispatchMode",  # sees each op below autograd; torch documents it, under this private path
    "as_torch_does",
    "backward_hooks_of_all_modules",
    "below_autograd",
    "default_store",
    # changes with each write to a dict; Python shows it to C alone, and torch.compile watches modules by it
    "dict_version",
    # torch.export does not record the calls inside; torch.fx.experimental makes no promise
    "disable_proxy_modes_tracing",
    "function_modes",
    "functions_applied_by",
    "handle_dtensor_ops",  # torch computes some of each rank's part alone; rules of others are public, these are not
    "has_hooks_of_all_modules",
    "has_pipeline_stages",
    "is_autocast_wrapper",
    "is_in_backward",
    "is_traceable_wrapper_subclass",  # whether a tensor, or its type, has plain tensors inside, as DTensor has
    "is_traceable_wrapper_subclass_type",
    "local_of_caller",
    "module_of_caller",
    "over_all_gradients",  # what a gradient of a stage refuses; clip_grad_norm_ asks nobody whether it has all
    # the pytree of the specs in exported programs and the only registry torch.export reads; the public pytree is not
    # in all torch versions that autopar supports
    "pytree",
    "root_of",
    "stage_backward",  # the backward of torch's pipeline stages; predicting their memory runs it
    "stage_backward_input",
    "stage_backward_weight",
    "wants_grouped_state",  # as wants_whole_state
    "wants_whole_state",  # whether a state dict is made for one of all stages
    # a check between ranks is no part of the model's step: whoever counts that must not see it; there is no public way
    "without_dispatch_modes",
    "without_function_modes",
]


# Members of torch's objects that torch does not document, which the package reads or writes where it needs them; why.
MEMBERS = {
    "_parameters": "the tables of a module: named_parameters() leaves out what is tied and what is None",
    "_buffers": "as _parameters",
    "_modules": "as _parameters; a module that is traced with a loss has the other's children and no others",
    "_non_persistent_buffers_set": "which buffers state_dict leaves out; a module only tells by leaving them out",
    "_compiled_call_impl": "whether a module was compiled in place by module.compile()",
    "_call_impl": "a call with hooks that tracing does not take for a call of another module",
    "_flat_weights": "recurrent modules keep their parameters here once more",
    "_flat_weights_names": "as _flat_weights",
    "_flat_weight_refs": "as _flat_weights, weakly",
    "_base": "the tensor that a view is of, for autograd",
    "_is_view": "whether autograd takes a tensor for a view, which detach_() refuses",
    "_version": "how often a tensor was written to; autograd checks what it saved by it",
    "_cdata": "identity of a storage: two Python objects may stand for one",
    "_forward_hooks": "which hooks a module has; torch only adds and removes them",
    "_forward_pre_hooks": "as _forward_hooks",
    "_backward_hooks": "as _forward_hooks, of modules and of tensors",
    "_backward_pre_hooks": "as _forward_hooks",
    "_post_accumulate_grad_hooks": "as _forward_hooks, of tensors",
    "_scaled_dot_product_efficient_attention": "the fused kernels, of which only the private ops say what they keep",
    "_scaled_dot_product_flash_attention": "as _scaled_dot_product_efficient_attention",
    "_amp_foreach_non_finite_check_and_unscale_": "the op by which GradScaler looks at all gradients at once",
    "_local_scalar_dense": "the op that reads a tensor as a number: item(), float(), bool()",
    "_schema": "argument names and aliases of an op",
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
    """A `TorchDispatchMode` that torch.compile never traces, so that its calls need no guard against that.

    On tensors without data the guard takes an eighth of the time of a call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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
    """A context in which autograd records no op, as inside a kernel.

    Unlike no_grad it leaves the rules of views alone.
    """
    return torch._C._AutoDispatchBelowAutograd()


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which no `TorchFunctionMode` and no `__torch_function__` sees the calls."""
    return torch._C.DisableTorchFunction()


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """The active `TorchFunctionMode`s, outermost first."""
    return _get_current_function_mode_stack()


def backward_hooks_of_all_modules() -> tuple[Callable[..., Any], ...]:
    """The hooks given to `register_module_full_backward_hook` and functions like it."""
    return *_global_backward_hooks.values(), *_global_backward_pre_hooks.values()


def has_hooks_of_all_modules() -> bool:
    """Whether `register_module_forward_hook` or a function like it was called."""
    return bool(_has_any_global_hook())


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


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread; torch.utils.checkpoint asks the same way."""
    return torch._C._current_graph_task_id() != -1


def over_all_gradients() -> frozenset[Any]:
    """The functions by which torch's clip_grad_norm_ and GradScaler look at all gradients of an optimizer at once."""
    return frozenset((torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_))


def wants_whole_state() -> str:
    """The function of torch.distributed.checkpoint.state_dict that is asked for a full state dict and calls us; "" if
    none is. Its options are not handed to the module, so they are read from its frame.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            options = frame.f_locals.get("info")
            if options is not None and options.full_state_dict:
                return frame.f_code.co_name
        frame = frame.f_back
    return ""


def wants_grouped_state() -> bool:
    """Whether torch.distributed.checkpoint.state_dict, which calls us, is asked for an optimizer's state in groups of
    parameters rather than by name. Read as in `wants_whole_state`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            options = frame.f_locals.get("info")
            if options is not None and options.handle_optim and not options.flatten_optimizer_state_dict:
                return True
        frame = frame.f_back
    return False


def handle_dtensor_ops(handlers: Mapping[OpOverload, Callable[[OpOverload, tuple, dict], Any]]) -> None:
    """Compute these ops of DTensors by `handler(op, args, kwargs)`, as torch itself does for ops that no rule says."""
    of_torch: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    of_torch.update(handlers)


@contextmanager
def as_torch_does(op: OpOverload) -> Iterator[None]:
    """Inside, `op` of DTensors is not computed by the handler that `handle_dtensor_ops` was given."""
    handler = DTensor._op_dispatcher._custom_op_handlers.pop(op)
    try:
        yield
    finally:
        DTensor._op_dispatcher._custom_op_handlers[op] = handler


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a slice of, or itself."""
    return mesh._get_root_mesh()


def has_pipeline_stages() -> bool:
    """Whether torch's pipeline stages take part in making buffers, as they do from 2.12 on."""
    return "tensor_meta" in inspect.signature(_RecvInfo).parameters


def default_store() -> Store:
    """The key-value store of the default process group, which `init_process_group` made from its `init_method`."""
    return _get_default_store()
