"""Check every strategy of one call against the op itself, and the collectives it issues against those it declares."""

import itertools
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# the ranks of tests/sbp/simulate.py
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from autopar.ir.graph import Op
from autopar.sbp.candidates import strategies_of
from autopar.sbp.local_ops import LOCAL_OPS, local_target
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Signature, Strategy
from tests.sbp.rulecheck import Tensors, check_strategy, make_op

# method of a process group, since torch 2.13 and before -> kind
_SINCE = hasattr(ProcessLocalGroup, "all_gather_single")
KINDS = {
    "allreduce": "all_reduce",
    "all_gather_single" if _SINCE else "_allgather_base": "all_gather",
    "reduce_scatter_single" if _SINCE else "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single" if _SINCE else "alltoall_base": "all_to_all",
    "send": "permute",
}


def f64(*shape: int, grad: bool = True) -> torch.Tensor:
    """Random numbers of `shape`."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def exercise(target: str, *args: Any, num_ranks: int = 2, **kwargs: Any) -> set[str]:
    """Check every signature of the call on one axis; all must divide evenly. Returns them as text."""
    op, inputs = make_op(target, *args, **kwargs)
    for signature in signatures_of(op):
        check(op, Strategy((signature,)), (num_ranks,), inputs)
    return {str(signature) for signature in signatures_of(op)}


def exercise_mesh(
    target: str, *args: Any, roles: tuple[str, str], mesh_shape: tuple[int, ...] = (2, 2), **kwargs: Any
) -> int:
    """Check the strategies of the call whose axes take `roles`; returns how many there are."""
    op, inputs = make_op(target, *args, **kwargs)
    found = [
        strategy
        for strategy in strategies_of(op, mesh_shape)
        if tuple(_kind(sig) for sig in strategy.signatures) == roles
    ]
    for strategy in found:
        check(op, strategy, mesh_shape, inputs)
    return len(found)


def _kind(signature: Signature) -> str:
    """The role, "split" for a plain split, "" for what is whole or pending."""
    is_split = any(placement.is_split for placement in signature.inputs + signature.outputs)
    return signature.role or ("split" if is_split else "")


def check(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], inputs: Tensors) -> None:
    """AssertionError unless the strategy divides evenly, gives the op's numbers and issues on each rank just the
    collectives declared.
    """
    with record(mesh_shape) as issued:
        assert check_strategy(op, strategy, mesh_shape, inputs), (
            f"{op.target}: {strategy} does not divide evenly on {mesh_shape}"
        )
    has_role = any(signature.role for signature in strategy.signatures)
    declared = Counter(LOCAL_OPS[local_target(op.target)].collectives(op, strategy, mesh_shape) if has_role else ())
    for rank in issued.values():
        assert rank == declared, f"{op.target}: {strategy} declares {declared}, issued {rank}"
    assert issued or not declared, f"{op.target}: {strategy} declares {declared}, issued none"


@contextmanager
def record(mesh_shape: tuple[int, ...]) -> Iterator[dict[int, Counter[Collective]]]:
    """The collectives each thread issues."""
    issued: dict[int, Counter[Collective]] = defaultdict(Counter)
    places = list(itertools.product(*map(range, mesh_shape)))

    def recorder(name: str, real: Any) -> Any:
        def call(group: ProcessLocalGroup, *args: Any, **kwargs: Any) -> Any:
            members = [places[rank] for rank in dist.get_process_group_ranks(group)]
            axes = tuple(axis for axis, indices in enumerate(zip(*members)) if len(set(indices)) > 1)
            tensors = [
                x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor)
            ]
            size = max(x.numel() * x.element_size() for x in tensors)
            # private: the one way to know that autograd is running this thread's backward
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            issued[threading.get_ident()][Collective(KINDS[name], axes, size, phase)] += 1
            return real(group, *args, **kwargs)

        return call

    with mock.patch.multiple(
        ProcessLocalGroup, **{name: recorder(name, getattr(ProcessLocalGroup, name)) for name in KINDS}
    ):
        yield issued


def in_order(options: Iterable[Any]) -> list[int]:
    """Positions of the options that have no rows in a rank's own order, from and to which nothing is converted."""
    return [index for index, option in enumerate(options) if not re.search(r"[LE]\(", str(option))]


def combinations(**choices: Any) -> list[dict[str, Any]]:
    """All combinations of keyword choices."""
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]
