"""`read_slots`: the inputs of all ops of a graph as arrays, by which copies of a block are compared all at once."""

from dataclasses import dataclass

import numpy as np

from autopar.ir.folding.match_blocks import wire
from autopar.ir.graph import Graph, Value


@dataclass(frozen=True)
class ReadSlots:
    """The slots in which ops read values, one after the other, op by op.

    `first`: i64[ops + 1], the first slot of each op. `user`: i64[slots], the op. `maker`: the op that makes the value,
    -1 for an input of the graph; `index`: the number of the output, or of the input. `first_user`, `last_user`:
    i64[inputs], positions of the ops that read an input first and last, -1 if none does. `is_result`: bool[ops],
    whether the graph returns or writes back what the op makes; `is_returned`: bool[inputs], likewise.
    """

    first: np.ndarray
    user: np.ndarray
    maker: np.ndarray
    index: np.ndarray
    first_user: np.ndarray
    last_user: np.ndarray
    is_result: np.ndarray
    is_returned: np.ndarray


def read_slots(graph: Graph) -> ReadSlots:
    """The slots of `graph`."""
    sources = graph.once(wire).sources
    first = np.concatenate([[0], np.cumsum([len(of_op) for of_op in sources], dtype=np.int64)])
    user = np.repeat(np.arange(len(sources)), np.diff(first))
    flat = np.array([source for of_op in sources for source in of_op], dtype=np.int64).reshape(-1, 2)
    maker, index = flat[:, 0], flat[:, 1]
    last_user, first_user = (np.full(len(graph.inputs), -1) for _ in range(2))
    of_input = maker < 0
    last_user[index[of_input]] = user[of_input]  # of several the last is assigned
    first_user[index[of_input][::-1]] = user[of_input][::-1]
    results = [value for value in graph.outputs if isinstance(value, Value)] + [value for _, value in graph.mutations]
    names = {value.name for value in results}
    is_result = np.array([any(value.name in names for value in op.outputs) for op in graph.ops], dtype=bool)
    is_returned = np.array([item.value.name in names for item in graph.inputs], dtype=bool)
    return ReadSlots(first, user, maker, index, first_user, last_user, is_result, is_returned)
