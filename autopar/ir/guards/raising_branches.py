"""`answer_without_error`: the answer of a branch that does not lead to a `raise`, by the bytecode of the line."""

import dis
import sys
from functools import lru_cache
from types import CodeType, FrameType

from autopar.ir.export.source_lines import is_of_tracing

_ENDS = ("RETURN", "YIELD", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "RERAISE")


def answer_without_error() -> bool | None:
    """The truth of what is being asked with which the code that asks does not raise: of `assert x`, or of `x` in `if x:
    raise ...`. None if both ways go on, or both raise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_of_tracing(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _answer_at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _answer_at(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    places = {each.offset: number for number, each in enumerate(instructions)}
    at = places[max(place for place in places if place <= offset)]
    at += instructions[at].opname == "TO_BOOL"  # since Python 3.13 before the jump
    asking = instructions[at]
    if not asking.opname.startswith("POP_JUMP") or not asking.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    goes_on, jumps = (_raises(instructions[place:]) for place in (at + 1, places[asking.argval]))
    if goes_on == jumps:
        return None
    is_jump_for = asking.opname.endswith("IF_TRUE")
    return is_jump_for if goes_on else not is_jump_for


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Whether a `raise` or a failed `assert` follows without a further decision."""
    for each in instructions:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname.startswith(_ENDS):
            return False
    return False
