"""Parts of a model compiled, several dtypes, hooks of state dicts, names, samplers, and traces by others."""

import copy
from typing import Any

import torch
from torch import nn

from tests.journey.case import DP, DP_TP, FORWARD, PP, Numbers, Run, case
from tests.journey.cases.checkpoints import folder, wait
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

OF_STAGES = "those of this rank's stages only"


class Body(Stack):
    """The blocks alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Around(nn.Module):
    """A compiled body, and a head that nobody compiled."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        body = Stack()
        body.forward = body.body
        self.head = nn.Linear(WIDTH, 1)
        self.body = run.compile(body)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(x)) - y.mean(1, keepdim=True)).square().mean()


@case(on=FORWARD, peers=False)
def only_a_part_is_compiled(run: Run) -> Numbers:
    """self.body = autopar.compile(body, mesh) within a plain module: AdamW over all parameters, three steps"""
    args, model, losses = batch(), Around(run), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False, refused="Compile the module that has both")
def norm_of_a_compiled_part_and_the_rest(run: Run) -> Numbers:
    """The same, and clip_grad_norm_ of all parameters, compiled or not"""
    args, model = batch(), Around(run)
    model(*args).backward()
    return {"norm": torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)} | run.gradients(model)


@case()
def parameters_of_two_dtypes(run: Run) -> Numbers:
    """The first block in bfloat16, all others in float32, casts between them, clip_grad_norm_ and AdamW"""

    class Mixed(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x.to(block.up.weight.dtype)).float()
            return x

    args, model = batch(), Mixed()
    model.blocks[0].bfloat16()
    model = run.compile(model, args=args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        losses.append(run.step(model, *args))
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)}


@case()
def hooks_of_state_dicts(run: Run) -> Numbers:
    """register_state_dict_pre_hook and register_load_state_dict_post_hook, each counts its calls, and keep_vars=True"""
    args, model, calls = batch(), Stack(), [0, 0]

    def before(*_: Any) -> None:
        calls[0] += 1

    def after(*_: Any) -> None:
        calls[1] += 1

    model.register_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)
    model = run.compile(model, args=args)
    calls[:] = [0, 0]
    loss = run.step(model, *args)
    state = copy.deepcopy(run.inner(model).state_dict())
    run.inner(model).load_state_dict(state)
    own = run.inner(model).state_dict(keep_vars=True)
    grads = sum(x.grad is not None for x in own.values()) - sum(p.grad is not None for _, p in run.named(model))
    counts = {"calls": torch.tensor(calls).float(), "kept": torch.tensor(float(grads))}
    return {"loss": loss, "again": run.step(model, *args)} | counts


class Halves(Block):
    """Writes the weight of the layer below it as two."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._cut)

    @staticmethod
    def _cut(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        if (whole := state.pop(f"{prefix}up.weight", None)) is not None:
            state[f"{prefix}upper.weight"], state[f"{prefix}lower.weight"] = whole[:WIDTH] * 2, whole[WIDTH:] * 2


@case(peers=False)
def whole_state_that_hooks_made(run: Run) -> Numbers:
    """model.full_state_dict() of blocks whose hooks write the weights of their layers in halves, in order"""
    args, model = batch(), run.compile(Stack(Halves))
    loss = run.step(model, *args)
    state = model.state_dict() if run.setting == "one device" else model.full_state_dict()
    numbered = {f"{number} {name}": x for number, (name, x) in enumerate(state.items())}
    return {"loss": loss} | numbered


@case()
def parameters_by_name(run: Run) -> Numbers:
    """torch.optim.AdamW of groups of (name, parameter), and its state with names, saved and loaded again"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = _by_name(run, model)
    losses = [run.step(model, *args)]
    optimizer.step()
    optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    missing = len(run.named(model)) - sum(len(group["param_names"]) for group in state["param_groups"])
    again = _by_name(run, model)
    again.load_state_dict(state)
    losses.append(run.step(model, *args))
    again.step()
    return {"losses": torch.stack(losses), "missing": torch.tensor(float(missing))} | run.parameters(model)


