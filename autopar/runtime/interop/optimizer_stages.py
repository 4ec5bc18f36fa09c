"""State of one device's optimizer with stages, where a rank's optimizer has the parameters of its own stages."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.interop.full_state import plain_copy
from autopar.runtime.interop.place_on_one_device import Place, place_on_one_device

BY_NAME = (
    "make the optimizers on one device and here of names and parameters, such as AdamW(model.named_parameters()), whose"
    " state goes by name, or save get_optimizer_state_dict(model, optimizer,"
    " options=StateDictOptions(flatten_optimizer_state_dict=True)) by torch.distributed.checkpoint"
)


@functools.cache
def load_own_stages() -> None:
    """From now on `load_state_dict` of an optimizer with parameters of some stages takes what is theirs from a state of
    all parameters.
    """
    load: Callable[..., None] = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_own(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        load(self, _of_own_stages(self, state_dict))

    torch.optim.Optimizer.load_state_dict = load_own  # type: ignore[method-assign]  # torch has no hook for all


def _of_own_stages(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of the parameters that `optimizer` has, of a state of all of the model's; any other as it is."""
    groups, given = optimizer.param_groups, state["param_groups"]
    marked = [place for group in groups for x in group["params"] if (place := place_on_one_device(x)) is not None]
    sizes, given_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in given]
    if not marked or sizes == given_sizes or len(sizes) != len(given_sizes):
        return state
    counts = {count for place in marked for count in place.number}
    taken = [_positions(group["params"], other, counts) for group, other in zip(groups, given)]
    if any(positions is None for positions in taken):
        raise AutoparError(
            f"the loaded state has groups of {given_sizes} parameters, this rank's optimizer, which has parameters of"
            f" its own stages only, groups of {sizes}: by number, state of one group of all the model's parameters or"
            f" of all that are trained ({' or '.join(map(str, sorted(counts)))}) can be told apart, and this is not;"
            f" {BY_NAME}"
        )
    kept = [
        {key: _chosen(x, positions or ()) if key in ("params", "param_names") else x for key, x in group.items()}
        for group, positions in zip(given, taken)
    ]
    own = {number for group in kept for number in group["params"]}
    return state | {"state": {key: x for key, x in state["state"].items() if key in own}, "param_groups": kept}


def _chosen(items: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [items[position] for position in positions]


def _positions(own: Sequence[torch.Tensor], given: Mapping[str, Any], counts: set[int]) -> Sequence[int] | None:
    """Where in a group of a state of all parameters those of `own` are; None if that is not known."""
    marks = [place_on_one_device(x) for x in own]
    if names := given.get("param_names"):
        found = [names.index(mark.fqn) if mark is not None and mark.fqn in names else None for mark in marks]
    elif (count := len(given["params"])) in counts:
        found = [mark.number.get(count) if mark is not None else None for mark in marks]
    else:
        return None
    return None if None in found else [position for position in found if position is not None]


def whole_optimizer_state(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, device: torch.device, *, is_kept: bool
) -> dict[str, Any]:
    """The state of the optimizers of all ranks of the pipeline's `group`, numbered as on one device, with the names of
    the parameters; each tensor in parts is sent by the first rank that has it, from and to `device`.
    """
    marks = {x: place_on_one_device(x) for each in optimizer.param_groups for x in each["params"]}
    own = {mark.fqn: optimizer.state[x] for x, mark in marks.items() if mark is not None and x in optimizer.state}
    groups = [[_numbered(marks[x]) for x in each["params"]] for each in optimizer.param_groups]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, (groups, {fqn: _report(x) for fqn, x in own.items()}), group=group)
    _check_groups([each for each, _ in reports])
    states: dict[str, dict[str, Any]] = {}
    for fqn in dict.fromkeys(fqn for _, reported in reports for fqn in reported):
        holder = next(rank for rank, (_, reported) in enumerate(reports) if fqn in reported)
        sent = _sent(own.get(fqn, {}), reports[holder][1][fqn], holder, group, device)
        states[fqn] = {key: plain_copy(x, is_kept=is_kept) if isinstance(x, torch.Tensor) else x for key, x in sent}
    names = [_merged([each[number] for each, _ in reports]) for number in range(len(groups))]
    numbers = {fqn: number for number, fqn in enumerate(fqn for each in names for fqn in each)}
    merged = [
        {key: x for key, x in each.items() if key not in ("params", "param_names")}
        | {"params": [numbers[fqn] for fqn in fqns], "param_names": fqns}
        for each, fqns in zip(optimizer.state_dict()["param_groups"], names)
    ]
    return {"state": {numbers[fqn]: x for fqn, x in states.items()}, "param_groups": merged}


def _numbered(place: Place | None) -> tuple[int, str]:
    """(number among all parameters, FQN); (-1, "") of a tensor that is no parameter of the model."""
    return (-1, "") if place is None else (place.number[max(place.number)], place.fqn)


def _check_groups(of_ranks: Sequence[Sequence[Sequence[tuple[int, str]]]]) -> None:
    """AutoparError on every rank unless it is known what the groups are on one device."""
    for number, groups in enumerate(of_ranks):
        if len(groups) != len(of_ranks[0]):
            raise AutoparError(
                f"the optimizer has {len(of_ranks[0])} groups on rank 0 of the pipeline and {len(groups)} on rank"
                f" {number}; expected the same groups on every rank, of parameters or of none"
            )
        if any((-1, "") in group for group in groups):
            raise AutoparError(
                f"the optimizer of rank {number} of the pipeline has parameters that are none of this model's: make it"
                " of model.parameters() after autopar.compile"
            )
        if any(list(group) != sorted(group) for group in groups):
            raise AutoparError(
                f"the parameters of a group of the optimizer, on rank {number} of the pipeline, are not in the order of"
                f" the model, so that it is not known how those of all stages follow one another; {BY_NAME}"
            )


def _merged(parts: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """The parameters of a group on all ranks, tied ones once."""
    return [fqn for _, fqn in sorted({item for part in parts for item in part})]


def _report(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter as others are told it: shape and dtype of what lies in parts."""
    return {key: _Like(x.shape, x.dtype) if isinstance(x, DTensor) else x for key, x in state.items()}


@dataclass(frozen=True)
class _Like:
    """A whole tensor that is sent."""

    shape: torch.Size
    dtype: torch.dtype


def _sent(
    mine: Mapping[str, Any], reported: Mapping[str, Any], holder: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Any]]:
    """The state of a parameter whole, which rank `holder` of the group has `reported`, on every rank."""
    for key, like in reported.items():
        if not isinstance(like, _Like):
            yield key, like
            continue
        part = mine.get(key)
        x = (
            part.full_tensor()
            if isinstance(part, DTensor)
            else torch.empty(like.shape, dtype=like.dtype, device=device)
        )
        x = x.contiguous()
        dist.broadcast(x, group=group, group_src=holder)
        yield key, x
