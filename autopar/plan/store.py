"""Plans as JSON text: what is written, and what is refused on reading, whatever the file holds."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.costmodel.cluster import Cluster, cluster_from_json
from autopar.costmodel.training import Training
from autopar.errors import MeshError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.text import fingerprint
from autopar.mesh import Devices, Mesh
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout, format_layout, parse_layout
from autopar.sbp.signature import Signature, Strategy

FORMAT = 1
AGAIN = "make the plan anew with autopar.plan(...).save(path)"


@dataclass(frozen=True, slots=True)
class HandCosts:
    """What a hand plan of the same model and mesh costs a step."""

    step_s: float
    memory_bytes: int


@dataclass(frozen=True)
class SavedPlan:
    """What a plan's file says; the graph and everything computed from it are not in the file.

    `fingerprint`: of the graph the plan was made for.
    """

    fingerprint: str
    mesh: Mesh
    cluster: Cluster
    training: Training
    memory_limit_bytes: float
    lower_bound_s: float
    bound_of: str
    found_by: str
    hand: Mapping[str, HandCosts]
    peak_bytes: tuple[int, ...]
    assignment: Assignment


def dumps(saved: SavedPlan) -> str:
    """JSON text with a checksum; equal plans give equal text."""
    content = {
        "format": FORMAT,
        "fingerprint": saved.fingerprint,
        "mesh": {"shape": saved.mesh.shape, "axis_names": saved.mesh.axis_names},
        "cluster": json.loads(saved.cluster.to_json()),
        "training": asdict(saved.training),
        "memory_limit_bytes": None if saved.memory_limit_bytes == float("inf") else saved.memory_limit_bytes,
        "lower_bound_s": saved.lower_bound_s,
        "bound_of": saved.bound_of,
        "found_by": saved.found_by,
        "hand": {name: asdict(costs) for name, costs in saved.hand.items()},
        "peak_bytes": saved.peak_bytes,
        "strategies": {name: [str(s) for s in strategy.signatures] for name, strategy in saved.assignment.strategies.items()},
        "layouts": _layouts_text(saved.assignment.layouts),
        "kept": _layouts_text(saved.assignment.kept),
        "outputs": _layouts_text(saved.assignment.outputs),
        "regathered": sorted(saved.assignment.regathered),
        "recomputed": saved.assignment.recomputed,
        "offloaded": saved.assignment.offloaded,
        "state_on_host": sorted(saved.assignment.state_on_host),
    }
    return signed(content)


def signed(content: Mapping[str, Any]) -> str:
    """JSON text of `content` with a checksum."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def loads(text: str) -> SavedPlan:
    """Inverse of `dumps`; PlanError if the text is damaged, edited, or of another format."""
    content = content_of(text)
    try:
        limit = content["memory_limit_bytes"]
        return SavedPlan(
            fingerprint=content["fingerprint"],
            mesh=Mesh(tuple(content["mesh"]["shape"]), tuple(content["mesh"]["axis_names"])),
            cluster=cluster_from_json(json.dumps(content["cluster"])),
            training=Training(**content["training"]),
            memory_limit_bytes=float("inf") if limit is None else float(limit),
            lower_bound_s=float(content["lower_bound_s"]),
            bound_of=str(content["bound_of"]),
            found_by=str(content["found_by"]),
            hand={name: HandCosts(**costs) for name, costs in content["hand"].items()},
            peak_bytes=tuple(map(int, content["peak_bytes"])),
            assignment=Assignment(
                {name: Strategy(tuple(map(parse_signature, rows))) for name, rows in content["strategies"].items()},
                *({name: parse_layout(layout) for name, layout in content[key].items()} for key in ("layouts", "kept", "outputs")),
                frozenset(map(str, content["regathered"])),
                *(tuple(tuple(map(str, region)) for region in content[key]) for key in ("recomputed", "offloaded")),
                state_on_host=frozenset(map(str, content["state_on_host"])),
            ),
        )
    except KeyError as error:
        raise PlanError(f"the plan lacks {error}; {AGAIN}") from error
    except (ValueError, TypeError, AttributeError, MeshError) as error:
        raise PlanError(f"the plan cannot be read: {error}; {AGAIN}") from error


def content_of(text: str) -> dict[str, Any]:
    """The JSON object without its checksum, once format and checksum are right."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"the plan is no JSON, or cut off: {error}; {AGAIN}") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise PlanError(f"not a plan: expected a JSON object with the key 'format'; {AGAIN}")
    if content["format"] != FORMAT:
        raise PlanError(
            f"the plan has format {content['format']}, this autopar reads {FORMAT}; read it with the autopar that wrote it, or {AGAIN}"
        )
    checksum = content.pop("checksum", None)
    if checksum is None:
        raise PlanError(f"the plan lacks 'checksum'; {AGAIN}")
    if checksum != _checksum(content):
        raise PlanError(f"the plan was changed after it was written (its checksum differs); to force a layout use pins=, then {AGAIN}")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_belongs(saved_fingerprint: str, saved: Mesh, graph: Graph, mesh: Mesh | Devices) -> None:
    """PlanError unless a plan for a graph of this fingerprint on mesh `saved` is one for `graph` on `mesh`."""
    if (isinstance(mesh, Devices) and mesh.num_devices != saved.num_devices) or (isinstance(mesh, Mesh) and saved.shape != mesh.shape):
        raise PlanError(f"the plan is for a mesh of shape {saved.shape}, this mesh is {mesh}; use that mesh or plan for this one")
    if saved_fingerprint != fingerprint(graph):
        raise PlanError(
            f"the plan is for another model or other input shapes (graph {saved_fingerprint[:12]}, here {fingerprint(graph)[:12]}); "
            "build the model and its example inputs as they were planned, or plan anew"
        )


def _layouts_text(layouts: Mapping[str, Layout]) -> dict[str, str]:
    return {name: format_layout(layout) for name, layout in layouts.items()}


def parse_signature(text: str) -> Signature:
    """Inverse of `str(Signature)`; ValueError if it is none.

    >>> str(parse_signature("S(1) S(0) -> P [vocabulary]"))
    'S(1) S(0) -> P [vocabulary]'
    """
    match = re.fullmatch(r"([^>]*) -> ([^\[]*?)(?: \[([^\]]+)\])?", text)
    if match is None:
        raise ValueError(f"not a signature: {text!r}")
    inputs, outputs = (tuple(placement for part in side.split() for placement in parse_layout(part)) for side in match.group(1, 2))
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
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read plan {os.fspath(path)!r}: {error}; {AGAIN}") from error
