"""The module in use: what is changed after compile, saved, loaded and copied."""

import copy
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import FORWARD, PP, SETTINGS, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


class Dropping(Block):
    """A block with dropout, which p=0 and p=1 make certain."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.scale = nn.Dropout(p), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x).tanh())) * self.scale


class Headed(Stack):
    """A head behind the blocks."""

    def __init__(self) -> None:
        super().__init__(Dropping)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(x)) - y).square().mean()


def two_steps(run: Run, model: nn.Module, change) -> Numbers:
    """A step, a change of the module, and a step after it."""
    args = batch()
    model = run.compile(model, args=args)
    first = run.step(model, *args)
    model.zero_grad()
    change(run.inner(model))
    return {"first": first, "second": run.step(model, *args)} | run.gradients(model)


@case(refused={PP: "changed after the model was cut into stages"})
def dropout_p_changed(run: Run) -> Numbers:
    """The rate of a dropout is changed after a step"""

    def change(model: nn.Module) -> None:
        model.blocks[1].dropout.p = 1.0

    return two_steps(run, Stack(Dropping), change)


@case()
def attribute_changed(run: Run) -> Numbers:
    """A number that forward reads is changed after a step"""

    def change(model: nn.Module) -> None:
        model.blocks[1].scale = 0.25

    return two_steps(run, Stack(Dropping), change)


@case(refused={PP: "changed after the model was cut into stages"})
def attribute_that_hides_one_of_the_class(run: Run) -> Numbers:
    """A submodule gets a forward of its own after a step"""

    def change(model: nn.Module) -> None:
        model.blocks[2].forward = lambda x: x * 0.5

    return two_steps(run, Stack(), change)


@case()
def attribute_changed_and_back(run: Run) -> Numbers:
    """A number that forward reads is changed for one step of three"""
    args, found = batch(), {}
    model = run.compile(Stack(Dropping), args=args)
    for number, scale in enumerate((1.0, 0.5, 1.0, 0.5)):
        run.inner(model).blocks[0].scale = scale
        found[f"loss {number}"] = run.step(model, *args)
    return found | run.gradients(model)


@case(refused={PP: "changed after the model was cut into stages"})
def forward_hook_added(run: Run) -> Numbers:
    """A forward hook is registered on a submodule after a step"""

    def change(model: nn.Module) -> None:
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)

    return two_steps(run, Stack(), change)


@case(on=FORWARD)
def forward_hook_removed(run: Run) -> Numbers:
    """A forward hook on a submodule is removed after a step"""
    model = Stack()
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
    return two_steps(run, model, lambda model: handle.remove())


@case(on=FORWARD)
def hook_of_the_module_itself(run: Run) -> Numbers:
    """A pre-hook on the module itself that scales its input, set before compile, then called in both modes"""
    model, args = Stack(), batch()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))
    model = run.compile(model, args=args)
    found = {"train": run.step(model, *args)}
    return found | {"eval": model.eval()(*args).detach()} | run.gradients(model)


@case(on=FORWARD)
def hook_of_the_module_itself_added(run: Run) -> Numbers:
    """A pre-hook on the module itself, set after a step"""

    def change(model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))

    return two_steps(run, Stack(), change)


@case(on=(PP,), refused="hooks of its own, which train_step with stages", peers=False)
def hook_of_the_module_itself_with_stages(run: Run) -> Numbers:
    """A pre-hook on the module itself, with stages"""
    model, args = Stack(), batch()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))
    return {"loss": run.step(run.compile(model, args=args), *args)}


@case(on=FORWARD)
def frozen_after_a_step(run: Run) -> Numbers:
    """requires_grad_(False) of a block after a step"""
    return two_steps(run, Stack(), lambda model: model.blocks[1].requires_grad_(False))


@case(on=FORWARD)
def unfrozen_after_a_step(run: Run) -> Numbers:
    """A block that was frozen at compile is trained after a step"""
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return two_steps(run, model, lambda model: model.blocks[1].requires_grad_(True))


@case(on=FORWARD)
def unfrozen_bit_by_bit(run: Run) -> Numbers:
    """Layers are unfrozen one after the other, the last first"""
    model, args = Stack(), batch()
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    model = run.compile(model, args=args)
    found = {}
    for number in (2, 1, 0):
        run.inner(model).blocks[number].requires_grad_(True)
        found[f"loss {number}"] = run.step(model, *args)
    return found | run.gradients(model)


@case(on=FORWARD)
def head_replaced(run: Run) -> Numbers:
    """A new head is put in place of the old one after a step"""

    def change(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.head = nn.Linear(WIDTH, WIDTH)

    return two_steps(run, Headed(), change)


@case(on=(PP,), refused="head.* changed .* after the model was cut into stages", peers=False)
def head_replaced_with_stages(run: Run) -> Numbers:
    """A new head is put in place of the old one after a step, with stages"""

    def change(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.head = nn.Linear(WIDTH, WIDTH)

    return two_steps(run, Headed(), change)


@case(on=FORWARD)
def head_without_parameters(run: Run) -> Numbers:
    """The head becomes an Identity after a step, to read features"""

    def change(model: nn.Module) -> None:
        model.head = nn.Identity()

    return two_steps(run, Headed(), change)


@case(on=FORWARD)
def low_rank_adapters_added(run: Run) -> Numbers:
    """Frozen layers get adapters after compile, which alone are trained"""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    def change(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.requires_grad_(False)
        for block in model.blocks:
            block.up = Adapted(block.up)

    return two_steps(run, Stack(), change)


@case(on=FORWARD)
def parameter_replaced(run: Run) -> Numbers:
    """A plain parameter is put in place of a weight after a step"""

    def change(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.blocks[0].up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    return two_steps(run, Stack(), change)


@case(refused=dict.fromkeys(SETTINGS, "the .data of parameter blocks.*.weight was assigned.*load_state_dict"))
def data_assigned(run: Run) -> Numbers:
    """param.data = a whole tensor"""

    def change(model: nn.Module) -> None:
        for block in model.blocks:
            if block.up.weight is not None:
                block.up.weight.data = torch.zeros(2 * WIDTH, WIDTH)

    return two_steps(run, Stack(), change)


@case()
def data_assigned_from_itself(run: Run) -> Numbers:
    """param.data = param.data * 0.5, as moving averages are written"""

    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    return two_steps(run, Stack(), change)


@case()
def data_changed_in_place(run: Run) -> Numbers:
    """param.data.mul_(0.5) for every parameter"""

    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.mul_(0.5)

    return two_steps(run, Stack(), change)


@case(on=FORWARD)
def buffer_replaced(run: Run) -> Numbers:
    """A buffer is set anew after a step"""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    def change(model: nn.Module) -> None:
        model.blocks[1].factor = torch.full((WIDTH,), 0.5)

    return two_steps(run, Stack(Scaled), change)


@case(refused={PP: "changed after the model was cut into stages"})
def tensor_attribute_changed_in_place(run: Run) -> Numbers:
    """A tensor that is no buffer is changed in place after a step"""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.ones(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    def change(model: nn.Module) -> None:
        model.blocks[1].factor.mul_(0.5)

    return two_steps(run, Stack(Scaled), change)


@case()
def list_attribute_changed_in_place(run: Run) -> Numbers:
    """An entry of a list that forward reads is changed after a step"""

    class Weighted(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [1.0, 1.0, 1.0]

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block, weight in zip(self.blocks, self.weights):
                x = block(x) * weight
            return x

    def change(model: nn.Module) -> None:
        model.weights[1] = 0.5

    return two_steps(run, Weighted(), change)


@case(on=FORWARD)
def dtype_changed(run: Run) -> Numbers:
    """model.double() after a step in float32"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    model.double()
    second = run.step(model, *(x.double() for x in args))
    return {"first": first, "second": second} | run.gradients(model)


@case()
def copied_and_changed(run: Run) -> Numbers:
    """A deep copy of the compiled module is changed; the module itself is not"""
    args = batch()
    model = run.compile(Stack(Dropping), args=args)
    copied = copy.deepcopy(model)
    run.inner(copied).blocks[0].scale = 0.5
    return {"copy": run.step(copied, *args), "model": run.step(model, *args)} | run.gradients(model)


@case()
def forward_of_the_instance(run: Run) -> Numbers:
    """The instance has a forward of its own when it is compiled"""
    model, args = Stack(), batch()
    model.forward = MethodType(lambda self, x, y: F.l1_loss(self.body(x), y), model)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)
