"""Whether causal attention of a part of the queries is computed in balanced order."""


def is_balanced(num_queries: int, num_keys: int, num_own: int) -> bool:
    """Whether a rank exchanges half of its `num_own` queries, so that all ranks see as many keys: the parts have two
    equal halves, and queries and keys are of one sequence.
    """
    return num_own < num_queries == num_keys and num_own % 2 == 0
