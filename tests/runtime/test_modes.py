"""Everything a training loop does with a module besides one forward and backward."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import AutoparError
from tests.runtime.training import forward_backward, whole, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import MLP, Case, build

pytestmark = pytest.mark.multirank

AXES = ("dp", "tp")
PINS = {"blocks.0.0.weight": "BS(0)", "blocks.0.2.weight": "BS(1)", "head.weight": "S(0)B"}


def _shard(model: nn.Module, *args: Any, pins: dict[str, str] | None = None, **kwargs: Any) -> nn.Module:
    """On 2x2 ranks, with communication for free so that everything is split; planned at once if there are arguments."""
    options = {"args": args, "kwargs": kwargs} if args or kwargs else {}
    return autopar.compile(model, device_mesh((2, 2), AXES), cluster="free-links", pins=pins, **options)


def _mlp(dropout: float = 0.0) -> MLP:
    torch.manual_seed(0)
    return MLP(dropout).double()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def _is_split(model: nn.Module) -> bool:
    return any(p.is_shard() for x in model.parameters() for p in x.placements)


def _difference(a: Any, b: Any) -> float:
    return float((whole(a) - whole(b)).abs().max())


def train_then_eval(name: str) -> float:
    """Dropout and batch norm switch with the mode; the parameters stay where they are."""
    truth, case = build(name), build(name)
    case = case._replace(model=_shard(case.model, *case.args, **case.kwargs))
    before = {x: p.placements for x, p in case.model.named_parameters()}
    worst_yet = 0.0
    for is_training in (True, False, True):
        results = []
        for each in (truth, case):
            each.model.train(is_training)
            results.append(forward_backward(each))
        worst_yet = max(worst_yet, worst(results[1], results[0], 1e-6)[0])
    assert before == {x: p.placements for x, p in case.model.named_parameters()}
    assert len(set(case.model._autopar.loaded.values())) == 2 and _is_split(case.model)
    return worst_yet


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_train_and_eval_take_turns(ranks4: Ranks, name: str) -> None:
    assert max(ranks4.run(train_then_eval, name)) <= 1e-5


def dropout_off_in_eval() -> None:
    truth, x = _mlp(0.5), torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = _shard(_mlp(0.5), x)
    assert _difference(model(x), truth.eval()(x)) > 1e-3
    assert _difference(model.eval()(x), truth(x)) <= 1e-12
    with torch.no_grad():
        y = model(x)
    assert not y.requires_grad and _difference(y, truth(x)) <= 1e-12


def test_no_dropout_in_eval(ranks4: Ranks) -> None:
    ranks4.run(dropout_off_in_eval)


def new_sizes() -> None:
    """Another batch size keeps the plan; gradients add up until they are cleared."""
    truth, model = _mlp(), _shard(_mlp(), pins=PINS)
    assert isinstance(model, MLP) and type(model).__name__ == "MLP"
    draw = torch.Generator().manual_seed(0)
    for size in (8, 4, 12, 8):
        x = torch.randn(size, 32, dtype=torch.float64, generator=draw)
        with warnings.catch_warnings(record=True) as said:
            for each in (truth, model):
                (whole(each(x)) ** 2).sum().backward()
        assert not [one for one in said if "planned in" in str(one.message)]
        assert worst(_gradients(model), _gradients(truth), 1e-6)[0] <= 1e-9
    assert len(set(model._autopar.loaded.values())) == 3 and _is_split(model)
    model.zero_grad()
    assert not _gradients(model)


def test_new_batch_sizes_and_accumulated_gradients(ranks4: Ranks) -> None:
    ranks4.run(new_sizes)


def recomputed(dropout: float) -> None:
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for is_recomputed in (False, True):
        model = _shard(_mlp(dropout), x, pins=PINS)
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=False) if is_recomputed else model(leaf)
        (whole(y) ** 2).sum().backward()
        gradients.append(_gradients(model) | {"x": leaf.grad})
    assert worst(gradients[1], gradients[0], 1e-9)[0] <= 1e-9


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_activations_draw_the_same_again(ranks4: Ranks, dropout: float) -> None:
    ranks4.run(recomputed, dropout)


def under_torch_compile() -> None:
    truth, (x,) = MLP(depth=1).double(), build("mlp").args
    truth.load_state_dict(_mlp().state_dict(), strict=False)
    model = _shard(copy.deepcopy(truth), x, pins=PINS)
    compiled = torch.compile(model, backend="aot_eager")
    for each, call in ((truth, truth), (model, compiled)):
        each.zero_grad()
        (whole(call(x)) ** 2).sum().backward()
    assert worst(_gradients(model), _gradients(truth), 1e-6)[0] <= 1e-9
    with torch.no_grad():
        assert _difference(compiled(x), truth(x)) <= 1e-12


def test_torch_compile_of_the_result(ranks4: Ranks) -> None:
    ranks4.run(under_torch_compile)


def dtensor_inputs() -> None:
    truth, (x,) = _mlp(), build("mlp").args
    model = _shard(_mlp(), x)
    mesh = device_mesh((2, 2), AXES)
    assert model.input_placements.keys() == {"x"}
    expected = truth(x)
    choices = [
        model.input_placements["x"],
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Replicate(), Replicate()),
    ]
    for placements in choices:
        part = distribute_tensor(x, mesh, placements, src_data_rank=None)
        assert _difference(model(part), expected) <= 1e-12, placements
    assert len(set(model._autopar.loaded.values())) == 1
    with pytest.raises(AutoparError, match="mesh"):
        model(distribute_tensor(x, device_mesh((4,), ("other",)), [Shard(0)], src_data_rank=None))
    leaf = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None).requires_grad_()
    whole_leaf = x.clone().requires_grad_()
    (whole(model(leaf)) ** 2).sum().backward()
    (truth(whole_leaf) ** 2).sum().backward()
    assert isinstance(leaf.grad, DTensor) and _difference(leaf.grad, whole_leaf.grad) <= 1e-9


def test_inputs_with_layouts_of_their_own(ranks4: Ranks) -> None:
    ranks4.run(dtensor_inputs)


@dataclass
class Answer:
    total: torch.Tensor
    parts: dict[str, Any]


class Talkative(nn.Module):
    """Takes and returns all sorts of things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.config = {"name": "talkative"}

    def forward(self, x, *, scale: float = 1.0, mode: str = "sum", extra: dict | None = None, skip=None):
        y = self.linear(x) * scale
        if extra is not None:
            y = y + extra["bias"][0]
        return Answer(
            y.sum() if mode == "sum" else y.mean(), {"y": y, "mode": mode, "pair": (x, [y * 2]), "none": None}
        )


