"""Runs under torchrun whose ranks die, leave and join, beside a run of one process that nothing disturbs.

    python -m bench.elastic [kills] [members] [links] [saves] [logical]     (all of them: half an hour on two cores)

kills: of four ranks one is killed, in a random phase of a random step, twenty times in one run. members: four agents of
torchrun with a rank each; one is lost with all its processes, another one, then two join. links: three hosts of an
emulated cluster, of which one's link stalls or is cut, and is well again (`bench.elastic_links`). In all three, `bench/
elastic_script.py` is trained, and what is compared is each step's loss and samples, by what was done last. saves: steps
of a network while its checkpoints are written beside it, in turns with steps without. logical: steps by
`logical_ranks=4` on four ranks beside those of plain data parallelism.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import psutil
from torch.distributed import TCPStore

from bench.elastic_links import FAULTS, links
from bench.elastic_log import MOST_S, RENDEZVOUS, ROOT, WHOLE, lines_of, resumed, tail, wait_for, whole
from bench.elastic_script import PHASES
from bench.papers.section import table
from bench.report import Row, add

NUM_KILLS, NUM_RANKS, SEED = 20, 4, 0
SAVE_EVERY = 5
KILLS_PAUSE_S, MEMBERS_PAUSE_S = 0.1, 0.5  # that each step takes longer: there is time to save, and to join
MEMBERS = (4, 3, 2, 4)  # ranks, one number after the other
STEPS_EACH = 25  # with so many ranks

KILLS = table(
    "Killed ranks",
    ("row", "rank", "phase", "step", "resumed at", "resumed after, s"),
    [f"kill {number + 1}" for number in range(NUM_KILLS)],
)
CHANGES = table(
    "Ranks that leave and join",
    ("row", "step", "resumed at", "resumed after, s"),
    [f"{before} to {after} ranks" for before, after in pairwise(MEMBERS)],
)
LINKS = table(
    "Links that fail",
    ("row", "step", "resumed by two at", "resumed by two after, s", "by all at", "by all after, s"),
    tuple(FAULTS),
)
STEPS = table(
    "Steps of a GPT of 8 M parameters",
    (
        "row",
        "ranks",
        "without, s",
        "with, s",
        "ratio",
        "lower quartile",
        "upper quartile",
        "waits for cores left out, ratio",
        "thread's CPU, ratio",
        "saves that took more than five steps",
    ),
    ("saves beside steps, 1 rank", "saves beside steps, 2 ranks", "logical ranks beside DDP, 4 ranks"),
)


def kills() -> dict[str, list[Row]]:
    """One run of four ranks with `NUM_KILLS` kills."""
    draw = random.Random(SEED)
    num_steps = 10 * (NUM_KILLS + 1)
    steps = sorted(draw.sample(range(2, num_steps - 2), NUM_KILLS))
    faults = [(step, draw.randrange(NUM_RANKS), draw.choice(PHASES)) for step in steps]
    # a save is of the step before one that divides by SAVE_EVERY, the only ones in which a rank can die while saving
    faults = [(_saving(step) if phase == "saving" else step, rank, phase) for step, rank, phase in faults]
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.time()
        (folder / "faults.json").write_text(json.dumps(faults))
        options = ("--standalone", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", str(NUM_KILLS + 2))
        agent = _start(folder, options, num_steps, KILLS_PAUSE_S)
        try:
            if agent.wait(MOST_S):
                raise RuntimeError(tail(folder))
        finally:
            _kill_all(agent)
        lines, found = lines_of(folder), []
        for number, (step, rank, phase) in enumerate(faults):
            fault = folder / f"fault-{number}"
            if not fault.exists():  # the rank was not in this phase again
                found.append({"row": f"kill {number + 1}", "error": f"no {phase} of rank {rank} in step {step}"})
                continue
            what = {"row": f"kill {number + 1}", "rank": rank, "phase": phase, "step": step}
            found.append(what | resumed(lines, float(fault.read_text())))
        return {KILLS.title: found, WHOLE.title: [whole("killed ranks", lines, num_steps, time.time() - start)]}


def _saving(step: int) -> int:
    return step // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY - 1


def members() -> dict[str, list[Row]]:
    """One run of agents of a rank each, of which there are `MEMBERS`, one number after the other."""
    num_steps, agents, found = STEPS_EACH * (len(MEMBERS) + 3), [], []  # joining takes a while, in which two go on
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.time()
        # in which the agents meet: that of an agent would end with it
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        options = ("--nnodes", f"{min(MEMBERS)}:{max(MEMBERS)}", "--nproc-per-node", "1", "--max-restarts", "20")
        options += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-id", "bench")
        options += ("--rdzv-conf", RENDEZVOUS)

        def join() -> subprocess.Popen:
            return _start(folder, options, num_steps, MEMBERS_PAUSE_S)

        def again() -> None:
            agents[:] = [join() if agent.poll() else agent for agent in agents]

        try:
            agents.extend(join() for _ in range(MEMBERS[0]))
            for number, (before, after) in enumerate(pairwise(MEMBERS), start=1):
                step = wait_for(folder, STEPS_EACH * number, before, again)
                at = time.time()
                for _ in range(before - after):
                    _kill_all(agents.pop())
                agents.extend(join() for _ in range(after - before))
                wait_for(folder, step + 1, after, again)
                found.append({"row": f"{before} to {after} ranks", "step": step, "at": at, "ranks": after})
            wait_for(folder, num_steps - 1, MEMBERS[-1], again)
            if any(agent.wait(MOST_S) for agent in agents):
                raise RuntimeError(tail(folder))
        finally:
            for agent in agents:
                _kill_all(agent)
        lines = lines_of(folder)
        rows = [{key: row[key] for key in ("row", "step")} | resumed(lines, row["at"], row["ranks"]) for row in found]
        of_all = whole("ranks that leave and join", lines, num_steps, time.time() - start)
        return {CHANGES.title: rows, WHOLE.title: [of_all]}


def _start(folder: Path, options: Sequence[str], num_steps: int, pause_s: float) -> subprocess.Popen:
    """An agent of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(ROOT / "bench" / "elastic_script.py")]
    command += [str(folder), "--steps", str(num_steps), "--save-every", str(SAVE_EVERY), "--pause", str(pause_s)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "AUTOPAR_CLUSTER": "cpu"}
    # agents that keep the store of their first meeting wait there in vain for those that join later (torch 2.13)
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "printed").open("a") as printed:
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)


