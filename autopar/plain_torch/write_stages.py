"""`stages_text`: the part of an exported file that makes a pipeline of a model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from autopar.plain_torch.module_stages import ModuleStages, StageModule
from autopar.schedule.orders import Schedule

# Schedule -> torch's class, and whether it takes a list of stages.
_CLASSES = {
    "gpipe": ("ScheduleGPipe", False),
    "1f1b": ("Schedule1F1B", False),
    "interleaved": ("ScheduleInterleaved1F1B", True),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", True),
}
_STAND_INS = '''
class Elsewhere(nn.Module):
    """Stands for a module of another stage; on the way to this stage's first module it returns zeros, of no effect."""

    def __init__(self, rows: object, module: nn.Module) -> None:
        super().__init__()
        self.rows, self.dtype = rows, next((x.dtype for x in module.parameters()), torch.get_default_dtype())
        self.meta = [module.to("meta")]  # in a list: its parameters are not of this stage

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name) if name in ("meta", "rows", "dtype") else getattr(self.meta[0], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.zeros(self.rows, first_of(args, kwargs))

    def zeros(self, rows: object, given: torch.Tensor) -> object:
        if isinstance(rows, tuple):
            return tuple(self.zeros(one, given) for one in rows)
        return None if rows is None else given.new_zeros(len(given), *rows, dtype=self.dtype)


class NextStage(Elsewhere):
    """Stands for the first module of the next stage: what it is called with is what this stage sends."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise Reached(first_of(args, kwargs))


class Reached(Exception):
    """A stage has come to the next one; args[0] is the tensor to send."""


def first_of(args: tuple, kwargs: dict) -> torch.Tensor:
    return next(iter((*args, *kwargs.values())))


def is_here(model: nn.Module, name: str) -> bool:
    """Whether this stage has a module."""
    for part in name.split("."):
        model = getattr(model, part)
        if isinstance(model, Elsewhere):
            return False
    return True


def keep_stage(model: nn.Module, stage: int) -> None:
    """Leave only the modules of a stage, which keep their names, and let `model` compute from its first to its last."""
    for name, (owner, rows) in MODULES.items():
        if owner != stage:
            stand_in = NextStage if name == first_module(stage + 1) else Elsewhere
            model.set_submodule(name, stand_in(rows, model.get_submodule(name)))
    {freeze}whole, first = model.forward, first_module(stage)

    def forward(*received: torch.Tensor, **batch: object) -> torch.Tensor:
        def give(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            x = left.pop()
            return ((x, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): x})

        left = list(received)
        start = [model.get_submodule(first)] if received else []
        hooks = [module.register_forward_pre_hook(give, prepend=True, with_kwargs=True) for module in start]
        try:
            output = whole(**batch)
        except Reached as reached:
            output = reached.args[0].contiguous()  # as it is sent
        else:
            if stage < NUM_STAGES - 1:
                raise RuntimeError(f"stage {stage} did not come to {first_module(stage + 1)}")
        finally:
            for hook in hooks:
                hook.remove()
        if left:
            raise RuntimeError(f"stage {stage} did not come to {first}")
        return output if isinstance(output, torch.Tensor) else output[0]

    model.forward = forward


def first_module(stage: int) -> str:
    """The module at which a stage starts; "" for the first."""
    return next((name for name, (owner, _) in MODULES.items() if owner == stage), "") if stage else ""
'''
# Functions that `parallelize` may call.
_OF_PARTS = {
    "blocks_here(": '''
def blocks_here(model: nn.Module, path: str, numbers: range) -> list[nn.Module]:
    """The blocks of a list that this stage has."""
    names = [f"{path}.{number}" for number in numbers]
    return [model.get_submodule(name) for name in names if is_here(model, name)]
''',
    "styles_here(": '''
def styles_here(model: nn.Module, styles: dict[str, object]) -> dict[str, object]:
    """The styles of modules that this stage has."""
    return {glob.escape(name): style for name, style in styles.items() if is_here(model, name)}
''',
}
_FREEZE = """for name in FROZEN.get(stage, ()):
        model.get_parameter(name).requires_grad_(False)  # another stage has and trains it
    """
_PIPELINE = '''
def pipeline(model: nn.Module, mesh: DeviceMesh, loss_fn: Callable | None = None) -> tuple[list[nn.Module], Callable]:
    """(the stages of `model` that this rank trains, `step`); `model` on the device of this rank, and changed.

    `step(*args, target=None, **kwargs)` takes this rank's rows of a batch, makes the gradients, and returns the mean
    loss on ranks of the last stage, else None. `loss_fn(output, target)`; None: the model returns its loss first.
    """
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"expected a mesh with axes {{AXES}}, found {{mesh.mesh_dim_names}}")
    parts, trained = {{}}, {{}}
    for stage in range(mesh.get_local_rank("pp"), NUM_STAGES, mesh["pp"].size()):
        parts[stage] = {copy}
        keep_stage(parts[stage], stage)
        trained[stage] = parallelize(parts[stage], {inner})
    group, device = mesh.get_group("pp"), torch.device(mesh.device_type)
    stages = [PipelineStage(part, stage, NUM_STAGES, device, group=group) for stage, part in trained.items()]
    loss_fn = loss_fn or (lambda output, target: output)
    schedule = {schedule}({stages}, MICROBATCHES, loss_fn=loss_fn)
{shared}
    def step(*args: object, target: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor | None:
        batch, losses = dict(zip(ARGUMENTS, args)) | kwargs, []
        given = target if target is not None else next(x for x in batch.values() if isinstance(x, torch.Tensor))
        schedule.step(target=given, losses=losses, return_outputs=False, **batch)
{sum}        return torch.stack(losses).mean().detach() if losses else None

    return list(trained.values()), step
'''
_SHARED = '''
def shared_by_stages(parts: dict[int, nn.Module], mesh: DeviceMesh) -> list[tuple]:
    """(group, parameters) of each parameter that several stages have, one of which is this rank's."""
    found = []
    for places in SHARED:
        for column in mesh.mesh.reshape(mesh["pp"].size(), -1).T.tolist():
            ranks = sorted({column[stage % len(column)] for stage, _ in places})
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found.append((group, [parts[stage].get_parameter(name) for stage, name in places if stage in parts]))
    return found


def sum_gradients(shared: list[tuple]) -> None:
    """Give each parameter that several stages have the sum of their gradients."""
    for group, parameters in shared:
        total = torch.stack([own_part(x.grad, x) for x in parameters]).sum(0)
        dist.all_reduce(total, group=group)
        for x in parameters:
            own = total.clone()
            if isinstance(x, DTensor):
                own = DTensor.from_local(
                    own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
                )
            x.grad = own


def own_part(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient, of a DTensor this rank's part, as the parameter is split."""
    if isinstance(grad, DTensor):
        return grad.redistribute(placements=parameter.placements).to_local()
    return grad
'''


def stages_text(made: ModuleStages, schedule: Schedule, axes: Sequence[str], arguments: Sequence[str]) -> str:
    """The tables and functions of a pipeline on a mesh of `axes`, the first of which is that of the pipeline.

    `arguments`: the names of the model's positional arguments.
    """
    name, is_list = _CLASSES[schedule.name]
    num_chunks = schedule.num_stages // schedule.num_ranks
    tables = [
        f"AXES = {tuple(axes)!r}  # of the mesh, that of the stages first",
        f"NUM_STAGES, MICROBATCHES = {schedule.num_stages}, {schedule.num_microbatches}",
        f"ARGUMENTS = {tuple(arguments)!r}  # of the model, by position",
        *_modules(made.modules),
    ]
    if made.frozen:
        tables += ["FROZEN = {  # stage: parameters that another one trains", *_frozen(made), "}"]
    if made.shared:
        tables.append("SHARED = (  # parameters that several stages have: (stage, name) of each")
        tables += [f"    {places!r}," for places in made.shared] + [")"]
    body = _PIPELINE.format(
        copy="copy.deepcopy(model)" if num_chunks > 1 else "model",
        inner=f"mesh[{tuple(axes[1:])!r}]" if len(axes) > 1 else "mesh",
        schedule=name,
        stages="stages" if is_list else "stages[0]",
        shared="    shared = shared_by_stages(parts, mesh)\n" if made.shared else "",
        sum="        sum_gradients(shared)\n" if made.shared else "",
    )
    stand_ins = _STAND_INS.replace("{freeze}", _FREEZE if made.frozen else "")
    parts = ["\n".join(tables), stand_ins, *([_SHARED] if made.shared else []), body]
    return "\n\n\n".join(part.strip("\n") for part in parts)


def part_functions(text: str) -> Iterator[str]:
    """The functions on a stage's modules that the text of `parallelize` calls."""
    yield from (function.strip("\n") for call, function in _OF_PARTS.items() if call in text)


def _modules(modules: Mapping[str, StageModule]) -> Iterator[str]:
    """The table of modules; neighbours in a list that are alike are one line."""
    yield "MODULES = {  # module: the stage that has it, and the shape of what it returns, without its rows"
    for (path, own), names in groupby(modules, key=lambda name: (_list_of(name), modules[name])):
        found = list(names)
        numbers = [int(name.rpartition(".")[2]) for name in found] if path else []
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            span = f"{numbers[0]}, {numbers[-1] + 1}" if numbers[0] else f"{numbers[-1] + 1}"
            text = f'f"{path}.{{number}}": ({own.stage}, {own.returned!r}) for number in range({span})'
            yield f"    **{{{text}}},"
        else:
            yield from (f"    {name!r}: ({own.stage}, {own.returned!r})," for name in found)
    yield "}"


def _list_of(name: str) -> str:
    """The path of the list in which a module has a number, "" if it has none or the path is no plain name."""
    path, _, number = name.rpartition(".")
    is_plain = all((part.isidentifier() and part.isascii()) or part.isdigit() for part in path.split("."))
    return path if number.isdigit() and number.isascii() and is_plain else ""


def _frozen(made: ModuleStages) -> Iterator[str]:
    for stage, members in groupby(sorted(made.frozen), key=lambda one: one[0]):
        yield f"    {stage}: ["
        yield from (f"        {name!r}," for _, name in members)
        yield "    ],"
