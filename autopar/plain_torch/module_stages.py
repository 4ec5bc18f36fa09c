"""`stages_by_module`: a plan's stages cut where modules begin, so that each runs by the code of the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Value
from autopar.ir.split_stages import StageGraph, crossing_numbers, cut, made_of_arguments
from autopar.plain_torch.block_stacks import stacks_of
from autopar.plain_torch.module_calls import ExampleRun, ModuleCall, Returned, called_modules

# A parameter of several stages: (stage, its FQN there) of each.
Shared = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class StageModule:
    """A module that one stage has alone; `returned`: what its stand-in on later stages returns."""

    stage: int
    returned: Returned


@dataclass(frozen=True)
class ModuleStages:
    """A model in stages, each but the first of which starts at the first op of a module, `first` by stage.

    `stages`: their graphs, of a microbatch. `modules`: FQN -> stage of the modules that are on one stage only, the
    outermost ones, in the order of the graph. `frozen`: (stage, FQN) of parameters that a stage has and does not use.
    `shared`: parameters that several stages use.
    """

    starts: tuple[str, ...]
    stages: tuple[StageGraph, ...]
    first: Mapping[int, str]
    modules: Mapping[str, StageModule]
    frozen: tuple[tuple[int, str], ...]
    shared: tuple[Shared, ...]

    @property
    def sent(self) -> tuple[Value, ...]:
        """The tensor that each stage but the last sends."""
        return tuple(next(v for v in stage.graph.outputs if isinstance(v, Value)) for stage in self.stages[:-1])


def stages_by_module(graph: Graph, starts: Sequence[str], num_microbatches: int, example: ExampleRun) -> ModuleStages:
    """`graph`, of a microbatch, cut at the modules nearest to the ops `starts`; PlanError if there are none.

    A stage may start at a module that is called once, whose first tensor is all that crosses the cut.
    """
    return _Cutting(graph, num_microbatches, example).near(starts)


class _Cutting:
    """A graph, and the calls of the modules that make it."""

    def __init__(self, graph: Graph, num_microbatches: int, example: ExampleRun) -> None:
        self.graph, self.num_microbatches = graph, num_microbatches
        self.model, self.calls = example.model, called_modules(example)
        self.remade = made_of_arguments(graph)
        self.again = {op.name for op in graph.ops if all(value.name in self.remade for value in op.outputs)}

    @cached_property
    def positions(self) -> Mapping[str, list[int]]:
        """FQN of a module -> the positions of its ops, without those that each stage computes itself."""
        found: dict[str, list[int]] = {}
        for position, op in enumerate(self.graph.ops):
            if op.name not in self.again:
                for name in _around(op.module):
                    found.setdefault(name, []).append(position)
        return found

    def near(self, starts: Sequence[str]) -> ModuleStages:
        doors, chosen = self._doors(), list[int]()
        for number, name in enumerate(starts):
            wanted = self.graph.position[name]
            left = [at for at in doors if not chosen or at > chosen[-1]]
            if not left:
                raise PlanError(
                    f"stage {number + 1} starts at {name} ({self.graph.ops[wanted].module or 'the model itself'}), and"
                    " no module is left that is called once with all that the stages before it give; take fewer stages"
                )
            chosen.append(min(left, key=lambda at: (abs(at - wanted), at)))
        bounds = [*chosen, len(self.graph.ops)]
        names = tuple(self.graph.ops[at].name for at in chosen)
        stages = cut(self.graph, names)
        modules = dict(sorted(self._owned(bounds), key=lambda item: self.positions.get(item[0], [-1])[0]))
        first = {own.stage: name for name, own in reversed(modules.items())}
        for number, at in enumerate(chosen):
            if first.get(number + 1) not in doors[at]:
                raise PlanError(
                    f"stage {number + 1} would start at {doors[at][0]}, parts of which are on several stages or return"
                    " what no stand-in can; take other stages"
                )
        frozen, shared = self._parameters(stages, modules)
        return ModuleStages(names, stages, first, modules, frozen, shared)

    def _doors(self) -> dict[int, list[str]]:
        """Position of an op -> the modules that start there and at which a stage may start, the outermost first."""
        crossing, doors = crossing_numbers(self.graph, self.remade), dict[int, list[str]]()
        blocks = tuple(f"{name}." for stack in stacks_of(self.model) for name in stack.names())
        for name, _ in self.model.named_modules():  # modules before those inside
            positions, call = self.positions.get(name), self.calls.get(name)
            if not name or not positions or call is None or call.count != 1 or crossing[positions[0]] != 1:
                continue
            if name.startswith(blocks):  # blocks are sharded and computed again as a whole
                continue
            if positions[0] and self._has_all(name, positions[0], call):
                doors.setdefault(positions[0], []).append(name)
        return dict(sorted(doors.items()))

    def _has_all(self, name: str, position: int, call: ModuleCall) -> bool:
        """Whether the module is called with the one tensor that crosses a cut before it, which nothing else reads."""
        graph = self.graph
        made = {value.name for op in graph.ops[:position] if op.name not in self.again for value in op.outputs}
        read = [(op, value) for op in graph.ops[position:] for value in op.inputs if value.name in made]
        if not read or not call.is_activation:
            return False
        rows, *rest = read[0][1].shape or (0,)
        is_alone = all(name in _around(op.module) for op, _ in read)
        return is_alone and call.given == (rows * self.num_microbatches, *rest)

    def _owned(self, bounds: Sequence[int], name: str = "") -> Iterator[tuple[str, StageModule]]:
        """The modules inside of one that are on one stage each."""
        for key, child in self.model.get_submodule(name).named_children():
            path = f"{name}.{key}" if name else key
            positions = self.positions.get(path, [])
            stages = {sum(at >= bound for bound in bounds[:-1]) for at in positions}
            if not positions and next(child.parameters(), None) is None:
                continue
            call, stage = self.calls.get(path), next(iter(stages), 0)
            if call is not None and call.count > 1 and next(child.parameters(), None) is None:
                continue  # other stages may call it on arguments, which each has
            is_run_later = stage < len(bounds) - 1 and call is not None
            is_called = call is not None or not list(child.children())
            can_stand = not is_run_later or (call is not None and call.is_plain)
            if len(stages) < 2 and is_called and can_stand:
                yield path, StageModule(stage, call.returned if call else None)
            else:
                yield from self._owned(bounds, path)

    def _parameters(
        self, stages: Sequence[StageGraph], modules: Mapping[str, StageModule]
    ) -> tuple[tuple[tuple[int, str], ...], tuple[Shared, ...]]:
        """`frozen` and `shared`; PlanError if a stage has not what it uses."""
        frozen, shared = list[tuple[int, str]](), list[Shared]()
        used = [{item.value.name for item in stage.graph.of_kind("parameter")} for stage in stages]
        for item in self.graph.of_kind("parameter"):
            users = list[tuple[int, str]]()
            for stage, names in enumerate(used):
                here = [name for name in (item.fqn, *item.aliases) if _stage_of(name, modules) in (None, stage)]
                if item.value.name not in names:
                    frozen += [(stage, name) for name in here]
                elif here:
                    users.append((stage, here[0]))
                else:
                    raise PlanError(
                        f"stage {stage} reads {item.fqn}, a parameter of a module that is called on another stage; cut"
                        " the model elsewhere"
                    )
            if len(users) > 1:
                shared.append(tuple(users))
        return tuple(frozen), tuple(shared)


def _around(module: str) -> Iterator[str]:
    """The FQNs of a module and of those around it, without the model itself."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _stage_of(parameter: str, modules: Mapping[str, StageModule]) -> int | None:
    """The stage that has a parameter; None: all have it."""
    return next((modules[name].stage for name in _around(parameter) if name in modules), None)
