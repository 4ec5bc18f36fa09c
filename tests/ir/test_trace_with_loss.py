"""A model and its loss function traced as one are what they are called one after the other."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.outline import export_once
from autopar.ir.print_graph import fingerprint
from autopar.ir.run_graph import run
from autopar.ir.trace_with_loss import trace_loss
from tests import zoo
from tests.ir.compare import bindings

LABELS = torch.randint(zoo.CLASSES, (zoo.BATCH,))
WEIGHTS = torch.rand(zoo.CLASSES)


class Margin(nn.Module):
    """A loss with submodules and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Softplus(), nn.Identity())
        self.register_buffer("scale", torch.rand(zoo.CLASSES).double())

    def forward(self, logits, target):
        return self.inner(self.scale * logits).mean() + F.cross_entropy(logits, target)


LOSSES = {
    "function": F.cross_entropy,
    "lambda": lambda logits, target: F.cross_entropy(logits, target) + logits.square().mean(),
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "closure over a tensor": functools.partial(F.cross_entropy, weight=WEIGHTS.double()),
    "module": nn.CrossEntropyLoss(),
    "module with weights": nn.CrossEntropyLoss(weight=WEIGHTS.double()),
    "module of modules": Margin(),
}


def check(model, loss_fn, args, kwargs, tolerance=1e-12):
    reference = copy.deepcopy(model)
    expected = loss_fn(reference(*args[:-1], **kwargs), args[-1])
    expected.backward()
    graph = trace_loss(model, loss_fn, args, kwargs)
    names = [item.fqn for item in graph.inputs if item.kind in ("parameter", "buffer")]
    state = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert names == state, "the model's own names, and no others"
    (loss,), _ = run(graph, bindings(graph, model, args, kwargs))
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    grads = [{name: p.grad for name, p in either.named_parameters()} for either in (model, reference)]
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
    return graph


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    case = zoo.build("mlp")
    graph = check(case.model, LOSSES[name], (*case.args, LABELS), {})
    assert [item.fqn for item in graph.of_kind("argument")] == ["x", "target"]
    bare = trace_loss(skeleton(case.model), LOSSES[name], (*case.args, LABELS), {})
    assert fingerprint(bare) == fingerprint(graph), "a model without data has the same graph"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_of_transformers(name):
    case = zoo.build(name)
    tokens = case.kwargs["input_ids"]
    loss_fn = lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten())  # noqa: E731
    check(case.model, loss_fn, (tokens, tokens.flip(0)), {})
    check(case.model, loss_fn, (tokens.flip(0),), {"input_ids": tokens})


def test_hooks_of_the_model_run_before_the_loss():
    case = zoo.build("mlp")
    case.model.register_forward_hook(lambda module, args, output: 2 * output)
    check(case.model, F.cross_entropy, (*case.args, LABELS), {})


def test_running_statistics_are_still_written():
    case = zoo.build("resnet")
    graph = trace_loss(case.model, F.cross_entropy, (*case.args, LABELS), {})
    assert {fqn for fqn, _ in graph.mutations} == {name for name, _ in case.model.named_buffers()}


def test_layers_are_still_exported_once(monkeypatch):
    """The outline of alike modules is used, and gives the graph that the whole export gives."""
    monkeypatch.setattr(zoo, "LAYERS", 6)
    case = zoo.build("llama")
    tokens = case.kwargs["input_ids"]
    loss_fn = lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten())  # noqa: E731
    found = []
    whole = export_once._export_parts
    monkeypatch.setattr(export_once, "_export_parts", lambda *args: found.append(whole(*args)) or found[-1])
    graph = trace_loss(skeleton(case.model), loss_fn, (tokens, tokens), {})
    assert found and found[0].bodies
    monkeypatch.setattr(export_once, "find_alike", lambda model: ())
    assert fingerprint(trace_loss(case.model, loss_fn, (tokens, tokens), {})) == fingerprint(graph)


def test_a_submodule_called_loss_fn():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss_fn = nn.Linear(4, 4)

        def forward(self, *x):
            return self.loss_fn(*x)

    check(Taken(), nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4)), {}, tolerance=1e-6)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits, target):
        return self.scale * F.cross_entropy(logits, target)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, target):
        self.calls.add_(1)
        return F.cross_entropy(logits, target)


