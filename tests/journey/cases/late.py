"""Changes after compile in places that are easily missed, tensors that a model returns, and what forward writes."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import DP, DP_TP, FORWARD, Numbers, Run, case
from tests.journey.cases.tricks import three_steps
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

ALONE = FORWARD
SETTINGS_OF_SCRIPT = {"scale": 1.0}


def before_and_after(run: Run, model: nn.Module, change: Callable[[nn.Module], object]) -> Numbers:
    """Losses of a step before a change of the compiled model and of one after it, and the gradients of both."""
    args = batch()
    model = run.compile(model, args=args)
    first = run.step(model, *args)
    change(run.inner(model))
    return {"before": first, "after": run.step(model, *args)} | run.gradients(model)


class Scaled(Stack):
    scale = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.scale


@case(on=ALONE)
def attribute_of_the_class_changed(run: Run) -> Numbers:
    """Model.scale = 2.0 of the class, after a step"""

    class Own(Scaled):
        pass

    return before_and_after(run, Own(), lambda model: setattr(Own, "scale", 2.0))


@case(on=ALONE)
def forward_of_a_class_replaced(run: Run) -> Numbers:
    """Block.forward = another function, after a step, as libraries patch attention"""

    class Own(Block):
        pass

    def doubled(self: Block, x: torch.Tensor) -> torch.Tensor:
        return 2 * Block.forward(self, x)

    return before_and_after(run, Stack(Own), lambda model: setattr(Own, "forward", doubled))


class Activated(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.act(self.body(x)) - y).square().mean()


@case(on=ALONE)
def partial_replaced(run: Run) -> Numbers:
    """model.act = functools.partial(F.leaky_relu, negative_slope=0.5), after a step"""
    new = functools.partial(F.leaky_relu, negative_slope=0.5)
    return before_and_after(run, Activated(), lambda model: setattr(model, "act", new))


@case(on=ALONE)
def keywords_of_a_partial_changed(run: Run) -> Numbers:
    """model.act.keywords["negative_slope"] = 0.5, after a step"""
    return before_and_after(run, Activated(), lambda model: model.act.keywords.update(negative_slope=0.5))


class Configured(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.0), name="a")
        self.table = {"a": [1.0]}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.config.inner.scale * self.table["a"][0]


@case(on=ALONE)
def config_within_a_config_changed(run: Run) -> Numbers:
    """model.config.text_config.scale = 2.0, two objects deep, after a step"""
    return before_and_after(run, Configured(), lambda model: setattr(model.config.inner, "scale", 2.0))


@case(on=ALONE)
def list_within_a_dict_changed(run: Run) -> Numbers:
    """model.table["a"][0] = 2.0, after a step"""
    return before_and_after(run, Configured(), lambda model: model.table["a"].insert(0, 2.0))


@case(on=ALONE)
def property_set(run: Run) -> Numbers:
    """model.temperature = 3.0 of a property with a setter, after a step"""

    class Own(Stack):
        def __init__(self) -> None:
            super().__init__()
            self._temperature = 1.0

        @property
        def temperature(self) -> float:
            return self._temperature

        @temperature.setter
        def temperature(self, value: float) -> None:
            self._temperature = value

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * self.temperature

    return before_and_after(run, Own(), lambda model: setattr(model, "temperature", 3.0))


@case(on=ALONE)
def variable_of_the_script_changed(run: Run) -> Numbers:
    """A dict of the script, no attribute of the model, which forward reads, is changed after a step"""

    class Own(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * SETTINGS_OF_SCRIPT["scale"]

    try:
        return before_and_after(run, Own(), lambda model: SETTINGS_OF_SCRIPT.update(scale=2.0))
    finally:
        SETTINGS_OF_SCRIPT["scale"] = 1.0


@case(on=ALONE)
def temperature_in_a_buffer(run: Run) -> Numbers:
    """model.temperature.fill_(0.5) of a buffer, after a step"""

    class Own(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.ones(()))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x / self.temperature, y)

    return before_and_after(run, Own(), lambda model: model.temperature.fill_(0.5))


class Hidden(Stack):
    """The loss, and what the first block gives."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.blocks[0](x)
        return (self.blocks[2](self.blocks[1](hidden)) - y).square().mean(), hidden


IN_PARTS = (DP, DP_TP)  # where what is returned is gathered from the parts that the loss is computed of


