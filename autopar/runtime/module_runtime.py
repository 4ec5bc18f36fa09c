"""The runtime of a sharded module: it traces, plans and loads a program for each kind of call, and runs it."""

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.codegen.lower import lower
from autopar.errors import AutoparError, warn
from autopar.ir.autocast import without_autocast
from autopar.ir.graph import Graph
from autopar.ir.inference.for_inference import for_inference
from autopar.ir.interpret import run_constants
from autopar.ir.op_facts import is_random
from autopar.ir.outline.held_beside import moved_along
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.rarely_collected import rarely_collected
from autopar.ir.trace_with_loss import LossFunction
from autopar.mesh import Shares, mesh_of
from autopar.plans.choices import Choices
from autopar.plans.other_batch import goes_by
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.call_key import (
    Key,
    describe_call,
    example_of,
    goes_on,
    grad_mode_reads,
    own_autograd,
    program_keys,
    up_to_numbers,
    up_to_sizes,
)
from autopar.runtime.checks.lone_call import Calls, reason_to_load
from autopar.runtime.checks.module_changes import Changes
from autopar.runtime.checks.replaced_tensors import ReplacedBuffers, mark_replaced
from autopar.runtime.checks.same_inputs import InputCheck
from autopar.runtime.dtensor_state import (
    drop_others,
    fill_in,
    held,
    holding,
    install,
    not_sharded,
    owners,
    shard_model,
    stateful,
    stored_layouts,
)
from autopar.runtime.interop.own_forward import tracer
from autopar.runtime.interop.stand_ins import Own, take_written
from autopar.runtime.load_program import Loaded, axes_of, load
from autopar.runtime.local_batch import LocalBatch, output_layouts, rows_of
from autopar.runtime.pipeline.fail_together import failing_together
from autopar.runtime.pipeline.held_tensors import held_by
from autopar.runtime.pipeline.same_stages import same_stages
from autopar.runtime.pipeline.trainer import Trainer, make_trainer, pipeline_mesh
from autopar.runtime.rank_agreement import (
    agree_on_call,
    agreed_graph,
    check_seed,
    check_weights,
    from_first,
    is_first,
    meet,
    on_every_rank,
    peers_alive,
    take_from_first,
)
from autopar.runtime.run_program import check_no_hooks, check_no_transform, is_more_than_forward, run, whole_batch
from autopar.runtime.sizes.call_kind import CallKind, shapes_of
from autopar.runtime.sizes.kept_plan import CallPlanner, Trial
from autopar.runtime.sizes.number_kind import NumberKind
from autopar.sbp.placement import Layout
from autopar.torch_compat import pytree

# A rank that is called with new shapes waits this long for the others: they may read data or write a checkpoint.
LATER_WAIT_S = 300.0


