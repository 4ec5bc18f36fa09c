"""What an export would lose: refused in the model's line, or, of buffers that are replaced, written back."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.export.refused_state import check_given_model
from autopar.ir.run_graph import run
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model

X = torch.arange(4.0)


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.mean
        self.mean = 0.5 * self.mean + x
        self.mean = self.mean + 1
        return self.mean - before


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Averaging()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(("model", "fqn"), [(Averaging(), "mean"), (Within(), "inner.mean")], ids=["outer", "inner"])
def test_a_buffer_that_is_replaced_is_written_back(model: nn.Module, fqn: str) -> None:
    graph = trace(model, (X,), {})
    names = {item.fqn: item.value.name for item in graph.inputs}
    (found,), written = run(graph, {names[fqn]: torch.ones(4), names["x"]: X})
    assert torch.equal(found, 0.5 + X) and torch.equal(written[fqn], 1.5 + X)
    assert torch.equal(model.get_buffer(fqn), torch.zeros(4)), "tracing leaves the model as it was"


class Counting(nn.Module):
    """A running mean that is written through .data, as in VQ-VAEs, and weights that are read through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean.data.mul_(0.9).add_(y.data, alpha=0.1)
        return (y * y.data * self.layer.weight.data.norm() - self.mean).sum()


class Centred(nn.Linear):
    """A buffer whose .data is set, as the centre of DINO's loss in lightly."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) - self.centre
        self.centre.data = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return y


def test_a_buffer_whose_data_is_set_is_kept() -> None:
    model, x = Centred().double(), torch.randn(8, 4).double()
    assert_same_as_model(trace(model, (x,), {}), model, (x,), {})


def test_what_is_written_and_read_through_data_is_kept() -> None:
    torch.manual_seed(0)
    model = Counting()
    graph = trace(model, (X,), {})
    state = dict(model.named_parameters()) | {"mean": model.mean.clone()}
    given = {item.value.name: state.get(item.fqn, X) for item in graph.inputs}
    (found,), written = run(graph, given)
    truth = model(X)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(written["mean"], model.mean)
    for one, other in zip(*(torch.autograd.grad(x, list(model.parameters())) for x in (found, truth))):
        torch.testing.assert_close(one, other)


class Moving(nn.Module):
    """A layer that is moved to where its input is, in each forward."""

    def __init__(self, *given) -> None:
        super().__init__()
        self.layer, self.given = nn.BatchNorm1d(4), given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.to(*self.given).to(x.device).to(x)(x)


def test_a_module_that_is_moved_to_where_it_is_stays() -> None:
    for given in ("cpu",), (torch.float32,), (torch.device("cpu", 0), torch.float32, True):
        assert trace(Moving(*given), (X.expand(3, 4),), {}).ops
    for other in torch.float64, "meta":
        with pytest.raises(TraceError, match=r"test_refused_state.py:\d+: .*BatchNorm1d.to\(...\) in forward gives"):
            trace(Moving(other), (X.expand(3, 4),), {})


class Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("state", torch.zeros(1))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.weight * x)


def replaced(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.state = x.detach()
    return x + model.state


def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def differentiated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.sum().backward()
    return x


def averaged(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    with torch.no_grad():
        model.weight.data = 0.9 * model.weight + 0.1
    return y


def shared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.weight.data = model.state.detach()
    return x


def written(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    model.weight.data.mul_(0.9)
    return y


def by_numpy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(x.detach().numpy() + 1)


def sparse(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.sparse_coo_tensor(torch.arange(4)[None], model.weight, (4,))


def by_address(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * (1 if x.data_ptr() else 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_numpy, r"`return x \+ torch.from_numpy.*; what NumPy computes is not recorded: compute it by torch"),
        (sparse, r".*aten.sparse_coo_tensor.* gives a tensor of layout torch.sparse_coo.*dense tensors"),
        (by_address, r"`return x \* .*; addresses of tensors are not recorded"),
        (written, r".*changes parameter weight in place after %matmul read it"),
        (averaged, r".*changes parameter weight in place after %matmul read it"),
        (shared, r"`model.weight.data = .*sets the .data of a tensor"),
        (replaced, r"`model.state = x.detach\(\)`.* replaces buffer state, torch.float32 of shape \[1\], by .* \[4\]"),
        (hooked, r"`x.register_hook.*tensor.register_hook in forward is not kept"),
        (differentiated, r"`x.sum\(\).backward\(\)`.*torch.Tensor.backward in forward is not recorded"),
    ],
)
def test_what_would_be_lost_is_refused_in_the_models_line(function, words: str) -> None:
    with pytest.raises(AutoparError, match=r"test_refused_state.py:\d+: " + words):
        trace(Calls(function), (X,), {})


def test_an_output_of_an_unknown_type_is_refused_with_what_to_return() -> None:
    model = Calls(lambda _, x: torch.distributions.Categorical(logits=x))
    with pytest.raises(TraceError, match=r"categorical.Categorical.*; return its tensors, .* e.g. logits"):
        trace(model, (X,), {})


def doubled(*args):
    return None


@pytest.mark.parametrize(
    ("set_hook", "where"),
    [
        (lambda model: model[1].weight.register_hook(doubled), "parameter 1.weight"),
        (lambda model: model[1].bias.register_post_accumulate_grad_hook(doubled), "parameter 1.bias"),
        (lambda model: model[0].register_full_backward_hook(doubled), "module 0"),
        (lambda model: model.register_full_backward_pre_hook(doubled), "the model"),
        (lambda model: model[0].register_backward_hook(doubled), "module 0"),
        (lambda model: torch.nn.modules.module.register_module_full_backward_hook(doubled), "every module"),
    ],
    ids=["weight", "accumulated", "module", "before", "old", "all modules"],
)
def test_hooks_on_gradients_are_refused_by_name(set_hook, where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    check_given_model(model)
    handle = set_hook(model)
    try:
        with pytest.raises(
            AutoparError, match=rf"{where} has a hook on gradients, doubled \(test_refused_state.py:\d+\)"
        ):
            check_given_model(model)
    finally:
        handle.remove()


def drawn_by_python(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.5 else -x


def drawn_by_numpy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def drawn_in_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if np.random.uniform(0.5, 1) < 1 else -x


def drawn_together(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(4))


_PYTHON, _NUMPY = "Python's random", "numpy.random"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (drawn_by_python, _PYTHON),
        (drawn_by_numpy, _NUMPY),
        (drawn_in_between, _NUMPY),
        (drawn_together, _NUMPY),
        (lambda model, x: x * random.random(), _PYTHON),
        (lambda model, x: x + random.randint(0, 3), _PYTHON),
        (lambda model, x: x if np.random.rand() else -x, _NUMPY),
        (lambda model, x: torch.where(x > random.uniform(0, 1), x, -x), _PYTHON),
        (lambda model, x: x.clamp(max=random.random()), "Python's random or numpy.random"),
        (lambda model, x: x + torch.tensor(np.random.uniform(-1, 1)), "Python's random or numpy.random"),
    ],
)
def test_random_numbers_that_are_not_of_torch_are_refused(function, name: str) -> None:
    with pytest.raises(TraceError, match=f"(?s)draws from {name}.*hand the number in"):
        trace(Calls(function), (X,), {})


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (lambda model, x: x if np.random.uniform(0, 1) < 0.0 else -x, -1),
        (lambda model, x: x if random.random() < 1.0 else -x, 1),
        (lambda model, x: x if np.random.rand() >= 0 else -x, 1),
        (lambda model, x: x if random.uniform(2, 1) >= 1 and random.uniform(0, 0.25) < 0.5 else -x, 1),
        (lambda model, x: x if np.random.uniform(0, 1) > 1 else -x, -1),
    ],
)
def test_draws_that_all_say_the_same_are_none(function, sign: int) -> None:
    states = random.getstate(), np.random.get_state()[2]
    (result,), _ = run(trace(Calls(function), (X,), {}), {"weight": torch.ones(4), "x": X})
    assert torch.equal(result, sign * X)
    assert (random.getstate(), np.random.get_state()[2]) == states


SEEN: list[torch.Tensor] = []
OBSERVERS = {
    "keeps": lambda module, args, output: SEEN.append(output),
    "prints": lambda module, args, output: print(output.shape),
}


def doubles(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def writes(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    output.mul_(2)


def sets_an_item(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    output[0] = 5.0


def needs_gradient(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    output.requires_grad_()


def with_hook(hook) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(hook)
    return model


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_hook_that_only_observes_is_refused(name: str) -> None:
    model = with_hook(OBSERVERS[name])
    with pytest.raises(TraceError, match=r"module 0 has a forward hook that returns nothing, .*test_refused_state.py"):
        trace(model, (X,), {})
    assert list(model[0]._forward_hooks.values()) == [OBSERVERS[name]], "tracing leaves the model as it was"


@pytest.mark.parametrize("hook", [doubles, writes, sets_an_item, needs_gradient])
def test_a_hook_that_acts_is_traced(hook) -> None:
    model = with_hook(hook)
    graph = trace(model, (X,), {})
    state = {item.value.name: model.get_parameter(item.fqn) for item in graph.inputs if item.kind == "parameter"}
    (found,), _ = run(graph, state | {graph.arguments[0]: X})
    assert torch.allclose(found, model(X))


def test_a_hook_that_sets_a_weight_is_traced() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    assert trace(model.eval(), (X,), {}).ops


class ReadsFile(nn.Module):
    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read()


FILE_READS: dict[str, Callable[[Path], float]] = {
    "open": lambda path: float(open(path).read()),  # noqa: SIM115
    "a path": lambda path: float(path.read_text()),
    "json": lambda path: json.loads(path.read_bytes()),
}


@pytest.mark.parametrize("read", FILE_READS.values(), ids=FILE_READS)
def test_a_file_that_the_forward_reads_is_told(read: Callable[[Path], float], tmp_path: Path) -> None:
    (tmp_path / "scale").write_text("2")
    with pytest.warns(UserWarning, match="forward reads a file, .*scale.* in __init__"):
        trace(ReadsFile(lambda: read(tmp_path / "scale")), (torch.ones(2),), {})
