"""torchtitan's Llama 3 in its own loop."""

import shutil
from collections.abc import Callable
from typing import Any

import torch

from tests.trainers.case import BATCH, LENGTH, STEPS, Numbers, Work


def torchtitan(work: Work) -> Numbers:
    """torchtitan's Llama 3 in its own `Trainer`: train, checkpoint, train from it"""
    from tests.trainers import titan

    autopar, mesh, size = work.autopar, work.mesh, BATCH // work.num_ranks

    # recipe
    def parallelize(model, **_):
        model = autopar.compile(model, mesh, batch=mesh.mesh_dim_names)
        model.register_forward_hook(summed)
        return model

    def summed(model, args, logits):
        """Gradients of the sum of the ranks' losses, which torchtitan takes, in place of their mean."""
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * mesh.size())

    @torch.no_grad()
    def plan(optimizers, models, parallel_dims):
        """Plan the model before a checkpoint is loaded; called once it has weights and an optimizer."""
        tokens = torch.full((size, LENGTH), torch.distributed.get_rank())
        positions = torch.arange(LENGTH).repeat(size, 1)
        models[0](tokens, positions=positions, attention_masks=models[0].get_attention_masks(positions))

    # end
    sizes = {"num_ranks": work.num_ranks, "batch": size, "steps": STEPS}
    return _trained_and_resumed(work, lambda folder: titan.trainer(parallelize, plan, folder, **sizes))


def torchtitan_stages(work: Work) -> Numbers:
    """torchtitan's Llama 3 in its own `Trainer`, in stages by its `pipelining_fn`: train, checkpoint, train from it"""
    from tests.trainers import titan
    from tests.trainers.titan import distributed

    autopar, mesh = work.autopar, work.mesh
    size = BATCH if work.num_ranks == 1 else BATCH // mesh["dp"].size()

    # recipe
    def pipeline(model, **_):
        model = autopar.compile(model, mesh, batch=("dp",), loss_fn=mean_of_words)
        distributed.clip_grad_norm_ = lambda parameters, max_norm, **_: model.clip_grad_norm_(max_norm)
        return AsSchedule(model), [model], True, True  # every rank is given tokens and labels

    def mean_of_words(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    class AsSchedule:
        """What torchtitan's Trainer calls with the microbatches of a step, here of this rank's rows."""

        def __init__(self, model):
            self.model = model

        def step(self, *, arg_mbs, kwarg_mbs, target_mbs, losses, **_):
            tokens = torch.cat([tokens for (tokens,) in arg_mbs])
            positions = torch.cat([given["positions"] for given in kwarg_mbs])
            loss = step(self.model, tokens, torch.cat(target_mbs), positions)
            losses.append(loss / mesh["dp"].size())  # Trainer sums over the ranks

    def step(model, tokens, labels, positions):
        masks = model.get_attention_masks(positions)
        return model.train_step(tokens, labels, positions=positions, attention_masks=masks)

    @torch.no_grad()
    def plan(optimizers, models, parallel_dims):
        tokens = torch.full((size, LENGTH), mesh["dp"].get_local_rank())
        step(models[0], tokens, tokens, torch.arange(LENGTH).repeat(size, 1))

    # end
    def made(folder: str) -> Any:
        if work.num_ranks == 1:
            one = {"num_ranks": 1, "batch": size, "steps": STEPS}
            return titan.trainer(lambda model, **_: autopar.compile(model, mesh), lambda *_: None, folder, **one)
        return titan.trainer(
            pipeline, plan, folder, num_ranks=work.num_ranks, batch=size, steps=STEPS, pipeline=pipeline
        )

    return _trained_and_resumed(work, made)


def _trained_and_resumed(work: Work, made: Callable[[str], Any]) -> Numbers:
    """What `made(folder)`, a Trainer, gives in all steps, and from the checkpoint of half of them."""
    first = made(work.path("titan"))
    first.train()
    numbers = {"losses": first.losses, "norms": first.norms, "end": first.model_parts[0].full_state_dict()}
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(work.path(f"titan/checkpoint/step-{STEPS}"))
    torch.distributed.barrier()
    again = made(work.path("titan"))
    again.train()
    return numbers | {"resumed": again.losses, "resumed end": again.model_parts[0].full_state_dict()}
