"""Runs the blocks of one part of a page, in order, in a folder of its own."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist
import yaml

from tests.pages.blocks import GIVEN, ROOT, Block, commands, missing

RunPython = Callable[[Block, Path], None]
_NAMESPACES: dict[str, dict] = {}  # of the ranks of this process: folder of the part -> names

# What a cluster has: `sbatch`, `srun`, `scontrol` and `kubectl`, which run on this host what they are given.
STAND_INS = Path(__file__).with_name("stand_ins")


def run_part(blocks: Iterable[Block], folder: Path, run_python: RunPython, *, bin_folder: Path, clean: bool) -> None:
    """Run or check each block; AssertionError names the block. `clean`: also those of a clean environment."""
    blocks = list(blocks)
    for number, block in enumerate(blocks):
        for name in re.findall(r"[\w./-]+", block.mark.partition("given=")[2].partition(" ")[0]):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(GIVEN / name if (GIVEN / name).exists() else ROOT / name, folder / name)
        if block.kind == "file":
            _write(block, folder, blocks[number + 1 :])
        elif block.kind == "python":
            setup = re.search(r"\bsetup=(\S+)", block.mark)
            for before in [replace(block, text=(GIVEN / setup[1]).read_text(), line=0)] if setup else []:
                run_python(before, folder)
            run_python(block, folder)
        elif block.kind == "output":
            command = block.mark.removeprefix("output ")
            _shell(block, command, block.text, folder, bin_folder)
        elif block.kind == "copied":
            pattern = block.mark.removeprefix("copied ").partition(":")[0]
            known = {line.strip() for path in ROOT.glob(pattern) for line in path.read_text().splitlines()}
            other = [line for line in block.text.splitlines() if line.strip() not in known]
            assert not other, f"{block.where}: not what {block.mark} has: {other[0]}"
        elif block.kind == "data":
            _parse(block)
        elif block.kind == "console" or (block.kind == "clean" and clean):
            found = commands(block)
            for place, (command, shown) in enumerate(found):
                _shell(block, command, shown, folder, bin_folder, is_last=place == len(found) - 1)
        elif block.kind in ("elsewhere", "clean"):
            assert ": " in block.mark, f"{block.where}: the mark gives no reason"
            _read_only(block)


def _write(block: Block, folder: Path, later: list[Block]) -> None:
    stem = Path(block.title).stem
    used = any(re.search(rf"\b{re.escape(stem)}\b", each.text) for each in later)
    assert used, f"{block.where}: no block after it uses {block.title}"
    _parse(block)
    (folder / block.title).write_text(block.text)


def _parse(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    elif block.language == "python":
        compile(block.text, block.where, "exec")


def _read_only(block: Block) -> None:
    if block.language in ("json", "yaml", "python"):
        _parse(block)
        return
    text = "\n".join(command for command, _ in commands(block))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert not done.returncode, f"{block.where}: {done.stderr}"


def _shell(block: Block, command: str, shown: str, folder: Path, bin_folder: Path, *, is_last: bool = True) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("AUTOPAR_CLUSTER", "PYTHONPATH")}
    environment = kept | {
        "PATH": f"{STAND_INS}:{bin_folder}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "AUTOPAR_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=570,
    )
    asked = re.search(r"\bstatus=(\d+)", block.mark)
    expected = int(asked[1]) if asked and is_last else 0
    said = f"{block.where}: {command}\n{done.stdout[-6000:]}"
    assert done.returncode == expected, f"{said}\nended with {done.returncode}, not {expected}"
    absent = missing(shown, done.stdout, varies="varies" in block.mark.split())
    assert not absent, f"{said}\nshown and not printed: {absent!r}"


def on_rank(where: str, text: str, folder: str) -> None:
    """Run a block on this rank, in the namespace of its part; the world is up already."""
    names = _NAMESPACES.setdefault(folder, {"__name__": "__page__"})
    shared = mock.patch.object(dist, "init_process_group", lambda *_, **__: None)
    ended = mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None)
    before = {name: sys.modules[name] for name in list(sys.modules)}
    with contextlib.chdir(folder), shared, ended, mock.patch.object(sys, "path", [folder, *sys.path]):
        exec(compile(text, where, "exec"), names)
    for name in sys.modules.keys() - before.keys():
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]  # a file of this part; another part may have one of that name