def _by_name(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    named = list(run.inner(model).named_parameters())
    weights = [(name, p) for name, p in named if name.endswith("weight")]
    biases = [(name, p) for name, p in named if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1)


@case()
def names_beside_parameters(run: Run) -> Numbers:
    """AdamW of {"params": ..., "param_names": ...}, made before the model is planned: as many, and averages by name"""
    args, model = batch(), run.compile(Stack())
    names, parameters = zip(*run.inner(model).named_parameters())
    optimizer = torch.optim.AdamW([{"params": list(parameters), "param_names": list(names)}], lr=0.1)
    numbers = {"loss": run.step(model, *args)}
    optimizer.step()
    state = optimizer.state_dict()
    [group] = state["param_groups"]
    numbers["others"] = torch.tensor(float(len(group["params"]) - len(run.named(model))))
    averages = {name: state["state"][number]["exp_avg"] for number, name in zip(group["params"], group["param_names"])}
    return numbers | {f"average of {name}": run.whole(x) for name, x in averages.items()} | run.parameters(model)


@case(refused={PP: OF_STAGES})
def a_norm_that_is_not_finite(run: Run) -> Numbers:
    """clip_grad_norm_(error_if_nonfinite=True) of gradients of which some are infinite: an error, on every rank"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, args[0] * torch.tensor([float("inf")] + [1.0] * (BATCH - 1))[:, None], args[1])
    raised = 0.0
    try:
        clip = torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        raised = float("non-finite" in str(error))
    return {"raised": torch.tensor(raised)}


@case()
def cached_parametrizations(run: Run) -> Numbers:
    """parametrize.cached() around a step of a model with a parametrisation"""
    from torch.nn.utils import parametrizations, parametrize

    args, model = batch(), Stack()
    for block in model.blocks:
        parametrizations.weight_norm(block.up)
    model = run.compile(model, args=args)
    with parametrize.cached():
        loss = run.step(model, *args)
    return {"loss": loss, "again": run.step(model, *args)} | run.gradients(model)


@case()
def default_device(run: Run) -> Numbers:
    """with torch.device("cpu"): around compile and a step, and torch.set_default_device("cpu")"""
    args = batch()
    with torch.device("cpu"):
        model = run.compile(Stack())
        first = run.step(model, *args)
    torch.set_default_device("cpu")
    try:
        second = run.step(model, *args)
    finally:
        torch.set_default_device(None)
    return {"first": first, "second": second} | run.gradients(model)


@case(peers=False)
def forked_random_state(run: Run) -> Numbers:
    """torch.random.fork_rng() around an evaluation, and what is drawn after it"""
    args = batch()
    model = run.compile(Stack(), args=args)
    torch.manual_seed(3)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(9)
        noisy = (args[0] + torch.randn(BATCH, WIDTH), args[1])
        found = run.step(model, *noisy) if run.setting == "pp x dp" else model(*noisy)
    return {"evaluated": found, "drawn": torch.randn(3), "loss": run.step(model, *args)}


@case(peers=False)
def selective_checkpoints(run: Run) -> Numbers:
    """torch.utils.checkpoint with create_selective_checkpoint_contexts, which saves products"""
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    save = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default])

    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=save)

    args = batch()
    model = run.compile(Stack(Checkpointed), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def many_trials(run: Run) -> Numbers:
    """Three models compiled, trained and dropped one after the other, as a search for hyperparameters does"""
    args, losses = batch(), []
    for depth in (2, 3, 3):
        torch.manual_seed(depth)
        model = run.compile(Stack(depth=depth + 1), args=args)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.step(model, *args)
        optimizer.step()
        losses.append(run.step(model, *args))
        del model, optimizer
    return {"losses": torch.stack(losses)}


@case(on=(DP, DP_TP), peers=False)
def distributed_sampler(run: Run) -> Numbers:
    """DistributedSampler and a DataLoader with drop_last=False of 19 rows, each rank its own, two epochs"""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rows, losses = TensorDataset(torch.randn(19, WIDTH), torch.randn(19, WIDTH)), []
    parts, part = (1, 0) if run.setting == "one device" else (run.mesh["dp"].size(), run.mesh["dp"].get_local_rank())
    model = run.compile(Stack(), batch=("dp",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(rows, parts, part, shuffle=True, drop_last=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = [*sampler]
        order += order[: -len(order) % 4 if parts == 1 else 0]  # what DistributedSampler fills up with
        for batch_of_rank in DataLoader(rows, BATCH // parts, sampler=order):
            losses.append(run.step(model, *batch_of_rank))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False, refused="torch.jit.trace of a model that autopar.compile returned")
def traced_by_others(run: Run) -> Numbers:
    """torch.jit.trace of the compiled model, to export it"""
    args = batch()
    model = run.compile(Stack(), args=args)
    return {"loss": torch.jit.trace(model, args)(*args)}


@case(on=FORWARD, peers=False, refused="torch.export of a model that autopar.compile returned")
def exported_after(run: Run) -> Numbers:
    """torch.export.export of the compiled model"""
    args = batch()
    model = run.compile(Stack(), args=args)
    return {"loss": torch.export.export(model, args).module()(*args)}


@case(on=FORWARD, peers=False, refused="torch.fx.symbolic_trace of a model that autopar.compile returned")
def symbolically_traced(run: Run) -> Numbers:
    """torch.fx.symbolic_trace of the compiled model"""
    args = batch()
    model = run.compile(Stack(), args=args)
    return {"loss": torch.fx.symbolic_trace(model)(*args)}


@case()
def compiled_update(run: Run) -> Numbers:
    """torch.compile(optimizer.step, backend="aot_eager")"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update, losses = torch.compile(optimizer.step, backend="aot_eager"), []
    for _ in range(2):
        losses.append(run.step(model, *args))
        update()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False)
