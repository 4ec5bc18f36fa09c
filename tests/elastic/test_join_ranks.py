"""Ranks of one generation meet, whatever those before them have left in the store."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from autopar.elastic.join_ranks import agreed_prefix


def test_ranks_agree_beside_names_that_the_dead_have_left():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"autopar/elastic/0/3/rank/{rank}", "dead")
    seen = []
    for _ in range(3):  # generations
        with ThreadPoolExecutor(3) as ranks:
            names = list(ranks.map(lambda rank: agreed_prefix(store, rank, 3), range(3)))
        assert len(set(names)) == 1 and names[0]
        seen.append(names[0])
    assert len(set(seen)) == 3
