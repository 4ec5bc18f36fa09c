"""Parts of the batch on a mesh with axes of one rank, as a run on one device has it."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from autopar.runtime.local_batch import LocalBatch, local_batch


def mesh(**sizes: int) -> Any:
    return cast(Any, SimpleNamespace(mesh_dim_names=tuple(sizes), mesh=torch.zeros(*sizes.values())))


def test_an_axis_of_one_rank_splits_no_rows() -> None:
    assert local_batch(mesh(dp=1), ("dp",)) is None
    assert local_batch(mesh(dp=1, tp=4), "local") is None
    assert local_batch(mesh(node=1, dp=4), ("node", "dp")) == LocalBatch(("dp",), 4)
    assert local_batch(mesh(dp=2, tp=2), "local") == LocalBatch(("dp",), 2)
