"""torchtitan's Llama 3 in its own loop."""

import shutil

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
    first = titan.trainer(parallelize, plan, work.path("titan"), **sizes)
    first.train()
    numbers = {"losses": first.losses, "norms": first.norms, "end": first.model_parts[0].full_state_dict()}
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(work.path(f"titan/checkpoint/step-{STEPS}"))
    torch.distributed.barrier()
    again = titan.trainer(parallelize, plan, work.path("titan"), **sizes)
    again.train()
    return numbers | {"resumed": again.losses, "resumed end": again.model_parts[0].full_state_dict()}
