"""Plans as JSON text: what is written, and what is refused on reading, whatever the file holds."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from autopar.costmodel.cluster.load_cluster import Cluster, cluster_from_json
from autopar.costmodel.training import Training
from autopar.errors import MeshError, MicrobatchError, PlanError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint, printable
from autopar.mesh import Devices, Mesh
from autopar.plans.json_fields import Fields, parse, shown
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout, format_layout, parse_layout
from autopar.sbp.signature import Signature, Strategy

Result = TypeVar("Result")

FORMAT = 2
_MOST_TOLD = 500  # characters of what is wrong with a text, which may quote it
AGAIN = "make the plan anew with autopar.plan(...).save(path)"


@dataclass(frozen=True, slots=True)
class HandCosts:
    """What a hand plan of the same model and mesh costs a step."""

    step_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the file of any plan says; the graph and everything computed from it are not in the file.

    `fingerprint`: of the graph the plan was made for. lower_bound_s, found_by, hand and peak_bytes took a search or a
    run to find and are not checked on reading: another version's, which priced otherwise, are left out, and a plan that
    is read from a file says so.
    """

    fingerprint: str
    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    lower_bound_s: float = 0.0
    found_by: str = ""
    hand: Mapping[str, HandCosts] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedPlan(Saved):
    """The file of a plan without stages, or the part of one that is about a stage."""

    bound_of: str
    assignment: Assignment


@cache
def autopar_version() -> str:
    """Of this autopar, which is in every plan's file."""
    return version("autopar")


def content_of_plan(plan: Any) -> dict[str, Any]:
    """What is written of a `SavedPlan`, or of a `Plan`, which has the same fields."""
    return common_content(plan) | {
        "bound_of": plan.bound_of,
        "strategies": {
            name: [str(s) for s in strategy.signatures] for name, strategy in plan.assignment.strategies.items()
        },
        "layouts": _layouts_text(plan.assignment.layouts),
        "kept": _layouts_text(plan.assignment.kept),
        "outputs": _layouts_text(plan.assignment.outputs),
        "regathered": sorted(plan.assignment.regathered),
        "recomputed": plan.assignment.recomputed,
        "offloaded": plan.assignment.offloaded,
        "state_on_host": sorted(plan.assignment.state_on_host),
    }


def common_content(plan: Any) -> dict[str, Any]:
    """The part of it that plans with and without stages share: the fields of `Saved`."""
    return {
        "format": FORMAT,
        "autopar": autopar_version(),
        "fingerprint": plan.fingerprint,
        "mesh": {"shape": plan.mesh.shape, "axis_names": plan.mesh.axis_names},
        "cluster": json.loads(plan.cluster.to_json()),
        "training": asdict(plan.training),
        "memory_limit_bytes": None if plan.memory_limit_bytes == float("inf") else plan.memory_limit_bytes,
        "lower_bound_s": plan.lower_bound_s,
        "found_by": plan.found_by,
        "hand": {name: asdict(costs) for name, costs in plan.hand.items()},
        "peak_bytes": plan.peak_bytes,
    }


