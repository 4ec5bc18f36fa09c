"""`spmd_types` accepts generated code (tests/runtime/test_numerics.py checks every module) and rejects it with a
conversion left out.
"""

import re

import pytest
import spmd_types as spmd

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.verify.check_placements import check, check_source
from tests.runtime.training import AXES, Mesh, build, device_mesh, plan_called, traced
from tests.workers import Ranks

CONVERSION = re.compile(r"^ *(\w+) = convert\((\w+), (\w+), ([^ ]+), ([^ ]+)\)", re.MULTILINE)
# With one of these left out the shapes still fit: only types can tell.
SAME_SHAPE = {("P", "I"), ("P", "R"), ("I", "R")}


def verdicts(name: str, kind: str, shape: tuple[int, ...]) -> dict[str, str]:
    """For each conversion of one program: what the checker says when it is left out."""
    mesh, torch_mesh = Mesh(shape, AXES[: len(shape)]), device_mesh(shape, AXES[: len(shape)])
    graph = traced(build(name))
    program = lower(graph, mesh, plan_called(kind, graph, mesh).assignment)
    check(program, torch_mesh)
    source = emit(program, is_typed=True)
    return {
        match[0].strip(): verdict(without(source, match), program, torch_mesh)
        for match in CONVERSION.finditer(source)
        if tells(match)
    }


def tells(match: re.Match) -> bool:
    return (match[4], match[5]) in SAME_SHAPE


def without(source: str, match: re.Match) -> str:
    """The source with the conversion an assignment and its claim gone."""
    name = match[1]
    source = source.replace(match[0], f"    {name} = {match[2]}  # no {match[0].strip()}")
    return re.sub(rf"\n *{name} = declare\({name}, [^\n]*", "", source, count=1)


def verdict(source: str, program, mesh) -> str:
    try:
        check_source(source, program, mesh)
    except spmd.SpmdTypeError:
        return "rejected"
    return "accepted"


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "kind"), [("mlp", "megatron"), ("gpt2", "megatron"), ("llama", "searched"), ("resnet", "random:1")]
)
def test_rejects_code_without_a_conversion(ranks4: Ranks, name: str, kind: str) -> None:
    found = ranks4.run(verdicts, name, kind, (2, 2))[0]
    assert found, "no conversion to leave out"
    assert {conversion: said for conversion, said in found.items() if said != "rejected"} == {}
