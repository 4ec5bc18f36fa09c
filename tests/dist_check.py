"""`python -m tests.dist_check PYTHON FOLDER`: the wheel and the sdist of FOLDER, installed and used by PYTHON.

`make dist-check` builds both. The environment has torch and nothing of this folder: what is missing in a package, a
file or a dependency, fails here.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.pages.blocks import Block, blocks_of
from tests.pages.run_blocks import run_part

ROOT = Path(__file__).parent.parent
MODEL = """
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return model, (torch.ones(32, 64),), {}
"""
COMMANDS = (
    ("--help",),
    ("explain", "net.py:build", "--mesh", "dp=2,tp=2", "--cluster", "h100", "--save", "net.plan.json"),
    ("explain", "net.py:build", "--mesh", "2", "--cluster", "h100", "--html", "net.html"),
    ("explain", "vgg13", "--mesh", "4", "--cluster", "cpu", "--fail-if", "gap > 50%"),
    ("verify", "net.py:build", "--mesh", "dp=2,tp=1", "--plan", "net.plan.json.none"),
    ("verify", "net.py:build", "--mesh", "dp=2", "--hand", "ddp"),
)
FAILS = 4  # number of the command with a file that is not there


def main(python: str, folder: str) -> None:
    """Check both files; an AssertionError or CalledProcessError says what is wrong."""
    python = str(Path(python).absolute())
    (wheel,), (source,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    check_contents(wheel, source)
    walk(python, wheel)
    for path in (wheel, source):
        again = ("--force-reinstall", "--no-deps") if path is source else ()
        limits = ("-c", str(ROOT / "constraints.txt"))
        subprocess.run([python, "-m", "pip", "install", "-q", *limits, *again, str(path.absolute())], check=True)
        with tempfile.TemporaryDirectory() as place:
            try_commands(python, Path(place))
        print(f"{path.name}: installed and used")


def walk(python: str, wheel: Path) -> None:
    """A newcomer's path: the commands of the start page, installing among them, in the order of the page."""

    def refuse(block: Block, _: Path) -> None:
        raise AssertionError(f"{block.where}: the start page has files and commands alone")

    os.environ["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(wheel, place)
        run_part(blocks_of("docs/start.md"), Path(place), refuse, bin_folder=Path(python).parent, clean=True)
    print("docs/start.md: walked")


def check_contents(wheel: Path, source: Path) -> None:
    """Both have every module, what pages are made of, the marker of types and the licence, and nothing of tests."""
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "autopar").rglob("*.py")} | {"autopar/py.typed"}
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "autopar" / "page" / "app").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules <= names, f"not in the wheel: {sorted(modules - names)}"
    others = {name.split("/")[0] for name in names} - {"autopar"}
    assert all(name.endswith(".dist-info") for name in others), f"in the wheel: {others}"
    assert any(name.endswith("LICENSE") for name in names), "no licence in the wheel"
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = (modules | {"LICENSE", "README.md", "pyproject.toml"}) - held
    assert not missing, f"not in the sdist: {sorted(missing)}"


def try_commands(python: str, place: Path) -> None:
    """A newcomer's commands, outside of the source's folder."""
    (place / "net.py").write_text(MODEL)
    where = [python, "-c", "import autopar; print(autopar.__file__)"]
    found = subprocess.run(where, cwd=place, check=True, capture_output=True, text=True).stdout
    assert "site-packages" in found, f"autopar is {found}"
    script = str(Path(python).with_name("autopar"))
    for number, words in enumerate(COMMANDS):
        done = subprocess.run([script, *words], cwd=place, capture_output=True, text=True, timeout=300)
        expected = 2 if number == FAILS else 0
        assert done.returncode == expected, f"autopar {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
