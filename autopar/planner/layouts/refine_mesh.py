"""`lift`: an assignment on a mesh as an assignment on a finer mesh of the same devices."""

from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment


def lift(assignment: Assignment, coarse: Mesh, fine: Mesh) -> Assignment:
    """`assignment` on `fine`, whose axes factorise those of `coarse` in order: a factor has the placement of its axis.

    MeshError if `fine` is no such mesh.
    """
    return assignment.on_axes(sources_of(coarse, fine))


def sources_of(coarse: Mesh, fine: Mesh) -> tuple[int, ...]:
    """For each axis of `fine` the axis of `coarse` of which it is a factor.

    >>> sources_of(Mesh((8, 8), ("a", "b")), Mesh((4, 2, 8), ("a", "b", "c")))
    (0, 0, 1)
    """
    sources, axis, rest = [], 0, coarse.shape[0]
    for size in fine.shape:
        if rest == 1 and size > 1 and axis + 1 < coarse.ndim:
            axis, rest = axis + 1, coarse.shape[axis + 1]
        if rest % size:
            raise MeshError(f"mesh {fine} does not refine mesh {coarse}; its axes must factorise the other's in order")
        sources.append(axis)
        rest //= size
    if rest > 1 or axis + 1 < coarse.ndim:
        raise MeshError(f"mesh {fine} does not refine mesh {coarse}; its axes must factorise the other's in order")
    return tuple(sources)


def refines(coarse: Mesh, fine: Mesh) -> bool:
    """Whether `lift` is possible."""
    try:
        sources_of(coarse, fine)
    except MeshError:
        return False
    return True
