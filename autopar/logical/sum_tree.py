"""The tree in which the gradients of logical ranks are added: the same one whatever ranks compute them.

A sum of floating-point numbers depends on its order. Here the order follows from the number of logical ranks alone:
[0, n) is the sum of [0, m) and [m, n), with m the largest power of two below n.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

Node = tuple[int, int]  # logical ranks [first, end)
Term = TypeVar("Term")


def blocks(num_logical: int, num_ranks: int) -> list[Node]:
    """The logical ranks of each rank, in order, as even as they go.

    >>> blocks(4, 3), blocks(4, 2)
    ([(0, 2), (2, 3), (3, 4)], [(0, 2), (2, 4)])
    """
    size, more = divmod(num_logical, num_ranks)
    ends = [rank * size + min(rank, more) for rank in range(num_ranks + 1)]
    return list(pairwise(ends))


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum a node of more than one logical rank is.

    >>> halves((0, 4)), halves((0, 3)), halves((4, 6))
    (((0, 2), (2, 4)), ((0, 2), (2, 3)), ((4, 5), (5, 6)))
    """
    first, end = node
    middle = first + (1 << (end - first - 1).bit_length() - 1)
    return (first, middle), (middle, end)


def nodes_of(block: Node, within: Node) -> list[Node]:
    """The largest nodes of the tree of `within` of which a rank with this block computes all logical ranks.

    >>> nodes_of((0, 3), (0, 4)), nodes_of((1, 4), (0, 4))
    ([(0, 2), (2, 3)], [(1, 2), (2, 4)])
    """
    if block[0] <= within[0] and within[1] <= block[1]:
        return [within]
    if block[1] <= within[0] or within[1] <= block[0]:
        return []
    return [node for half in halves(within) for node in nodes_of(block, half)]


def sum_of(node: Node, term: Callable[[Node], Term | None], add: Callable[[Term, Term], Term]) -> Term:
    """The sum of a node in the tree's order; `term` gives the nodes that are known, all single logical ranks at least.

    Terms are asked for in order, and few are held at a time: about the logarithm of their number.
    """
    if (known := term(node)) is not None:
        return known
    left, right = halves(node)
    return add(sum_of(left, term, add), sum_of(right, term, add))


class SumOverRanks:
    """The mean over all logical ranks of a vector, on every rank, in memory that is kept from one to the next.

    `blocks_of_ranks`: the logical ranks of each rank of `group`. Each rank adds one part of the vector for all: an
    all-to-all of the nodes' parts, the tree, and an all-gather. With a logical rank on each rank these are the bytes of
    an all-reduce.
    """

    def __init__(self, blocks_of_ranks: Sequence[Node], rank: int, group: dist.ProcessGroup) -> None:
        self.num_logical, self.group = blocks_of_ranks[-1][1], group
        self._nodes = [nodes_of(block, (0, self.num_logical)) for block in blocks_of_ranks]
        self._num_own = len(self._nodes[rank])
        self._rows = torch.empty(0)

    def rows(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[own nodes, size]: where this rank writes the vector of each of its nodes, all of it; then `mean` is called.

        Here is what was written before.
        """
        num_ranks = len(self._nodes)
        part = -(-size // num_ranks)
        kept = self._rows
        if (kept.dtype, kept.device, kept.shape) != (dtype, device, (self._num_own, num_ranks * part)):
            self._rows = torch.zeros((self._num_own, num_ranks * part), dtype=dtype, device=device)
            self._received = self._rows.new_empty((sum(map(len, self._nodes)), part))
            self._whole = self._rows.new_empty(num_ranks * part)
        return self._rows[:, :size]

    def mean(self) -> torch.Tensor:
        """The mean of what was written to `rows`; holds until the next call of it. It is longer, by zeros."""
        num_ranks = len(self._nodes)
        if num_ranks == 1:
            return torch.div(self._rows[0], self.num_logical, out=self._whole)
        received = self._received
        sent = self._rows.view(self._num_own, num_ranks, -1).transpose(0, 1).contiguous()
        counts = [len(each) for each in self._nodes]
        sizes = [self._num_own] * num_ranks
        dist.all_to_all_single(received, sent.view(-1, received.shape[1]), counts, sizes, group=self.group)
        known = dict(zip((node for each in self._nodes for node in each), received))
        # each node is read once, so that the sum may take its place
        total = sum_of((0, self.num_logical), known.get, torch.Tensor.add_).div_(self.num_logical)
        dist.all_gather_into_tensor(self._whole, total, group=self.group)
        return self._whole
