"""What the ranks run of plans in stages and microbatches: whole training steps, beside the same on one device."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace_with_loss import traced
from autopar.mesh import as_mesh
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.runtime.pipeline.trainer import Trainer, pipeline_mesh
from autopar.runtime.sharded_module import ShardedModule, shard_module
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import Layout
from autopar.sbp.redistribute import Collective
from autopar.verify.count_collectives import count_collectives
from tests.runtime.training import EPS, LEARNING_RATE, random_assignment, whole, worst
from tests.workers import device_mesh

BATCH, LENGTH, WORDS, WIDTH, HEADS, CLASSES = 8, 8, 64, 16, 4, 16
IGNORED = -100


class Sample(NamedTuple):
    """`loss_fn(model(*args[:-1], **kwargs), args[-1])` is the loss; without a loss function the model's own."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


def token_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """As transformers' causal models have it, in the dtype of the logits."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _labels(ids: torch.Tensor) -> torch.Tensor:
    """The tokens, of which each sample ignores another number, one of them all."""
    lengths = torch.tensor([8, 3, 1, 8, 6, 0, 2, 5]).repeat(-(-len(ids) // 8))[: len(ids)]
    return torch.where(torch.arange(ids.shape[1]) < lengths[:, None], ids, IGNORED)


def _gpt2(blocks: int, dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": blocks, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False))
    model.loss_type = "ForCausalLM"
    return model


def _llama(blocks: int, dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _t5(blocks: int, dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_heads=HEADS,
        num_layers=blocks,
        relative_attention_num_buckets=4,  # so few that each stage computes the position biases itself
        use_cache=False,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _vit(blocks: int, dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


class Odd(nn.Module):
    """What the others have not: a frozen start, a parameter nobody reads, buffers, a constant with an entry for each
    sample, and what passes all blocks by."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[0], dtype=x.dtype)[:, None] / x.shape[0]
        x = start = self.start(x) + position
        for block in self.blocks:
            x = x + block(x * self.scale).tanh() * position
        return self.head(x + start * self.scale)


def _odd(blocks: int, batch: int) -> Sample:
    """Classes have weights, and some samples are ignored: what a sample counts depends on the whole batch."""
    model, labels = Odd(blocks).double(), torch.arange(batch) % CLASSES
    weight = torch.linspace(0.1, 2, CLASSES).double()
    labels[1::3] = IGNORED
    return Sample(
        model, (torch.randn(batch, WIDTH).double(), labels), {}, nn.CrossEntropyLoss(weight, ignore_index=IGNORED)
    )


def _batch_norm(blocks: int, batch: int) -> Sample:
    """Statistics of the whole batch, kept in buffers of each stage."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(blocks)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).double()
    return Sample(model, (torch.randn(batch, WIDTH).double(), torch.arange(batch) % CLASSES), {}, F.cross_entropy)


WHOLE = {"odd": _odd, "batch norm": _batch_norm}
MODELS = {"gpt2": _gpt2, "llama": _llama, "t5": _t5, "vit": _vit}


def sample(
    name: str, *, blocks: int = 4, dropout: float = 0.0, batch: int = BATCH, has_loss_fn: bool = False
) -> Sample:
    """The model called `name` in float64 with a batch, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in WHOLE:
            return WHOLE[name](blocks, batch)
        model = MODELS[name](blocks, dropout).double().train()
        if name == "vit":
            kwargs = {"pixel_values": torch.randn(batch, 3, 8, 8).double(), "labels": torch.randint(CLASSES, (batch,))}
            return Sample(model, (), kwargs, None)
        ids = torch.randint(WORDS, (batch, LENGTH))
    labels = _labels(ids)
    if has_loss_fn:
        return Sample(model, (ids, labels), {}, token_loss)
    return Sample(model, (), {"input_ids": ids, "labels": labels}, None)


def loss_of(case: Sample) -> torch.Tensor:
    """On one device."""
    if case.loss_fn is None:
        return case.model(*case.args, **case.kwargs).loss
    return case.loss_fn(case.model(*case.args[:-1], **case.kwargs), case.args[-1])


def plan_of_sample(
    case: Sample, mesh: str, num_microbatches: int | None = None, schedule: str | None = None, **request: Any
) -> Plan | StagedPlan:
    """A plan on devices whose links cost nothing, so that it splits what it can."""
    graph = traced(skeleton(case.model), case.loss_fn, case.args, case.kwargs)
    asked = {"num_microbatches": num_microbatches, "schedule": schedule, "time_limit_s": 2.0} | request
    return choose_plan(graph, as_mesh(mesh), load_cluster("free-links"), PlanRequest(**asked))


