"""Generated source holds nothing of a name but a literal or an identifier that codegen chose; comments cannot be ended
by one.
"""

import ast
import contextlib
import keyword
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.codegen.names import axis_names, code, variable
from autopar.codegen.program import Program
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.runtime.load_program import compile_source, namespace
from tests.planner.cases import by_hand, traced

CODE = "self.ran.append(1)"
HARMLESS = Mesh((2, 2), ("dp", "tp"))


def lowered(mesh: Mesh, kind: str = "megatron", graph: Graph | None = None) -> Program:
    return lower(graph or traced("mlp"), mesh, by_hand("mlp", kind))


def has_run(source: str) -> bool:
    """Whether the generated function, as far as it goes without tensors, does what `CODE` says."""
    forward = compile_source(source, namespace())
    ran: list[int] = []
    for num_axes in (1, 2, 3):
        with contextlib.suppress(Exception):
            forward(SimpleNamespace(ran=ran, axes=(None,) * num_axes, local=lambda _: None), None)
    return bool(ran)


def named(*names: str) -> Mesh:
    """A mesh with any axis names, past the checks at the door."""
    mesh = object.__new__(Mesh)
    object.__setattr__(mesh, "shape", (2,) * len(names))
    object.__setattr__(mesh, "axis_names", names)
    return mesh


@pytest.mark.parametrize(
    "name",
    [
        f"b,) = self.axes; {CODE} #",
        f"x\n    {CODE}\n    #",
        f"a = {CODE}",
        "class",
        "2d",
        "dp-shard",
        "dp.shard",
        "größe",
        " ",
    ],
)
def test_an_axis_name_is_no_code(name: str) -> None:
    source = emit(lowered(named(name, "tp")))
    assert not has_run(source) and CODE not in source
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert all(one.isascii() for one in names)


def test_harmless_axis_names_are_kept() -> None:
    assert "(axis_dp, axis_tp" in emit(lowered(HARMLESS))


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1) | st.sampled_from(["a", "b", "a_and_b", "0", "1", "0_and_1"]),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
@example(["a", "b", "a_and_b"])
@example(["1", "é"])
@example(["1", "è", "é"])
def test_two_axes_never_share_an_identifier(names: list[str]) -> None:
    joint = [(i, j) for j in range(len(names)) for i in range(j)] + (
        [tuple(range(len(names)))] if len(names) > 2 else []
    )
    given_to = axis_names(named(*names), tuple(joint))
    assert len(set(given_to.values())) == len(names) + len(joint)
    assert all(name.isascii() and name.isidentifier() and name.startswith("axis_") for name in given_to.values())


AWKWARD = (
    [
        "",
        "_",
        "x",
        "self",
        "self_",
        "self__",
        "class",
        "class_",
        "None",
        "print",
        "torch",
        "axis_dp",
        "axis_dp_",
        "named_x",
        "named_",
    ]
    + [
        "a.b",
        "a_b",
        "a-b",
        "a__b",
        "é",
        "e\u0301",
        "ﬁ",
        "fi",
        "x²",
        "x2",
        "region_1",
        "region_1_",
        "offload_1",
        "__debug__",
        "__debug",
    ]
    + ["__debug_", "__debug__ ", "2d", "match", "\n", "\ud800", "named__2e_", "x.", "x_2e_"]
)


@given(st.text() | st.sampled_from(AWKWARD), st.text() | st.sampled_from(AWKWARD))
@example("class", "class_")
@example("a.b", "a_b")
@example("ﬁ", "fi")
def test_two_values_never_share_a_variable(left: str, right: str) -> None:
    assert (variable(left) == variable(right)) == (left == right)


@given(st.text() | st.sampled_from([*AWKWARD, *keyword.kwlist, *keyword.softkwlist]))
def test_a_variable_is_an_identifier_that_hides_nothing(name: str) -> None:
    found = variable(name)
    assert found.isascii() and found.isidentifier() and not keyword.iskeyword(found)
    assert (
        found not in namespace()
        and not found.startswith(("axis_", "region_", "offload_"))
        and found not in ("self", "seed", "declare")
    )
    exec(f"{found} = 1", {})
    exec(f"def f(self, {found}):\n    del {found}", {})


def test_awkward_names_do_not_collide_among_each_other() -> None:
    assert len({variable(name) for name in AWKWARD}) == len(AWKWARD)


@pytest.mark.parametrize(
    "origin",
    [f"a\n    {CODE}", f"a\r    {CODE}", f"a\x0c{CODE}", "a\x00b", "\ud800", f"a\u2028{CODE}", f"\x1b[2J{CODE}"],
)
def test_a_comment_cannot_be_ended(origin: str) -> None:
    graph = traced("mlp")
    graph = replace(graph, ops=tuple(replace(op, module=origin, line=origin) for op in graph.ops))
    source = emit(lowered(HARMLESS, graph=graph))
    assert not has_run(source) and "\x1b" not in source
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(emit(lowered(HARMLESS))))


def test_fqns_are_literals() -> None:
    graph, fqn = traced("mlp"), f"a'); {CODE}; ('\n\x00\ud800"
    first = graph.inputs[0]
    graph = replace(graph, inputs=(replace(first, fqn=fqn), *graph.inputs[1:]))
    source = emit(lowered(HARMLESS, graph=graph))
    assert [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value == fqn
    ] == [fqn]


def test_a_copy_of_a_value_never_takes_the_name_of_another() -> None:
    """Two parameters "w" and "w__1": the gathered copy of the first was called like the second."""
    graph = traced("mlp")
    names = [item.value.name for item in graph.of_kind("parameter")]
    copied = next(name for name in names if f"{variable(name)}__1" in emit(lowered(HARMLESS, "zero3")))
    other = next(name for name in names if name != copied)
    taken = renamed(graph, {other: f"{copied}__1"})
    assignment = by_hand("mlp", "zero3")
    layouts = {f"{copied}__1" if name == other else name: layout for name, layout in assignment.layouts.items()}
    program = lower(taken, HARMLESS, replace(assignment, layouts=layouts))
    written = [
        node.id
        for node in ast.walk(ast.parse(emit(program)))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    assert written.count(f"{copied}__1") == 1


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    def of(value):
        return replace(value, name=names.get(value.name, value.name))

    inputs = tuple(replace(item, value=of(item.value)) for item in graph.inputs)
    ops = tuple(replace(op, inputs=tuple(map(of, op.inputs)), outputs=tuple(map(of, op.outputs))) for op in graph.ops)
    return replace(graph, inputs=inputs, ops=ops)


NUMBERS = [1, -1.5, math.inf, -math.inf, math.nan, True, 1 + 2j, complex(0, math.nan)]
OTHERS = [
    None,
    "a'\n#",
    b"\x00",
    torch.float32,
    torch.device("cpu"),
    torch.contiguous_format,
    torch.strided,
    (1, (2, "x")),
]


@pytest.mark.parametrize("leaf", [*NUMBERS, *OTHERS])
def test_constants_are_literals(leaf: object) -> None:

    found = eval(code(leaf), namespace())
    assert repr(found).replace("[", "(").replace("]", ")") == repr(leaf) or found == leaf


def test_a_constant_that_is_no_literal_is_refused() -> None:

    class Text(str):
        def __repr__(self) -> str:
            return CODE

    for leaf in (Text("x"), object(), [Text("x")]):
        with pytest.raises(AutoparError, match="no literal"):
            code(leaf)
