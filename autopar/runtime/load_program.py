"""Turn a program's source into a function that runs on this rank."""

import itertools
import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.codegen.emit import emit
from autopar.codegen.generated_self import Forward, Gather
from autopar.codegen.names import local_name
from autopar.codegen.program import Program
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.collective_time import nesting
from autopar.ir.graph import Graph
from autopar.mesh import Shares
from autopar.plans.choices import Choices
from autopar.plans.plan import Plan
from autopar.plans.resplit import resplit
from autopar.runtime.interop.output_hooks import copied_outputs
from autopar.runtime.process_groups import joint_group, level_groups
from autopar.runtime.rank_agreement import peers_alive
from autopar.runtime.saved_tensors.gather_bucket import GatherBucket
from autopar.runtime.saved_tensors.offload_saved import Offload
from autopar.runtime.saved_tensors.recompute import recomputed
from autopar.runtime.saved_tensors.regather import regathered
from autopar.runtime.seeded_rng import draw_seed, seeded
from autopar.sbp.axis import Axis, joint_axis
from autopar.sbp.convert import convert, convert_together, move
from autopar.sbp.in_flight import InFlight, all_arrived, cast_stored
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.nested import Nest
from autopar.sbp.placement import E, I, L, Layout, P, R, S, shares

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program ready to run: `self` of the generated functions (`GeneratedSelf`). `owners`: FQN -> (module, attribute)
    that holds the tensor.

    gather: of a split program, the function that is run once a step; `used`: what `function` reads of its results
    (`step.open_step`). rows: outputs of which each rank is given its part of the batch -> the dim of the batch.
    copied: `copied_outputs`.
    """

    choices: Plan | Choices
    graph: Graph
    program: Program
    source: str
    function: Forward
    mesh: DeviceMesh
    placed: "MeshAxes"
    constants: Mapping[str, torch.Tensor]
    owners: Mapping[str, tuple[nn.Module, str]]
    gather: Gather | None = None
    used: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    copied: frozenset[int] = frozenset()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.placed.now

    @property
    def plan(self) -> Plan:
        """The plan, which is priced now if that was not asked for before, or the batch is in other shares since."""
        plan = self.choices.plan if isinstance(self.choices, Choices) else self.choices
        return resplit(plan, self.shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """The sizes of the shares that the batch is in now; () if it is in none."""
        return next((self.axes[axis].shares for axis, _ in self.program.mesh.shares), ())

    @property
    def step_seed(self) -> int:
        raise AssertionError("only microbatches have random ops that draw alike: a `Pass` runs them")

    def draw_seed(self) -> int:
        return draw_seed()

    def of(self, owners: Mapping[str, tuple[nn.Module, str]]) -> "Loaded":
        """The same for a copy of the module, whose tensors have these owners."""
        return replace(self, owners=owners, used={})

    def share(self, sizes: tuple[int, ...]) -> None:
        """From the next call on the batch is in shares of these sizes."""
        self.placed.share(sizes)

    def local(self, fqn: str) -> torch.Tensor:
        """This rank's part of a parameter or buffer; its gradient becomes a DTensor again."""
        state = self.state(fqn)
        if torch.is_grad_enabled():
            return _Locals.apply(state)[0]
        # to_local() makes a view of the part each time, which takes longer than a small op; torch detaches no tensor
        # subclass in inference mode that is no view of that mode
        return state.to_local() if torch.is_inference_mode_enabled() else state._local_tensor

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        """`local` of parameters that are converted together."""
        if torch.is_grad_enabled():
            return _Locals.apply(*map(self.state, fqns))
        return tuple(map(self.local, fqns))

    def local_copy(self, fqn: str) -> torch.Tensor:
        """`local` of a buffer that is written back to."""
        return self.local(fqn).clone()

    def state(self, fqn: str) -> DTensor:
        module, name = self.owners[fqn]
        held = module._parameters[name] if name in module._parameters else module._buffers[name]
        assert isinstance(held, DTensor), f"{fqn} was replaced by a tensor that is no DTensor"
        return held

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Store the new content of a buffer."""
        with torch.no_grad():
            self.state(fqn).to_local().copy_(value)


@dataclass(eq=False)
class MeshAxes:
    """The axes of a program; those that have the batch in shares may get others between two steps."""

    now: tuple[Axis, ...]

    def share(self, sizes: tuple[int, ...]) -> None:
        """From now on the batch is in shares of these sizes."""
        self.now = tuple(replace(axis, shares=sizes) if axis.shares else axis for axis in self.now)


class _Locals(torch.autograd.Function):
    """The local parts of DTensors, as `to_local` gives them; gradients are DTensors that can be differentiated again.

    Those of parts that are converted together are there together too.
    """

    @staticmethod
    def forward(ctx, *stored):
        ctx.specs = [x._spec for x in stored]
        ctx.in_flight = list[InFlight]()
        ctx.set_materialize_grads(False)
        # autograd makes the tensors returned results of this
        parts = tuple(part.view_as(part) for part in (x.to_local() for x in stored))
        ctx.mark_non_differentiable(*(part for x, part in zip(stored, parts) if not x.requires_grad))
        return parts

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.in_flight:
            with peers_alive():
                gradients = all_arrived(ctx.in_flight, gradients)
        return tuple(None if local is None else _of_spec(local, spec) for local, spec in zip(gradients, ctx.specs))


def _of_spec(local: torch.Tensor, spec: Any) -> DTensor:
    if not torch.is_grad_enabled():
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # its __init__ does nothing, in 3 us
    ends = {"shape": spec.shape, "stride": spec.stride}
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, **ends)


def load(program: Program, axes: tuple[Axis, ...], **fields: Any) -> Loaded:
    """Compile the program's source; `fields` are the other fields of `Loaded`."""
    fields["placed"] = MeshAxes(axes)
    source, names = emit(program), namespace()
    function, copied = compile_source(source, names), copied_outputs(fields["graph"], program)
    return Loaded(
        program=program, source=source, function=function, gather=names.get("gather"), copied=copied, **fields
    )


