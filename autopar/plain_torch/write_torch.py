"""`write_torch`: the Python file of a `TorchLayout`, which needs torch alone."""

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from autopar.ir.print_graph import printable
from autopar.plain_torch.block_stacks import BlockStack, by_block, expression, members, wrapped
from autopar.plain_torch.torch_layout import COLUMNS, GATHERED, ROWS, TABLE, TorchLayout, is_conv1d
from autopar.plain_torch.write_stages import part_functions
from autopar.torch_compat import CheckpointWrapper

_STYLES = {
    COLUMNS: "Colwise{}()",
    GATHERED: "Colwise{}(output_layouts=Replicate())",
    ROWS: "Rowwise{}()",
    TABLE: "Rowwise{}(input_layouts=Replicate())",
}
# Module -> the names that a file may import of it, in the order of a sorted file.
_IMPORTS = {
    "torch": ("nn",),
    CheckpointWrapper.__module__: ("checkpoint_wrapper",),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.pipelining": (
        "PipelineStage", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
    ),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard", "distribute_module", "distribute_tensor"),
    "torch.distributed.tensor.parallel": ("ColwiseParallel", "RowwiseParallel", "parallelize_module"),
    "torch.nn.parallel": ("DistributedDataParallel",),
}  # fmt: skip
_CONV1D = '''
class {kind}Conv1D({kind}Parallel):
    """The style for transformers' Conv1D, a product whose weight is [inputs, outputs]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, placement in (("weight", {weight}), ("bias", {bias})):
                part = distribute_tensor(getattr(module, key), mesh, [placement])
                module.register_parameter(key, nn.Parameter(part))

        def before(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> DTensor:
            placement = {given}
            x = inputs[0]
            return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)

        def after(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> object:
            return output.redistribute(placements=self.output_layouts).to_local()

        return distribute_module(module, device_mesh, split, before, after)
'''
_SUM = '''
def sum_gradients_of(module: nn.Module, names: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Sum the gradients of parameters that meet this rank's part of heads or features: each rank has a term."""

    def total(grad: torch.Tensor) -> torch.Tensor:
        terms = grad.contiguous().clone()
        dist.all_reduce(terms, group=mesh.get_group())
        return terms

    def before(module: nn.Module, args: tuple) -> None:
        for name in names:
            parameter = module.get_parameter(name)
            if parameter.requires_grad and seen.get(name) is not parameter:  # fully_shard gives others to forward
                parameter.register_hook(total)
                seen[name] = parameter

    seen: dict[str, nn.Parameter] = {}
    module.register_forward_pre_hook(before)
'''
_PLACES = {
    "Colwise": {"weight": "Shard(1)", "bias": "Shard(0)", "given": "Replicate()"},
    "Rowwise": {"weight": "Shard(0)", "bias": "Replicate()", "given": "Shard(-1)"},
}
WIDTH = 116


def write_torch(layout: TorchLayout, model: nn.Module, notes: Iterable[str] = (), stages: str = "") -> str:
    """The text of a file with `parallelize(model, mesh)`; `notes`: paragraphs at its beginning, as comments.

    `stages`: `stages_text`, with which `parallelize` is that of a stage. Text that comes from the model or the plan is
    in comments of one line, or quoted.
    """
    is_part = bool(stages)
    parts = [
        _split_tensors(layout, model, is_part),
        _recompute(layout, is_part),
        _split_batch(layout, model, is_part),
        _parallelize(layout, is_part),
    ]
    body = "\n\n\n".join(part for part in parts if part)
    kinds = [k for k in _PLACES if f"{k}Conv1D(" in body]
    classes = "\n".join(_CONV1D.format(kind=kind, **_PLACES[kind]) for kind in kinds)
    body = "\n\n\n".join([*([_SUM.strip("\n")] if layout.summed else []), body])
    head = "\n".join(f"# {line}".rstrip() for note in notes for line in wrapped(printable(note), WIDTH))
    text = "\n\n\n".join(part.strip("\n") for part in (classes, body) if part.strip())
    tables, _, functions = stages.partition("\n\n\n")
    axes = "\n".join(part for part in (_axes(layout, is_part), tables) if part)
    text = "\n\n\n".join(part for part in (text, *part_functions(text), functions) if part)
    return f"{head}\n\n{_imports(f'{axes}{text}')}\n\n{axes}\n\n\n{text}\n"


