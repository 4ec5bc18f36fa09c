"""The tree of sums is one tree, whatever ranks know which of its nodes."""

import pytest

from autopar.logical.sum_tree import blocks, nodes_of, sum_of


@pytest.mark.parametrize("num_logical", [1, 2, 3, 4, 5, 7, 8, 12])
def test_all_mappings_add_in_the_same_order(num_logical):
    def text(known):
        return sum_of((0, num_logical), known, "({}+{})".format)

    def leaf(node):
        return str(node[0]) if node[1] - node[0] == 1 else None

    expected = text(leaf)
    for num_ranks in range(1, num_logical + 1):
        every = blocks(num_logical, num_ranks)
        assert [x for first, end in every for x in range(first, end)] == list(range(num_logical))
        nodes = [node for block in every for node in nodes_of(block, (0, num_logical))]
        known = {node: sum_of(node, leaf, "({}+{})".format) for node in nodes}
        assert text(known.get) == expected