def compile_source(source: str, names: dict[str, Any]) -> Forward:
    """The function `forward` that `source` defines, which with all others is then in `names`; tracebacks show its
    lines.
    """
    exec(code_of(source), names)
    return names["forward"]


def code_of(source: str) -> CodeType:
    """The compiled `source`; tracebacks show its lines."""
    filename = f"<autopar {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return compile(source, filename, "exec")


def function_of(code: CodeType, numbers: Mapping[str, float]) -> Forward:
    """The function `forward` of compiled source that reads these numbers too."""
    names: dict[str, Any] = {**namespace(), **numbers}
    exec(code, names)
    return names["forward"]


def namespace() -> dict[str, Any]:
    """Names that generated code may use."""
    local = SimpleNamespace(**{local_name(target): op.run for target, op in LOCAL_OPS.items()})
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "autopar": torch.ops.autopar,
        "local": local,
        "convert": convert,
        "move": move,
        "cast_stored": cast_stored,
        "seeded": seeded,
        "convert_together": convert_together,
        "GatherBucket": GatherBucket,
        "regathered": regathered,
        "recomputed": recomputed,
        "Offload": Offload,
        "I": I,
        "P": P,
        "R": R,
        "S": S,
        "shares": shares,
        "E": E,
        "L": L,
        "inf": math.inf,
        "nan": math.nan,
    }


def axes_of(
    mesh: DeviceMesh, joint: Sequence[tuple[int, ...]] = (), cluster: Cluster | None = None, shares: Shares = ()
) -> tuple[Axis, ...]:
    """The mesh's axes as this rank sees them, then each of the `joint` sets of several as one; all ranks must call with
    the same sets. `cluster`: by whose prices collectives over several link levels are run level by level; None: never.
    `shares`: of `Mesh`.
    """
    names = mesh.mesh_dim_names or tuple(f"a{i}" for i in range(mesh.ndim))

    def nest(axes: tuple[int, ...]) -> Nest | None:
        how = None if cluster is None else nesting(cluster, tuple(mesh.shape), axes)
        return None if how is None else Nest(how, level_groups(mesh, axes, how.sizes))

    single = tuple(
        Axis(name, mesh.size(i), mesh.get_local_rank(i), mesh.get_group(i), nest((i,)), shares=dict(shares).get(i, ()))
        for i, name in enumerate(names)
    )
    return single + tuple(
        joint_axis([single[i] for i in axes], joint_group(mesh, axes), nest(tuple(axes))) for axes in joint
    )


def torch_placements(layout: Layout) -> tuple[TorchPlacement, ...]:
    """A stored layout as DTensor placements; mesh order is DTensor's own order of nested splits.

    What is in shares, which DTensor does not know, is whole.
    """
    return tuple(Shard(p.dim) if p.is_split and not p.shares else Replicate() for p in layout)
