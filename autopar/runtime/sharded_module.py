"""The sharded module: the user's own module class, its tensors DTensors, its forward the generated program."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import AutoparError
from autopar.ir.kept_attributes import Unannounced
from autopar.ir.trace_with_loss import LossFunction
from autopar.mesh import PIPELINE
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.checks.dtensor_ops import handle_scalars_and_random_ops
from autopar.runtime.checks.module_changes import FORWARD
from autopar.runtime.checks.same_inputs import InputCheck
from autopar.runtime.checks.saved_parts import check_saved_here, watch_files
from autopar.runtime.dtensor_state import cut_to_parts, put, whole_state
from autopar.runtime.grad_norm import clip_gradients
from autopar.runtime.interop.compiled_after import CompiledAfter, check_no_function_mode
from autopar.runtime.interop.full_state import FullState, saving_pretrained
from autopar.runtime.interop.generation import for_generation
from autopar.runtime.interop.loss_scale import take_loss_scale
from autopar.runtime.interop.optimizer_stages import load_own_stages
from autopar.runtime.interop.optimizer_state import FullOptimizerState, cut_loaded_state
from autopar.runtime.interop.own_forward import OwnForward, forward_like, own_members
from autopar.runtime.interop.stand_ins import own_parameters, stand_in, take_written
from autopar.runtime.interop.trainer_attributes import TrainerAttributes
from autopar.runtime.load_program import torch_placements
from autopar.runtime.local_batch import LocalBatch
from autopar.runtime.module_runtime import LATER_WAIT_S, Runtime
from autopar.runtime.pipeline.parameter_elsewhere import leave_out_of_optimizers
from autopar.runtime.pipeline.trainer import Trainer
from autopar.runtime.rank_agreement import check_weights, from_first, meet
from autopar.runtime.sizes.kept_plan import CallPlanner
from autopar.torch_compat import wants_grouped_state, wants_whole_state

_numbers = itertools.count()  # of sharded modules of this process
_SHOWN = "_autopar_shows"  # the forward that a sharded class shows, if it may be that of several models


class ShardedModule(Unannounced, OwnForward, FullState, FullOptimizerState, TrainerAttributes, CompiledAfter):
    """Mixed into the class of the user's model by `shard_module`."""

    _autopar: Runtime
    __call__ = nn.Module.__call__  # one of the model's own is traced, around its forward

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, in the stages and microbatches of the plan: the loss, on every rank.

        Called as the module is; with the `loss_fn` of `autopar.compile`, with its target behind. Gradients are added to
        those of the parameters, as `backward` does. Under torch.no_grad() the loss alone, as for an evaluation.
        `scaler=`, a torch.amp.GradScaler: backward is that of the scaled loss, which is returned as it is.
        """
        if not self._autopar.trains:
            raise AutoparError(
                "model.train_step(...) of a model that was compiled for inference (trains=False, or a plan made so),"
                " which has no gradients; call model(...), or compile it for training"
            )
        check_no_function_mode()
        scale = take_loss_scale(self, kwargs, torch.device(self._autopar.mesh.device_type))
        return self._autopar.train_step(self, args, kwargs, scale)

    def measure(self, steps: int = 10) -> Any:
        """A `Ledger`: `for _ in ledger:` runs as many training steps, of which `ledger.account` compares each term with
        its prediction; every rank runs the loop.
        """
        from autopar.verify.ledger import Ledger  # the layer above, which reads modules

        return Ledger(self, steps)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters, those that other ranks hold included; every rank calls
        this.
        """
        program = self._autopar.current()
        counted_elsewhere = program.counted_elsewhere if isinstance(program, Trainer) else ()
        return clip_gradients(self, max_norm, self._autopar.mesh, counted_elsewhere)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.current()
        with torch.inference_mode(False):  # in which torch cannot detach a DTensor
            state, elsewhere = super().state_dict(*args, **kwargs), self._autopar.elsewhere
        if elsewhere and wants_whole_state():
            names = [name for name, _ in self.named_modules(remove_duplicate=False)]
            return whole_state(state, names, self._autopar.mesh.get_group(PIPELINE))
        return state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module: with stages what other ranks hold is without content, a `ParameterElsewhere`."""
        runtime = self.__dict__.get("_autopar")
        asking = wants_whole_state() if runtime is not None and runtime.elsewhere else ""
        if asking not in ("", "_get_model_state_dict", "_verify_options"):
            raise AutoparError(
                "this rank holds the parameters of its own stages only, so that a full state dict of the optimizer, or"
                " one read into the model, cannot be made or spread from one rank: leave out full_state_dict (and"
                " broadcast_from_rank0), and save and load by torch.distributed.checkpoint, or give every rank the"
                " whole state by model.load_state_dict"
            )
        if asking == "" and runtime is not None and runtime.elsewhere and wants_grouped_state():
            raise AutoparError(
                "an optimizer has groups of this rank's parameters only, and a checkpoint would keep one rank's groups"
                " for all: give options=StateDictOptions(flatten_optimizer_state_dict=True), by which its state is"
                " saved and loaded by name"
            )
        return super().named_parameters(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As of any module; AutoparError with stages, of which this rank has some only."""
        if self._autopar.elsewhere:
            raise AutoparError(
                "this rank holds the parameters of its own stages only, those of all others are elsewhere: call"
                " model.apply(...) before autopar.compile"
            )
        with self._until_planned():
            return super().apply(fn)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        with self._until_planned():
            return super()._apply(*args, **kwargs)

    def _until_planned(self) -> AbstractContextManager[None]:
        """The model's own parameters in place of what stands for them, if nothing is sharded yet."""
        runtime = self._autopar
        return nullcontext() if runtime.last else own_parameters(self, runtime.own, runtime.mesh)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`; whole tensors, the same on every rank, are cut to this rank's parts, those of
        other ranks' stages are left out.
        """
        runtime = self._autopar
        if runtime.last is None:  # what is read now is sharded by the first plan
            with self._until_planned():
                return super().load_state_dict(state_dict, *args, **kwargs)
        for fqn, x in state_dict.items():
            check_saved_here(x, fqn)
        plain = {fqn: x for fqn, x in state_dict.items() if type(x) in (torch.Tensor, nn.Parameter)}
        if runtime.check is not None and plain:
            runtime.num_loads += 1
            meet(runtime.mesh, f"autopar/{runtime.name}/load_state_dict/{runtime.num_loads}", LATER_WAIT_S)
            check_weights(
                runtime.mesh,
                plain,
                "load the same state on every rank, or give it as DTensors (check=False turns this off)",
            )
        # after hooks of the module's own, which may rename what is in the state
        handle = self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, metadata, strict, missing, unexpected, errors: cut_to_parts(
                self, state, runtime.elsewhere, missing, errors
            )
        )
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        finally:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedModule":
        """A module with tensors of its own that runs the same programs, e.g. for a moving average of the parameters."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self._autopar.mesh)] = self._autopar.mesh
        copied.__dict__.update(
            {name: copy.deepcopy(x, memo) for name, x in self.__dict__.items() if name != "_autopar"}
        )
        copied._autopar = memo.get(id(self._autopar)) or self._autopar.of(copied)
        return copied

    def __copy__(self) -> "ShardedModule":
        """The same module under another object, as `copy.copy` of any module."""
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a compiled module cannot be pickled whole, for it is of this process: save its state_dict() by"
            " torch.distributed.checkpoint, or get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True)), and load that into the model of another run"
        )

    @property
    def plan(self) -> Plan | StagedPlan:
        """The plan in use for the last shapes and mode seen."""
        return self._autopar.current().plan

    @property
    def code(self) -> str:
        """The generated Python of this rank."""
        return self._autopar.current().source

    @property
    def input_placements(self) -> dict[str, tuple[TorchPlacement, ...]]:
        """DTensor placements in which the plan wants each argument; handing them in so saves slicing the global batch.
        A step in microbatches takes whole arguments, and what is in shares is whole for DTensor: batch="local" takes a
        rank's share.
        """
        running = self._autopar.current()
        if isinstance(running, Trainer):
            return {
                item.fqn: (Replicate(),) * running.parts[0].loaded.mesh.ndim
                for item in running.graph.of_kind("argument")
            }
        return {
            item.fqn: torch_placements(layout) for item, layout in running.program.inputs if item.kind == "argument"
        }


def shard_module(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: CallPlanner,
    loss_fn: LossFunction | None = None,
    param_dtype: torch.dtype | None = None,
    *,
    parts: LocalBatch | None = None,
    outputs: str = "whole",
    check: bool | str = False,
) -> ShardedModule:
    """`model` itself, made a module that plans itself at its first call and is sharded then; `unshard` undoes it until
    then. `param_dtype`: in which it is computed, None for its own; the others: as of `autopar.compile`.
    """
    handle_scalars_and_random_ops()
    cut_loaded_state()
    load_own_stages()
    leave_out_of_optimizers()
    watch_files()
    original = type(model)
    name = from_first(mesh, f"{dist.get_rank()}/{next(_numbers)}")
    own = stand_in(model, mesh)
    model.__class__ = _sharded_class(model, original)
    if "forward" in model.__dict__:
        model.__dict__[FORWARD] = model.__dict__.pop("forward")
    sharded = cast(ShardedModule, model)
    sharded._autopar = Runtime(
        mesh,
        plan,
        original,
        name,
        own,
        loss_fn,
        param_dtype,
        parts,
        InputCheck(mesh, parts) if check else None,
        check == "strict",
        gives_whole=outputs == "whole",
    )
    return sharded


def _sharded_class(model: nn.Module, original: type[nn.Module]) -> type:
    """The class of the sharded `model`; it has the original's name, which libraries look up and write to configs.

    Models of one class have one, which torch.func.stack_module_state expects, unless they have members of their own.
    """
    own = own_members(model, ShardedModule)
    shown = None if own or "forward" in vars(model) else original.forward
    for known in original.__subclasses__() if shown else ():
        if vars(known).get(_SHOWN) is shown:
            return known
    members = {"forward": forward_like(model), "__module__": original.__module__, "__doc__": original.__doc__}
    members |= saving_pretrained(original) | for_generation(original) | own | {_SHOWN: shown}
    sharded = type(original.__name__, (ShardedModule, original), members)
    sharded.__qualname__ = original.__qualname__
    return sharded


@contextmanager
def unsharded_on_error(module: ShardedModule) -> Iterator[None]:
    """A scope that plans the module; if it raises, the module is what it was."""
    try:
        yield
    except BaseException:
        unshard(module)
        raise


def unshard(module: ShardedModule) -> None:
    """Make `module` what it was, if nothing of it is sharded yet."""
    runtime = module._autopar
    if not runtime.loaded:
        take_written(module, runtime.own)
        del module._autopar
        # pyrefly: ignore[bad-argument-type]: the class that shard_module had mixed its own into
        module.__class__ = runtime.original
        if FORWARD in module.__dict__:
            module.forward = module.__dict__.pop(FORWARD)
        put(module, runtime.own)
