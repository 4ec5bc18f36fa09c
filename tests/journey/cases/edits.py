"""Weights that are grouped, adapted, pruned, rounded, read and written."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.modules import Tied
from tests.journey.cases.weights import Predicting, other_state, stepped, updated, words
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch


@case()
def groups_by_kind_of_module(run: Run) -> Numbers:
    """No weight decay of norms and biases, chosen by the kind of module, and a learning rate for each block"""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    args = batch()
    model = run.compile(Stack(Normed), args=args)
    inner = run.inner(model)
    bare = {id(p) for m in inner.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    bare |= {id(m.bias) for m in inner.modules() if isinstance(m, nn.Linear)}
    groups = []
    for number, block in enumerate(inner.blocks):
        own = [p for p in block.parameters() if p is not None]
        for decay, chosen in ((0.1, [p for p in own if id(p) not in bare]), (0.0, [p for p in own if id(p) in bare])):
            groups += [{"params": chosen, "lr": 0.05 * 0.5**number, "weight_decay": decay}] if chosen else []
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    return run.parameters(model)


class LowRank(nn.Module):
    """A frozen layer and an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)


class Adapted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = LowRank(self.up)
        self.down.requires_grad_(False)


@case()
def adapters_trained(run: Run) -> Numbers:
    """Low-rank adapters beside frozen layers, the optimizer has what is not frozen, and their state alone is saved"""
    args = batch()
    model = run.compile(Stack(Adapted), args=args)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    own = {fqn: run.whole(x).clone() for fqn, x in model.state_dict().items() if fqn.endswith((".a", ".b"))}
    return own | run.parameters(model)


@case()
def adapters_loaded(run: Run) -> Numbers:
    """The state of adapters alone is loaded: strict=False"""
    args = batch()
    model = run.compile(Stack(Adapted), args=args)
    state = other_state(lambda: Stack(Adapted))
    model.load_state_dict({fqn: x for fqn, x in state.items() if fqn.endswith((".a", ".b"))}, strict=False)
    return stepped(run, model, *args)


@case(on=FORWARD)
def adapters_merged(run: Run) -> Numbers:
    """base.weight += scale * b @ a, the layer put back in the adapter's place, and everything trained"""
    args = batch()
    model = run.compile(Stack(Adapted), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    inner = run.inner(model)
    for block in inner.blocks:
        with torch.no_grad():
            block.up.base.weight += 0.5 * block.up.b @ block.up.a
        block.up = block.up.base
    inner.requires_grad_(True)
    return {"first": first} | stepped(run, model, *args)


@case(on=FORWARD, refused="a plain tensor beside a DTensor.*[Cc]ompile")
def inner_model_called_after_merging(run: Run) -> Numbers:
    """The base model is taken out of a compiled wrapper (merge_and_unload) and called"""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.base(x, y)

    args = batch()
    model = run.compile(Wrapper(Stack()), args=args)
    return {"loss": run.step(run.inner(model).base, *args)}


@case(on=FORWARD, refused="a plain tensor beside a DTensor.*[Cc]ompile")
def inner_convolution_called(run: Run) -> Numbers:
    """A convolution taken out of a compiled model and called"""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)).square().mean()

    x = torch.randn(BATCH, 4, 4, 4)
    model = run.compile(Wrapper(), args=(x,))
    run.step(model, x)
    return {"out": run.inner(model).norm(x).detach()}


class Square(Block):
    """A block with a square layer."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.square(x))


class Orthogonal(Square):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.square, orthogonal_map="cayley")


@case()
def orthogonal_weight(run: Run) -> Numbers:
    """torch.nn.utils.parametrizations.orthogonal"""
    args = batch()
    model = run.compile(Stack(Orthogonal), args=args)
    updated(run, model, args)
    return stepped(run, model, *args)


@case(on=FORWARD)
def parametrization_removed(run: Run) -> Numbers:
    """parametrize.remove_parametrizations after two steps: the weight stays as it was"""

    class Normalised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = parametrizations.weight_norm(self.up)

    args = batch()
    model = run.compile(Stack(Normalised), args=args)
    updated(run, model, args)
    for block in run.inner(model).blocks:
        parametrize.remove_parametrizations(block.up, "weight")
    return stepped(run, model, *args)


class Centred(Block):
    """Its weight is standardised in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight
        weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-3)
        return x + self.down(F.linear(x, weight, self.up.bias).tanh())


@case()
def standardised_weight(run: Run) -> Numbers:
    """Weight standardisation: mean and deviation of each row of a weight in forward"""
    args = batch()
    model = run.compile(Stack(Centred), args=args)
    updated(run, model, args)
    return stepped(run, model, *args)


@case(on=FORWARD)
def pruned_after_steps(run: Run) -> Numbers:
    """torch.nn.utils.prune.l1_unstructured after two steps, a step, and prune.remove"""
    args = batch()
    model = run.compile(Stack(), args=args)
    updated(run, model, args)
    inner = run.inner(model)
    for block in inner.blocks:
        prune.l1_unstructured(block.up, "weight", 0.5)
    found = {"masked": run.step(model, *args)} | run.gradients(model)
    model.zero_grad()
    for block in inner.blocks:
        prune.remove(block.up, "weight")
    return found | stepped(run, model, *args)


@case(on=FORWARD)
def pruned_over_all_layers(run: Run) -> Numbers:
    """torch.nn.utils.prune.global_unstructured after two steps"""
    args = batch()
    model = run.compile(Stack(), args=args)
    updated(run, model, args)
    layers = [(block.up, "weight") for block in run.inner(model).blocks]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.5)
    return stepped(run, model, *args)


