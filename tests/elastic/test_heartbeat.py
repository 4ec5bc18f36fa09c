"""A rank that is cut off is noticed by the one before it, one that is done is not missed."""

import time
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from autopar.elastic.heartbeat import Heartbeat

BEAT_S, SILENT_S = 0.02, 0.5


@pytest.fixture
def server() -> Iterator[TCPStore]:
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Cuttable:
    """The connection of a rank to the store, until it is cut."""

    def __init__(self, server: TCPStore) -> None:
        self.server, self.is_cut = server, False

    def connect(self) -> Store:
        outer = self

        class Link(PrefixStore):
            def set(self, key: str, value: str) -> None:
                if outer.is_cut:
                    raise RuntimeError("no route to host")
                super().set(key, value)

        client = TCPStore("localhost", self.server.port, is_master=False, wait_for_workers=False)
        return Link("ranks", client)


def started(server: TCPStore, num_ranks: int) -> tuple[list[Cuttable], list[Heartbeat], dict[int, str]]:
    links, told = [Cuttable(server) for _ in range(num_ranks)], dict[int, str]()
    options = {"beat_s": BEAT_S, "silent_s": SILENT_S}
    ranks = [
        Heartbeat(link.connect, "g", rank, num_ranks, lost=lambda why, rank=rank: told.update({rank: why}), **options)
        for rank, link in enumerate(links)
    ]
    return links, ranks, told


def test_the_rank_before_one_that_is_cut_off_ends_and_so_does_that_one(server: TCPStore) -> None:
    links, ranks, told = started(server, 3)
    time.sleep(2 * SILENT_S)
    assert not told
    links[2].is_cut = True
    time.sleep(3 * SILENT_S)
    assert "no sign of life of rank 2" in told[1] and 2 in told
    for rank in ranks:
        rank.stop()


def test_ranks_that_are_done_are_not_missed(server: TCPStore) -> None:
    _, ranks, told = started(server, 3)
    time.sleep(SILENT_S)
    ranks[1].stop()
    time.sleep(2 * SILENT_S)
    assert not told
    for rank in ranks:
        rank.stop()
