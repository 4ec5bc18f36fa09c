"""How an op is run on shards when running the op itself on them would be wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Op
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


@dataclass(frozen=True)
class LocalOp:
    """`run(*args, **kwargs, **roles)` takes the op's own arguments with local tensors, and for every role that some
    mesh axis takes the keyword `role=(Axis, ...)`, outermost axis first. `collectives(op, strategy, mesh_shape)` lists
    exactly the collectives that `run` and its backward issue (empty on axes of size 1).
    """

    run: Callable[..., Any]
    collectives: Callable[[Op, Strategy, tuple[int, ...]], tuple[Collective, ...]]
