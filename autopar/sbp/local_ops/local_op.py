"""`LocalOp`: the implementation of an op on shards for signatures under which the op itself would be wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Op
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy


@dataclass(frozen=True)
class LocalOp:
    """An implementation of an op on local tensors, and the list of its collectives.

    `run(*args, **kwargs, **roles)` takes the op's arguments with local tensors, and for every role that a mesh axis
    takes the keyword `role=(Axis, ...)`, outermost axis first. `collectives(op, strategy, mesh_shape)` lists exactly
    the collectives that `run` and its backward issue; axes of size 1 issue none. `uneven_roles`: those of which parts
    may differ in size; `run` then takes `role_part=(size of the dim, unit, whether in shares)` too.
    """

    run: Callable[..., Any]
    collectives: Callable[[Op, Strategy, tuple[int, ...]], tuple[Collective, ...]]
    uneven_roles: frozenset[str] = frozenset()