@case(on=ALONE, refused=dict.fromkeys(IN_PARTS, "register_hook or retain_grad of an output.*full backward hook"))
def hidden_tensor_retained(run: Run) -> Numbers:
    """loss, hidden = model(x, y); hidden.retain_grad() and hidden.register_hook before backward (Grad-CAM)"""
    args, seen = batch(), []
    model = run.compile(Hidden(), args=args)
    loss, hidden = model(*args)
    hidden.retain_grad()
    hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss.backward()
    return {"loss": loss.detach(), "retained": hidden.grad, "seen": seen[0]} | run.gradients(model)


@case(on=ALONE, wrong=dict.fromkeys(IN_PARTS, "appears to not have been used in the graph"))
def gradient_of_a_hidden_tensor(run: Run) -> Numbers:
    """torch.autograd.grad(loss, hidden) of two outputs of one call"""
    args = batch()
    loss, hidden = run.compile(Hidden(), args=args)(*args)
    return {"gradient": torch.autograd.grad(loss, hidden)[0]}


@case(on=ALONE, refused=r"retain_grad in forward is not kept: return the tensor, and call retain_grad\(\)")
def hidden_tensor_retained_inside(run: Run) -> Numbers:
    """hidden.retain_grad() in forward, which returns it"""

    class Retained(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.blocks[0](x)
            hidden.retain_grad()
            return (self.blocks[1](hidden) - y).square().mean(), hidden

    args = batch()
    loss, hidden = run.compile(Retained(), args=args)(*args)
    loss.backward()
    return {"gradient": hidden.grad}


@case(on=ALONE)
def weight_returned(run: Run) -> Numbers:
    """A weight among the outputs, penalised outside"""

    class Penalised(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x, y), self.blocks[0].up.weight

    args = batch()
    model = run.compile(Penalised(), args=args)
    loss, weight = model(*args)
    (loss + weight.square().sum()).backward()
    return {"loss": loss.detach()} | run.gradients(model)


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@case(on=ALONE)
def outputs_masked_in_place(run: Run) -> Numbers:
    """logits[:, 0] = -1e9 and logits[:, 1:] += 1 of what the model returned, before a cross-entropy"""
    x, _ = batch()
    model = run.compile(Outputs(), args=(x,))
    logits = model(x)
    logits[:, 0] = -1e9
    logits[:, 1:] += 1
    loss = F.cross_entropy(logits, torch.arange(BATCH) % (WIDTH - 1) + 1)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def initialised_by_the_first_batch(run: Run) -> Numbers:
    """ActNorm by torch.where of a buffer that says whether it is initialised"""

    class Initialised(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ready", torch.tensor(0.0))
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x)
            with torch.no_grad():
                self.shift.copy_(torch.where(self.ready > 0, self.shift, hidden.mean(0)))
                self.ready.fill_(1.0)
            return (hidden - self.shift - y).square().mean()

    return three_steps(run, Initialised())


@case(on=ALONE, refused="keeps state in attribute is_initialised")
def initialised_by_an_attribute(run: Run) -> Numbers:
    """`if not self.is_initialised:` a weight's data is set from the batch, once"""

    class Initialised(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.is_initialised, self.shift = False, nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x)
            if not self.is_initialised:
                self.shift.data.copy_(hidden.detach().mean(0))
                self.is_initialised = True
            return (hidden - self.shift - y).square().mean()

    return three_steps(run, Initialised())


@case(on=ALONE)
def weight_clamped_in_forward(run: Run) -> Numbers:
    """with torch.no_grad(): self.weight.clamp_(-0.1, 0.1) in forward"""

    class Clamped(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.blocks[0].up.weight.clamp_(-0.1, 0.1)
            return super().forward(x, y)

    return three_steps(run, Clamped())


@case(on=ALONE)
def weight_normalised_in_forward(run: Run) -> Numbers:
    """self.weight.data = F.normalize(self.weight.data) in forward"""

    class Normalised(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.blocks[0].up.weight.data = F.normalize(self.blocks[0].up.weight.data, dim=1)
            return super().forward(x, y)

    return three_steps(run, Normalised())


TABLE = torch.linspace(0.5, 1.5, WIDTH)
WEIGHTS = [1.0] * 2000


@case()
def tensor_of_the_script_changed(run: Run) -> Numbers:
    """A tensor and a list of 2000 numbers of the script, which forward reads, are written to after a step"""

    class Weighted(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x * TABLE, y) * WEIGHTS[0]

    args = batch()
    try:
        model = run.compile(Weighted(), args=args)
        first = run.step(model, *args)
        TABLE.mul_(2)
        second = run.step(model, *args)
        WEIGHTS[0] = 3.0
        return {"first": first, "second": second, "third": run.step(model, *args)} | run.gradients(model)
    finally:
        TABLE.copy_(torch.linspace(0.5, 1.5, WIDTH))
        WEIGHTS[0] = 1.0
