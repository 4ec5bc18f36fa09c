"""The same bits through 4, 2, 1, 3 and 4 ranks, of models with dropout and batch norm, in every step."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import autopar
from autopar.errors import AutoparError, MeshError, MicrobatchError
from tests.runtime.test_written_parameters import Limited, Momentum
from tests.workers import device_mesh

LOGICAL, STEPS = 4, 105
COUNTS = (4, 2, 1, 3, 4)  # of ranks, for STEPS // 5 steps each


def gpt2():
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=16, n_layer=2, n_head=2, n_inner=32)
    return GPT2LMHeadModel(config), lambda: {"input_ids": (ids := torch.randint(97, (8, 12))), "labels": ids}


class ResNet(nn.Module):
    """Two residual blocks with batch norm, and a loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, pixels, labels):
        x = self.stem(pixels)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet():
    return ResNet(), lambda: {"pixels": torch.randn(8, 3, 8, 8), "labels": torch.randint(5, (8,))}


def vit():
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**small, image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.1)
    return ViTForImageClassification(config), lambda: {
        "pixel_values": torch.randn(8, 3, 8, 8),
        "labels": torch.randint(5, (8,)),
    }


def digest(module, optimizer, loss):
    """The bits of the loss, all parameters, buffers and optimizer state."""
    tensors = [loss, *module.state_dict().values()]
    tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def part_mesh(num_ranks):
    """The first ranks as a mesh of their own, and the others as one that is not used."""
    if num_ranks == dist.get_world_size():
        return device_mesh((num_ranks,), ("dp",))
    return DeviceMesh("cpu", torch.arange(num_ranks), mesh_dim_names=("dp",))


