"""Ranks of one generation meet, whatever those before them have left in the store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from autopar.elastic.join_ranks import agreed_prefix
from autopar.errors import AutoparError

JOINS = """
import torch, torch.distributed as dist
from autopar.elastic.join_ranks import join
join()
dist.all_reduce(x := torch.ones(1))
print(int(x))
"""


def meet(store, world_size):
    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(lambda rank: agreed_prefix(store, rank, world_size, timeout_s=60), range(world_size)))


def test_ranks_agree_beside_names_that_the_dead_have_left():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"autopar/elastic/3/rank/{rank}", "dead")
    seen = []
    for _ in range(3):  # generations
        names = meet(store, 3)
        assert len(set(names)) == 1 and names[0]
        seen.append(names[0])
    assert len(set(seen)) == 3


def test_ranks_agree_while_a_first_rank_that_was_replaced_still_answers():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as replaced:
        old = replaced.submit(agreed_prefix, store, 0, 4, timeout_s=30)  # the ranks 1 to 3 of its generation are dead
        while not store.check(["autopar/elastic/4/answer/dead/1"]):
            store.set("autopar/elastic/4/rank/1", "dead")
        names = meet(store, 4)
    assert len(set(names)) == 1
    with pytest.raises(AutoparError, match="rank 0 was replaced"):
        old.result()


def test_ranks_that_nobody_joins_end():
    with pytest.raises(AutoparError, match=r"rank 0 waited 0\.1 s for the other 3 ranks"):
        agreed_prefix(dist.HashStore(), 0, 4, timeout_s=0.1)
    with pytest.raises(AutoparError, match=r"rank 2 waited 0\.1 s for the other 3 ranks"):
        agreed_prefix(dist.HashStore(), 2, 4, timeout_s=0.1)


def test_agents_that_count_restarts_differently_have_one_world():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(rank)}
        started.append(
            subprocess.Popen([sys.executable, "-c", JOINS], env=os.environ | own, stdout=subprocess.PIPE, text=True)
        )
    try:
        assert [each.communicate(timeout=120)[0].strip() for each in started] == ["2", "2"]
    finally:
        for each in started:
            each.kill()
