"""Meshes as users and files write them: which names an axis may have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Mesh, as_mesh, parse_mesh

NAMES = ["dp-shard", "dp.shard", "class", "2d", "größe", "并行", "a b", "None", "x'; y", "}"]
WRONG = [
    "",
    " ",
    " dp",
    "dp\t",
    "a\nb",
    "\x1b[2J",
    "a\x00",
    "\ud800",
    "\u202eabc",
    "a\u2028b",
    3,
    None,
    b"dp",
    ("dp",),
    True,
]


@pytest.mark.parametrize("name", NAMES)
def test_an_axis_may_have_any_name_that_prints(name):
    mesh = Mesh((2, 4), (name, "tp"))
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize("name", WRONG, ids=ascii)
def test_names_that_are_no_text_or_do_not_print_are_refused(name):
    with pytest.raises(MeshError, match="without control characters") as error:
        Mesh((2, 4), (name, "tp"))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["a=b", "a,b", "tp:S", "dp+tp"])
def test_names_that_hold_what_separates_axes_are_refused(name):
    with pytest.raises(MeshError, match="separates axes"):
        Mesh((2, 4), (name, "tp"))


@pytest.mark.parametrize("shape", [(), (0,), (2.0,), (True,), ("2",), (None,), (-1,), (float("nan"),), ((2,),)])
def test_sizes_that_are_no_positive_numbers_are_refused(shape):
    with pytest.raises(MeshError, match="positive sizes"):
        Mesh(shape, tuple(map(str, range(len(shape)))))


def test_a_mesh_whose_number_is_no_int_is_refused():
    with pytest.raises(MeshError, match="cannot read mesh"):
        parse_mesh("dp=" + "9" * 5000)


@given(st.lists(st.text(), min_size=1, max_size=3, unique=True))
def test_a_mesh_is_read_as_it_prints_or_refused(names):
    try:
        mesh = Mesh((2,) * len(names), tuple(names))
    except MeshError as error:
        assert str(error).isprintable()
        return
    assert parse_mesh(str(mesh)) == mesh


def test_a_shape_gets_names():
    assert as_mesh((2, 4)) == Mesh((2, 4), ("a0", "a1"))
