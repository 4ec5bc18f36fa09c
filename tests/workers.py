"""Ranks for tests: processes that hold one gloo world, started once and reused."""

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

START_S = 120.0
ANSWER_S = 300.0  # no test takes as long, on a machine that does other things besides; ranks that do are stuck
DIED = "the process died"
MOST_CALLS = 60  # after which new ranks are started: after hours of tests in one process they were slow
GRACE_S = 5.0  # after the first failure: time for the other ranks to answer before they count as stuck
# Imported once by the fork server, so that a rank starts in a fraction of a second.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.export",
    "autopar.api",
    "autopar.planner.choose",
    "autopar.runtime.pipeline.trainer",
    "tests.workers",
    "transformers.integrations.moe",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
]


class RankError(AssertionError):
    """A rank raised, hung or died; the message has the first failing rank's traceback."""


class Ranks:
    """`num_ranks` processes in one world; a failed or hung call ends them, the next call starts new ones.

    `join(rank, num_ranks, init_method)` is called once by each process: by default it makes a gloo world.
    """

    def __init__(self, num_ranks: int, join: Callable[[int, int, str], None] | None = None) -> None:
        self.num_ranks = num_ranks
        self.join = join or join_gloo
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store = ""
        self._num_calls = 0
        atexit.register(self.stop)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """Call `function(*args)` on every rank and return their results in rank order.

        The function is found by its qualified name, arguments and results are pickled. RankError as soon as a rank
        fails.
        """
        payload = pickle.dumps((function, args))
        if not self._is_alive():
            self._start()
        self._num_calls += 1
        for connection in self._connections:
            connection.send_bytes(payload)
        return self._collect(time.monotonic() + timeout_s)

    def replace_old(self) -> None:
        """End ranks that have had `MOST_CALLS` calls; the next call starts new ones."""
        if self._num_calls >= MOST_CALLS:
            self.stop()

    def stop(self) -> None:
        """End the ranks; only those this pool started."""
        self._num_calls = 0
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections):
            process.join()
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._store, ignore_errors=True)

    def _is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def _start(self) -> None:
        self.stop()
        self._store = tempfile.mkdtemp(prefix="autopar-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            arguments = (self.join, rank, self.num_ranks, self._store, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._collect(time.monotonic() + START_S)

    def _how_died(self, rank: int) -> str:
        """How the process ended, and where each of its threads was, if a signal ended it."""
        process = self._processes[rank]
        process.join(GRACE_S)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"{DIED} ({how})\n{_fault_file(self._store, rank).read_text()}"

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failure, has_died = "", False
        waiting = dict(zip(self._connections, range(self.num_ranks)))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = f"ranks {sorted(waiting.values())} did not answer in time"
                self.stop()
                raise RankError(f"{failure}\n({stuck})" if failure else stuck)
            for connection in ready:
                rank = waiting.pop(connection)
                results[rank], text = _receive(connection)
                if text == DIED:
                    has_died, text = True, self._how_died(rank)
                if text and not failure:
                    failure = f"rank {rank}:\n{text}"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failure:
            if has_died:  # its end of the pipe closes a moment before the process counts as dead
                self.stop()
            raise RankError(failure)
        return [results[rank] for rank in range(self.num_ranks)]


def _receive(connection: Connection) -> tuple[Any, str]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None, DIED


def join_gloo(rank: int, num_ranks: int, init_method: str) -> None:
    """Join a world of gloo."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks)


def _fault_file(store: str, rank: int) -> Path:
    return Path(store, f"fault{rank}")


def _serve(
    join: Callable[[int, int, str], None], rank: int, num_ranks: int, store: str, connection: Connection
) -> None:
    faulthandler.enable(_fault_file(store, rank).open("w"))
    torch.set_num_threads(1)
    join(rank, num_ranks, f"file://{store}/world")
    connection.send_bytes(pickle.dumps((None, "")))
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the tests are gone; gloo's threads would wait for peers
        connection.send_bytes(_answer(payload))


def _answer(payload: bytes) -> bytes:
    try:
        function, args = pickle.loads(payload)
        return pickle.dumps((function(*args), ""))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, DeviceMesh]] = WeakKeyDictionary()  # by their world


def device_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> DeviceMesh:
    """For use inside a rank: the mesh of that shape over all ranks, its process groups made once in a world."""
    assert dist.group.WORLD is not None, "torch.distributed is initialised"
    known = _meshes.setdefault(dist.group.WORLD, {})
    if (shape, axis_names) not in known:
        known[shape, axis_names] = init_device_mesh("cpu", shape, mesh_dim_names=axis_names)
    return known[shape, axis_names]