def _axes(layout: TorchLayout, is_part: bool) -> str:
    lines = [
        f"AXES = {tuple(layout.mesh.axis_names)!r}  # of the mesh",
        f"BATCH_AXES = {layout.names(layout.data_axes)!r}  # their ranks take rows of their own, all others the same",
    ]
    lines = lines[is_part:]  # a pipeline's mesh has an axis more
    if layout.dtypes and layout.shard_axes:
        given = ", ".join(f"{name}=torch.{dtype}" for name, dtype in layout.dtypes.items())
        lines.append(f"PRECISION = MixedPrecisionPolicy({given})")
    return "\n".join(lines)


def _imports(text: str) -> str:
    lines = ["import copy"] * ("copy." in text) + ["import glob"] * ("glob." in text)
    if "Callable" in text:
        lines.append("from collections.abc import Callable")
    lines += [""] * bool(lines)
    if "\nimport torch" not in text and "torch." in text.replace("torch.distributed.", ""):
        lines.append("import torch")
    if "dist." in text:
        lines.append("import torch.distributed as dist")
    for module, names in _IMPORTS.items():
        used = [name for name in names if f"{name}(" in text or f"{name}." in text or f"{name} " in text
                or f"{name})" in text or f"{name}," in text]  # fmt: skip
        if used:
            lines.append(f"from {module} import {', '.join(used)}")
    return "\n".join(lines)


def _split_tensors(layout: TorchLayout, model: nn.Module, is_part: bool) -> str:
    if not layout.tensor_axes:
        return ""
    lines = [
        "def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:",
        '    """Tensor parallelism: products whose outputs are split feed products whose inputs are split."""',
    ]
    texts = {name: _style(style, model.get_submodule(name)) for name, style in layout.styles.items()}
    outside, runs = by_block(texts, layout.stacks)
    if outside:
        lines += _table("model", outside, "    ", is_part)
    for stack, numbers, inside in runs:
        lines += [f"    for block in {_blocks(stack, numbers, is_part)}:", *_table("block", inside, "        ")]
    lines += _divided(layout, is_part)
    lines += _summed(layout, is_part)
    if any(getattr(module, "inplace", False) is True for module in model.modules()):
        lines += [
            "    for module in model.modules():",
            '        if getattr(module, "inplace", False):',
            "            module.inplace = False  # autograd allows no change in place of what the styles return",
        ]
    for first, second in layout.ties:
        paths = [name.rpartition(".")[::2] for name in (first, second)]
        (one, attribute), (other, same) = ((expression("model", path), name) for path, name in paths)
        indent = "    "
        if is_part:
            here = " and ".join(f"is_here(model, {path!r})" for path, _ in paths)
            lines.append(f"    if {here}:")
            indent += "    "
        lines.append(f"{indent}{other}.{same} = {one}.{attribute}  # one parameter with two names")
    return "\n".join(lines)


def _blocks(stack: BlockStack, numbers: range, is_part: bool) -> str:
    """The expression of some blocks of a stack, of which a stage has only its own."""
    if not is_part:
        return members("model", stack, numbers)
    span = f"{numbers.start}, {numbers.stop}" if numbers.start else f"{numbers.stop}"
    return f"blocks_here(model, {stack.path!r}, range({span}))"


def _divided(layout: TorchLayout, is_part: bool) -> Iterator[str]:
    outside, runs = by_block(layout.divided, layout.stacks)
    for name, attributes in outside.items():
        if is_part:
            yield f"    if is_here(model, {name!r}):"
        indent = "    " * (1 + is_part)
        yield from (f"{indent}{expression('model', name)}.{one} //= mesh.size()  # this rank's" for one in attributes)
    for stack, numbers, inside in runs:
        yield f"    for block in {_blocks(stack, numbers, is_part)}:"
        for name, attributes in inside.items():
            yield from (
                f"        {expression('block', name)}.{one} //= mesh.size()  # this rank's" for one in attributes
            )


def _summed(layout: TorchLayout, is_part: bool) -> Iterator[str]:
    outside, runs = by_block(layout.summed, layout.stacks)
    for name, parameters in outside.items():
        if is_part and name:
            yield f"    if is_here(model, {name!r}):"
        indent = "    " * (1 + (is_part and bool(name)))
        yield f"{indent}sum_gradients_of({expression('model', name)}, {parameters!r}, mesh)"
    for stack, numbers, inside in runs:
        yield f"    for block in {_blocks(stack, numbers, is_part)}:"
        yield from (
            f"        sum_gradients_of({expression('block', name)}, {own!r}, mesh)" for name, own in inside.items()
        )


def _style(style: str, module: nn.Module) -> str:
    return _STYLES[style].format("Conv1D" if is_conv1d(module) else "Parallel")


