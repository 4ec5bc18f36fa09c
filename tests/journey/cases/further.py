"""Contexts around a step, hooks of all kinds, parametrisations, and arguments of other kinds."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint_sequential

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.tricks import three_steps
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch


def stepped(run: Run, model: nn.Module, around: Callable[[], Any]) -> Numbers:
    """Loss and gradients of a step within a context."""
    args = batch()
    model = run.compile(model, args=args)
    with around():
        loss = run.step(model, *args)
    return {"loss": loss} | run.gradients(model)


class Output(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@case()
def another_default_dtype(run: Run) -> Numbers:
    """torch.set_default_dtype(torch.float64) between two steps of a model that makes a tensor in forward"""

    class Made(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (super().forward(x, y) * torch.ones(1).cumsum(0)).sum()

    args = batch()
    model = run.compile(Made(), args=args)
    first = run.step(model, *args)
    with default_dtype(torch.float64):
        second = run.step(model, *args)
    return {"first": first, "second": second, "is float64": torch.tensor(float(second.dtype == torch.float64))}


@case(on=FORWARD)
def hook_of_all_modules(run: Run) -> Numbers:
    """register_module_forward_hook, of all modules there are, that doubles what linear layers give, after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)

    def doubled(module: nn.Module, given: Any, out: torch.Tensor) -> Any:
        return out * 2 if isinstance(module, nn.Linear) else None

    handle = register_module_forward_hook(doubled)
    try:
        second = run.step(model, *args)
    finally:
        handle.remove()
    return {"first": first, "second": second} | run.gradients(model)


@case(on=FORWARD)
def pre_hook_of_all_modules_before_compile(run: Run) -> Numbers:
    """register_module_forward_pre_hook, of all modules, that scales what blocks get, before compile"""

    def scaled(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
        return (given[0] * 0.5,) if isinstance(module, Block) else None

    handle = register_module_forward_pre_hook(scaled)
    try:
        return stepped(run, Stack(), lambda: torch.enable_grad())
    finally:
        handle.remove()


@case()
def hooks_with_keywords(run: Run) -> Numbers:
    """register_forward_pre_hook(with_kwargs=True) that changes a keyword, prepend=True, always_call=True"""

    class Keyed(Block):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    class Calling(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, scale=0.5)
            return x

    model = Calling(Keyed)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args, kwargs: (args, {"scale": 0.8}), with_kwargs=True)
        block.register_forward_hook(lambda m, args, out: out + 1, always_call=True)
        block.register_forward_hook(lambda m, args, out: out * 0.5, prepend=True)
    return three_steps(run, model)


@case(refused={PP: "microbatches would do several times a step"})
def spectral_norm(run: Run) -> Numbers:
    """parametrizations.spectral_norm: power iterations in buffers that training moves on, three steps"""
    model = Stack()
    for block in model.blocks:
        parametrizations.spectral_norm(block.up)
    return three_steps(run, model)


@case()
def orthogonal_weights(run: Run) -> Numbers:
    """parametrizations.orthogonal (Cayley) of a square weight"""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x).tanh()

    return three_steps(run, Stack(Square))


@case(on=FORWARD)
def parametrised_after_compile(run: Run) -> Numbers:
    """parametrizations.weight_norm of a layer after a step, and an optimizer made of what there is then"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    parametrizations.weight_norm(run.inner(model).blocks[1].up)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = run.step(model, *args)
    optimizer.step()
    return {"first": first, "second": second} | run.parameters(model)


@case(on=FORWARD)
def pruned_after_compile(run: Run) -> Numbers:
    """prune.l1_unstructured of a layer after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    prune.l1_unstructured(run.inner(model).blocks[1].up, "weight", amount=0.5)
    model.zero_grad()
    return {"first": first, "second": run.step(model, *args)} | run.gradients(model)


@case()
def checkpointed_in_sequence(run: Run) -> Numbers:
    """torch.utils.checkpoint.checkpoint_sequential of the blocks in two segments"""

    class Checkpointed(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)

    return three_steps(run, Checkpointed())


