"""The line of the user's code that an op comes from, and what to do about an error there."""

import linecache
import os
import re
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from autopar.errors import is_pythons, is_users

TRANSFORMS = "transforms of torch.func in the model are not supported: write the batched computation out"
_TRANSFORMING = {("_functorch", "vmap.py"), ("_functorch", "eager_transforms.py")}
_WITHOUT_CONTENTS = (
    "on the meta device, tensor attributes and tensors that the forward makes have no contents:"
    " register them as buffers"
)
_OF_ERRORS = {
    "DataDependentOutputException": (
        "the op looks at the values of a tensor, which a plan cannot: write it by ops that do not"
    ),
    "FakeTensorDeviceMismatchError": _WITHOUT_CONTENTS,
}

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_IR = os.path.dirname(os.path.dirname(__file__))
_HERE = (
    _IR + os.sep,
    os.path.join(os.path.dirname(_IR), "torch_compat.py"),
)  # tracing, whose frames are not the user's


@lru_cache(maxsize=4096)
def line_of_stack(stack_trace: str) -> str:
    """The innermost line outside torch as "model.py:41", or ""; transformers' model files precede its shared helpers.

    >>> line_of_stack('File "/a/model.py", line 41, in forward')
    'model.py:41'
    """
    return _innermost(_frames(stack_trace))[0]


def line_of_caller() -> str:
    """The line of the model that is being traced, as `line_of_stack` tells it of a stack."""
    frames: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    # from the stand-in for a module, through the model, to what traces it
    while frame is not None and not (frames and frame.f_code.co_filename.startswith(_HERE)):
        if not frame.f_code.co_filename.startswith(_HERE):
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(frames[::-1])[0]


def quote_stack(stack_trace: str) -> str:
    """The line of a stack with its text, such as "model.py:41: `x = x.item()`", for an error."""
    line, text = _innermost(_frames(stack_trace))
    return f"{line}: `{text}`" if text else line


def quoted_here() -> str:
    """The innermost line outside torch that is running, with its text."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack(limit=80)]
    line, text = _innermost([frame for frame in frames if not frame[0].startswith(_HERE)])
    return f"{line}: `{text}`" if text else line


def is_of_tracing(path: str) -> bool:
    """Whether code of this file is torch's or traces, and is none of the model."""
    return path.startswith((_TORCH, *_HERE, "<"))


def _frames(stack_trace: str) -> list[tuple[str, int]]:
    return [(path, int(line)) for path, line in _FRAME.findall(stack_trace) if not path.startswith(_HERE)]


def line_of_error(error: BaseException) -> tuple[str, str]:
    """("model.py:41", its text) of the innermost line outside torch that raised the error.

    ("", "") if there is none.
    """
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _innermost([frame for frame in frames if not frame[0].startswith(_HERE)])


def in_own_lines(error: BaseException | None) -> BaseException | None:
    """`error` and what caused it with the lines of the user's code alone in their tracebacks; None without any."""
    if error is None:
        return None
    trace, own = error.__traceback__, []
    while trace is not None:
        own += [trace] if is_users(trace.tb_frame.f_code.co_filename) else []
        trace = trace.tb_next
    if not own:
        return None
    for entry in reversed(own):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__cause__ = in_own_lines(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
    return error.with_traceback(trace)


def module_of(nn_module_stack: Any) -> str:
    """The FQN of the innermost module.

    Export calls the second call of a module "layers.0@1", which gives "layers.0".
    """
    if not nn_module_stack:
        return ""
    return re.sub(r"@\d+", "", list(nn_module_stack.values())[-1][0])


def _innermost(frames: list[tuple[str, int]]) -> tuple[str, str]:
    # "<string>" and the like are code that torch made.
    outside = [frame for frame in frames if not frame[0].startswith((_TORCH, "<")) and not is_pythons(frame[0])]
    helpers = f"{os.sep}transformers{os.sep}"
    is_helper = [helpers in path and not os.path.basename(path).startswith("modeling_") for path, _ in outside]
    own = [frame for frame, helps in zip(outside, is_helper) if not helps]
    for path, line in reversed(own or outside):
        return f"{os.path.basename(path)}:{line}", linecache.getline(path, line).strip()
    return "", ""


COMMUNICATES = (
    "the forward calls a collective of torch.distributed, but a compiled model computes what one device does with the"
    " whole batch, whose sums need no other rank and would be counted once for each: switch it off, as by"
    " sync_codebook=False, or call it around the model"
)
_OF_WORDS = {  # of torch's message
    "Unhandled FakeTensor Device Propagation": _WITHOUT_CONTENTS,  # a RuntimeError until torch 2.12
    ".numpy() is not supported": (
        "what NumPy computes is not recorded: compute it by torch, or outside, and hand it in as an argument"
    ),
    "torch.distributed.nn.functional": COMMUNICATES,
    "Cannot access data pointer": "addresses of tensors are not recorded, and the program has others: do without",
    "in output, which is not a known type": (
        "return its tensors, in a tuple, dict or dataclass (of a torch.distributions object its parameters, e.g."
        " logits), and make the object of what the compiled model gives"
    ),
}
_ELSEWHERE = (
    "it reads weights of the compiled model itself, which are DTensors, by a global name or another object, and a copy"
    " of the model is traced: let forward read them from self, as types.MethodType(function, model) does"
)


def remedy_of(error: Exception) -> str:
    """A clause to append to the message of an error of torch's that a trace ended with; "" if there is none."""
    remedy = _OF_ERRORS.get(type(error).__name__, "")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename).parts[-2:] in _TRANSFORMING:
            remedy = TRANSFORMS
    if "cast NotImplemented to Tensor" in str(error):  # of a DTensor beside what is traced
        remedy = _ELSEWHERE
    remedy = next((told for words, told in _OF_WORDS.items() if words in str(error)), remedy)
    if "fake tensor in the exported program constant's list" in str(error):  # torch does not record what vmap moves
        remedy = "of torch.vmap, take torch.vmap(out_dims=0) and move the dim of the result"
    return f"; {remedy}" if remedy else ""
