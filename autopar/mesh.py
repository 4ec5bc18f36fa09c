"""`Mesh`, a device mesh as plain data, so that planning needs no process group."""

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError

# Characters that separate names, sizes and layouts in the text of a mesh or a pin: "dp=2,tp=4", "dp+tp", "tp:S(0)".
SEPARATORS = "=,:+"
Shares = tuple[tuple[int, tuple[int, ...]], ...]  # as of `Mesh`
# The mesh axis along which the stages of a pipeline lie, as torchtitan calls it; in plans it is the first.
PIPELINE = "pp"
# Axes along which ranks share their rows, as every trainer has it: one data loader for all ranks of a model's copy.
SHARING = frozenset((PIPELINE, "tp", "cp", "sp", "mp", "model"))


class SeenShares(tuple[int, ...]):
    """Shares of the batch as the rank of index `seen` on their axis sees them: sizes are those of its rows, where they
    are otherwise those of the largest share. They are unequal to the same shares as others see them.
    """

    seen: int

    def __new__(cls, rows: Iterable[int], seen: int) -> "SeenShares":
        made = super().__new__(cls, rows)
        made.seen = seen
        return made

    def __getnewargs__(self) -> tuple[tuple[int, ...], int]:
        return tuple(self), self.seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenShares) and self.seen == other.seen and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((tuple(self), self.seen))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes and names of the mesh axes, outermost first; ranks are laid out row-major.

    A name is any text that prints on one line and contains none of `SEPARATORS`, so that `str(mesh)` can be parsed in
    only one way. MeshError for other names, or sizes below 1.

    `shares`: the rows of the batch that each rank of one axis gets, (axis, its ranks' rows); (): all get as many. They
    are no part of `str(mesh)`. What is priced on the mesh is the rank with the most rows, or that of `SeenShares`.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    shares: Shares = ()

    def __post_init__(self) -> None:
        if not self.shape or any(type(size) is not int or size < 1 for size in self.shape):
            raise MeshError(
                f"mesh shape must be positive sizes, found {reprlib.repr(self.shape)}; write e.g. '2x4' or 'dp=2,tp=4'"
            )
        for name in self.axis_names:
            _check_name(name)
        if len(set(self.axis_names)) != len(self.axis_names) or len(self.axis_names) != len(self.shape):
            expected, found = len(self.shape), reprlib.repr(self.axis_names)
            raise MeshError(f"mesh {reprlib.repr(self.shape)} needs {expected} distinct axis names, found {found}")
        _check_shares(self)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def axis_index(self, name: str) -> int:
        """Index of the axis called `name`; MeshError if there is none."""
        if name not in self.axis_names:
            raise MeshError(f"no mesh axis {name!r}; the mesh has {', '.join(self.axis_names)}")
        return self.axis_names.index(name)

    def name_of(self, axes: tuple[int, ...]) -> str:
        """The name of several axes taken as one, such as "dp+tp"."""
        return "+".join(self.axis_names[axis] for axis in axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape))


def _check_shares(mesh: Mesh) -> None:
    """MeshError unless the shares of `mesh` are a positive number of rows for each rank of one of its axes."""
    if len(mesh.shares) > 1:
        raise MeshError("the batch is in shares on one axis of the mesh, found several; split it evenly on the others")
    for axis, rows in mesh.shares:
        if not 0 <= axis < mesh.ndim or len(rows) != mesh.shape[axis]:
            expected = mesh.shape[axis] if 0 <= axis < mesh.ndim else 0
            raise MeshError(
                f"shares are the rows of each rank of an axis: {expected} numbers, found {reprlib.repr(rows)}"
            )
        if any(type(size) is not int or size < 1 for size in rows):
            raise MeshError(
                f"each rank gets one row of the batch or more, found shares {reprlib.repr(rows)}; leave a rank that"
                " gets none out of the mesh"
            )


