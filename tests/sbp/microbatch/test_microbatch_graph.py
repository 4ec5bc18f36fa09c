"""Microbatches of a step, added up, give the numbers of the whole batch."""

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import MicrobatchError
from autopar.ir.folding.fold import fold
from autopar.ir.interpret import run_constants
from autopar.ir.run_graph import run
from autopar.ir.split_stages import cut, cut_points
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.planner.layouts.search_meshes import make_plan
from autopar.sbp.local_ops.grouped_mm import TARGETS
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts, microbatched
from autopar.sbp.placement import S
from tests import zoo
from tests.ir.compare import bindings
from tests.ir.test_split_stages import run_stages, t5
from tests.sbp.microbatch.run_microbatches import slice_of, step


def check(model, args, kwargs, counts=(1, 2, 4, 8), tolerance=1e-12):
    """Losses, other outputs and the gradients of parameters, against autograd on the model itself."""
    reference = copy.deepcopy(model)
    results = [x for x in torch.utils._pytree.tree_leaves(reference(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    sum(x for x in results if x.ndim == 0 and x.requires_grad).backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    graph = trace(model, args, kwargs)
    for count in counts:
        micro = microbatched(graph, count)
        model.zero_grad()
        found = [x for x in step(micro, bindings(graph, model, args, kwargs)) if isinstance(x, torch.Tensor)]
        torch.testing.assert_close(found, [x.detach() for x in results], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            {n: p.grad for n, p in model.named_parameters()}, grads, rtol=tolerance, atol=tolerance
        )
        assert_alone(micro)
    return micro


def assert_alone(micro):
    """No op of a microbatch has the size of the whole batch baked in: shapes are what the ops give on local inputs
    (`run` would fail), and all values but inputs have one producer."""
    made = [value.name for op in micro.graph.ops for value in op.outputs] + [
        item.value.name for item in micro.graph.inputs
    ]
    assert len(made) == len(set(made))


class WithLoss(nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x, target):
        return self.loss(self.model(x), target)


def ignoring(labels):
    """Labels of which most of the first samples' are ignored, fewer of the others': microbatches have unequal numbers
    of tokens.
    """
    labels = labels.clone()
    for sample in range(len(labels)):
        labels[sample, : max(len(labels[0]) - 1 - sample, 0)] = -100
    return labels


@pytest.fixture
def exact(monkeypatch):
    """Losses of transformers are float32 by `logits.float()`; then equality is that of float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize(
    "offset",
    [lambda x: 2 - 2 * x, lambda x: 1 + x, lambda x: torch.rsub(x, 3, alpha=2) - 0.5, lambda x: (x - 0.25) / 3],
)
def test_numbers_beside_the_mean_of_a_loss_are_counted_once(offset):
    model = WithLoss(nn.Linear(4, 3).double(), lambda y, target: offset((y * target).sum(1).mean()))
    check(model, (torch.randn(8, 4).double(), torch.randn(8, 3).double()), {})


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_language_models_with_ignored_labels(name, exact):
    case = t5() if name == "t5" else zoo.build(name)
    kwargs = case.kwargs | {"labels": ignoring(case.kwargs["labels"])}
    case.model.config.use_cache = False
    micro = check(case.model, case.args, kwargs)
    assert len(micro.counts) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_padding_masks(name, exact):
    case = t5() if name == "t5" else zoo.build(name)
    mask = torch.ones(zoo.BATCH, zoo.SEQUENCE, dtype=torch.long)
    for sample in range(zoo.BATCH):
        mask[sample, zoo.SEQUENCE - sample // 2 :] = 0
    check(case.model, case.args, case.kwargs | {"attention_mask": mask}, counts=(2, 8))


def test_classes_of_the_last_token():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {
        "vocab_size": zoo.VOCABULARY,
        "n_positions": zoo.SEQUENCE,
        "n_embd": zoo.HIDDEN,
        "n_layer": 1,
        "n_head": zoo.HEADS,
    }
    drops = {
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, **drops, use_cache=False, num_labels=4)).double()
    tokens = torch.randint(1, zoo.VOCABULARY, (zoo.BATCH, zoo.SEQUENCE))
    tokens[2, 4:] = 0
    check(model, (), {"input_ids": tokens, "labels": torch.randint(4, (zoo.BATCH,))}, counts=(2, 8))


def test_vit(exact):
    case = zoo.build("vit")
    check(case.model, case.args, case.kwargs)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_experts_sort_the_tokens_of_a_microbatch(name):
    """Tokens sorted by expert and brought back: each comes out as from the whole batch."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": zoo.VOCABULARY, "hidden_size": zoo.HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": zoo.SEQUENCE}
    experts = {
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 2,
    }
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{name}Config")(**sizes, **experts, **ends, use_cache=False)
    model = getattr(transformers, f"{name}ForCausalLM")(config)  # grouped products are not for float64
    tokens = torch.randint(zoo.VOCABULARY, (zoo.BATCH, zoo.SEQUENCE))
    micro = check(model, (), {"input_ids": tokens, "labels": ignoring(tokens)}, counts=(2, 8), tolerance=1e-5)
    assert any(op.target in TARGETS for op in micro.graph.ops), "experts were called one by one"


LOSSES = {
    "mean": lambda logits, target: logits.mean(),
    "mean of a dim": lambda logits, target: logits.mean(0).sum(),
    "sum": lambda logits, target: logits.square().sum(),
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "l1 sum": lambda logits, target: F.l1_loss(logits, target, reduction="sum"),
    "kl": lambda logits, target: F.kl_div(logits.log_softmax(1), target.softmax(1), reduction="batchmean"),
    "bce": lambda logits, target: F.binary_cross_entropy_with_logits(logits, target.sigmoid()),
    "cross entropy": lambda logits, target: F.cross_entropy(logits, target.argmax(1)),
    "cross entropy of probabilities": lambda logits, target: F.cross_entropy(logits, target.softmax(1)),
    "smoothed": lambda logits, target: F.cross_entropy(logits, target.argmax(1), label_smoothing=0.1),
    "ignoring a class": lambda logits, target: F.cross_entropy(logits, target[:, :2].argmax(1), ignore_index=1),
    "nll": lambda logits, target: F.nll_loss(logits.log_softmax(1), target.argmax(1)),
    "none": lambda logits, target: F.cross_entropy(logits, target.argmax(1), reduction="none").mean(),
    "two": lambda logits, target: F.mse_loss(logits, target) + 0.1 * F.cross_entropy(logits, target.argmax(1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    torch.manual_seed(0)
    model = WithLoss(zoo.MLP(), LOSSES[name]).double()
    check(model, (torch.randn(8, zoo.HIDDEN).double(), torch.randn(8, zoo.CLASSES).double()), {})


def test_stages_of_a_microbatch_in_turn():
    """Cut after it is made for microbatches, a graph does the same: the tokens' count enters on the stage of the
    loss.
    """
    case = zoo.build("gpt2")
    graph = trace(case.model, case.args, case.kwargs)
    micro = microbatched(graph, 4)
    stages = cut(micro.graph, cut_points(fold(micro.graph), micro.graph))
    count = micro.counts[0].input.value.name
    assert [count in stage.graph.arguments for stage in stages] == [False, False, False, True]
    inputs = bindings(graph, case.model, case.args, case.kwargs)
    own = {name: slice_of(x, micro.placements[name], 4, 1) for name, x in inputs.items()} | {
        count: torch.tensor(1 / 56)
    }
    own |= {name: slice_of(x, micro.placements[name], 4, 1) for name, x in run_constants(micro.graph, "cpu").items()}
    expected, _ = run(micro.graph, own)
    found, _ = run_stages(stages, own)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_microbatch_can_be_planned(name):
    case = t5() if name == "t5" else zoo.build(name)
    graph = microbatched(trace(case.model, case.args, case.kwargs), 2).graph
    plan = make_plan(graph, parse_mesh("2x2"), load_cluster("v100"))
    assert set(plan.assignment.strategies) == {op.name for op in graph.ops}


def test_three_microbatches():
    model = WithLoss(zoo.MLP(), F.mse_loss).double()
    check(model, (torch.randn(6, zoo.HIDDEN).double(), torch.randn(6, zoo.CLASSES).double()), {}, counts=(3, 6))


class Weighted(nn.Module):
    """Class weights in a buffer; a regularisation that is the same for every microbatch is added to the loss."""

    def __init__(self):
        super().__init__()
        self.model = zoo.MLP()
        self.register_buffer("weight", torch.rand(zoo.CLASSES))

    def forward(self, x, target):
        loss = F.cross_entropy(self.model(x), target, weight=self.weight)
        return loss + 0.1 * self.model.head.weight.square().sum(), self.model.head.bias.square().sum()


def test_class_weights_and_regularisation():
    torch.manual_seed(0)
    target = torch.randint(zoo.CLASSES, (8,))
    target[[0, 1, 5]] = -100
    micro = check(Weighted().double(), (torch.randn(8, zoo.HIDDEN).double(), target), {})
    kinds = {item.kind for item in micro.counts[0].graph.inputs}
    assert kinds == {"argument", "buffer"}


class Masked(nn.Module):
    """A mask made in the forward, for the whole batch or one for all; a learned token for each sample."""

    def __init__(self, is_for_each):
        super().__init__()
        self.is_for_each = is_for_each
        self.project, self.token = nn.Linear(16, 48), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        if self.is_for_each:
            lengths = torch.arange(x.shape[0])[:, None, None, None]
            mask = mask.expand(x.shape[0], 1, size, size) & (torch.arange(size) <= lengths)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


@pytest.mark.parametrize("is_for_each", [False, True])
def test_masks_that_are_constants(is_for_each):
    model, x = Masked(is_for_each).double(), torch.randn(8, 6, 16).double()
    micro = check(model, (x,), {})
    placed = [micro.placements[item.value.name] for item in micro.graph.of_kind("constant")]
    assert (S(0) in placed) == is_for_each


def test_eval_batch_norm_is_allowed_and_training_is_not():
    case = zoo.build("resnet")
    model = WithLoss(case.model, F.cross_entropy)
    args = (*case.args, torch.randint(zoo.CLASSES, (zoo.BATCH,)))
    graph = trace(model, args, {})
    with pytest.raises(MicrobatchError, match=r"batch_norm.*model\.stem\.1.*statistics.*eval"):
        microbatched(graph, 2)
    assert microbatch_counts(graph) == (1,)
    assert microbatched(graph, 1).graph == graph
    check(model.eval(), args, {})


def test_counts_that_do_not_divide():
    model = WithLoss(zoo.MLP(), F.mse_loss)
    graph = trace(model, (torch.randn(12, zoo.HIDDEN), torch.randn(12, zoo.CLASSES)), {})
    assert microbatch_counts(graph) == (1, 2, 3, 4, 6, 12)
    for count, nearest in ((5, "4, 6"), (24, "12"), (0, "1"), (8, "6, 12")):
        with pytest.raises(MicrobatchError, match=rf"batch of 12 .* {count} .*: {nearest}$"):
            microbatched(graph, count)


def routed(x, w, between=lambda rows: rows, after=lambda rows, order: rows):
    """Rows sorted by a key, multiplied one by one and put back."""
    _, order = (x @ w).argmax(1).sort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return after(between(x[order]) @ w, order)[back].square().sum()


REFUSED = {
    "a sum over sorted rows": (lambda x, w: routed(x, w, between=lambda rows: rows.cumsum(0)), "sort"),
    "sorted rows beside others": (lambda x, w: routed(x, w, between=lambda rows: rows + x), "sort"),
    "rows sorted twice": (lambda x, w: routed(x, w, after=lambda rows, order: rows[order]), "sort"),
    "the order itself": (lambda x, w: routed(x, w, after=lambda rows, order: rows * order[:, None]), "sort"),
    "rows by place": (lambda x, w: routed(x, w, between=lambda rows: rows * torch.arange(8)[:, None]), "sort"),
    "products of means": (lambda x, w: ((x @ w).mean(0) * (x @ w).square().mean(0)).sum(), "whole batch"),
    "softmax over the batch": (lambda x, w: (x @ w).softmax(0).square().sum(), "softmax"),
    "contrastive": (lambda x, w: ((x @ w) @ (x @ w).T).logsumexp(1).sum(), "matmul|mm|transpose|permute"),
    "norm of a mean": (lambda x, w: (x @ w).mean(0).norm(), "norm"),
    "weights of targets from parameters": (
        lambda x, w: F.cross_entropy(x @ w, (x @ w).detach().argmax(1), torch.ones(16)),
        "parameter w",
    ),
    "cumsum": (lambda x, w: (x @ w).cumsum(0).sum(), "cumsum"),
}


class Refused(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(16, 16)), function

    def forward(self, x):
        return self.function(x, self.w)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_batch_is_refused(name):
    function, text = REFUSED[name]
    with pytest.raises(MicrobatchError, match=text):
        microbatched(trace(Refused(function), (torch.randn(8, 16),), {}), 2)


def test_sorted_rows_that_are_put_back():
    model = Refused(routed).double()
    check(model, (torch.randn(8, 16).double(),), {})
    check(Refused(lambda x, w: routed(x, w, between=torch.sin)).double(), (torch.randn(8, 16).double(),), {})


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x.square().sum()


def test_buffers_that_are_written_are_refused():
    with pytest.raises(MicrobatchError, match="calls"):
        microbatched(trace(Counting(), (torch.randn(8, 4),), {}), 2)


def test_float16_sums_are_refused():
    model = WithLoss(nn.Linear(4, 4), F.cross_entropy).half()
    with pytest.raises(MicrobatchError, match="float16"):
        microbatched(trace(model, (torch.randn(8, 4).half(), torch.zeros(8, dtype=torch.long)), {}), 2)


def test_low_precision_losses_keep_their_type():
    model = WithLoss(nn.Linear(4, 4), F.cross_entropy).bfloat16()
    check(model, (torch.randn(8, 4).bfloat16(), torch.randint(4, (8,))), {}, counts=(2, 4), tolerance=5e-2)


def test_random_ops_that_are_the_same_for_all_samples():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 16))

        def forward(self, x):
            return F.dropout(x + F.dropout(self.positions, 0.5), 0.5).square().mean()

    micro = microbatched(trace(Drops(), (torch.randn(8, 4, 16),), {}), 2)
    assert micro.alike == ("dropout",)


def test_many_layers_take_no_time(monkeypatch):
    monkeypatch.setattr(zoo, "LAYERS", 40)
    case = zoo.build("llama")
    graph = trace(case.model, case.args, case.kwargs)
    start = time.process_time()
    microbatched(graph, 4)
    assert time.process_time() - start < 1.5
