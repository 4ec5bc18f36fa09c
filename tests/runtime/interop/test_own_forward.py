"""What code outside reads of a sharded module's `forward`, and what comes of another one set on it."""

import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar import api
from autopar.errors import AutoparError, TraceError
from tests.workers import Ranks, device_mesh

WIDTH = 16


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scaled(nn.Module):
    """A forward with a keyword and annotations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, **rest: Any) -> torch.Tensor:
        """Scaled."""
        return self.body(x) * scale


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def tripled(model: nn.Module) -> Any:
    """A forward for `model` that uses the one it has, and a submodule."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: torch.Tensor, triple: bool = False, **rest: Any) -> torch.Tensor:
        return before(x, **rest) + 2 * self.body(x) if triple else before(x, **rest)

    return MethodType(forward, model)


def in_bfloat16(model: nn.Module) -> Any:
    """The forward of `model` within autocast, as accelerate makes it."""
    return MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """Before, with another forward, with the first again, within autocast."""
    own = model.forward
    found = [model(batch())]
    model.forward = tripled(model)
    found += [model(batch(), triple=True), model(batch(), triple=False)]
    model.forward = own
    found.append(model(batch(), scale=2.0))
    model.forward = in_bfloat16(model)
    found.append(model(batch()))
    return [plain(x) for x in found]


def outputs_on_ranks() -> list[torch.Tensor]:
    return outputs(autopar.compile(scaled(), device_mesh((2, 2), ("dp", "tp")), cluster="free-links"))


@pytest.mark.multirank
def test_a_forward_that_replaces_the_compiled_one_is_compiled(ranks4: Ranks) -> None:
    truth = outputs(scaled())
    for found in ranks4.run(outputs_on_ranks):
        for x, y in zip(found, truth, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("is_within", "num_plans"), [(True, 1), (False, 2)])
def test_compiled_within_the_autocast_of_a_trainer_it_is_planned_once(
    one_rank: None, is_within: bool, num_plans: int
) -> None:
    mesh = device_mesh((1,), ("dp",))
    with patch.object(api, "choose_plan", wraps=api.choose_plan) as choose:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_within):
            model = autopar.compile(scaled(), mesh, args=(batch(),))
        model._original_forward = model.forward
        model.forward = in_bfloat16(model)
        assert model(batch()).dtype == torch.bfloat16
    assert choose.call_count == num_plans


def test_the_original_signature_and_name_are_shown(one_rank: None) -> None:
    model = autopar.compile(scaled(), device_mesh((1,), ("dp",)))
    assert inspect.signature(model.forward) == inspect.signature(scaled().forward)
    assert inspect.signature(type(model).forward) == inspect.signature(Scaled.forward)
    assert model.forward.__doc__ == "Scaled." and type(model).__name__ == "Scaled"
    assert type(model).__module__ == Scaled.__module__


def test_the_signature_of_a_forward_of_the_instance_is_shown(one_rank: None) -> None:
    model = scaled()
    model.forward = lambda y: model.body(y)
    assert str(inspect.signature(autopar.compile(model, device_mesh((1,), ("dp",))).forward)) == "(y)"


def test_a_second_forward_of_an_instance_that_had_its_own_is_refused(one_rank: None) -> None:
    model = scaled()
    model.forward = lambda x: model.body(x)
    model = autopar.compile(model, device_mesh((1,), ("dp",)))
    with pytest.raises(AutoparError, match=r"set it before autopar\.compile"):
        model.forward = lambda x: x


def of_closure(model: Scaled) -> None:
    model.forward = lambda x: model.body(x) * 2


def wrapped(model: Scaled) -> None:
    before = model.forward

    @functools.wraps(before)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return before(*args, **kwargs) * 2

    model.forward = forward


def of_method(model: Scaled) -> None:
    model._old_forward = model.forward
    model.forward = functools.partial(lambda old, x: old(x) * 2, model._old_forward)


def of_layer(model: Scaled) -> None:
    before, layer = model.body.forward, model.body
    model.body.forward = lambda x: before(x) + x @ layer.weight.T


def hooked(model: Scaled) -> None:
    model.body.register_forward_hook(lambda _module, _args, out: out + model.body.bias)