def checkpoint_of_safetensors(run: Run) -> Numbers:
    """torch.distributed.checkpoint.save with a HuggingFaceStorageWriter, and load with its reader into another model"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

    args = batch()
    with folder(run) as path:
        model = run.compile(Stack(), args=args)
        run.step(model, *args)
        writer = HuggingFaceStorageWriter(str(path / "saved"), save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        wait(run)
        torch.manual_seed(8)
        other = run.compile(Stack(), args=args)
        state = other.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path / "saved")))
        other.load_state_dict(state)
        return {"loss": run.step(other, *args)} | run.parameters(other)


@case(on=FORWARD, peers=False, refused="make_fx of a model that autopar.compile returned")
def traced_by_make_fx(run: Run) -> Numbers:
    """torch.fx.experimental.proxy_tensor.make_fx of the compiled model"""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, _ = batch()
    model = run.compile(Body(), args=(x,))
    return {"out": make_fx(model)(x)(x)}


@case(on=FORWARD, peers=False, refused="torch.jit.script or torch.jit.trace of a model that autopar.compile returned")
def scripted_after(run: Run) -> Numbers:
    """torch.jit.script of the compiled model, before its first call"""
    x, _ = batch()
    return {"out": torch.jit.script(run.compile(Body()))(x)}


@case(on=(DP_TP,), peers=False, refused="a batch of gradients at once .* Leave vectorize out")
def jacobian_at_once(run: Run) -> Numbers:
    """torch.autograd.functional.jacobian(vectorize=True) of the compiled model in its input"""
    x, _ = batch()
    return {"jacobian": torch.autograd.functional.jacobian(run.compile(Body(), args=(x,)), x, vectorize=True)}


@case()
def counted_by_torch(run: Run) -> Numbers:
    """FlopCounterMode and CommDebugMode around the first step"""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.flop_counter import FlopCounterMode

    args, losses, counted = batch(), [], []
    model = run.compile(Stack())
    for _ in range(2):
        with FlopCounterMode(display=False) as flops, CommDebugMode():
            losses.append(run.step(model, *args))
        counted.append(flops.get_total_flops())
    return {"losses": torch.stack(losses), "again": torch.tensor(counted[0] / counted[1])} | run.gradients(model)


@case()
def copies_in_forward(run: Run) -> Numbers:
    """copy.deepcopy of a layer and of the input within forward: the copies get no gradient"""

    class Copying(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x) + copy.deepcopy(self.blocks[0])(copy.deepcopy(x))

    args = batch()
    model = run.compile(Copying(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def compiled_in_inference_mode(run: Run) -> Numbers:
    """A model with a batch norm that is built, compiled and called within torch.inference_mode()"""
    x, _ = batch()
    with torch.inference_mode():
        model = run.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval())
        return {"out": model(x).clone(), "again": model(x + 1).clone()}
