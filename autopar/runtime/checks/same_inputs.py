"""Whether the ranks were given the same batch, or parts of it as they said: compared by a digest in the first steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RankMismatch, warn
from autopar.runtime.local_batch import LocalBatch
from autopar.runtime.rank_agreement import gather, peers_alive
from autopar.runtime.run_program import on_device
from autopar.runtime.seeded_rng import peek_seed
from autopar.torch_compat import without_dispatch_modes

NUM_ENTRIES = 2**18  # of each tensor; of larger ones an evenly spaced sample
SEED = "torch's random state"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Named = Sequence[tuple[str, torch.Tensor]]


@dataclass
class InputCheck:
    """Compares the arguments of calls number 1, 2, 4, 8, ... on the ranks of `mesh`."""

    mesh: DeviceMesh
    parts: LocalBatch | None
    num_calls: int = 0

    def is_due(self) -> bool:
        """Count a call; whether it is one of those that are compared."""
        self.num_calls += 1
        return self.num_calls & (self.num_calls - 1) == 0

    def compare(self, arguments: Named, *, draws: bool) -> None:
        """RankMismatch on every rank if one was given other rows than it should be; if the model `draws`, also if its
        random state differs.
        """
        named = [(name, x) for name, x in arguments if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
        names = [name for name, _ in named] + [SEED] * draws
        if not names:
            return
        own = [digest(on_device(x, name, self.mesh.device_type)) for name, x in named]
        if draws:
            own.append(torch.tensor(peek_seed(), device=self.mesh.device_type))
        both = torch.stack([torch.stack(own), -torch.stack(own)])
        sharing, others = self._axes()
        self._reduce(both, sharing)
        if sharing:
            self._refuse(both, names, own)
        self._reduce(both, others)
        if draws and others:
            self._refuse(both[:, -1:], [SEED], own[-1:])
        if others and self.num_calls == 1:
            self._warn(both, named)

    def _axes(self) -> tuple[list[int], list[int]]:
        """The axes of the mesh along which rows are the same, and the others."""
        names = self.mesh.mesh_dim_names or ()
        is_other = [self.parts is not None and name in self.parts.axis_names for name in names]
        return [i for i in range(len(names)) if not is_other[i]], [i for i in range(len(names)) if is_other[i]]

    def _reduce(self, both: torch.Tensor, axes: Sequence[int]) -> None:
        with peers_alive(), without_dispatch_modes():
            for axis in axes:
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.mesh.get_group(axis))

    def _refuse(self, both: torch.Tensor, names: list[str], own: list[torch.Tensor]) -> None:
        """Raise if what was reduced is not the same on all ranks that it was reduced over."""
        largest, least = both.tolist()
        different = [i for i, (a, b) in enumerate(zip(largest, least)) if a != -b]
        if self.parts is not None:  # another group of ranks that share their rows may be at fault: all raise together
            different = sorted({i for found in gather(self.mesh, different) for i in found})
        if different:
            found = gather(self.mesh, int(own[different[0]]))
            rank = next((rank for rank, other in enumerate(found) if other != found[0]), 0)
            raise RankMismatch(self._message(names[different[0]], rank))

    def _message(self, name: str, rank: int) -> str:
        where = f"{name} on rank {rank} of the mesh differs from rank 0's at call {self.num_calls}"
        if name == SEED:
            return (
                f"{where}, and the model has random ops (dropout): call torch.manual_seed with the same seed on every"
                " rank and draw what only one rank needs from a torch.Generator of its own; check=False turns this off"
            )
        if self.parts is None:
            return (
                f"argument {where}: by default every rank gives the whole batch, the same on all. Give it so (one seed"
                " for every rank's sampler, no DistributedSampler), or compile with batch='local' if each rank gives"
                " its own part; autopar.compile(..., check=False) turns this comparison off"
            )
        return (
            f"argument {name} is not the same on ranks that share their rows, at call {self.num_calls}: with"
            f" batch={self.parts.axis_names} ranks that differ on other axes only give the same"
            " rows. Make the data loader's rank the place on those axes, or name in batch= all axes on which ranks have"
            " other rows; autopar.compile(..., check=False) turns this comparison off"
        )

    def _warn(self, both: torch.Tensor, named: Named) -> None:
        largest, least = both[:, : len(named)].tolist()
        has_rows = [x.ndim > 0 and x.numel() > 1 for _, x in named]
        parts = self.parts
        if (
            parts is not None
            and any(has_rows)
            and all(a == -b for a, b, is_part in zip(largest, least, has_rows) if is_part)
        ):
            warn(
                f"every rank gave the same rows, with batch={parts.axis_names}: the batch then has each of them"
                f" {parts.num_parts} times; give each rank its own part, or leave batch='global'"
            )


@torch.no_grad()
def digest(x: torch.Tensor) -> torch.Tensor:
    """62 bits that depend on each entry of `x`, or of a sample of `NUM_ENTRIES`, and its place; a scalar on its
    device.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.detach().reshape(-1)
    if x.numel() > NUM_ENTRIES:
        x = x[:: x.numel() // NUM_ENTRIES]
    bits = x.contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=x.device) * 0x9E3779B97F4A7C1 + 1
    return (bits * weights).sum() & (2**62 - 1)