def structures() -> None:
    torch.manual_seed(0)
    truth = Talkative().double()
    model = _shard(copy.deepcopy(truth), pins={"linear.weight": "BS(0)"})
    x, bias = torch.randn(8, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    calls = [
        {"scale": 2.0, "extra": {"bias": (bias,)}},
        {"extra": {"bias": (bias,)}, "scale": 2.0},
        {"scale": 3, "mode": "mean"},
        {"skip": None},
    ]
    for kwargs in calls:
        found, expected = model(x, **kwargs), truth(x, **kwargs)
        assert type(found) is Answer and found.parts.keys() == expected.parts.keys()
        assert found.parts["mode"] == expected.parts["mode"] and found.parts["none"] is None
        assert type(found.parts["pair"]) is tuple and type(found.parts["pair"][1]) is list
        assert type(found.total) is torch.Tensor and _difference(found.total, expected.total) <= 1e-9
        assert _difference(found.parts["y"], expected.parts["y"]) <= 1e-12
        assert _difference(found.parts["pair"][1][0], expected.parts["pair"][1][0]) <= 1e-12
    assert len(set(model._autopar.loaded.values())) == 3, "the order of keywords does not matter"
    assert model.config == {"name": "talkative"} and isinstance(model, Talkative)
    assert "def forward(self" in model.code and "linear" in model.plan.explain()
    with pytest.raises(AutoparError, match="holds a builtins"):
        model(x, skip=object())


def test_arguments_and_results_of_any_structure(ranks4: Ranks) -> None:
    ranks4.run(structures)


def transformers_output() -> None:
    truth, case = build("gpt2"), build("gpt2")
    model = _shard(case.model, **case.kwargs)
    found, expected = model(**case.kwargs), truth.model(**case.kwargs)
    assert type(found) is type(expected) and found.keys() == expected.keys()
    assert type(found.loss) is torch.Tensor and _difference(found.loss, expected.loss) <= 1e-5
    assert _difference(found.logits, expected.logits) <= 1e-9
    assert model.config is not None and model.config.n_layer == truth.model.config.n_layer
    found = model(input_ids=case.kwargs["input_ids"])
    assert found.loss is None and _difference(found.logits, expected.logits) <= 1e-9


def test_output_classes_of_transformers(ranks4: Ranks) -> None:
    ranks4.run(transformers_output)


def hooks_and_the_original() -> None:
    original = _mlp()
    (x,) = build("mlp").args
    early, held = torch.optim.SGD(original.parameters(), lr=0.1), original.head.weight
    model = _shard(original, x, pins=PINS)
    assert model is original and isinstance(model, MLP) and list(model.state_dict()) == list(_mlp().state_dict())
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append("after"))
    model.register_full_backward_hook(lambda module, *gradients: seen.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (whole(model(x)) ** 2).sum().backward()
    optimizer.step()
    assert seen == ["before", "after", "backward"]
    for late in (early.zero_grad, early.step, held.sum, lambda: held.grad, lambda: copy.deepcopy(held)):
        with pytest.raises(AutoparError, match=r"parameter '.*' until autopar.compile .* after autopar.compile"):
            late()


def test_hooks_run_and_what_was_a_parameter_before_says_so(ranks4: Ranks) -> None:
    ranks4.run(hooks_and_the_original)


def fails_to_compile() -> None:
    truth, (x,) = _mlp(), build("mlp").args
    model = _mlp()
    held = model.head.weight
    with pytest.raises(AutoparError, match="nowhere"):
        _shard(model, x, pins={"nowhere": "BB"})
    assert type(model) is MLP and model.head.weight is held and torch.equal(model(x), truth(x))


def test_a_model_that_cannot_be_compiled_stays_what_it_was(ranks4: Ranks) -> None:
    ranks4.run(fails_to_compile)


def first_without_gradients(mode: str) -> None:
    """What is planned while no gradient is asked for trains all the same."""
    truth, case = build("mlp"), build("mlp")
    model = _shard(case.model, pins=PINS)
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        assert _difference(model(*case.args), truth.model(*case.args)) <= 1e-12
    assert worst(forward_backward(case._replace(model=model)), forward_backward(truth), 1e-6)[0] <= 1e-9
    assert len(set(model._autopar.loaded.values())) == 1


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_planned_without_gradients_trains_all_the_same(ranks4: Ranks, mode: str) -> None:
    ranks4.run(first_without_gradients, mode)


def without_training() -> None:
    """A frozen part has no gradient; inference needs no backward."""
    models = _mlp(), _mlp()
    for model in models:
        model.blocks[0].requires_grad_(False)
    case = build("mlp")
    truth, found = Case(models[0], *case[1:]), Case(_shard(models[1], *case.args, pins=PINS), *case[1:])
    expected = forward_backward(truth)
    gradients = forward_backward(found)
    assert "blocks.0.0.weight" not in gradients and dist.get_world_size() == 4
    assert worst(gradients, expected, 1e-6)[0] <= 1e-9
    with torch.inference_mode():
        assert _difference(found.model(*case.args), truth.model(*case.args)) <= 1e-12


def test_frozen_parameters_and_inference(ranks4: Ranks) -> None:
    ranks4.run(without_training)


def models_of_one_class() -> None:
    x = build("mlp").args[0]
    first, second, own = _mlp(), _mlp(), _mlp()
    own.forward = lambda x: 2 * MLP.forward(own, x)
    base, before = copy.deepcopy(first), own(x)
    first, second, own = _shard(first, x), _shard(second, x), _shard(own, x)
    assert type(first) is type(second) is not type(own) and _difference(own(x), before) <= 1e-12
    stacked, _ = torch.func.stack_module_state([first, second])
    with pytest.raises(AutoparError, match=r"bmm.* plain tensor beside a DTensor"):
        torch.vmap(lambda parameters: torch.func.functional_call(base, parameters, (x,)))(stacked)


def test_models_of_one_class_stay_of_one(ranks4: Ranks) -> None:
    """torch.func.stack_module_state told that they are of several."""
    ranks4.run(models_of_one_class)
