"""Forms in which a model or its state comes: lazy, compiled by torch, on meta, with state of one device."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


def trained_on(run: Run, optimizer_of: Any, **options: Any) -> Numbers:
    """Two steps on one device, then two of the compiled model with the optimizer's state of those."""
    args, model = batch(), Stack()
    before = optimizer_of(model.parameters())
    for _ in range(2):
        before.zero_grad()
        model(*args).backward()
        before.step()
    saved = copy.deepcopy(before.state_dict())
    model.zero_grad()
    model = run.compile(model, args=args, **options)
    optimizer = optimizer_of(model.parameters())
    optimizer.load_state_dict(saved)
    found = {}
    for number in range(2):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)


@case()
def adamw_state_of_one_device(run: Run) -> Numbers:
    """The state of AdamW from a run on one device, loaded with the weights"""
    return trained_on(run, lambda own: torch.optim.AdamW(own, lr=0.01, eps=1e-3, amsgrad=True))


@case()
def momentum_of_one_device(run: Run) -> Numbers:
    """SGD's momentum from a run on one device"""
    return trained_on(run, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))


@case()
def rprop_state_of_one_device(run: Run) -> Numbers:
    """Rprop's step sizes from a run on one device"""
    return trained_on(run, lambda own: torch.optim.Rprop(own, lr=0.01))


@case()
def adafactor_of_whole_weights(run: Run) -> Numbers:
    """Adafactor of weights that pins= stores whole"""
    args, model = batch(), Stack()
    pins = {fqn: "B" if run.setting in ("dp", PP) else "BB" for fqn, _ in model.named_parameters()}
    model = run.compile(model, args=args, pins=pins)
    optimizer, found = torch.optim.Adafactor(model.parameters(), lr=0.1), {}
    for number in range(3):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)


class OldNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.up = nn.utils.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))


@case()
def old_weight_norm(run: Run) -> Numbers:
    """torch.nn.utils.weight_norm, which sets the weight in a pre-hook"""
    args = batch()
    model = run.compile(Stack(OldNorm), args=args)
    found = {"first": run.step(model, *args), "second": run.step(model, *args)}
    return found | run.gradients(model)


@case()
def old_weight_norm_of_all_dims(run: Run) -> Numbers:
    """torch.nn.utils.weight_norm(dim=None), trained for three steps"""

    class Whole(Block):
        def __init__(self) -> None:
            super().__init__()
            with pytest.warns(FutureWarning):
                self.down = nn.utils.weight_norm(nn.Linear(2 * WIDTH, WIDTH), dim=None)

    args, found = batch(), {}
    model = run.compile(Stack(Whole), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)


@case(on=FORWARD)
def old_weight_norm_removed(run: Run) -> Numbers:
    """torch.nn.utils.remove_weight_norm after a step"""
    args = batch()
    model = run.compile(Stack(OldNorm), args=args)
    first = run.step(model, *args)
    for block in run.inner(model).blocks:
        nn.utils.remove_weight_norm(block.up)
    model.zero_grad()
    return {"first": first, "second": run.step(model, *args)} | run.gradients(model)


class Lazy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.LazyLinear(WIDTH)


