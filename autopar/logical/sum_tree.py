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


def summed_over_ranks(
    own: Sequence[torch.Tensor], blocks_of_ranks: Sequence[Node], rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over all logical ranks of a vector, on every rank. `own`: that of each of `nodes_of` this rank's block.

    Each rank adds one part of the vector for all: an all-to-all of the nodes' parts, the tree, and an all-gather. With
    a logical rank on each rank these are the bytes of an all-reduce.
    """
    everything, num_ranks = (0, blocks_of_ranks[-1][1]), len(blocks_of_ranks)
    if num_ranks == 1:
        return own[0]
    size = own[0].numel()
    part = -(-size // num_ranks)
    nodes = [nodes_of(block, everything) for block in blocks_of_ranks]
    padded = own[0].new_zeros((len(own), num_ranks * part))
    for row, vector in zip(padded, own):
        row[:size] = vector
    sent = padded.view(len(own), num_ranks, part).transpose(0, 1).contiguous()
    received = sent.new_empty((sum(map(len, nodes)), part))
    counts = [len(each) for each in nodes]
    dist.all_to_all_single(received, sent.view(-1, part), counts, [len(own)] * num_ranks, group=group)
    known = dict(zip((node for each in nodes for node in each), received))
    total = sum_of(everything, known.get, torch.add)
    whole = total.new_empty(num_ranks * part)
    dist.all_gather_into_tensor(whole, total.contiguous(), group=group)
    return whole[:size]
