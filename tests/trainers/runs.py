"""The runs of a case: on one device, and on four ranks in each setting."""

import inspect
import re
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from tests.trainers import cases, further_cases, half_cases, loop_cases, titan_cases
from tests.trainers.case import SETTINGS, Numbers, run_case
from tests.workers import RankError, Ranks

TIMEOUT_S = 500.0
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-3  # of the largest entry of a tensor, after 20 steps in float32, or lower
MODULES = (cases, half_cases, titan_cases, further_cases, loop_cases)
SAME = "same numbers"
STAGES = "pp=2,dp=2"


def names() -> list[str]:
    """The cases, in the order of the files."""
    return [name for module in MODULES for name in _names_in(module)]


def _names_in(module: ModuleType) -> list[str]:
    functions = inspect.getmembers(module, lambda each: inspect.isfunction(each) and each.__module__ == module.__name__)
    public = {name: each for name, each in functions if not name.startswith("_")}
    with_work = {name: each for name, each in public.items() if [*inspect.signature(each).parameters] == ["work"]}
    return sorted(with_work, key=lambda name: with_work[name].__code__.co_firstlineno)


def settings_of(name: str) -> list[str]:
    """The settings of a case; Lightning's strategies make the mesh themselves, without stages."""
    if name == "torchtitan_stages":
        return [STAGES]
    has_stages = case(name).__module__ in (cases.__name__, titan_cases.__name__) and name not in (
        "lightning_trainer",
        "fabric",
    )
    return [setting for setting in SETTINGS if has_stages or setting != STAGES]


def case(name: str) -> Callable[..., Numbers]:
    return next(getattr(module, name) for module in MODULES if name in _names_in(module))


def recipe(name: str) -> str:
    """What a user writes: the lines of the case between `# recipe` and `# end`."""
    blocks = re.findall(r"^ *# recipe\n(.*?)^ *# end$", inspect.getsource(case(name)), re.DOTALL | re.MULTILINE)
    return "\n".join(textwrap.dedent(block).strip("\n") for block in blocks) + "\n"


@cache
def truth(name: str) -> Numbers:
    """The numbers of one device."""
    one = Ranks(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return one.run(run_case, name, "", folder, timeout_s=TIMEOUT_S)[0]
        finally:
            one.stop()


def outcome(ranks: Ranks, name: str, setting: str) -> str:
    """What came of a case: the same numbers, another one, or the words of the error."""
    assert setting in SETTINGS, f"settings are {', '.join(SETTINGS)}, found {setting}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = ranks.run(run_case, name, setting, folder, timeout_s=TIMEOUT_S)
        except RankError as error:
            ranks.stop()
            return _words(str(error))
    tolerance = HALF_TOLERANCE if case(name).__module__ == half_cases.__name__ else TOLERANCE
    texts = (text for each in results for text in differences(each, truth(name), tolerance))
    first = next(texts, "")
    return f"**other numbers**: {first}" if first else SAME


def differences(found: Any, expected: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two results differ, by more than `tolerance`."""
    if isinstance(expected, dict):
        if set(found) != set(expected):
            return [f"{path}: names {sorted(set(found) ^ set(expected))[:3]}"]
        return [text for key in expected for text in differences(found[key], expected[key], tolerance, f"{path}/{key}")]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} entries instead of {len(expected)}"]
        pairs = zip(found, expected)
        return [text for i, (x, y) in enumerate(pairs) for text in differences(x, y, tolerance, f"{path}/{i}")]
    x, y = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if x.shape != y.shape:
        return [f"{path}: shape {tuple(x.shape)} instead of {tuple(y.shape)}"]
    error = float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)) if y.numel() else 0.0
    return [] if error < tolerance else [f"{path}: off by {error:.1e}"]


def _words(traceback: str) -> str:
    """The last error of a traceback: `refused` if it is one of autopar's."""
    errors = re.findall(
        r"^((?:[\w.]+\.)?(\w*(?:Error|Failed|Mismatch|Unsupported\w*))): (.*(?:\n(?!\s*$).*)*)", traceback, re.MULTILINE
    )
    name, short, text = errors[-1] if errors else ("", "RankError", traceback.strip().splitlines()[-1])
    kind = "refused" if name.startswith("autopar.") else "error"
    return f"{kind}: {short}: {' '.join(text.split())}"