def _table(root: str, styles: Mapping[str, str], indent: str, is_part: bool = False) -> list[str]:
    """A call of parallelize_module; its keys are patterns, so that names are escaped."""
    escape = (lambda name: name) if is_part else glob.escape
    rows = [f"{indent}    {escape(name)!r}: {style}," for name, style in styles.items()]
    given = "styles"
    if is_part:
        given = "styles_here(model, styles)"
    return [f"{indent}styles = {{", *rows, f"{indent}}}", f"{indent}parallelize_module({root}, mesh, {given})"]


def _recompute(layout: TorchLayout, is_part: bool) -> str:
    if not layout.recomputed:
        return ""
    _, runs = by_block(dict.fromkeys(layout.recomputed, True), layout.stacks)
    lines = [
        "def recompute(model: nn.Module) -> None:",
        '    """Keep only the inputs of these blocks for backward, which computes the rest again."""',
    ]
    for stack, numbers, _ in runs:
        blocks = expression("model", stack.path)
        span = f"{numbers.start}, {numbers.stop}" if numbers.start else f"{numbers.stop}"
        lines.append(f"    for number in range({span}):")
        if is_part:
            lines += [
                f'        name = f"{stack.path}.{{number}}"',
                "        if is_here(model, name):",
                "            model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))",
            ]
        else:
            lines.append(f"        {blocks}[number] = checkpoint_wrapper({blocks}[number])")
    return "\n".join(lines)


def _split_batch(layout: TorchLayout, model: nn.Module, is_part: bool) -> str:
    if not layout.data_axes:
        return ""
    head = ["def split_batch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:"]
    if any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules()):
        sync = [
            '    if mesh.device_type == "cuda":  # torch has it for GPUs only; elsewhere ranks normalise their rows',
            "        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        ]
    else:
        sync = []
    if not layout.shard_axes:
        doc = '    """Data parallelism: whole parameters, and the mean of all ranks\' gradients."""'
        lines = [
            "    has_weights = not any(parameter.is_meta for parameter in model.parameters())  # to send from rank 0",
            "    return DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=has_weights)",
        ]
        return "\n".join([*head, doc, *sync, *lines])
    is_hybrid = layout.shard_axes != layout.data_axes
    where = "on the last axis of the mesh, whole on the first" if is_hybrid else "on the mesh"
    doc = f'    """Data parallelism with parameters, gradients and optimizer state in parts {where}."""'
    lines = [*head, doc, *sync]
    policy = ", mp_policy=PRECISION" if layout.dtypes else ""
    freed = {name: name not in layout.kept for stack in layout.stacks for name in stack.names()}
    for stack, numbers, inside in by_block(freed, layout.stacks)[1]:
        lines += [
            f"    for block in {_blocks(stack, numbers, is_part)}:",
            f"        fully_shard(block, mesh=mesh, reshard_after_forward={inside['']}{policy})",
        ]
    lines += [f"    fully_shard(model, mesh=mesh, reshard_after_forward={'' not in layout.kept}{policy})"]
    return "\n".join([*lines, "    return model"])


def _parallelize(layout: TorchLayout, is_part: bool) -> str:
    body = [
        "    if mesh.mesh_dim_names != AXES:",
        '        raise ValueError(f"expected a mesh with axes {AXES}, found {mesh.mesh_dim_names}")',
    ]
    if is_part:  # `pipeline` has looked at the mesh
        body = []
    if layout.tensor_axes:
        body.append(f"    split_tensors(model, {_mesh(layout, layout.tensor_axes, 'tensors')})")
    if layout.recomputed:
        body.append("    recompute(model)")
    if layout.data_axes:
        is_hybrid = layout.shard_axes not in ((), layout.data_axes)
        where = f"mesh[{layout.names(layout.data_axes)!r}]" if is_hybrid else _mesh(layout, layout.data_axes, "data")
        body.append(f"    model = split_batch(model, {where})")
    head = "def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:"
    what = "a stage, or the whole model" if is_part else "`model`, on the device of this rank or on meta"
    doc = f'    """Change {what}, and return the module to call."""'
    return "\n".join([head, doc, *body, "    return model"])


def _mesh(layout: TorchLayout, axes: Sequence[int], name: str) -> str:
    """The expression of the mesh of one axis, made of several if need be."""
    names = layout.names(axes)
    if len(names) == 1:
        return f"mesh[{names[0]!r}]"
    return f"mesh[{names!r}]._flatten({name!r})"
