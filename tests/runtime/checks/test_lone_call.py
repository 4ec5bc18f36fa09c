"""A compiled model is refused in a fork of the rank's process, where its collectives would wait for ever."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


def _status_of_fork(work: Callable[[], object]) -> int:
    """0 if `work` is refused in a fork, as of a DataLoader; 1 if it is done, and -SIGALRM if it waits."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(20)
    try:
        work()
    except autopar.AutoparError as error:
        os._exit(0 if "a fork (a worker of a DataLoader" in str(error) else 2)
    os._exit(1)


def _use_in_forks() -> None:
    torch.manual_seed(0)
    x = torch.ones(4, 4)
    model = autopar.compile(nn.Linear(4, 4), device_mesh((2, 2), ("dp", "tp")), cluster="cpu", args=(x,))
    for use in (lambda: model(x), model.full_state_dict):
        assert _status_of_fork(use) == 0
    assert model(x).shape == (4, 4)


def test_a_fork_is_told_that_it_cannot_use_the_model(ranks4: Ranks) -> None:
    ranks4.run(_use_in_forks)
