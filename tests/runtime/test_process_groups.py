"""Groups of a mesh of some ranks: their members may know different numbers of groups."""

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.process_groups import joint_group
from autopar.torch_compat import num_groups
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


def sums_of_rows() -> list[float]:
    """The sum over each half of the ranks, by two groups of the same ranks."""
    mesh = device_mesh((2, 2), ("a", "b"))["b"]
    if dist.get_rank() in (0, 3):  # groups that the other half's member does not know
        for _ in range(2):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    before, sums = num_groups(), []
    for copy in (1, 2):
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=joint_group(mesh, (0,), copy=copy))
        sums.append(x.item())
    assert num_groups() >= before + 2
    return sums


def test_members_that_know_different_numbers_of_groups_make_one(ranks4: Ranks) -> None:
    assert ranks4.run(sums_of_rows, timeout_s=60.0) == [[1.0, 1.0]] * 2 + [[5.0, 5.0]] * 2
