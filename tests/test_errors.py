"""Warnings point to the user's line, whatever of autopar, torch and Python is between."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from autopar.errors import warn

INSIDE = """
@contextmanager
def inside():
    warn('slow')
    yield
"""


def _line() -> int:
    return sys._getframe(1).f_lineno


def test_warning_within_a_hook_points_to_the_call_of_the_module() -> None:
    model, namespace = nn.Sequential(nn.ReLU()), {"warn": warn}
    exec(compile("def hook(*_):\n    warn('slow')\n", "<generated>", "exec"), namespace)
    model.register_forward_hook(torch.no_grad()(namespace["hook"]))
    with pytest.warns(UserWarning, match="slow") as record:
        before = _line()
        model(torch.ones(1))
    assert (record[0].filename, record[0].lineno) == (__file__, before + 1)


def test_warning_within_a_context_points_to_its_user() -> None:
    namespace = {"warn": warn, "contextmanager": contextmanager}
    exec(compile(INSIDE, "<generated>", "exec"), namespace)
    with pytest.warns(UserWarning, match="slow") as record, namespace["inside"]():
        here = _line() - 1
    assert (record[0].filename, record[0].lineno) == (__file__, here)


def test_warning_without_a_user_is_one_all_the_same() -> None:
    script = "from autopar.errors import warn; warn('slow')"  # of a file called <string>
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "UserWarning: slow" in result.stderr
