"""The files of plans: JSON text with a format number, the version that wrote it and a checksum."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from dataclasses import fields as fields_in
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.training import Training
from autopar.errors import MeshError, MicrobatchError, PlanError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint, printable
from autopar.mesh import Devices, Mesh
from autopar.plans.json_codec import MemoryLimit, as_json, from_object
from autopar.plans.json_fields import Fields, parse, shown
from autopar.sbp.assignment import Assignment
from autopar.schedule.orders import Schedule

Result = TypeVar("Result")
Plans = TypeVar("Plans", bound="SavedAnyPlan")

FORMAT = 8
_MOST_TOLD = 500  # characters of an error about a text, which may quote it
AGAIN = "make the plan anew with autopar.plan(...).save(path)"


@dataclass(frozen=True, slots=True)
class HandCosts:
    """The costs of a hand plan of the same model and mesh, for a step."""

    step_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SavedAnyPlan:
    """The content of the file of any plan; the graph and everything computed from it are not in the file.

    `fingerprint`: of the graph that the plan was made for. The fields with defaults are claims: lower_bound_s,
    found_by, hand and peak_bytes are results of a search or a run and are not checked on reading. Those of another
    version of autopar, whose prices may differ, are dropped, and a plan from a file says so.
    """

    fingerprint: str
    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: MemoryLimit
    lower_bound_s: float = 0.0
    found_by: str = ""
    hand: Mapping[str, HandCosts] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedPlan(SavedAnyPlan):
    """The content of the file of a plan without stages, or of the part of a file for one stage."""

    bound_of: str
    assignment: Assignment


@dataclass(frozen=True, kw_only=True)
class SavedStages(SavedAnyPlan):
    """The content of the file of a plan with stages, microbatches or both."""

    schedule: Schedule
    starts: tuple[str, ...]
    stages: tuple[SavedPlan, ...]
    bound_of: str = "plan"


@cache
def autopar_version() -> str:
    """The version of this autopar, which every plan's file has."""
    return version("autopar")


def dumps(kind: type[SavedAnyPlan], plan: Any) -> str:
    """The JSON text of a plan, which has the fields of `kind`."""
    return signed({"format": FORMAT, "autopar": autopar_version(), **as_json(kind, plan)})


def loads(kind: type[Plans], text: str) -> Plans:
    """The content of a plan's text; PlanError if it is no plan of this `kind`, was edited, or has another format."""
    fields = fields_of(text)
    return reading(lambda: _read(kind, fields))


def _read(kind: type[Plans], fields: Fields) -> Plans:
    is_same_version = fields.text("autopar") == autopar_version()
    saved = from_object(kind, fields.without("format", "autopar"))
    return saved if is_same_version else _without_claims(saved)


def _without_claims(saved: Plans) -> Plans:
    """`saved`, and its stages, without the claims, which cannot be computed again."""
    claims = {
        each.name
        for each in fields_in(SavedAnyPlan)
        if each.default is not MISSING or each.default_factory is not MISSING
    }
    known = {each.name: getattr(saved, each.name) for each in fields_in(saved) if each.name not in claims}
    if isinstance(saved, SavedStages):
        known["stages"] = tuple(map(_without_claims, saved.stages))
    return type(saved)(**known)


def has_stages(text: str) -> bool:
    """Whether the text is of a plan with stages, microbatches or both; PlanError if it is no plan."""
    return "stages" in fields_of(text)


def signed(content: Mapping[str, Any]) -> str:
    """The JSON text of `content` with a checksum; equal content gives equal text."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def reading(read: Callable[[], Result]) -> Result:
    """The result of `read`, with its errors as PlanError."""
    try:
        return read()
    except (ValueError, RecursionError, MeshError, MicrobatchError, UnsupportedOp) as error:
        raise PlanError(f"the plan cannot be read: {printable(str(error), _MOST_TOLD)}; {AGAIN}") from error


def fields_of(text: str) -> Fields:
    """The fields of a plan's text; PlanError if it is damaged, edited or has another format."""
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


class _Placed(Protocol):
    @property
    def mesh(self) -> Mesh: ...
    @property
    def fingerprint(self) -> str: ...


def check_belongs(saved: _Placed, graph: Graph, mesh: Mesh | Devices) -> Mesh:
    """The mesh of a saved plan for `graph`: `mesh`, or that of the plan if `mesh` is left open.

    PlanError if the plan is for another graph or mesh.
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
    return saved.mesh if is_open else replace(mesh, shares=saved.mesh.shares)


def write(path: str | os.PathLike, text: str) -> None:
    """Write `text` to a file atomically: readers never see half a plan."""
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
    """The text of a plan's file; PlanError if it cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read plan {os.fspath(path)!r}: {error}; {AGAIN}") from error