@case(on=FORWARD)
def evaluated_in_inference_mode(run: Run) -> Numbers:
    """torch.inference_mode() of an evaluation between two steps, with an input that was made in it"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    with torch.inference_mode():
        shifted = args[0] + 1
        middle = model(shifted, args[1])
    model.zero_grad()
    return {"first": first, "middle": middle.clone(), "last": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def gradients_by_phase(run: Run) -> Numbers:
    """with torch.set_grad_enabled(phase == "train"), and model.train(phase == "train"), in turn"""
    args = batch()
    model, losses = run.compile(Stack(), args=args), {}
    for number, phase in enumerate(("train", "val", "train", "val")):
        model.train(phase == "train")
        with torch.set_grad_enabled(phase == "train"):
            loss = model(*args)
            if phase == "train":
                loss.backward()
        losses[f"loss {number}"] = loss.detach()
    return losses | run.gradients(model)


@case()
def anomalies_detected(run: Run) -> Numbers:
    """torch.autograd.set_detect_anomaly(True) around a step"""
    return stepped(run, Stack(), lambda: torch.autograd.set_detect_anomaly(True))


@case()
def saved_on_the_host(run: Run) -> Numbers:
    """torch.autograd.graph.save_on_cpu() around a step"""
    return stepped(run, Stack(), lambda: torch.autograd.graph.save_on_cpu())


@case()
def saved_in_less(run: Run) -> Numbers:
    """saved_tensors_hooks that halve what is saved, and double it when it is read"""
    return stepped(run, Stack(), lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0.5, lambda x: x * 2))


@case()
def profiled(run: Run) -> Numbers:
    """torch.profiler.profile around a step"""
    return stepped(run, Stack(), lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))


@case(on=FORWARD)
def weighted_backward(run: Run) -> Numbers:
    """torch.autograd.backward of two losses with weights, and out.backward(gradient) of what is no scalar"""
    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Output(), args=(x,))
    out = model(x)
    torch.autograd.backward([out.sum(), out.square().sum()], [torch.tensor(0.5), torch.tensor(2.0)], retain_graph=True)
    out.backward(torch.linspace(0, 1, WIDTH).expand(BATCH, WIDTH))
    return run.gradients(model)


@case(on=FORWARD)
def products_with_jacobians(run: Run) -> Numbers:
    """torch.autograd.functional.vjp and hvp of the compiled model in its input"""
    x, v = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    model = run.compile(Output(), args=(x,))
    _, vjp = torch.autograd.functional.vjp(model, x, v)
    _, hvp = torch.autograd.functional.hvp(lambda one: model(one).square().sum(), x, v)
    return {"vjp": vjp, "hvp": hvp}


@case()
def gradients_kept_and_put_back(run: Run) -> Numbers:
    """[p.grad.clone() ...] of one batch, added to those of the next by p.grad.add_, p.grad.zero_() in place of None"""
    model = run.compile(Stack(), args=batch())
    run.step(model, *batch())
    kept = {fqn: p.grad.clone() for fqn, p in run.named(model)}
    for _, p in run.named(model):
        p.grad.zero_()
    loss = run.step(model, *batch())
    for fqn, p in run.named(model):
        p.grad.add_(kept[fqn], alpha=0.5)
    return {"loss": loss} | run.gradients(model)


@case()
def gradient_hook_after_compile(run: Run) -> Numbers:
    """p.register_hook(lambda g: g * 0.1) of some weights after compile, and removed after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    handles = [p.register_hook(lambda g: g * 0.1) for fqn, p in model.named_parameters() if "bias" in fqn]
    first = run.step(model, *args)
    for handle in handles:
        handle.remove()
    return {"first": first, "second": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def called_by_another_thread(run: Run) -> Numbers:
    """Forward and backward in a thread of its own (a background evaluation)"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    thread = threading.Thread(target=lambda: found.update(loss=run.step(model, *args)))
    thread.start()
    thread.join()
    return found | run.gradients(model)


@case(refused="CUSTOM_OBJ.*not by a torch.Generator made in forward")
def generator_in_forward(run: Run) -> Numbers:
    """torch.randn(..., generator=torch.Generator().manual_seed(0)) in forward: the same noise in each call"""

    class Noisy(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(0)
            return super().forward(x + torch.randn(WIDTH, generator=generator), y)

    return three_steps(run, Noisy())


@case(refused="torch.manual_seed in forward would run while the model is traced")
def seed_in_forward(run: Run) -> Numbers:
    """torch.manual_seed(0) and a random projection in forward"""

    class Projected(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            return super().forward(x @ torch.randn(WIDTH, WIDTH), y)

    return three_steps(run, Projected())


@case(on=FORWARD, refused="a tensor of layout torch.sparse_coo.*expected dense ones")
def sparse_input(run: Run) -> Numbers:
    """A sparse matrix (an adjacency) among the arguments: torch.sparse.mm"""

    class Graph(Stack):
        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(edges, self.body(x)).square().mean()

    args = torch.randn(BATCH, WIDTH), torch.eye(BATCH).to_sparse()
    model = run.compile(Graph())
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD, refused="a tensor of layout torch.jagged.*expected dense ones")
def jagged_input(run: Run) -> Numbers:
    """torch.nested.nested_tensor(layout=torch.jagged) as input"""
    model = run.compile(Output())
    rows = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    return {"values": model(rows).values().detach()}


@case(on=FORWARD)
def one_tensor_twice(run: Run) -> Numbers:
    """The same tensor twice among the outputs, with None, a number and a text"""

    class Many(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.body(x)
            return {"a": h, "b": [h, h * 2, None], "c": 3, "d": "text", "e": h.argmax(-1)}

    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Many(), args=(x,))
    out = model(x)
    assert out["b"][2] is None and out["c"] == 3 and out["d"] == "text"
    (out["a"].sum() + out["b"][0].square().sum() + out["b"][1].sum()).backward()
    return {"a": out["a"].detach(), "e": out["e"]} | run.gradients(model)


@case(refused={PP: "changed .* after the model was cut into stages"})
def converted_after_a_step(run: Run) -> Numbers:
    """model.double() after a step, with an input in float64"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model = model.double()
    model.zero_grad()
    return {"first": first, "second": run.step(model, *(x.double() for x in args))} | run.gradients(model)


@case(on=FORWARD)
def frozen_as_a_whole(run: Run) -> Numbers:
    """model.requires_grad_(False) for a step on the input alone, then True again"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model.requires_grad_(False)
    x = args[0].clone().requires_grad_()
    model(x, args[1]).backward()
    model.requires_grad_(True)
    model.zero_grad()
    return {"first": first, "input": x.grad, "last": run.step(model, *args)} | run.gradients(model)


@case()
def deterministic_algorithms(run: Run) -> Numbers:
    """torch.use_deterministic_algorithms(True) and float32 products in "high" precision after a step"""
    before = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        return three_steps(run, Stack())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
