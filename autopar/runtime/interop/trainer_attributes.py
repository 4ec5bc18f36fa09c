"""`TrainerAttributes`: the attributes by which trainers ask whether a model is parallel already.

A trainer that is given a model wraps it in DistributedDataParallel, unless the model says by such an attribute that it
is sharded. There is no common protocol, so that each library's own names are answered here, and nowhere else:

- torch: DistributedDataParallel reads `_ddp_params_and_buffers_to_ignore` before it does anything, Join `join_hook`.
- transformers: a model whose `is_distributed_loading_by_transformers` is true is trained as it is, and saved by a call
  on every rank. Its Trainer gives the model `num_items_in_batch`, the number of all ranks' items, and multiplies the
  loss by the number of ranks, of which it expects the mean.
- accelerate: `prepare_model` leaves a model alone that has `_is_accelerate_prepared`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.mesh import PIPELINE
from autopar.runtime.local_batch import LocalBatch
from autopar.torch_compat import local_of_caller, module_of_caller

_COMPILED = (
    ": expected none for a model that autopar.compile returned, for torch.compile of its program with the collectives"
    " takes minutes, and fails under such a trainer (InternalTorchDynamoError). Leave it out: torch_compile=False,"
    " dynamo_backend='no'"
)


class TrainerAttributes(nn.Module):
    """Mixed into a sharded module's class, so that a trace, which is of the original class, sees none of it."""

    _autopar: Any

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        if module_of_caller() != "torch.nn.parallel.distributed":
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise AutoparError(
            "the model was compiled by autopar, which reduces its gradients itself; DistributedDataParallel, by your"
            " script or by a trainer in it, is expected to be given the model as written for one device. Leave it out,"
            " or tell the trainer that the model is parallel already: docs/trainers.md has the lines for each"
        )

    @property
    def join_hook(self) -> Any:
        if module_of_caller() != "torch.distributed.algorithms.join":
            own: Any = super()
            return own.join_hook
        raise AutoparError(
            "Join([model]), for ranks whose data ends at different steps, of a model that autopar.compile returned:"
            " every rank takes part in each of its calls. Leave Join out, and end the loop of every rank after the same"
            " number of batches, as with DistributedSampler or drop_last=True"
        )

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Asked by transformers' Trainer: whether the model has its layout already and reduces its gradients itself.

        AutoparError unless every rank gives its own part of the batch, as the Trainer loads it; if it is to be
        compiled; and for stages, since the Trainer calls `model(...)` and backward itself.
        """
        if module_of_caller().partition(".")[0] != "transformers":  # torch.jit.trace reads all attributes
            own: Any = super()
            return own.is_distributed_loading_by_transformers
        if PIPELINE in (self._autopar.mesh.mesh_dim_names or ()):
            raise AutoparError(
                "transformers.Trainer calls model(...) and loss.backward(), and stages are run by"
                f" model.train_step(...): expected a mesh without the axis {PIPELINE!r}, found"
                f" {self._autopar.mesh.mesh_dim_names}; or a loop of your own that calls train_step"
            )
        self._check_own_parts("transformers.Trainer")
        if getattr(local_of_caller("args"), "torch_compile", False):  # read by the Trainer as it is made
            raise AutoparError(f"TrainingArguments(torch_compile=True){_COMPILED}")
        return True

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate has nothing to do with the model: it reads this before it wraps it.

        All that is left to it is mixed precision, which it is asked for as of a model for evaluation: autocast alone.
        """
        if module_of_caller() != "accelerate.accelerator" or local_of_caller("evaluation_mode"):
            return False
        self._check_own_parts("accelerate")
        caller = local_of_caller("self")
        if caller.mixed_precision == "fp8":
            raise AutoparError(
                "Accelerator(mixed_precision='fp8') replaces layers of the model, which is compiled already; expected"
                " 'no', 'fp16' or 'bf16'"
            )
        backend = caller.state.dynamo_plugin.backend
        if backend != "NO":
            raise AutoparError(f"Accelerator(dynamo_backend={str(backend)!r}){_COMPILED}")
        if caller.native_amp and self not in vars(caller)["_models"]:  # of accelerate; no public name
            caller.prepare_model(self, device_placement=False, evaluation_mode=True)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, is_so: bool) -> None:
        """Set by accelerate on all that it prepared."""

    def _check_own_parts(self, trainer: str) -> None:
        parts, mesh = self._autopar.parts, self._autopar.mesh
        found = 1 if parts is None else parts.num_parts
        if found != mesh.size():
            raise AutoparError(
                f"{trainer} gives each of the mesh's {mesh.size()} ranks rows of its own, and the model was compiled"
                f" for {found} part{'s' * (found > 1)} of the batch: expected autopar.compile(model, mesh,"
                f" batch={tuple(mesh.mesh_dim_names or ())}), in which every rank gives a part"
            )


def as_of_all_parts(kwargs: Mapping[str, Any], parts: LocalBatch | None) -> dict[str, Any]:
    """`kwargs` with the `num_items_in_batch` that makes the loss of the whole batch the mean over the ranks.

    It divides what a rank sums over its rows; the whole batch's sum is that of `num_parts` ranks.
    """
    count = kwargs.get("num_items_in_batch")
    if parts is None or not isinstance(count, int | torch.Tensor):
        return dict(kwargs)
    return {**kwargs, "num_items_in_batch": count * parts.num_parts}