@pytest.mark.parametrize("set_forward", [of_closure, wrapped, of_method, of_layer, hooked])
@pytest.mark.parametrize("when", ["before compile", "before the plan", "after the plan"])
def test_functions_set_on_a_model_may_enclose_it(one_rank: None, set_forward: Any, when: str) -> None:
    """As trainers and patches set them: the trace, which is of a copy, met the DTensors of the model itself."""
    truth, model = scaled(), scaled()
    set_forward(truth)
    if when == "before compile":
        set_forward(model)
    model = autopar.compile(
        model, device_mesh((1,), ("dp",)), cluster="cpu", args=None if when == "before the plan" else (batch(),)
    )
    if when != "before compile":
        set_forward(model)
    for _ in range(2):
        found, expected = model(batch()), truth(batch())
        torch.testing.assert_close(plain(found), plain(expected))
        found.sum().backward(), expected.sum().backward()
        for x, y in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(plain(x.grad), y.grad)


def test_a_forward_that_reads_the_model_by_another_object_is_refused(one_rank: None) -> None:
    model = autopar.compile(scaled(), device_mesh((1,), ("dp",)), cluster="cpu")
    held = SimpleNamespace(model=model)
    model.forward = lambda x: held.model.body(x)
    with pytest.raises(TraceError, match=r"weights of the compiled model itself.*types.MethodType\(function, model\)"):
        model(batch())


def test_ddp_around_a_compiled_part_and_a_plain_layer_is_refused(one_rank: None) -> None:
    model = autopar.compile(scaled(), device_mesh((1,), ("dp",)), cluster="cpu", args=(batch(),))
    with pytest.raises(AutoparError, match=r"DistributedDataParallel is around both.*wrap the layers outside alone"):
        DistributedDataParallel(nn.Sequential(model, nn.Linear(WIDTH, 2)))


def test_wrapping_in_ddp_says_what_to_do(one_rank: None) -> None:
    model = autopar.compile(scaled(), device_mesh((1,), ("dp",)))
    with pytest.raises(AutoparError, match=r"DistributedDataParallel.*Leave it out.*docs/trainers\.md"):
        DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


class Half(nn.Module):
    """A layer whose result no longer fits what follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : x.shape[1] // 2]


def test_a_trace_that_fails_says_what_was_changed_since_the_plan(one_rank) -> None:
    model = autopar.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), device_mesh((1,), ("dp",)), cluster="cpu")
    model(torch.ones(2, 4))
    model[0] = Half()
    with pytest.raises(TraceError, match=r"changed since it was planned \(.*before autopar.compile.*get_peft_model"):
        model(torch.ones(2, 4))


def test_a_hook_on_the_gradients_of_all_modules_is_refused_once_it_is_set(one_rank: None) -> None:
    model = autopar.compile(scaled(), (1,), cluster="cpu", args=(batch(),))
    model(batch()).sum().backward()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(AutoparError, match="every module has a hook on gradients"):
            model(batch())
    finally:
        handle.remove()
    model(batch()).sum().backward()


OUTSIDE = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_that_only_a_hook_has_is_refused_where_it_would_get_a_gradient(
    one_rank: None, trains: bool
) -> None:
    """It got none, silently."""
    model = autopar.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH)), (1,), cluster="cpu", trains=trains)
    model[0].register_forward_hook(lambda module, args, output: output * OUTSIDE)
    with pytest.raises(AutoparError, match="it would get none") if trains else nullcontext():
        model(torch.ones(2, WIDTH))


class Cycling(nn.Linear):
    """Of a scale of its own that is another in each call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scales = itertools.cycle([1.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(self.scales)


@pytest.mark.parametrize("loss_fn", [None, nn.functional.mse_loss])
def test_a_forward_that_goes_by_an_iterator_is_refused(one_rank: None, loss_fn: Any) -> None:
    """Each call did what the traced one did."""
    x = torch.ones(2, WIDTH)
    args = (x,) if loss_fn is None else (x, x)
    with pytest.raises(AutoparError, match=r"though it is called alike: .*iterator"):
        autopar.compile(Cycling(), (1,), cluster="cpu", args=args, loss_fn=loss_fn)
