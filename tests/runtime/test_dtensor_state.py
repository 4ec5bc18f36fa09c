"""Parameters and buffers as DTensors: whole state dicts, optimizers, clipping, and models born on the meta device."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.errors import AutoparError
from tests.runtime.training import adamw, forward_backward, sharded, state_of, whole, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build

pytestmark = pytest.mark.multirank

AXES = ("dp", "tp")


def _sharded(name: str, shape: tuple[int, ...], kind: str, *, seed: int = 0) -> Case:
    case, model = sharded(name, shape, kind, seed=seed)
    model(*case.args, **case.kwargs)
    return case._replace(model=model)


def _step(case: Case, optimizer: torch.optim.Optimizer) -> None:
    forward_backward(case)
    optimizer.step()


def whole_state_dicts() -> bool:
    truth, case = build("gpt2", seed=3), _sharded("gpt2", (2, 2), "megatron")
    whole_state = {name: x.clone() for name, x in truth.model.state_dict().items()}
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(case.model, whole_state if dist.get_rank() == 0 else {}, options=full)
    whole_state = truth.model.state_dict()
    assert worst(state_of(case.model), whole_state, 1e-6)[0] == 0
    got = get_model_state_dict(case.model, options=StateDictOptions(full_state_dict=True))
    assert worst(got, whole_state, 1e-6)[0] == 0 and not any(isinstance(x, DTensor) for x in got.values())
    other = build("gpt2", seed=4).model.state_dict()
    assert not case.model.load_state_dict(other).missing_keys
    assert worst(state_of(case.model), other, 1e-6)[0] == 0
    with pytest.raises(RuntimeError, match="size mismatch"):
        case.model.load_state_dict(other | {"transformer.wpe.weight": torch.ones(3, 3)})
    assert case.model.lm_head.weight is case.model.transformer.wte.weight
    return any(p.is_shard() for x in case.model.parameters() for p in x.placements)


def test_whole_state_dicts_go_in_and_out(ranks4: Ranks) -> None:
    assert all(ranks4.run(whole_state_dicts))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, foreach=True),
}


def clip_and_step() -> dict[str, tuple[float, float]]:
    found = {}
    for name, make in OPTIMIZERS.items():
        cases = build("mlp"), _sharded("mlp", (2, 2), "megatron")
        norms = []
        for case in cases:
            optimizer = make(case.model.parameters())
            for _ in range(2):
                forward_backward(case)
                norms.append(float(whole(nn.utils.clip_grad_norm_(case.model.parameters(), 0.1))))
                optimizer.step()
        placements = {x.placements for x in cases[1].model.parameters()}
        assert len(placements) > 1, placements
        difference = max(abs(a - b) / a for a, b in zip(norms[:2], norms[2:]))
        found[name] = difference, worst(state_of(cases[1].model), state_of(cases[0].model), 1e-2)[0]
    return found


def test_clipping_and_foreach_optimizers_on_mixed_placements(ranks4: Ranks) -> None:
    for found in ranks4.run(clip_and_step):
        assert all(max(pair) <= 1e-9 for pair in found.values()), found


class _Largest(TorchDispatchMode):
    """`peak`: bytes of all real tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive += [
            weakref.ref(x)
            for x in tree_leaves(out)
            if type(x) in (torch.Tensor, nn.Parameter) and x.device.type == "cpu"
        ]
        self.alive = [ref for ref in self.alive if ref() is not None]
        storages = {storage._cdata: storage.nbytes() for ref in self.alive for storage in [ref().untyped_storage()]}
        self.peak = max(self.peak, sum(storages.values()))
        return out