def with_any_layouts(plan: StagedPlan, seed: int) -> StagedPlan:
    """Any valid strategy for every op of every stage, any layout for what is stored and for what crosses a cut."""
    draw, stages, needed = random.Random(seed), [], {}
    stored: dict[str, Layout] = {}
    for stage in reversed(plan.stages):
        folded = fold(stage.graph)
        found = random_assignment(stage.graph, folded, annotate(stage.graph, stage.mesh, folded), stage.mesh, draw)
        parameters = [(item.fqn, item.value.name) for item in stage.graph.of_kind("parameter")]
        layouts = {name: stored.setdefault(fqn, found.layouts[name]) for fqn, name in parameters}
        outputs = {name: needed.get(name, layout) for name, layout in found.outputs.items()}
        assignment = replace(found, layouts=found.layouts | layouts, outputs=outputs)
        stages.insert(0, plan_of(stage.graph, assignment, stage.mesh, stage.cluster, training=stage.training))
        needed = {item.value.name: found.layouts[item.value.name] for item in stage.graph.of_kind("argument")}
    return replace(plan, stages=tuple(stages))


def under(plan: Plan | StagedPlan, case: Sample) -> ShardedModule:
    """The model sharded by `plan`, which was made for it: it is not traced again."""
    module = shard_module(case.model, device_mesh(plan.mesh.shape, plan.mesh.axis_names), lambda *_: plan, case.loss_fn)
    module._autopar._trace = lambda *_: plan.graph
    module._autopar.prepare(module, case.args, case.kwargs, trains=True)
    return module


def planned_of_rank(plan: StagedPlan, rank: int) -> Counter[Collective]:
    """How often a step issues each collective on a rank of the pipeline, within its stages."""
    found: Counter[Collective] = Counter()
    for number in plan.schedule.stages_of(rank):
        costs = plan.stages[number].costs
        for one in costs.collectives:
            found[one.collective] += costs.num_issued(one)
    return found


def one_device(case: Sample, steps: int) -> dict[str, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, and the state after `steps` of AdamW."""
    return _trained(case, lambda: loss_of(case), lambda loss: loss.backward(), steps)


def staged(case: Sample, model: ShardedModule, steps: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same on this rank, of what it holds."""
    return _trained(
        case._replace(model=model), lambda: model.train_step(*case.args, **case.kwargs), lambda loss: None, steps
    )


def _trained(
    case: Sample, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None], steps: int
) -> dict[str, Any]:
    optimizer, first = torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE, eps=EPS), {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward()
        backward(loss)
        first = first or {"loss": loss.detach()} | gradients(case.model)
        optimizer.step()
    return {"first": first, "last": {name: whole(x).detach().clone() for name, x in case.model.state_dict().items()}}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole ones, of the parameters that are here."""
    own = [(name, p) for name, p in model.named_parameters() if not isinstance(p, ParameterElsewhere)]
    return {name: whole(p.grad).clone() for name, p in own if p.grad is not None}


def issued_of(model: ShardedModule, case: Sample) -> Counter[Collective]:
    """What a step issues within the stages of this rank, between ranks of one stage."""
    trainer: Trainer = model._autopar.last
    with count_collectives(trainer.parts[0].loaded.mesh) as issued:
        model.train_step(*case.args, **case.kwargs)
    return Counter(one for one in issued if one.axes)


def train_under(jobs: Sequence[tuple[dict[str, Any], StagedPlan]]) -> list[dict[str, Any]]:
    """Train the model of each (options of `sample`, plan) on every rank: how far from one device, what was held and
    issued.
    """
    truths: dict[str, Any] = {}
    reports = []
    for options, plan in jobs:
        key = repr(options)
        if key not in truths:
            truths[key] = one_device(sample(**options), 2)
        case = sample(**options)
        model = under(plan, case)
        reports.append(compared(case, model, plan, truths[key]))
    return reports


def compared(case: Sample, model: ShardedModule, plan: StagedPlan, truth: Mapping[str, Any]) -> dict[str, Any]:
    rank = pipeline_mesh(device_mesh(plan.mesh.shape, plan.mesh.axis_names))[2]
    found = staged(case, model, 2)
    own = {name for name, p in model.named_parameters() if not isinstance(p, ParameterElsewhere)}
    expected = {when: {name: truth[when][name] for name in found[when]} for when in truth}
    assert found["first"].keys() == expected["first"].keys() == own & truth["first"].keys() | {"loss"}
    return {
        "rank": rank,
        "first": worst(found["first"], expected["first"], 1e-6),
        "last": worst(found["last"], expected["last"], LEARNING_RATE),
        "own": own,
        "state": set(found["last"]),
        "local": sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters()),
        "issued": issued_of(model, case),
        "planned": planned_of_rank(plan, rank),
    }