def signed(content: Mapping[str, Any]) -> str:
    """JSON text of `content` with a checksum; equal content gives equal text."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def reading(read: Callable[[], Result]) -> Result:
    """What `read` gives; a PlanError where that is no plan."""
    try:
        return read()
    except (ValueError, RecursionError, MeshError, MicrobatchError, UnsupportedOp) as error:
        raise PlanError(f"the plan cannot be read: {printable(str(error), _MOST_TOLD)}; {AGAIN}") from error


def read_plan(fields: Fields) -> SavedPlan:
    """The plan without stages that the fields describe; ValueError or MeshError if they describe none."""
    strategies = fields.under("strategies")
    return SavedPlan(
        **vars(read_common(fields)),
        bound_of=fields.text("bound_of"),
        assignment=Assignment(
            {name: Strategy(tuple(map(parse_signature, strategies.texts(name)))) for name in strategies},
            *(_read_layouts(fields.under(key)) for key in ("layouts", "kept", "outputs")),
            frozenset(fields.texts("regathered")),
            *(fields.text_lists(key) for key in ("recomputed", "offloaded")),
            state_on_host=frozenset(fields.texts("state_on_host")),
        ),
    )


def read_common(fields: Fields) -> Saved:
    """What plans with and without stages share; errors as in `read_plan`."""
    saved = Saved(
        fingerprint=fields.text("fingerprint"),
        mesh=_read_mesh(fields.under("mesh")),
        cluster=cluster_from_json(json.dumps(fields.under("cluster").content)),
        training=_read_training(fields.under("training")),
        memory_limit_bytes=(
            float("inf") if fields["memory_limit_bytes"] is None else fields.number("memory_limit_bytes", least=1.0)
        ),
    )
    told = {
        "lower_bound_s": fields.number("lower_bound_s"),
        "found_by": fields.text("found_by"),
        "hand": _read_hand(fields.under("hand")),
        "peak_bytes": fields.numbers("peak_bytes"),
    }
    return replace(saved, **told) if fields.text("autopar") == autopar_version() else saved


def _read_mesh(fields: Fields) -> Mesh:
    return Mesh(fields.numbers("shape"), tuple(fields.list("axis_names")))


def _read_training(fields: Fields) -> Training:
    counts = {key: fields.whole(key) for key in ("num_microbatches", "num_in_flight", "num_waiting")}
    return Training(fields.only("optimizer", *counts).text("optimizer"), **counts)


def _read_hand(fields: Fields) -> dict[str, HandCosts]:
    each = {name: fields.under(name).only("step_s", "memory_bytes") for name in fields}
    return {name: HandCosts(costs.number("step_s"), costs.whole("memory_bytes")) for name, costs in each.items()}


def _read_layouts(fields: Fields) -> dict[str, Layout]:
    return {name: parse_layout(fields.text(name)) for name in fields}


def fields_of(text: str) -> Fields:
    """The fields of a plan's text, once its format and checksum are right; PlanError if it is damaged, edited or of
    another format.
    """
    try:
        return Fields(_unsigned(parse(text)))
    except ValueError as error:
        raise PlanError(f"the plan is no JSON, or cut off: {error}; {AGAIN}") from error
    except RecursionError as error:
        raise PlanError(f"the plan is nested too deeply; {AGAIN}") from error


def _unsigned(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise PlanError(f"not a plan: expected a JSON object with the key 'format'; {AGAIN}")
    if content["format"] != FORMAT:
        found = shown(content["format"])
        raise PlanError(
            f"the plan has format {found}, this autopar reads {FORMAT}; read it with the autopar that wrote it, or"
            f" {AGAIN}"
        )
    checksum = content.pop("checksum", None)
    if checksum is None:
        raise PlanError(f"the plan lacks 'checksum'; {AGAIN}")
    if checksum != _checksum(content):
        raise PlanError(
            "the plan was changed after it was written (its checksum differs); to force a layout use pins=, then"
            f" {AGAIN}"
        )
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_belongs(saved: Saved, graph: Graph, mesh: Mesh | Devices) -> Mesh:
    """The mesh on which `saved` is a plan for `graph`: `mesh`, or that of the plan where it is left open. PlanError if
    it is none.
    """
    is_open = isinstance(mesh, Devices)
    if saved.mesh.num_devices != mesh.num_devices or not (is_open or saved.mesh.shape == mesh.shape):
        raise PlanError(
            f"the plan is for a mesh of shape {saved.mesh.shape}, this mesh is {mesh}; use that mesh or plan for"
            " this one"
        )
    if saved.fingerprint != fingerprint(graph):
        graphs = f"graph {printable(saved.fingerprint, 12)}, here {fingerprint(graph)[:12]}"
        raise PlanError(
            f"the plan is for another model or other input shapes ({graphs}); build the model and its example inputs as"
            " they were planned, or plan anew"
        )
    return saved.mesh if is_open else mesh


def _layouts_text(layouts: Mapping[str, Layout]) -> dict[str, str]:
    return {name: format_layout(layout) for name, layout in layouts.items()}


def parse_signature(text: str) -> Signature:
    """Inverse of `str(Signature)`; ValueError if it is none.

    >>> str(parse_signature("S(1) S(0) -> P [vocabulary]"))
    'S(1) S(0) -> P [vocabulary]'
    """
    match = re.fullmatch(r"([^>]*) -> ([^\[]*?)(?: \[([^\]]+)\])?", text)
    if match is None:
        raise ValueError(f"not a signature: {shown(text)}")
    inputs, outputs = (
        tuple(placement for part in side.split() for placement in parse_layout(part)) for side in match.group(1, 2)
    )
    return Signature(inputs, outputs, match[3] or "")


def write(path: str | os.PathLike, text: str) -> None:
    """Write the file whole or not at all: readers never see half a plan."""
    path = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".part", delete=False) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def read(path: str | os.PathLike) -> str:
    """Text of a plan's file; PlanError if it cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read plan {os.fspath(path)!r}: {error}; {AGAIN}") from error
