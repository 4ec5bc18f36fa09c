"""What a user sees of a model that cannot be traced: the error with its remedy, and lines of his own."""

import traceback
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from autopar.errors import TraceError
from autopar.ir.export.run_export import export
from autopar.ir.trace import trace


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if super().forward(x).sum() > 0 else -x


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x @ x.new_zeros(5, 5)
        except RuntimeError as error:
            raise KeyError("no such weight") from error


class Hooked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y.register_hook(lambda grad: 3 * grad)
        return y


class Jacobian(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(super().forward))(x)


def raised(model: nn.Module) -> TraceError:
    with pytest.raises(TraceError) as caught:
        export(model, (torch.ones(2, 3, requires_grad=True),), {})
    return caught.value


@pytest.mark.parametrize("model", [Branches(3, 3), Hooked()], ids=["branch", "refusal"])
def test_a_cause_that_says_nothing_new_is_not_shown(model: nn.Module) -> None:
    error = raised(Around(model))
    assert str(error).startswith("test_run_export.py:")
    shown = "".join(traceback.format_exception(error))
    assert "The above exception was the direct cause" not in shown and shown.count(str(error)) == 1


def test_an_error_about_torchs_own_objects_has_a_remedy() -> None:
    assert "transforms of torch.func in the model are not " in str(raised(Jacobian(3, 3)))


def test_the_cause_is_shown_in_the_users_own_lines() -> None:
    error = raised(Around(Fails()))
    assert "KeyError: 'no such weight'" in str(error)
    causes = [error.__cause__, error.__cause__.__cause__]
    assert [type(cause) for cause in causes] == [KeyError, RuntimeError]
    names = [[frame.name for frame in traceback.extract_tb(cause.__traceback__)] for cause in causes]
    assert names == [["forward", "forward"], ["forward"]]
    assert {frame.filename for cause in causes for frame in traceback.extract_tb(cause.__traceback__)} == {__file__}


class Flexible(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None, None]
        return self.attend(x, x, x)


def _causal(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _masked(*qkv: torch.Tensor, size: int = 2, **options: Any) -> torch.Tensor:
    mask = create_block_mask(_causal, None, None, size, size, device="cpu", **options)
    return flex_attention(*qkv, block_mask=mask)


@pytest.mark.parametrize("attend", [flex_attention, _masked, torch.compile(flex_attention, backend="eager")])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_flex_attention_is_one_op_however_it_is_called(attend: Callable[..., Any], needs_gradient: bool) -> None:
    original = flex_attention.__code__
    program = export(Flexible(attend), (torch.ones(2, 3, requires_grad=needs_gradient),), {})
    called = [node for node in program.graph.nodes if "flex_attention" in str(node.target)]
    assert [str(node.target) for node in called] == ["autopar.flex_attention.default"]
    assert flex_attention.__code__ is original


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (partial(_masked, size=4), "the BlockMask is of 4 queries and 4 keys"),
        pytest.param(
            partial(_masked, compute_dq_write_order=True),
            "order of writes",
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch has no such argument until 2.12"),
        ),
        (lambda *qkv: flex_attention(*qkv, return_aux=AuxRequest(max_scores=True)), "no largest scores"),
        (lambda q, k, v: flex_attention(q, k[:, :, :, :2], v), "head sizes do not fit"),
        (lambda q, k, v: flex_attention(q.expand(1, 3, 2, 3), k, v), "enable_gqa=True"),
    ],
)
def test_flex_attention_that_cannot_be_kept_is_refused_by_name(attend: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=rf"test_run_export.py:\d+.*flex_attention.*{message}|BlockMask.*{message}"):
        export(Flexible(attend), (torch.ones(2, 3, requires_grad=True),), {})


class Task(Enum):
    SINGLE = 1
    DOUBLE = 2


class Asked(nn.Module):
    def forward(self, x: torch.Tensor, task: Task, *more: Any) -> dict[str, Any]:
        assert all(isinstance(each, (torch.dtype, torch.device, bytes, complex)) for each in more)
        out = (x + x if task is Task.DOUBLE else x).to(more[0])
        return {"out": out, "dtype": out.dtype, "device": out.device, "more": more}


@pytest.mark.parametrize(("task", "num_sums"), [(Task.SINGLE, 0), (Task.DOUBLE, 1)])
def test_constants_that_torch_does_not_take_reach_the_forward_and_come_out(task: Task, num_sums: int) -> None:
    more = torch.float64, torch.device("cpu"), b"x", 2j
    graph = trace(Asked(), (torch.ones(2), task, *more), {})
    assert [op.target for op in graph.ops].count("aten.add.Tensor") == num_sums
    assert graph.arguments[1:] == (task, *more)
    assert graph.outputs[1:] == (torch.float64, torch.device("cpu"), *more)
