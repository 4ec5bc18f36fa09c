"""What `ModuleWatch` notices of a module, and how long it takes where nothing changed."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.checks.count_settings import settings_counted
from autopar.runtime.checks.dtensor_writes import handle_writes
from autopar.runtime.checks.module_changes import ModuleWatch
from tests.workers import Ranks, device_mesh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.later = nn.ModuleList()
        self.norm = nn.BatchNorm1d(4)
        self.scales, self.config = [1.0, 2.0], SimpleNamespace(rate=0.1)
        self.factor = torch.ones(3)
        self.handle = self.blocks[1].register_forward_hook(lambda *_: None)


def _write(table: dict, name: str, item: object) -> None:
    table[name] = item


def _data(model: Model) -> None:
    model.blocks[1].first.weight.data = torch.zeros(4, 4)


CHANGES: dict[str, Callable[[Model], object]] = {
    "attribute set": lambda m: setattr(m.blocks[0].dropout, "p", 0.5),
    "attribute added": lambda m: setattr(m.blocks[0], "new", 1),
    "attribute added to the root": lambda m: setattr(m, "new", 1),
    "attribute deleted": lambda m: delattr(m.blocks[0].dropout, "inplace"),
    "attribute renamed": lambda m: setattr(m, "named", vars(m).pop("scales")),
    "attribute written into the dict": lambda m: _write(vars(m.blocks[0].dropout), "p", 0.5),
    "attribute of an object": lambda m: setattr(m.config, "rate", 0.5),
    "item of a list": lambda m: _write(m.scales, 1, 3.0),
    "tensor attribute in place": lambda m: m.factor.mul_(2),
    "module replaced": lambda m: setattr(m.blocks[1], "act", nn.GELU()),
    "module added": lambda m: m.blocks[0].add_module("new", nn.ReLU()),
    "module deleted": lambda m: delattr(m.blocks[0], "act"),
    "module inserted into an empty list": lambda m: m.later.insert(0, nn.ReLU()),
    "module put into a list": lambda m: _write(m.blocks, 0, Block()),
    "parameter replaced": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(4))),
    "parameter added": lambda m: m.blocks[0].act.register_parameter("new", nn.Parameter(torch.ones(1))),
    "parameter removed": lambda m: setattr(m.blocks[0].first, "bias", None),
    "parameter written into the table": lambda m: _write(m.norm._parameters, "weight", nn.Parameter(torch.ones(4))),
    "buffer replaced": lambda m: setattr(m.norm, "running_mean", torch.ones(4)),
    "buffer added": lambda m: m.blocks[0].register_buffer("new", torch.ones(4)),
    "needs no gradient": lambda m: m.blocks[1].first.weight.requires_grad_(False),
    "data assigned": _data,
    "hook added": lambda m: m.blocks[0].first.register_forward_hook(lambda *_: None),
    "hook before forward": lambda m: m.blocks[0].first.register_forward_pre_hook(lambda *_: None),
    "hook on gradients": lambda m: m.blocks[0].first.register_full_backward_hook(lambda *_: None),
    "hook removed": lambda m: m.handle.remove(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_noticed_at_once_and_again(name: str) -> None:
    model = Model()
    watch = ModuleWatch(model)
    assert not watch.has_changed()
    CHANGES[name](model)
    assert watch.has_changed() and watch.has_changed()
    assert not ModuleWatch(model).has_changed()


def test_mode_and_what_is_written_as_it_was_are_no_changes() -> None:
    model = Model()
    watch = ModuleWatch(model)
    assert all(watch.modes())
    model.blocks[0].eval()
    model.blocks[1].dropout.p = float("0.1")
    model.norm.weight = model.norm.weight
    model.scales[0] = 1.0
    model.norm.running_mean.add_(1)
    assert not watch.has_changed()
    assert watch.modes() == tuple(module.training for module in model.modules()) and not all(watch.modes())


def test_root_may_get_hooks_of_its_own() -> None:
    model = Model()
    watch = ModuleWatch(model)
    model.register_forward_hook(lambda *_: None)
    assert not watch.has_changed()


def _table_replaced(model: Model) -> None:
    model.norm.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(4)), "bias": model.norm.bias}


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_of_all_modules_is_noticed(kind: str) -> None:
    watch = ModuleWatch(Model())
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        assert watch.has_changed()
    finally:
        handle.remove()


def test_another_table_is_noticed() -> None:
    model = Model()
    watch = ModuleWatch(model)
    _table_replaced(model)
    assert watch.has_changed()


def in_parts(num_blocks: int) -> Model:
    """A model whose parameters are DTensors."""
    model, mesh = Model(num_blocks), device_mesh((4,), ("dp",))
    for module in model.modules():
        for name, x in module._parameters.items():
            module._parameters[name] = nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)]))
    return model


def _flag(model: Model) -> None:
    model.blocks[1].first.weight.requires_grad = False


def _swap(model: Model, other: nn.Parameter) -> None:
    torch.utils.swap_tensors(model.norm.weight, other)


CHANGES_OF_DTENSORS: dict[str, Callable[[Model, nn.Parameter], object]] = {
    "requires_grad_": lambda m, _: m.blocks[0].requires_grad_(False),
    "requires_grad": lambda m, _: _flag(m),
    "data": lambda m, _: setattr(m.norm.weight, "data", m.norm.weight.full_tensor() * 2),
    "detach_": lambda m, _: m.norm.weight.detach_(),
    "dtype of the model": lambda m, _: m.double(),
    "dtype of a layer": lambda m, _: m.blocks[1].second.to(torch.bfloat16),
    "swapped": _swap,
    "replaced": lambda m, other: setattr(m.norm, "weight", other),
    "written into the table": lambda m, other: _write(m.norm._parameters, "weight", other),
    "assigned by load_state_dict": lambda m, _: m.load_state_dict(
        {name: x.detach().clone() for name, x in m.state_dict().items()}, assign=True
    ),
}


def noticed(name: str) -> tuple[bool, bool, bool]:
    """Of DTensors, whether a change is noticed: before it, after it, and again after other DTensors were set."""
    model, other = in_parts(2), nn.Parameter(torch.empty(0))
    other = nn.Parameter(distribute_tensor(torch.ones(4), model.norm.weight.device_mesh, [Shard(0)]))
    watch = ModuleWatch(model)
    other.requires_grad_(True)
    before = watch.has_changed()
    CHANGES_OF_DTENSORS[name](model, other)
    return before, watch.has_changed(), watch.has_changed()


def assigned() -> tuple[torch.Tensor, ...]:
    """A weight after DTensors like it were assigned to its data, one of which is written to, and the first again."""
    handle_writes()  # as at the first compile
    weight = in_parts(2).norm.weight
    first, second = weight.data, weight.data * 2
    weight.data = second
    doubled = weight.full_tensor().clone()
    second.mul_(5)
    written = weight.full_tensor().clone()
    weight.data = first
    return doubled, written, weight.full_tensor()


def exchanged_at_one_address() -> bool:
    """Whether a weight is noticed that was exchanged for another, as model.double().float() does, whose memory lies
    where the first one's was.
    """
    handle_writes()  # as at the first compile, before settings are counted
    model = in_parts(2)
    weight = model.norm.weight
    watch = ModuleWatch(model)
    part = torch.from_numpy(weight.to_local().detach().numpy())  # other memory for torch
    torch.utils.swap_tensors(weight, nn.Parameter(DTensor.from_local(part, weight.device_mesh, [Shard(0)])))
    watch.check_data()
    return watch.has_changed()


def swapped_with_a_plain_one() -> None:
    weight = in_parts(2).norm.weight
    handle_writes()  # as at the first compile, before settings are counted
    settings_counted()
    with pytest.raises(AutoparError, match=r"swap_tensors of a DTensor of shape .*load_state_dict"):
        torch.utils.swap_tensors(nn.Parameter(torch.ones(4)), weight)


@pytest.mark.multirank
def test_swap_tensors_of_a_weight_and_a_plain_parameter_is_refused_by_name(ranks4: Ranks) -> None:
    ranks4.run(swapped_with_a_plain_one)


@pytest.mark.multirank
def test_another_weight_at_the_address_of_the_first_is_no_assignment_of_data(ranks4: Ranks) -> None:
    assert ranks4.run(exchanged_at_one_address) == [True] * 4


@pytest.mark.multirank
def test_data_of_the_same_layout_is_shared_by_assignment(ranks4: Ranks) -> None:
    for found in ranks4.run(assigned):
        for x, factor in zip(found, (2, 10, 1)):
            torch.testing.assert_close(x.detach(), factor * Model(2).norm.weight.detach())


@pytest.mark.multirank
def test_what_is_set_on_dtensors_is_noticed(ranks4: Ranks) -> None:
    for name in CHANGES_OF_DTENSORS:
        assert ranks4.run(noticed, name) == [(False, True, True)] * 4, name


def _least_s(work: Callable[[], object]) -> float:
    found = []
    for _ in range(300):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def costs() -> tuple[int, float, float]:
    """Modules, and seconds of a loop that reads one attribute of each, and of the watch where nothing changed."""
    model = in_parts(100)
    watch, modules = ModuleWatch(model), list(model.modules())
    reading = _least_s(lambda: [module.training for module in modules])
    assert not watch.has_changed()
    return len(modules), reading, _least_s(watch.has_changed)


@pytest.mark.multirank
def test_cost_where_nothing_changed(ranks4: Ranks) -> None:
    """A third of a loop that reads one attribute of each module; comparing all of them takes 16 times as long as it."""
    found = ranks4.run(costs)
    assert all(number > 500 for number, _, _ in found)
    assert min(watching / reading for _, reading, watching in found) < 1, found
