"""The training script of `bench.elastic`, run by torchrun: it kills itself where a file says, and resumes.

    torchrun --standalone --nproc-per-node 4 --max-restarts 9 bench/elastic_script.py FOLDER --steps 60

`FOLDER/faults.json` is a list of [step, rank, phase]: in this step that rank, or the last one if there are fewer, is
killed in "forward", "backward", "optimizer" or "saving", or finds the disk full ("full") while it saves, or loses the
process that writes ("writer"). Each happens once. The first rank appends a line to `FOLDER/log.jsonl` for each step:
what was done, on which samples.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch

import autopar
import autopar.elastic
from autopar.elastic.file_image import Memory

NUM_SAMPLES, BATCH = 100, 12
START = time.time()  # of this process
PHASES = ("forward", "backward", "optimizer", "saving")


class Network(torch.nn.Module):
    """A small regression, in float64 so that sums in another order are equal to 1e-12."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 4)).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(x).double(), y.double())


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """All samples and their labels."""
    x = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].sin() + x[:, 4:8]


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and a schedule of its rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def undisturbed(num_steps: int) -> list[float]:
    """The losses of one process without autopar."""
    model, (x, y) = Network(), samples()
    optimizer, schedule = optimizer_of(model)
    sampler = autopar.StatefulSampler(NUM_SAMPLES, (BATCH,), 0)
    batches, losses = (rows for _ in range(num_steps) for rows in sampler), []
    for _, rows in zip(range(num_steps), batches):
        loss = model(x[rows], y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


class Faults:
    """The faults of `faults.json` that this rank has still to suffer."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        file = folder / "faults.json"
        listed = json.loads(file.read_text()) if file.exists() else []
        self.folder = folder
        self.own = {
            (step, phase): index
            for index, (step, victim, phase) in enumerate(listed)
            if min(victim, num_ranks - 1) == rank and not (folder / f"fault-{index}").exists()
        }

    def arm(self, step: int) -> None:
        """Prepare what happens in this step."""
        for phase in PHASES[:3]:
            if (step, phase) in self.own:
                sys.setprofile(lambda frame, event, _, phase=phase: self._look(frame, event, step, phase))
        for phase in ("saving", "full", "writer"):
            if (step, phase) in self.own:
                self._arm_saving(step, phase)

    def _look(self, frame: FrameType, event: str, step: int, phase: str) -> None:
        """Kill this process when a function of the phase is entered."""
        code = frame.f_code
        inside = {
            "forward": code.co_filename.startswith("<autopar"),
            "backward": code.co_name == "backward" and "convert" in code.co_filename,
            "optimizer": code.co_name == "adam" and "optim" in code.co_filename,
        }
        if event == "call" and inside[phase]:
            self._kill(step, phase)

    def _arm_saving(self, step: int, phase: str) -> None:
        write, index = Memory.write, self.own[step, phase]

        def failing(memory: Memory, path: Path) -> list:
            if (self.folder / f"fault-{index}").exists():
                return write(memory, path)
            if phase == "saving":
                threading.Timer(0.01 * random.random(), self._kill, (step, phase)).start()
                return write(memory, path)
            self._note(index)
            if phase == "full":
                return write(memory, Path("/dev/full"))  # a disk without room
            write(memory, path)
            assert memory.process is not None, "it has written"
            memory.process.send_signal(signal.SIGSTOP)  # so that it is killed before it has written
            threading.Timer(0.01, memory.process.kill).start()
            return write(memory, path)

        Memory.write = failing

    def _kill(self, step: int, phase: str) -> None:
        sys.setprofile(None)
        self._note(self.own[step, phase])
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, index: int) -> None:
        (self.folder / f"fault-{index}").write_text(repr(time.time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--param-dtype", choices=("bfloat16",), help="compute in this dtype over float64")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = samples()
    with autopar.elastic.Run(options.folder / "run", save_every=options.save_every) as run:
        faults = Faults(options.folder, run.rank, run.num_ranks)
        chosen = {"param_dtype": getattr(torch, options.param_dtype)} if options.param_dtype else {}
        example = x[:BATCH], y[:BATCH]
        model = run.compile(Network(), args=example, cluster="cpu", mesh=lambda n: (n,), pins=PINS, **chosen)
        optimizer, schedule = optimizer_of(model)
        sampler = autopar.StatefulSampler(NUM_SAMPLES, (BATCH,), 0)
        batches = (rows for _ in range(options.steps) for rows in sampler)
        with open(options.folder / "log.jsonl", "a") as log:
            for step in run.steps(options.steps, model, optimizer, sampler=sampler, schedule=schedule):
                faults.arm(step)
                rows = next(batches)
                loss = model.train_step(x[rows], y[rows])
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                time.sleep(options.pause)
                if run.rank == 0:
                    line = {"step": step, "loss": float(loss), "rows": rows, "ranks": run.num_ranks}
                    print(json.dumps(line | {"start": START, "at": time.time()}), file=log, flush=True)


# A stored layout that splits, so that there is something to communicate and to reshard.
PINS = {"net.0.weight": "S(0)", "net.2.weight": "S(1)"}

if __name__ == "__main__":
    main()