def _kill_all(agent: subprocess.Popen) -> None:
    """Kill an agent and its ranks at once, as a machine that is lost."""
    if agent.poll() is None:
        process = psutil.Process(agent.pid)
        for each in (*process.children(recursive=True), process):
            each.send_signal(signal.SIGKILL)
        agent.wait()


def steps(what: str, num_ranks: int) -> Row:
    """One row of `STEPS`: the median over turns of the ratio with and without `what`."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    done = subprocess.run(
        [*command, str(ROOT / "bench" / "elastic_steps.py"), what],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("seconds ", "late ")))
    seconds = json.loads(told["seconds"])
    (walls, of_cpu, waited), (walls_with, of_cpu_with, waited_with) = (
        zip(*seconds[way]) for way in ("without", "with")
    )
    own, own_with = ([a - b for a, b in zip(*each)] for each in ((walls, waited), (walls_with, waited_with)))
    low, middle, high = quantiles((b / a for a, b in zip(walls, walls_with)), n=4)
    return {
        "ranks": num_ranks,
        "without, s": median(walls),
        "with, s": median(walls_with),
        "ratio": middle,
        "lower quartile": low,
        "upper quartile": high,
        "waits for cores left out, ratio": median(b / a for a, b in zip(own, own_with)),
        "thread's CPU, ratio": median(b / a for a, b in zip(of_cpu, of_cpu_with)),
        "saves that took more than five steps": told.get("late", "-"),
    }


def failing_links() -> dict[str, list[Row]]:
    """One run for each fault of a link."""
    found, runs = links(LINKS.header)
    return {LINKS.title: found, WHOLE.title: runs}


def saves() -> dict[str, list[Row]]:
    """Checkpoints every ten steps beside none; a rank alone leaves a core of two to the thread that writes."""
    return {STEPS.title: [{"row": name} | steps("saves", n) for n, name in zip((1, 2), STEPS.rows)]}


def logical() -> dict[str, list[Row]]:
    """`logical_ranks=4` on four ranks beside DistributedDataParallel."""
    return {STEPS.title: [{"row": STEPS.rows[-1]} | steps("logical", NUM_RANKS)]}


CASES = {"kills": kills, "members": members, "links": failing_links, "saves": saves, "logical": logical}


def main() -> None:
    """Run the cases that are named, or all, and write each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    for name in parser.parse_args().cases or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        add("elastic", (KILLS, CHANGES, LINKS, WHOLE, STEPS), CASES[name](), {"seed": SEED})


if __name__ == "__main__":
    main()