def _check_name(name: object) -> None:
    """MeshError unless `name` is a valid axis name; the message escapes control characters."""
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise MeshError(
            "the name of a mesh axis is text without control characters or surrounding spaces, found"
            f" {reprlib.repr(name)}"
        )
    if separators := set(SEPARATORS).intersection(name):
        raise MeshError(
            f"mesh axis {reprlib.repr(name)} contains {''.join(sorted(separators))!r}, which separates axes in the text"
            " of a mesh or a pin ('dp=2,tp=4', 'tp:S(0)', 'dp+tp'); call it e.g. 'dp-shard' or 'dp.shard'"
        )


@dataclass(frozen=True, slots=True)
class Devices:
    """A number of devices without a mesh: the search chooses how to factorise it into axes.

    `per_node`: devices in a node; 0: as many as the cluster has in one.
    """

    num_devices: int
    per_node: int = 0

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.per_node < 0 or (self.per_node and self.num_devices % self.per_node):
            raise MeshError(
                f"expected a positive number of devices, in full nodes, found {self.num_devices} in nodes of"
                f" {self.per_node}"
            )

    def __str__(self) -> str:
        return f"{self.num_devices} devices"


def parse_mesh(text: str) -> Mesh:
    """Read '2x4', '8' or 'dp=2,tp=4'.

    >>> print(parse_mesh("2x4"))
    a0=2,a1=4
    >>> parse_mesh("dp=2,tp=4").axis_names
    ('dp', 'tp')
    """
    try:
        if "=" in text:
            pairs = [part.split("=") for part in text.split(",")]
            return Mesh(tuple(int(size) for _, size in pairs), tuple(name.strip() for name, _ in pairs))
        sizes = tuple(int(size) for size in text.lower().split("x"))
        return Mesh(sizes, tuple(f"a{i}" for i in range(len(sizes))))
    except ValueError as error:
        raise MeshError(f"cannot read mesh {text!r}; write e.g. '2x4' or 'dp=2,tp=4'") from error


def parse_devices(text: str) -> Mesh | Devices:
    """The mesh of `text`, as `parse_mesh` reads it; '64' and 'nodes=8,devices=8' are `Devices` and leave the mesh open.

    >>> parse_devices("64")
    Devices(num_devices=64, per_node=0)
    >>> parse_devices("nodes=8,devices=4")
    Devices(num_devices=32, per_node=4)
    >>> print(parse_devices("8x8"))
    a0=8,a1=8
    """
    mesh = parse_mesh(text)
    if mesh.axis_names == ("nodes", "devices"):
        return Devices(mesh.num_devices, mesh.shape[1])
    return Devices(mesh.num_devices) if text.strip().isdigit() else mesh


def as_mesh(mesh: "Mesh | Devices | DeviceMesh | str | int | tuple[int, ...]") -> Mesh | Devices:
    """The mesh that a user wrote in any of the accepted forms; `Devices` if it is left open.

    TypeError for anything else, MeshError for a malformed mesh.
    """
    if isinstance(mesh, Mesh | Devices):
        return mesh
    if isinstance(mesh, str):
        return parse_devices(mesh)
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        return Devices(mesh)
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    if isinstance(mesh, bool):
        raise TypeError(f"a mesh is no truth value, found {mesh}")
    return Mesh(tuple(mesh), tuple(f"a{i}" for i in range(len(mesh))))


def stages_first(mesh: "Mesh | Devices") -> "Mesh | Devices":
    """`mesh` with its pipeline axis, if it has one, as the first.

    >>> print(stages_first(parse_mesh("dp=2,pp=4")))
    pp=4,dp=2
    """
    if isinstance(mesh, Devices) or PIPELINE not in mesh.axis_names:
        return mesh
    order = stages_first_order(mesh.axis_names)
    return Mesh(tuple(mesh.shape[axis] for axis in order), tuple(mesh.axis_names[axis] for axis in order))


def stages_first_order(axis_names: tuple[str, ...]) -> tuple[int, ...]:
    """The indices of the axes with the pipeline axis first, all others as they are."""
    return tuple(sorted(range(len(axis_names)), key=lambda axis: axis_names[axis] != PIPELINE))


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The `Mesh` with the sizes and axis names of a DeviceMesh; axes without names are called a0, a1, ..."""
    names = mesh.mesh_dim_names or tuple(f"a{i}" for i in range(mesh.ndim))
    return Mesh(tuple(mesh.shape), tuple(names))
