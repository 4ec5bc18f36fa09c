"""Names and constants in generated source: safe identifiers, literals, and comments that no text can end.

Names of mesh axes, parameters and modules come from users and plan files. Only free ASCII identifiers are used
unchanged.
"""

import keyword
import re
from collections.abc import Sequence
from typing import Any

import torch

from autopar.codegen.program import Variable
from autopar.errors import AutoparError
from autopar.ir.functions.function_passes import FunctionName
from autopar.ir.loops.body import BodyName
from autopar.ir.numbers.free_number import FreeFloat, FreeInt
from autopar.ir.print_graph import printable
from autopar.ir.sizes.size import Size
from autopar.mesh import Mesh
from autopar.sbp.placement import Placement
from autopar.sbp.uneven.parts import PartSize

Axes = tuple[int, ...]

# Names that generated functions read and that are not their variables.
GLOBALS = frozenset(
    (
        "aten",
        "autopar",
        "complex",
        "convert",
        "declare",
        "getattr",
        "inf",
        "local",
        "move",
        "nan",
        "recomputed",
        "regathered",
        "seed",
    )
    + ("seeded", "self", "torch", "convert_together", "E", "GatherBucket", "I", "L", "Offload", "P", "R", "S")
)
# Prefixes of names that Python or this package chooses, and of names that `emit` numbers.
_PREFIXES = ("__", "axis_", "bucket_", "named_", "offload_", "region_")
_LITERALS = (bool, int, float, str, bytes, type(None))
_TORCH_LITERALS = (torch.dtype, torch.layout, torch.memory_format)


def variable(name: str) -> str:
    """`name` as a Python identifier that hides nothing the generated code uses; different names give different
    identifiers.

    >>> variable("blocks_0_weight"), variable("class"), variable("class_"), variable("w.1")
    ('blocks_0_weight', 'class_', 'class__', 'named_w_2e_1')
    """
    if not is_identifier(name) or name.startswith(_PREFIXES):
        # "_" is doubled, and any other character that is no letter or digit becomes its code between two "_", so that
        # different names stay different.
        return "named_" + "".join(_escaped(char) for char in name)
    bare = name.rstrip("_")
    return f"{name}_" if keyword.iskeyword(bare) or bare in GLOBALS else name


def _escaped(char: str) -> str:
    if char == "_":
        return "__"
    return char if char.isascii() and char.isalnum() else f"_{ord(char):x}_"


def is_identifier(name: str) -> bool:
    """Whether `name` is an ASCII identifier; Python equates different spellings of others (PEP 3131)."""
    return name.isascii() and name.isidentifier()


def axis_names(mesh: Mesh, joint: Sequence[Axes]) -> dict[Axes, str]:
    """Distinct identifiers for each axis of the mesh and each of the `joint` sets of several axes.

    >>> axis_names(Mesh((2, 4), ("dp-shard", "tp")), [(0, 1)])
    {(0,): 'axis_dp_shard', (1,): 'axis_tp', (0, 1): 'axis_dp_shard_and_tp'}
    """
    sets = [*((axis,) for axis in range(mesh.ndim)), *joint]
    plain = [re.sub("[^A-Za-z0-9_]", "_", name) for name in mesh.axis_names]
    names = {axes: "axis_" + "_and_".join(plain[axis] for axis in axes) for axes in sets}
    if len(set(names.values())) < len(names):
        names = {axes: "axis_" + "_and_".join(map(str, axes)) for axes in sets}
    return names


def comment(text: str) -> str:
    """`text` as a comment, on a line of its own or behind a statement; no `text` can end it."""
    return f"# {printable(text)}"


def called(target: str) -> str:
    """The expression for the op `target`, a path below torch.ops."""
    first, *rest = (
        target.split(".") if target.startswith(("aten.", "autopar.")) else ["torch", "ops", *target.split(".")]
    )
    for part in rest:
        # An overload may be called like a keyword: aten.random.from
        first = (
            f"{first}.{part}" if is_identifier(part) and not keyword.iskeyword(part) else f"getattr({first}, {part!r})"
        )
    return first


def keywords(kwargs: Sequence[tuple[str, str]]) -> list[str]:
    """The keyword arguments of a call as source, from (name, source of the value)."""
    return [
        f"{key}={value}" if is_identifier(key) and not keyword.iskeyword(key) else f"**{{{key!r}: {value}}}"
        for key, value in kwargs
    ]


def local_name(target: str) -> str:
    """The name of an op's local implementation in the generated code.

    >>> local_name("aten.embedding.default"), local_name("aten.mean.dim")
    ('embedding', 'mean_dim')
    """
    _, name, overload = target.split(".")
    return name if overload == "default" else f"{name}_{overload}"


def _split(placement: Placement) -> str:
    numbers = f"{int(placement.dim)}" if placement.unit == 1 else f"{int(placement.dim)}, {int(placement.unit)}"
    sections = f", sections={tuple(map(int, placement.sections))}" if placement.sections else ""
    return f"{'shares' if placement.shares else 'S'}({numbers}{sections})"


def code(item: Any) -> str:
    """An argument as Python source; AutoparError if it is no literal, since its repr could be any text."""
    match item:
        case Variable(name=name, is_view=True):
            # not view_as: gradients of two leaves in a sum would have one memory, and the next ones be added twice
            return f"aten.alias.default({variable(name)})"
        case Variable(name=name):
            return variable(name)
        case tuple() | list():
            return f"[{', '.join(map(code, item))}]"
        case Placement(kind="S"):
            return _split(item)
        case Placement(kind="L" | "E" as kind, dim=dim):
            return f"{kind}({int(dim)})"
        case Placement(kind="P" | "I" | "R" as kind):
            return kind
        case torch.device():
            return f"torch.device({str(item)!r})"
        case Size() | FreeFloat() | FreeInt() | PartSize():
            return item.text
        case BodyName() | FunctionName():
            return repr(str(item))
        case complex() if type(item) is complex:
            return f"complex({item.real!r}, {item.imag!r})"
    if type(item) in _LITERALS or isinstance(item, _TORCH_LITERALS):
        return repr(item)
    raise AutoparError(
        f"a constant of the program is a {type(item).__module__}.{type(item).__qualname__}, which is no literal of"
        " Python; expected numbers, strings, None, dtypes, devices and tuples of these; let the model take or return"
        " one of them"
    )