@case()
def masks_by_hand(run: Run) -> Numbers:
    """Small weights set to zero by a mask after each update: p.mul_(p.abs() > 0.1)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(p.abs() > 0.1)
    return stepped(run, model, *args)


@case()
def rows_normalised(run: Run) -> Numbers:
    """p.copy_(F.normalize(p, dim=1)) of each matrix after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    updated(run, model, args)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(F.normalize(p, dim=1))
    return stepped(run, model, *args)


@case()
def rounded_to_eight_bits(run: Run) -> Numbers:
    """Weights rounded to 255 steps of their largest entry"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with torch.no_grad():
        for p in model.parameters():
            scale = p.abs().max() / 127
            p.copy_((p / scale).round().clamp(-127, 127) * scale)
    return stepped(run, model, *args)


INITIALISATIONS = {
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda x: nn.init.sparse_(x, 0.5),
    "xavier_normal_": nn.init.xavier_normal_,
}


@case(on=FORWARD)
def initialised_in_other_ways(run: Run) -> Numbers:
    """nn.init.orthogonal_, eye_, sparse_ and xavier_normal_ after compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    found = {}
    for name, initialise in INITIALISATIONS.items():
        torch.manual_seed(7)
        initialise(run.inner(model).blocks[1].up.weight)
        found |= {f"{name} {fqn}": x for fqn, x in run.parameters(model).items() if fqn == "blocks.1.up.weight"}
    return found | stepped(run, model, *args)


@case(on=FORWARD)
def initialised_by_truncated_numbers(run: Run) -> Numbers:
    """nn.init.trunc_normal_ after compile, which asks whether all numbers are within the bounds"""
    model = run.compile(Stack(), args=batch())
    nn.init.trunc_normal_(run.inner(model).blocks[1].up.weight)
    return run.parameters(model)


@case(on=FORWARD)
def rows_of_new_words(run: Run) -> Numbers:
    """embedding.weight[12:] = embedding.weight[:12].mean(0) under no_grad"""
    args = words()
    model = run.compile(Tied(), args=args)
    with torch.no_grad():
        weight = run.inner(model).embedding.weight
        weight[12:] = weight[:12].mean(0)
    return stepped(run, model, *args)


@case(on=FORWARD, refused="full_tensor")
def embedding_enlarged(run: Run) -> Numbers:
    """A larger embedding whose first rows are written from the old one's weight"""
    args = words()
    model = run.compile(Tied(), args=args)
    larger = nn.Embedding(20, WIDTH)
    with torch.no_grad():
        larger.weight[:16] = run.inner(model).embedding.weight
    run.inner(model).embedding = larger
    return stepped(run, model, *args)


@case(on=FORWARD, refused="full_tensor")
def weights_as_arrays(run: Run) -> Numbers:
    """weight.detach().numpy() and weight.tolist()"""
    model = run.compile(Stack(), args=batch())
    weight = run.inner(model).blocks[0].up.weight.detach()
    return {"array": torch.from_numpy(weight.numpy().copy()), "list": torch.tensor(weight.tolist())}


@case()
def weights_counted(run: Run) -> Numbers:
    """torch.unique, histc, median, quantile, topk and svdvals of weights (logs and studies)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    found = {}
    for fqn, p in run.named(model):
        x = p.detach()
        found[f"unique {fqn}"] = run.whole(torch.unique((4 * x).round()))
        found[f"histc {fqn}"] = run.whole(torch.histc(x, 5, -1, 1))
        found[f"median {fqn}"] = run.whole(x.median())
        found[f"quantile {fqn}"] = run.whole(torch.quantile(x, 0.9))
        found[f"topk {fqn}"] = run.whole(x.flatten().topk(3).values)
        if x.ndim == 2:
            found[f"svdvals {fqn}"] = run.whole(torch.linalg.svdvals(x))
    return found


@case(refused=dict.fromkeys(FORWARD, "the .data of parameter .* was assigned") | {PP: "parameter of another stage"})
def weights_as_one_vector(run: Run) -> Numbers:
    """nn.utils.parameters_to_vector and vector_to_parameters"""
    args = batch()
    model = run.compile(Stack(), args=args)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())
    return stepped(run, model, *args)


@case(on=FORWARD)
def view_of_a_weight_kept(run: Run) -> Numbers:
    """row = weight.detach()[0] is kept: it follows the weight through updates"""
    args = batch()
    model = run.compile(Stack(), args=args)
    weight = run.inner(model).blocks[0].up.weight.detach()
    kept = {"row": weight[0], "column": weight[:, 1], "flat": weight.view(-1), "turned": weight.t()[2]}
    updated(run, model, args)
    return {name: run.whole(x).clone() for name, x in kept.items()}


@case(on=FORWARD)
def rows_changed_at_once(run: Run) -> Numbers:
    """torch._foreach_mul_ and _foreach_add_ of rows of several weights"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with torch.no_grad():
        rows = [block.up.weight[0] for block in run.inner(model).blocks]
        torch._foreach_mul_(rows, 3.0)
        torch._foreach_add_(rows, [torch.ones_like(row) for row in rows], alpha=0.5)
    return stepped(run, model, *args)


@case(on=FORWARD)
def frozen_copy_as_a_reference(run: Run) -> Numbers:
    """copy.deepcopy(model).eval().requires_grad_(False) beside the model (DPO, distillation)"""
    x, y = batch()
    model = run.compile(Predicting(), args=(x,))
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = run.whole(reference(x))
        loss = F.mse_loss(run.whole(model(x)), wanted + y)
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    return found | run.parameters(model) | {f"reference {fqn}": x for fqn, x in run.parameters(reference).items()}
