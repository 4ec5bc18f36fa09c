"""Outputs of a call are plain and whole whatever the plan; `outputs="sharded"` leaves them as the plan has them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.sbp.placement import format_layout
from autopar.verify.count_collectives import count_collectives
from tests.journey.case import DP, FREE
from tests.journey.runs import Ranked
from tests.workers import Ranks, device_mesh

VOCABULARY = 1024
SPLIT_HEAD = {"head.weight": "S(0)S(0)"}


class Scored(nn.Module):
    """Logits; given labels the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None):
        logits = self.head(self.inner(x).relu())
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


def example() -> tuple[Scored, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Scored().double(), torch.randn(8, 16).double(), torch.randint(VOCABULARY, (8,))


def of_loss_outside(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    logits = model(x)
    F.cross_entropy(logits, labels).backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [logits.detach(), *gradients]


def train_with_the_loss_outside(is_planned_at_once: bool) -> list[str]:
    """The layouts of outputs in the plan; whole plain logits, and gradients, are one device's."""
    model, x, labels = example()
    sharded = autopar.compile(
        copy.deepcopy(model),
        device_mesh((2, 2), ("a", "b")),
        cluster="cpu",
        pins=SPLIT_HEAD,
        args=(x,) if is_planned_at_once else None,
    )
    found, expected = of_loss_outside(sharded, x, labels), of_loss_outside(model, x, labels)
    assert type(found[0]) is torch.Tensor
    torch.testing.assert_close(found, expected)
    return [format_layout(layout) for layout in sharded.plan.assignment.outputs.values()]


@pytest.mark.multirank
def test_a_loss_outside_the_model_takes_whole_outputs(ranks4: Ranks) -> None:
    planned_at_once = ranks4.run(train_with_the_loss_outside, True)
    assert planned_at_once[0] != ["BB"], "the plan splits the logits: the call gathers them"
    assert ranks4.run(train_with_the_loss_outside, False) == [["BB"]] * 4, "the plan of a call has them whole"


def gathered_by(way: str) -> tuple[list[int], str, list[str]]:
    """Bytes of the gathers of a step, the kind of the logits, and what `explain` says of outputs."""
    model, x, labels = example()
    mesh = device_mesh((2, 2), ("a", "b"))
    outputs = "sharded" if way == "sharded" else "whole"
    sharded = autopar.compile(
        model, mesh, cluster="cpu", pins=SPLIT_HEAD, args=(x, labels), outputs=outputs, check=False
    )
    with count_collectives(mesh) as issued:
        found = sharded.train_step(x, labels) if way == "train_step" else sharded(x, labels)[1]
    lines = [line for line in sharded.plan.explain().splitlines() if "model(...) gathers" in line]
    return [one.num_bytes for one in issued if one.kind == "all_gather"], type(found).__name__, lines


@pytest.mark.multirank
def test_only_a_call_that_gives_whole_outputs_gathers_them(ranks4: Ranks) -> None:
    whole, kind, lines = ranks4.run(gathered_by, "call")[0]
    assert kind == "Tensor"
    assert len(lines) == 1 and "a split output" in lines[0] and "64 KiB" in lines[0]
    for way, expected in (("train_step", "Tensor"), ("sharded", "DTensor")):
        gathers, kind, _ = ranks4.run(gathered_by, way)[0]
        assert whole[: len(gathers)] == gathers and whole[len(gathers) :][-1:] == [8 * VOCABULARY * 8]
        assert kind == expected


def memory_for_whole_outputs() -> list[str]:
    """What planning says of a limit that whole logits exceed, and the layout with which split ones fit it."""
    mesh, said = device_mesh((4,), ("a",)), []
    limit = 1.8e6  # whole, the logits are 2 MB
    for outputs in ("whole", "sharded"):
        model, x = nn.Linear(16, 64), torch.zeros(8192, 16)
        sharded = autopar.compile(
            model, mesh, cluster="free-links", memory_limit_bytes=limit, outputs=outputs, num_microbatches=1
        )
        try:
            with torch.no_grad():
                said.append(type(sharded(x)).__name__)
        except autopar.AutoparError as error:
            said.append(str(error))
    return said


@pytest.mark.multirank
def test_outputs_too_large_to_be_whole_are_named_with_the_remedy(ranks4: Ranks) -> None:
    refused, kind = ranks4.run(memory_for_whole_outputs)[0]
    assert 'outputs="sharded"' in refused and "bytes" in refused
    assert kind == "DTensor"


def test_another_word_for_outputs_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match='outputs= expects "whole" or "sharded", found \'plain\''):
        autopar.compile(nn.Linear(2, 2), 1, outputs="plain")


def hook_on_logits(setting: str) -> str:
    """What a rank is told that hooks the gradient of logits of which the model computes its loss; "" if the hook sees
    the gradient that it has on one device.
    """
    model, x, labels = example()
    run, seen = Ranked(setting), list[torch.Tensor]()
    with run.planned():
        sharded = run.compile(copy.deepcopy(model), args=(x, labels))
    for one in (model, sharded):
        loss, logits = one(x, labels)
        try:
            logits.register_hook(seen.append)
        except autopar.AutoparError as error:
            return str(error)
        loss.backward()
    torch.testing.assert_close(seen[0], seen[1])
    return ""


@pytest.mark.multirank
def test_a_hook_on_what_is_gathered_and_read_in_parts_is_refused(ranks4: Ranks) -> None:
    assert all("full backward hook" in text for text in ranks4.run(hook_on_logits, DP))
    assert ranks4.run(hook_on_logits, FREE) == [""] * 4
