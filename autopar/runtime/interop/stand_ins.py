"""Stand-ins for the parameters of a compiled model until its first call plans it: DTensors in the memory of the
model's own, so that what a script writes to them is what will be sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.ir.export.meta_copy import bare
from autopar.ir.outline.held_beside import moved_along
from autopar.runtime.checks.replaced_tensors import mark_replaced
from autopar.runtime.dtensor_state import held, mark_stand_in, on_mesh, owners, put
from autopar.sbp.placement import I

Own = dict[str, torch.Tensor]  # FQN -> the model's own parameter, a tied one under all its names


def stand_in(module: nn.Module, mesh: DeviceMesh) -> Own:
    """Put stand-ins in place of the parameters of `module`, so that each can later become its part of the real one in
    place: FQN -> what was there.
    """
    places = owners(module)
    own: Own = {fqn: x for fqn, (owner, name) in places.items() if (x := owner._parameters.get(name)) is not None}
    made = {id(x): _stand_in(x, mesh) for x in own.values()}
    with moved_along(module):
        put(module, {fqn: made[id(x)] for fqn, x in own.items()})
    return own


def _stand_in(parameter: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    content = parameter.detach()
    content = content.clone() if content.is_inference() else content  # those require no gradient
    if not isinstance(content, DTensor):  # else of a module that was part of a compiled one
        # from_local would move the model to the device of the mesh
        like = on_mesh(bare(parameter).detach(), parameter, (I,) * mesh.ndim, mesh)
        content = DTensor(content, like._spec, requires_grad=False)
    return mark_stand_in(nn.Parameter(content, requires_grad=parameter.requires_grad))


def take_written(module: nn.Module, own: Own) -> None:
    """Make `own` what `module` has by now: stand-ins may have been given other memory, or parameters been set."""
    places = owners(module)
    for fqn in [fqn for fqn in own if fqn not in places or held(*places[fqn]) is None]:
        del own[fqn]
    found: Own = {}
    taken: dict[int, torch.Tensor] = {}
    for fqn, (owner, name) in places.items():
        if (now := owner._parameters.get(name)) is not None:
            if id(now) not in taken:
                taken[id(now)] = _taken(now, own.get(fqn), fqn)
            found[fqn] = taken[id(now)]
    own.update(found)


def _taken(now: nn.Parameter, before: torch.Tensor | None, fqn: str) -> torch.Tensor:
    """The parameter that `now` is or stands for; `before`: what it stood for."""
    if now is before:
        return now
    content = _content(now)
    if before is not None and _is_one(content, _content(before)):
        return before.requires_grad_(now.requires_grad)
    if before is not None:
        mark_replaced(before, fqn)
    is_stand_in = isinstance(now, DTensor) and all(placement.is_replicate() for placement in now.placements)
    return nn.Parameter(content, requires_grad=now.requires_grad) if is_stand_in else now


@torch.no_grad()
def _content(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor in memory: of a DTensor this rank's part, which for a stand-in is all."""
    return x.to_local() if isinstance(x, DTensor) else x


def _is_one(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same memory; those on meta have none."""
    is_like = (x.device, x.dtype, x.shape) == (y.device, y.dtype, y.shape)
    return is_like and (x.is_meta or x.data_ptr() == y.data_ptr())


@contextmanager
def own_parameters(module: nn.Module, own: Own, mesh: DeviceMesh) -> Iterator[None]:
    """`module` with its own parameters in place of the stand-ins, which afterwards stand for what it has then."""
    take_written(module, own)
    places = owners(module)
    standing = {fqn: held(*places[fqn]) for fqn in own}
    put(module, own)
    try:
        yield
    finally:
        made: dict[int, torch.Tensor | None] = {}
        used = set[int]()
        for fqn in own:
            if (now := held(*places[fqn])) is None:
                continue
            if id(now) not in made:
                made[id(now)] = _standing_for(now, standing[fqn], used, mesh)
            own[fqn], standing[fqn] = now, made[id(now)]
        put(module, standing)


def _standing_for(now: torch.Tensor, before: torch.Tensor | None, used: set[int], mesh: DeviceMesh) -> torch.Tensor:
    """The stand-in of `now`: the object that stood `before` in its place, unless that is `used` for what it was tied
    to.
    """
    if before is None or id(before) in used:
        return _stand_in(now, mesh)
    used.add(id(before))
    if not _is_one(_content(now), _content(before)):
        torch.utils.swap_tensors(before, _stand_in(now, mesh))
    return before