REFUSED = {
    "a loss for each sample": (functools.partial(F.cross_entropy, reduction="none"), r"one floating scalar.*\[8\]"),
    "two": (lambda logits, target: (logits.mean(), logits.sum()), "one floating scalar"),
    "no gradient": (lambda logits, target: logits.detach().mean(), "depends on the model's parameters"),
    "a number": (lambda logits, target: 1.0, "found 1.0"),
    "parameters": (Trained(), r"parameters to train \(scale\)"),
    "buffers": (Counting(), "calls"),
    "no function": ("mse", "found str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    loss_fn, text = REFUSED[name]
    case = zoo.build("mlp")
    with pytest.raises(AutoparError, match=text):
        trace_loss(case.model, loss_fn, (*case.args, LABELS), {})


class Warming(nn.Module):
    """A loss module with a weight that grows with each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, logits, target):
        self.calls += 1
        return F.cross_entropy(logits, target) * self.calls

    compute = forward


class Smoothed:
    """An object that is a loss function, with a running mean of its losses."""

    def __init__(self):
        self.mean = torch.ones(())

    def __call__(self, logits, target):
        loss = F.cross_entropy(logits, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class Logged(Smoothed):
    """Keeps the last loss for a log, which nobody reads in it."""

    def __init__(self):
        self.last = None

    def __call__(self, logits, target):
        self.last = F.cross_entropy(logits, target)
        return self.last


KEPT = {
    "a number of a module": (Warming(), "loss_fn.calls"),
    "a number of a module's method": (Warming().compute, "loss_fn.calls"),
    "a tensor of an object": (Smoothed(), "loss_fn.mean"),
    "a tensor of a partial's object": (functools.partial(Smoothed()), "loss_fn.mean"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_loss_that_keeps_state_is_refused(name):
    loss_fn, place = KEPT[name]
    case = zoo.build("mlp")
    with pytest.raises(TraceError, match=rf"test_trace_with_loss.py:\d+: the forward keeps state in attribute {place}"):
        trace_loss(case.model, loss_fn, (*case.args, LABELS), {})


@pytest.mark.filterwarnings("ignore:.*the forward sets attribute loss_fn.last")
def test_a_loss_that_notes_its_last_value_stays_as_it_is():
    case, loss_fn = zoo.build("mlp"), Logged()
    check(case.model, Logged(), (*case.args, LABELS), {})
    trace_loss(case.model, loss_fn, (*case.args, LABELS), {})
    assert loss_fn.last is None


def test_a_model_that_keeps_state_in_an_attribute_of_its_own_is_refused_with_a_loss():
    class Growing(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    with pytest.raises(TraceError, match=r"the forward keeps state in attribute calls"):
        trace_loss(Growing(4, 4), F.mse_loss, (torch.randn(2, 4), torch.randn(2, 4)), {})


def test_calls_that_do_not_fit():
    case = zoo.build("mlp")
    with pytest.raises(AutoparError, match="last positional argument"):
        trace_loss(case.model, F.cross_entropy, (), {})
    with pytest.raises(TraceError, match="forward takes"):
        trace_loss(case.model, F.cross_entropy, (*case.args, LABELS), {"y": 1})


class Positioned(nn.Linear):
    """Keeps an offset for calls that go on with a sequence, as Qwen-VL does."""

    offset = None

    def forward(self, x, start=0):
        if self.offset is None or start == 0:
            self.offset = x.argmax(-1, keepdim=True) + 1
            return super().forward(x)
        return super().forward(x) + self.offset


class Averaged(nn.Linear):
    """Asks for the offset of the call before, and of its numbers too."""

    offset = None

    def forward(self, x):
        before, self.offset = self.offset, x.mean(0)
        return super().forward(x) if before is None or bool((before > 0).all()) else super().forward(x) * 2


@pytest.mark.filterwarnings("ignore:.*the forward sets attribute offset")
def test_an_attribute_that_is_only_asked_whether_it_is_there_is_no_state():
    trace_model = Positioned(3, 3)
    graph = trace_loss(trace_model, F.cross_entropy, (torch.randn(2, 3), torch.tensor([0, 2])), {})
    assert trace_model.offset is None
    assert len(graph.of_kind("argument")) == 2
    with pytest.raises(TraceError, match=r"the forward keeps state in attribute offset, which the next call reads"):
        trace_loss(Averaged(3, 3), F.cross_entropy, (torch.randn(2, 3), torch.tensor([0, 2])), {})