@dataclass
class Runtime:
    """The runtime of a sharded module: the programs loaded so far, by mode and input shapes."""

    mesh: DeviceMesh
    plan: CallPlanner
    original: type[nn.Module]
    name: str  # the same on every rank, and no other module's
    own: Own  # the model's own parameters, until the first plan shards them
    loss_fn: LossFunction | None = None  # of train_step
    param_dtype: torch.dtype | None = None  # in which it is computed
    parts: LocalBatch | None = None  # None: every rank gives the whole batch
    check: InputCheck | None = None  # None: nothing is compared between ranks
    is_strict: bool = False  # weights must be equal on all ranks; otherwise the first rank's are taken
    is_in_use: bool = False  # somebody may hold the parameters
    shares: Shares = ()  # of the batch, if they were changed since it was planned
    trains: bool = True  # otherwise calls record no gradients
    gives_whole: bool = True  # outputs of a call; otherwise those that lie split are DTensors
    elsewhere: Mapping[str, torch.Tensor] = field(default_factory=dict)  # like what only other ranks hold, by FQN
    num_copies: int = 0
    num_loads: int = 0  # of state dicts with whole tensors
    bare: nn.Module | None = None  # what is being traced
    offloaded: frozenset[str] = frozenset()  # FQNs of the parameters whose optimizer state is on the host
    num_trained: int = 0  # calls in training, as long as optimizer state is not where the plan has it
    loaded: dict[Key, Loaded | Trainer] = field(default_factory=dict)
    kinds: dict[Key, CallKind] = field(default_factory=dict)  # by key up to sizes
    number_kinds: dict[Key, NumberKind] = field(default_factory=dict)  # by key up to numbers
    trials: dict[Key, Trial | None] = field(default_factory=dict)  # under plans made for other sizes
    first: Loaded | Trainer | None = None
    last: Loaded | Trainer | None = None
    num_met: int = 0  # how often all ranks loaded a program
    recent: tuple[Key | None, Key | None] = (None, None)  # of the last two calls
    changes: Changes = field(default_factory=Changes)
    calls: Calls = field(default_factory=Calls)
    replaced: ReplacedBuffers = field(default_factory=ReplacedBuffers)

    def current(self) -> Loaded | Trainer:
        """The program last used."""
        if self.last is None:
            raise AutoparError(
                "not planned yet: the model is traced at its first call; call it once, or give args= to autopar.compile"
            )
        return self.last

    def of(self, module: nn.Module) -> "Runtime":
        """The same for a copy of the module."""
        loaded = {key: program.of(owners(module)) for key, program in self.loaded.items()}
        last = next((loaded[key] for key, program in self.loaded.items() if program is self.last), None)
        first = next((loaded[key] for key, program in self.loaded.items() if program is self.first), None)
        self.num_copies += 1
        name = f"{self.name}.{self.num_copies}"
        changes = self.changes.of(module if loaded else None)
        own = {"num_copies": 0, "num_met": 0, "changes": changes, "calls": Calls(), "replaced": ReplacedBuffers()}
        own |= {"kinds": {}, "number_kinds": {}, "trials": {}, "own": {}}
        return replace(self, loaded=loaded, name=name, first=first, last=last, **own)

    def take_state_on_host(self, names: Iterable[str] | None) -> frozenset[str]:
        """`names`, by default this rank's parameters whose optimizer state the plan has on the host, to be put so."""
        self.offloaded |= self._state_on_host() if names is None else frozenset(names)
        return self.offloaded

    def _state_on_host(self) -> frozenset[str]:
        current = self.current()
        plans = [part.loaded.choices for part in current.parts] if isinstance(current, Trainer) else [current.choices]
        plans = [plan for plan in plans if plan.assignment.state_on_host]
        pairs = ((item, plan.assignment.state_on_host) for plan in plans for item in plan.graph.of_kind("parameter"))
        return frozenset(item.fqn for item, on_host in pairs if item.value.name in on_host)

    def _cut(self) -> Trainer | None:
        """The first program, if this rank has some of the stages only."""
        return self.first if self.elsewhere and isinstance(self.first, Trainer) else None

    @torch.compiler.disable
    def _remind(self, module: nn.Module) -> None:
        """Say once, in the second step of training, that the optimizer's state is not where the plan has it."""
        is_trained = module.training and torch.is_grad_enabled()
        if not is_trained or self.num_trained > 1 or self._state_on_host() <= self.offloaded:
            return
        self.num_trained += 1
        if self.num_trained > 1:
            warn(
                f"the plan counts on the optimizer's state of {len(self._state_on_host() - self.offloaded)} parameters"
                " being on the host, else it may not fit: call autopar.offload_optimizer(optimizer, model) once,"
                " before training"
            )

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward of `module`."""
        leaves = self.prepare(module, args, kwargs)
        self._remind(module)
        self._compare(leaves)
        return run(self._alone(), args, kwargs, self.parts, leaves=leaves, is_whole=self.gives_whole)

    def train_step(
        self, module: nn.Module, args: tuple, kwargs: dict, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of `module` in training, backward of `scale` times the loss."""
        leaves = self.prepare(module, args, kwargs, trains=True)
        if isinstance(self.last, Loaded) and self.loss_fn is None and is_more_than_forward(module):
            return self._backward(module(*args, **kwargs), scale)
        self._remind(module)
        self._compare(leaves)
        if isinstance(self.last, Trainer):
            if self.loss_fn is None:
                check_no_hooks(module)
            given = args, kwargs
            if self.parts is not None:
                given = whole_batch(*given, self.parts, self.last.parts[0].loaded.axes, self.mesh.device_type)
            return self.last.step(*given, scale)
        outputs = run(self._alone(), args, kwargs, self.parts, is_whole=False)  # but the loss, of no dims
        return self._backward(outputs, scale)

    def _backward(self, outputs: Any, scale: torch.Tensor | None) -> torch.Tensor:
        graph = self._alone().graph
        loss = pytree.tree_leaves(outputs)[graph.outputs.index(loss_only(graph).outputs[0])]
        if torch.is_grad_enabled():
            with peers_alive():
                (loss if scale is None else loss * scale).backward()
        return loss.detach()

    def _alone(self) -> Loaded:
        """The program last used, of a plan without stages and microbatches."""
        if not isinstance(self.last, Loaded):
            raise AutoparError(
                "the plan has stages or microbatches, which model(...) cannot run: call model.train_step(...) first, or"
                " give args= to autopar.compile, so that the model is planned for calls alone besides"
            )
        return self.last

    @torch.compiler.disable
    def _compare(self, leaves: list[Any]) -> None:
        """Whether the ranks were given what they should be, in some of the calls."""
        if self.check is None or not self.check.is_due():
            return
        last = self.current()
        draws = last.draws if isinstance(last, Trainer) else last.program.has_random_ops
        arguments = zip(last.graph.arguments, leaves)
        with failing_together(cut.meeting) if (cut := self._cut()) is not None else nullcontext():
            self.check.compare([(name, x) for name, x in arguments if isinstance(name, str)], draws=draws)

    @torch.compiler.disable(reason="autopar looks at each call outside of compiled graphs")
    def prepare(self, module: nn.Module, args: tuple, kwargs: dict, *, trains: bool = False) -> list[Any]:
        """Make `current()` the program for this call, in which all ranks take part; the leaves of its arguments."""
        check_no_transform()
        self.calls.begin()
        is_new = self._notice_changes(module)
        call, mode, leaves = describe_call(self.changes.modes(module), args, kwargs, self.mesh.device_type, self.parts)
        key = (*mode, self.changes.generation, trains)
        program, over = self.loaded.get(key), self.trials.get(key)
        if program is None and goes_on(*self.recent, key) and (known := self.kinds.get(up_to_sizes(key))) is not None:
            program, over = known.recall(key, (args, kwargs), self.loaded, self.trials)
        self.recent = self.recent[1], key
        if program is None or (over is not None and over.is_over()):
            start_s = time.perf_counter()
            self._meet(call, ", ".join(self.changes.last[:3]) if is_new else "")
            examples = pytree.tree_map(lambda leaf: example_of(leaf, self.parts), (args, kwargs))
            shapes = shapes_of(examples)
            kind = self.kinds.get(up_to_sizes(key)) or CallKind(shapes)
            numbers = self.number_kinds.get(up_to_numbers(key)) or NumberKind(self.mesh)
            trace, kept = tracer(module, self, self.loss_fn if trains else None, examples), (self.loaded, self.trials)
            if over is None and (made := kind.known(shapes) or numbers.known(key, examples, trace, kept)):
                self.loaded[key], self.trials[key], self.last = made.loaded, made.trial, made.loaded
                return leaves
            without_casts = without_autocast(but=self.mesh.device_type)
            with rarely_collected(), grad_mode_reads() as reads, own_autograd(), without_casts:
                graph = agreed_graph(self.mesh, lambda: kind.graph(examples, trace))
                outputs = {} if trains else self._output_layouts(graph)
                plan, trial, stored = self._of_first_stages(graph, trains), None, {}
                if plan is None:
                    stored = stored_layouts(module, graph, self.mesh) if self.first is not None else {}
                    trial = None if over is not None else kind.trial(graph, shapes, stored, outputs, self.plan)
                    plan = None if trial is None else trial.choices
                if is_planned := plan is None:
                    plan = self.plan(graph, stored, trains, outputs)
                    plan = kind.keep(plan, shapes, from_first(self.mesh, time.perf_counter() - start_s), over)
                program = self._load(module, graph, plan)
            if is_first(self.mesh) and (kind.made_of or self.num_met == 2):  # later kinds are no news
                kind.tell_time(time.perf_counter() - start_s, is_planned=is_planned)
            kind.reads_grad_mode |= reads.found
            keys = self._add(program, trial, kind, key, gathers=bool(outputs))
            numbers.note(program, trial, examples)
            self.number_kinds.update(dict.fromkeys(map(up_to_numbers, keys), numbers))
            self.changes.take(module)
        elif self.check is not None:
            self.calls.passed(self)
        self.last = program
        return leaves

    def _notice_changes(self, module: nn.Module) -> bool:
        """Whether the module was changed since the last call; programs that no state of it needs are forgotten then."""
        self.replaced.check()
        cut = self._cut()  # of the ranks, each sees its own tensors: the others are told by the step they wait in
        with failing_together(cut.meeting) if cut is not None and self.changes.is_due() else nullcontext():
            is_new = self.changes.notice(module, is_cut=cut is not None)
        if is_new:
            for known in (self.loaded, self.kinds, self.number_kinds, self.trials):
                for key in [key for key in known if key[-2] not in self.changes.states]:
                    del known[key]
        return is_new

    def _output_layouts(self, graph: Graph) -> dict[str, Layout]:
        graph = graph if self.trains else graph.once(for_inference)
        return output_layouts(graph, mesh_of(self.mesh).axis_names, self.parts, is_whole=self.gives_whole)

    def _add(
        self, program: Loaded | Trainer, trial: Trial | None, kind: CallKind, key: Key, *, gathers: bool
    ) -> list[Key]:
        """Keep a program for all calls that it does for, and give their keys. `gathers`: its outputs."""
        # without stages, microbatches and a loss function one program does for both ways, unless it gathers outputs
        is_for_both = isinstance(program, Loaded) and self.loss_fn is None and not gathers
        keys = program_keys(key, in_both_grad_modes=not kind.reads_grad_mode, for_both_ways=is_for_both)
        self.loaded.update(dict.fromkeys(keys, program))
        self.trials.update(dict.fromkeys(keys, trial))
        kind.note(trial, program)
        self.kinds.update(dict.fromkeys(map(up_to_sizes, keys), kind))
        self.first = self.first or program
        self.replaced.mark(fqn for fqn, _ in program.graph.mutations)
        return keys

    def _of_first_stages(self, graph: Graph, trains: bool) -> StagedPlan | None:
        """The plan for a graph with the stages on which parameters lie already; None if they lie on none."""
        first = self.first
        if not isinstance(first, Trainer) or not goes_by(first.plan, graph, trains=trains):
            return None
        held, last = len(first.parts), self.changes.last
        return on_every_rank(self.mesh, "planning", lambda: same_stages(first.plan, graph, held, last, trains=trains))

    def _meet(self, call: Key, changed: str) -> None:
        """All ranks load a program now; the first time they may come far apart. `changed`: what of the module."""
        wait_s = LATER_WAIT_S if self.first else dist.default_pg_timeout.total_seconds()
        cut, calls = self._cut(), None if self.check is None else self.calls
        with failing_together(cut.meeting) if cut is not None else nullcontext():
            meet(self.mesh, self.next_place(), wait_s, calls, reason_to_load(changed, call[0]))
        self.num_met += 1
        agree_on_call(self.mesh, call)

    def next_place(self) -> str:
        """The key in the store under which all ranks meet next, to load a program."""
        return f"autopar/{self.name}/{self.num_met + 1}"

    @without_autocast()
    def _load(self, module: nn.Module, graph: Graph, plan: Plan | Choices | StagedPlan) -> Loaded | Trainer:
        """The program of a plan; the first time, also take over the model's tensors."""
        if isinstance(plan, StagedPlan):
            return self._load_stages(module, graph, plan)
        # which fails on all ranks if on one: the graph and the plan are the same
        program = lower(plan.graph, plan.mesh, plan.assignment)
        if program.has_random_ops:
            check_seed(self.mesh)
        with moved_along(module):
            self._take_over(module, graph, plan.assignment.layouts, self.mesh)
        with peers_alive():
            axes = axes_of(self.mesh, program.joint_axes, plan.cluster, self.shares or program.mesh.shares)
        return load(
            program,
            choices=plan,
            graph=graph,
            mesh=self.mesh,
            axes=axes,
            constants=run_constants(graph, torch.device(self.mesh.device_type)),
            owners=owners(module),
            rows={} if self.parts is None else rows_of(graph),
        )

    def _load_stages(self, module: nn.Module, graph: Graph, plan: StagedPlan) -> Trainer:
        if any(is_random(op) for op in graph.ops):
            check_seed(self.mesh)
        mesh, _, rank = pipeline_mesh(self.mesh)
        held, layouts = held_by(plan, rank)
        with moved_along(module):
            self._take_over(module, replace(graph, inputs=held), layouts, mesh)
        place, sizes = f"autopar/{self.name}/{self.num_met}/step", next((rows for _, rows in self.shares), ())
        return make_trainer(plan, graph, self.mesh, owners(module), place, sizes)

    def _take_over(self, module: nn.Module, graph: Graph, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> None:
        """Shard what of the graph is not; the first time, leave out the tensors that only other ranks have."""
        if self.first is not None:
            self._take_over_new(module, graph, layouts)
            return
        take_written(module, self.own)
        with holding(module, self.own):
            self.make_equal(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})
            parts = on_every_rank(self.mesh, "sharding the model", lambda: shard_model(module, graph, layouts, mesh))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        install(module, graph, parts, is_in_use=self.is_in_use)
        self.elsewhere = drop_others(module, graph, torch.empty(0, device=mesh.device_type).device)
        self.replaced.add(buffers, dict(module.named_buffers(remove_duplicate=False)))
        for fqn, parameter in self.own.items():
            mark_replaced(parameter, fqn)
        self.own.clear()

    def _take_over_new(self, module: nn.Module, graph: Graph, layouts: Mapping[str, Layout]) -> None:
        """Shard what was put into the module since the first plan."""
        plain = set(not_sharded(module))
        new = replace(graph, inputs=tuple(item for item in stateful(graph) if item.fqn in plain))
        if not new.inputs:
            return
        places = owners(module)
        tensors = {item.fqn: x for item in new.inputs if (x := held(*places[item.fqn])) is not None}
        self.make_equal(module, tensors)
        parts = on_every_rank(self.mesh, "sharding what is new", lambda: shard_model(module, new, layouts, self.mesh))
        install(module, new, parts, is_in_use=False)
        for fqn, tensor in tensors.items():
            mark_replaced(tensor, fqn)

    def make_equal(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give `tensors` of the module, by FQN, the content that the first rank has, or check that they have it."""
        tensors = {fqn: x for fqn, x in tensors.items() if not isinstance(x, DTensor)}
        if self.is_strict:
            check_weights(self.mesh, tensors, 'check="strict" wants the same seed or checkpoint on every rank')
        elif self.check is not None:
            fill_in(module, take_from_first(self.mesh, tensors))
