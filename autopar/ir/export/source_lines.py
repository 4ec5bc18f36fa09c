"""Where in the user's code an op comes from."""

import linecache
import os
import re
import traceback
from functools import lru_cache
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_IR = os.path.dirname(os.path.dirname(__file__))
_HERE = (
    _IR + os.sep,
    os.path.join(os.path.dirname(_IR), "torch_compat.py"),
)  # tracing, whose frames are not the user's


@lru_cache(maxsize=4096)
def line_of_stack(stack_trace: str) -> str:
    """The innermost line outside torch as "model.py:41", a model file of transformers before its shared helpers; "" if
    there is none.

    >>> line_of_stack('File "/a/model.py", line 41, in forward')
    'model.py:41'
    """
    return _innermost(_frames(stack_trace))[0]


def quote_stack(stack_trace: str) -> str:
    """The same with its text, "model.py:41: `x = x.item()`", for an error."""
    line, text = _innermost(_frames(stack_trace))
    return f"{line}: `{text}`" if text else line


def _frames(stack_trace: str) -> list[tuple[str, int]]:
    return [(path, int(line)) for path, line in _FRAME.findall(stack_trace) if not path.startswith(_HERE)]


def line_of_error(error: BaseException) -> tuple[str, str]:
    """("model.py:41", its source text) where the error was raised, outside torch; ("", "") if it names no such line."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _innermost([frame for frame in frames if not frame[0].startswith(_HERE)])


def module_of(nn_module_stack: Any) -> str:
    """FQN of the innermost module; a module that is called again is "layers.0@1" to export, and "layers.0" to us."""
    if not nn_module_stack:
        return ""
    return re.sub(r"@\d+", "", list(nn_module_stack.values())[-1][0])


def _innermost(frames: list[tuple[str, int]]) -> tuple[str, str]:
    # "<string>" and the like are code that torch made.
    outside = [frame for frame in frames if not frame[0].startswith((_TORCH, "<"))]
    models = [frame for frame in outside if os.path.basename(frame[0]).startswith("modeling_")]
    for path, line in reversed(models or outside):
        return f"{os.path.basename(path)}:{line}", linecache.getline(path, line).strip()
    return "", ""