class Rotated(nn.Module):
    """A plain module with a parent that initialises over its children, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("angles", torch.empty(64), persistent=False)

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(64))
        for layer in self.layers[:2]:
            layer.weight.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.norm(x) + self.angles


def _plain_truth(make) -> nn.Module:
    with torch.device("meta"):
        model = make()
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    return model


def meta_plain() -> tuple[float, int, int]:
    truth = _plain_truth(Rotated)
    with torch.device("meta"):
        model = Rotated()
    torch.manual_seed(dist.get_rank())  # the first rank's random state is what counts
    args, before = (torch.ones(8, 64),), torch.get_rng_state()
    with _Largest() as largest:
        model = autopar.compile(model, device_mesh((4,), ("dp",)), args=args, pins=PLAIN_PINS)
    assert torch.equal(before, torch.get_rng_state())
    assert worst(state_of(model), truth.state_dict(), 1e-6)[0] == 0
    assert torch.equal(whole(model.angles), torch.arange(64.0))
    return largest.peak, sum(x.numel() * x.itemsize for x in truth.parameters()), _own_bytes(model)


PLAIN_PINS = {f"layers.{i}.weight": "S(0)" for i in range(8)}


def _own_bytes(model: nn.Module) -> int:
    return sum(x.to_local().numel() * x.itemsize for x in model.parameters())


def test_meta_model_is_initialised_as_on_one_device_and_never_whole(ranks4: Ranks) -> None:
    for peak, size, own in ranks4.run(meta_plain):
        assert own < size / 3, "the plan must split the parameters"
        assert peak < 0.75 * size, f"{peak} bytes were alive at once, the model has {size}"


def meta_of_transformers(name: str) -> float:
    truth = build(name, dtype=torch.float32).model
    with torch.device("meta"):
        model = type(truth)(truth.config)
    for tensor in (*truth.parameters(), *truth.buffers()):
        tensor.data = torch.full_like(tensor, 7)
    torch.manual_seed(0)
    for module in truth.modules():
        module._is_hf_initialized = False
    truth.initialize_weights()
    torch.manual_seed(dist.get_rank())
    case = build(name, dtype=torch.float32)
    model = autopar.compile(
        model.train(), device_mesh((2, 2), AXES), args=case.args, kwargs=case.kwargs, cluster="free-links"
    )
    found = {name: whole(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    expected = dict((*truth.named_parameters(), *truth.named_buffers()))
    difference = worst(found, expected, 1e-6)[0]
    loss, true_loss = case.loss(model(*case.args, **case.kwargs)), case.loss(truth(*case.args, **case.kwargs))
    return max(difference, abs(float(whole(loss)) - float(true_loss)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_meta_transformers_are_initialised_as_on_one_device(ranks4: Ranks, name: str) -> None:
    assert max(ranks4.run(meta_of_transformers, name)) <= 1e-5


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def meta_without_initialisation() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Uninitialised())
    with pytest.raises(AutoparError) as error:
        autopar.compile(model, device_mesh((4,), ("dp",)), args=(torch.randn(8, 8),))
    return str(error.value)


def test_meta_tensor_that_nothing_initialises_is_named(ranks4: Ranks) -> None:
    texts = ranks4.run(meta_without_initialisation)
    assert all("1.scale" in text and "Uninitialised" in text and "reset_parameters" in text for text in texts), texts


def lazy() -> None:
    truth, case = build("mlp"), build("mlp")
    model = autopar.compile(case.model, device_mesh((2, 2), AXES), cluster="free-links")
    parameters = list(model.parameters())
    case = case._replace(model=model)
    # the second before anything is planned
    cases, optimizers = (truth, case), (adamw(truth.model), adamw(case.model))
    with pytest.raises(AutoparError, match="call it once"):
        model.state_dict()
    model.load_state_dict(truth.model.state_dict())
    for _ in range(2):
        for each, optimizer in zip(cases, optimizers):
            _step(each, optimizer)
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert worst(state_of(model), state_of(truth.model), 1e-2)[0] <= 1e-9
    assert any(p.is_shard() for x in model.parameters() for p in x.placements)


def test_optimizer_made_before_the_first_call_keeps_working(ranks4: Ranks) -> None:
    ranks4.run(lazy)


def tied_and_copied() -> None:
    case = _sharded("gpt2", (2, 2), "zero3")
    model = case.model
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {"lm_head.weight", "transformer.wte.weight"} <= model.state_dict().keys()
    assert "lm_head.weight" not in dict(model.named_parameters())
    average = copy.deepcopy(model)
    assert average.lm_head.weight is average.transformer.wte.weight is not model.lm_head.weight
    _step(case, adamw(case.model))
    now, then = (float(case.loss(each(**case.kwargs))) for each in (model, average))
    assert abs(then - float(build("gpt2").loss(build("gpt2").model(**case.kwargs)))) < 1e-5 < abs(now - then)


def test_tied_weights_stay_tied_also_in_a_copy(ranks4: Ranks) -> None:
    ranks4.run(tied_and_copied)