@case(refused="blocks.0.down.weight is not initialised.*Call the model once")
def lazy_linear(run: Run) -> Numbers:
    """nn.LazyLinear before its first call"""
    args = batch()
    model = run.compile(Stack(Lazy), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(refused="blocks.0.down.weight is not initialised.*Call the model once")
def lazy_linear_without_example(run: Run) -> Numbers:
    """nn.LazyLinear before its first call, compiled without args="""
    return {"loss": run.step(run.compile(Stack(Lazy)), *batch())}


@case()
def lazy_linear_that_was_called(run: Run) -> Numbers:
    """nn.LazyLinear after its first call"""
    args, model = batch(), Stack(Lazy)
    model(*args)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(refused="argument x is on the meta device and has no values")
def input_on_meta(run: Run) -> Numbers:
    """model(x.to("meta"), y)"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y))
    return {"loss": run.step(model, x.to("meta"), y)}


@case()
def example_on_meta(run: Run) -> Numbers:
    """args= of tensors on meta, and a step with values"""
    args = batch()
    model = run.compile(Stack(), args=tuple(x.to("meta") for x in args))
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def functional_call_with_own_parameters(run: Run) -> Numbers:
    """torch.func.functional_call with the model's own parameters, and with weights made of them (MAML)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    own = dict(model.named_parameters())
    second = torch.func.functional_call(model, own, args)
    second.backward()
    halved = {fqn: p * 0.5 for fqn, p in own.items()}
    third = torch.func.functional_call(model, halved, args)
    third.backward()
    return {"first": first, "second": second.detach(), "third": third.detach()} | run.gradients(model)


@case(on=FORWARD, refused=dict.fromkeys(FORWARD, "place of parameter blocks.0.up.weight.*distribute_tensor"))
def functional_call_with_whole_tensors(run: Run) -> Numbers:
    """torch.func.functional_call with whole plain tensors"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    halved = {fqn: run.whole(p.detach()) * 0.5 for fqn, p in model.named_parameters()}
    return {"loss": torch.func.functional_call(model, halved, args).detach()}


@case(refused="the model is what torch.compile returned.*model._orig_mod")
def compiled_by_torch_before(run: Run) -> Numbers:
    """torch.compile(model) before autopar.compile"""
    args = batch()
    model = run.compile(torch.compile(Stack(), backend="eager"), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def compiled_in_place_before(run: Run) -> Numbers:
    """model.compile() before autopar.compile"""
    args, model = batch(), Stack()
    model.compile(backend="eager")
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(refused="module blocks.1 is what torch.compile returned.*model.blocks.1._orig_mod")
def block_compiled_by_torch_before(run: Run) -> Numbers:
    """model.blocks[1] = torch.compile(block) before autopar.compile"""
    args, model = batch(), Stack()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def block_compiled_in_place_before(run: Run) -> Numbers:
    """model.blocks[1].compile() before autopar.compile, which has no effect"""
    args, model = batch(), Stack()
    model.blocks[1].compile(backend="eager")
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD, refused="fullgraph=True.*outside of compiled graphs. Leave fullgraph out")
def compiled_as_one_graph_after(run: Run) -> Numbers:
    """torch.compile(model, fullgraph=True) after autopar.compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    faster = torch.compile(model, backend="eager", fullgraph=True)
    losses = {}
    for number in range(2):
        loss = faster(*args)
        loss.backward()
        losses[str(number)] = loss.detach()
    return losses | run.gradients(model)


@case(on=FORWARD, refused="fullgraph=True.*outside of compiled graphs. Leave fullgraph out")
def compiled_in_place_as_one_graph_after(run: Run) -> Numbers:
    """model.compile(fullgraph=True) after autopar.compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    model.compile(backend="eager", fullgraph=True)
    return {"loss": model(*args).detach()}


@case()
def deep_copy_trained_on(run: Run) -> Numbers:
    """copy.deepcopy of the compiled model, and a step of each: neither sees the other's gradients"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    found = {"twin's loss": run.step(twin, *(2 * x for x in args))}
    found |= {f"twin's {name}": x for name, x in run.gradients(twin).items()}
    return found | run.gradients(model)


@case()
def deep_copy_before_the_first_call(run: Run) -> Numbers:
    """copy.deepcopy of a compiled model that is not planned yet"""
    args = batch()
    model = run.compile(Stack())
    twin = copy.deepcopy(model)
    found = {"twin's loss": run.step(twin, *args)} | {f"twin's {name}": x for name, x in run.gradients(twin).items()}
    return found | {"loss": run.step(model, *args)} | run.gradients(model)


@case(refused="cannot be pickled whole.*save its state_dict")
def pickled_by_pickle(run: Run) -> Numbers:
    """pickle.dumps(model) of the compiled module"""
    model = run.compile(Stack(), args=batch())
    pickle.dumps(model)
    return run.parameters(model)


@case(on=FORWARD)
def block_saved_whole(run: Run) -> Numbers:
    """torch.save(model.blocks[0]) of a block of the compiled module, and torch.load on the same ranks"""
    model, file = run.compile(Stack(), args=batch()), io.BytesIO()
    torch.save(model.blocks[0], file)
    file.seek(0)
    return run.parameters(torch.load(file, weights_only=False))


@case(on=FORWARD)
def functional_call_before_the_first_call(run: Run) -> Numbers:
    """torch.func.functional_call with the model's own parameters, without a call before"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = torch.func.functional_call(model, dict(model.named_parameters()), args)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=(PP,), peers=False, refused="cannot run alone; call model.train_step")
def functional_call_with_stages(run: Run) -> Numbers:
    """torch.func.functional_call of a model in stages"""
    args = batch()
    model = run.compile(Stack(), args=args)
    return {"loss": torch.func.functional_call(model, dict(model.named_parameters()), args).detach()}