def train(make, counts):
    """Digest of each step of this rank; None where it has no part. State goes by state dicts from count to count."""
    digests, kept = [], None
    for phase, count in enumerate(counts):
        mesh = part_mesh(count)
        if dist.get_rank() < count:
            torch.manual_seed(0)
            module, batch = make()
            module = autopar.compile(module.train(), mesh, logical_ranks=LOGICAL)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            if kept is not None:
                module.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            for step in range(STEPS // 5 * phase, STEPS // 5 * (phase + 1)):
                torch.manual_seed(100 + step)
                loss = module.train_step(**batch())
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                digests.append(digest(module, optimizer, loss))
            state = [module.state_dict(), optimizer.state_dict()]
        else:
            digests += [None] * (STEPS // 5)
            state = None
        box = [state]
        dist.broadcast_object_list(box, src=0)
        kept = box[0]
    return digests


@pytest.mark.multirank
@pytest.mark.parametrize("make", [gpt2, resnet, vit])
def test_the_same_bits_on_any_number_of_ranks_in_every_step(ranks4, make):
    changing = ranks4.run(train, make, COUNTS)
    alone = ranks4.run(train, make, (1,) * 5)[0]
    assert len(set(alone)) == STEPS  # it does train
    for digests in changing:
        assert all(found in (None, expected) for found, expected in zip(digests, alone))
    assert [sum(found is not None for found in digests) for digests in changing] == [105, 84, 63, 42]


def mean_of_parts(make):
    """Loss and gradients of logical ranks computed one by one, in plain PyTorch without random numbers."""
    torch.manual_seed(0)
    module, batch = make()
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    torch.manual_seed(1)
    given = batch()
    compiled = autopar.compile(module, device_mesh((4,), ("dp",)), logical_ranks=LOGICAL)
    loss = compiled.train_step(**given)
    found = [x.grad.clone() for x in compiled.parameters()]
    torch.manual_seed(0)
    plain, _ = make()
    plain.train()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    losses = [plain(**{name: x.chunk(4)[i] for name, x in given.items()}) for i in range(4)]
    (sum(losses) / 4).backward()
    torch.testing.assert_close(loss, (sum(losses) / 4).detach())
    torch.testing.assert_close(found, [x.grad for x in plain.parameters()])
    return True


@pytest.mark.multirank
def test_gradients_are_the_mean_over_the_logical_ranks(ranks4):
    assert all(ranks4.run(mean_of_parts, resnet))


class Idle(nn.Module):
    """A layer that only rows of the last logical rank use, and one that none does."""

    def __init__(self):
        super().__init__()
        self.used, self.some, self.none = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return (self.used(x) + (self.some(x) if x[0, 0] > 0 else 0)).mean()


def idle_layers():
    torch.manual_seed(0)
    module = autopar.compile(Idle(), device_mesh((4,), ("dp",)), logical_ranks=4)
    x = -torch.ones(8, 4)
    x[6:] = 1
    module.train_step(x)
    with torch.no_grad():
        whole = float(module.eval()(x[:2]))
    return module.none.weight.grad, module.some.weight.grad.tolist(), whole


@pytest.mark.multirank
def test_a_layer_that_some_logical_ranks_leave_out(ranks4):
    results = ranks4.run(idle_layers)
    assert all(none is None and some == [[0.25] * 4] for none, some, _ in results)
    assert len({whole for *_, whole in results}) == 1


class Mixed(nn.Module):
    """Parameters of two types, a transposed one among them, and a loss that the module keeps."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 3).double(), nn.Linear(3, 1, dtype=torch.bfloat16)
        self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())

    def forward(self, x):
        self.kept = self.narrow(self.wide(x).tanh().bfloat16()).double().mean()
        return self.kept


def mixed_steps():
    """Gradients of a step that are kept, of two steps that are added, and the loss that the module kept."""
    torch.manual_seed(0)
    module = autopar.compile(Mixed(), device_mesh((4,), ("dp",)), logical_ranks=4)
    one, other = torch.randn(2, 8, 4, dtype=torch.float64)
    module.train_step(one)
    kept = [x.grad for x in module.parameters()]
    module.zero_grad()
    module.train_step(other)
    module.train_step(one)
    loss = float(module.kept)
    torch.manual_seed(0)
    plain, copies = Mixed(), []
    _, _ = torch.randn(2, 8, 4, dtype=torch.float64)
    for x in (one, other):
        plain.zero_grad()
        (sum(plain(part) for part in x.chunk(4)) / 4).backward()
        copies.append([p.grad.clone() for p in plain.parameters()])
    torch.testing.assert_close(kept, copies[0], rtol=0.02, atol=1e-3)  # sums in bfloat16 are in another order
    torch.testing.assert_close(
        [x.grad for x in module.parameters()], [a + b for a, b in zip(*copies)], rtol=0.02, atol=1e-3
    )
    assert loss == float(plain(one.chunk(4)[dist.get_rank()]))
    return True


@pytest.mark.multirank
def test_gradients_that_are_kept_stay_and_those_of_other_types_are_added(ranks4):
    assert all(ranks4.run(mixed_steps))


def refused(what):
    mesh = device_mesh((4,), ("dp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    calls = {
        "too few": lambda: autopar.compile(model, mesh, logical_ranks=2),
        "none": lambda: autopar.compile(model, mesh, logical_ranks=0),
        "tensors": lambda: autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), logical_ranks=4),
        "pins": lambda: autopar.compile(model, mesh, logical_ranks=4, pins={"0.weight": "S(0)"}),
        "rows": lambda: autopar.compile(model, mesh, logical_ranks=4).train_step(torch.ones(6, 4)),
        "loss": lambda: autopar.compile(model, mesh, logical_ranks=4).train_step(torch.ones(8, 4)),
        "call": lambda: autopar.compile(model, mesh, logical_ranks=4)(torch.ones(8, 4)),
    }
    try:
        calls[what]()
    except AutoparError as error:
        return type(error).__name__, str(error)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("too few", MeshError, "logical_ranks=2 on 4 ranks: no mapping"),
        ("none", AutoparError, "positive number, found 0"),
        ("tensors", MeshError, r"found mesh (2, 2)"),
        ("pins", AutoparError, "cannot be combined with plan=, planning options"),
        ("rows", MicrobatchError, "4 equal parts, found [6] rows"),
        ("loss", AutoparError, "trains on a scalar loss, found torch.Size([8])"),
        ("call", AutoparError, "trained by model.train_step"),
    ],
)
def test_what_cannot_be_served_is_said(ranks4, what, kind, words):
    for name, message in ranks4.run(refused, what):
        assert name == kind.__name__ and words in message


def _refusal_of_writes(how, kind):
    module = autopar.compile(kind(how), device_mesh((4,), ("dp",)), logical_ranks=LOGICAL)
    with pytest.raises(AutoparError, match=r"the forward writes parameter \w+\.(0\.)?weight, .*around train_step"):
        module.train_step(torch.randn(8, 8), torch.randn(8, 8))


@pytest.mark.multirank
@pytest.mark.parametrize("kind", [Momentum, Limited])
@pytest.mark.parametrize("how", ["in place", "data"])
def test_parameters_that_the_forward_writes_are_refused(ranks4, how, kind):
    ranks4.run(_refusal_of_writes, how, kind)
