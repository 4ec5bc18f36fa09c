"""`TorchLayout`: what torch's own parallelism does to a model, and the layouts of that kind that are near a plan."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from torch import nn

from autopar.ir.graph import Graph, Op
from autopar.mesh import Mesh
from autopar.plain_torch.block_stacks import BlockStack, stacks_of
from autopar.plain_torch.local_parts import LocalParts, follow_parts
from autopar.planner.handwritten.hf_tp_plan import weights_of
from autopar.planner.handwritten.propagate import is_kind
from autopar.plans.plan import Plan
from autopar.sbp.analysis.megatron_pairs import Structure, product_slots, structure_of

COLUMNS, GATHERED, ROWS, TABLE = "columns", "columns, gathered", "rows", "table"


@dataclass(frozen=True)
class TorchLayout:
    """A module's parallel form.

    `data_axes`: mesh axes that split the batch; on `shard_axes`, some of them, parameters are split by fully_shard, on
    the others whole. `tensor_axes`: all other axes. `styles`: FQN of a module -> COLUMNS (outputs split), GATHERED
    (outputs split and gathered), ROWS (inputs split) or TABLE (the rows of a lookup). `kept`: blocks, and "" for all
    outside of blocks, of which gathered parameters stay until backward. `recomputed`: blocks whose activations are
    computed again. `divided`: FQN of a module -> its attributes that count heads or features, which a rank has a part
    of. `ties`: pairs of FQNs of one parameter. `met`: FQN of a whole parameter that meets parts -> the modules that
    give these; the terms of its gradient on the ranks of the tensor axes are summed. `dtypes`: argument of
    fully_shard's MixedPrecisionPolicy -> name of a dtype.
    """

    mesh: Mesh
    stacks: tuple[BlockStack, ...]
    data_axes: tuple[int, ...]
    shard_axes: tuple[int, ...]
    tensor_axes: tuple[int, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ties: tuple[tuple[str, str], ...] = ()
    met: Mapping[str, frozenset[str]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def summed(self) -> dict[str, tuple[str, ...]]:
        """FQN of a module -> its parameters of which the gradients are summed."""
        found: dict[str, tuple[str, ...]] = {}
        for fqn, givers in sorted(self.met.items()):
            if any(self.styles.get(giver) == COLUMNS for giver in givers):
                module, _, name = fqn.rpartition(".")
                found[module] = (*found.get(module, ()), name)
        return found

    @property
    def num_tensor(self) -> int:
        """The number of ranks between which tensors are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.tensor_axes)

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        """The names of mesh axes."""
        return tuple(self.mesh.axis_names[axis] for axis in axes)


def near(
    plans: Sequence[Plan], model: nn.Module, *, in_stages: bool = False, products: tuple[type[nn.Module], ...] = ()
) -> Iterator[TorchLayout]:
    """The layouts near `plans`, those of the stages of `model`: for each choice of tensor axes what the plans split
    there, with parameters stored as the plans store most of them. `in_stages`: without DistributedDataParallel, whose
    reducer fails at the second step of torch's pipelines (2.13: "rebuilt parameter indices size is not same").
    `products`: the classes of modules that can be split; none: those of torch and transformers' Conv1D.
    """
    mesh, stacks = plans[0].mesh, stacks_of(model)
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    structures = [structure_of(plan.graph) for plan in plans]
    for tensor in (some for count in range(len(axes) + 1) for some in combinations(axes, count)):
        styles: dict[str, str] = {}
        met: dict[str, frozenset[str]] = {}
        for plan, structure in zip(plans, structures):
            own, own_met = split_modules(plan, structure, tensor, model, products)
            styles |= own
            met |= own_met
        ties = tuple(dict.fromkeys(_ties(plans, styles, model)))
        if bool(styles) != bool(tensor):
            continue
        data = tuple(axis for axis in axes if axis not in tensor)
        shard = _shard_axes(plans, data)
        blocks = [name for stack in stacks for name in stack.names()]
        again = tuple(name for name in blocks if any(_is_recomputed(plan, name) for plan in plans))
        is_ddp = not shard and not tensor and not in_stages
        is_known = shard == data or (len(data) == 2 and shard == data[-1:])  # fully_shard has one axis for each use
        sharded = shard if is_known else () if is_ddp else data
        kept = frozenset(name for name in (*blocks, "") if not _is_freed(plans, name, blocks, data))
        yield TorchLayout(mesh, stacks, data, sharded, tensor, styles, kept, again, {}, ties, met)
        if data and not (sharded == data and not kept):
            yield TorchLayout(mesh, stacks, data, data, tensor, styles, frozenset(), again, {}, ties, met)


def split_modules(
    plan: Plan,
    structure: Structure,
    axes: tuple[int, ...],
    model: nn.Module,
    products: tuple[type[nn.Module], ...] = (),
) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """(FQN -> style of each module whose weight the plan splits on all of `axes`, and torch can split; `met`)."""
    graph = plan.graph
    weights, chosen, owners = weights_of(graph, structure), {}, {}
    for op in graph.ops:
        kind = structure.kinds.get(op.name, "")
        slots = product_slots(op, structure.from_parameters)
        strategy = plan.assignment.strategies[op.name]
        signatures = [strategy.signatures[axis] for axis in axes]
        if kind in ("column", "row") and axes:
            is_split = all(any(is_kind(k, op, s, slots) for k in ("column", "row")) for s in signatures)
            if is_split and (owner := _owner(op, weights[op.name], model, products)):
                chosen[op.name], owners[op.name] = kind, owner
    paired, met = _paired(graph, structure, chosen)
    styles = {owners[name]: style for name, style in paired.items()}
    for op in graph.ops:
        if op.name in structure.vocabulary and axes:
            signatures = [plan.assignment.strategies[op.name].signatures[axis] for axis in axes]
            if all(is_kind("vocabulary", op, signature, None) for signature in signatures):
                styles[op.module] = TABLE
    styles = {name: style for name, style in styles.items() if style != TABLE or _is_table(model, name)}
    return styles, {fqn: frozenset(owners[name] for name in names) for fqn, names in met.items()}


def _paired(
    graph: Graph, structure: Structure, chosen: Mapping[str, str]
) -> tuple[dict[str, str], Mapping[str, frozenset[str]]]:
    """(product -> style: rows of which all inputs are columns, and columns, gathered if no product follows;
    `LocalParts.met`).

    The model's code must compute with the parts of columns, and what the row reads be such a part: a fused projection,
    which is taken apart before, has others.
    """
    sources, readers = _sources_and_readers(graph, structure)
    rows, columns = ({name for name, kind in chosen.items() if kind == wanted} for wanted in ("row", "column"))
    parts, whole, alone = None, set[str](), set[str]()
    while parts is None or whole or alone:
        columns, rows = columns - whole, rows - alone
        whole = {name for name in columns if readers.get(name) and not readers[name] <= rows}
        alone = {name for name in rows if not sources[name] or not sources[name] <= columns}
        if not whole and not alone:
            parts = follow_parts(graph, structure, {name for name in columns if readers.get(name)})
            whole = parts.wrong & columns
            alone = {name for name in rows if not _reads_part(graph, structure, name, parts)}
    kinds = dict.fromkeys(rows, ROWS) | {name: COLUMNS if readers.get(name) else GATHERED for name in columns}
    return {name: kinds[name] for name in chosen if name in kinds}, parts.met


def _reads_part(graph: Graph, structure: Structure, name: str, parts: LocalParts) -> bool:
    """Whether each rank has its part of the last dim of a product's activation."""
    op = graph.ops[graph.position[name]]
    slots = product_slots(op, structure.from_parameters)
    activation = op.inputs[slots[0] if slots else 0]
    return parts.dims.get(activation.name) == len(activation.shape) - 1


def _sources_and_readers(graph: Graph, structure: Structure) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Product -> the products that its activation derives from in a region of tensors, and the inverse."""
    feeds: dict[str, set[str]] = {}
    sources: dict[str, set[str]] = {}
    readers: dict[str, set[str]] = {}
    for op in graph.ops:
        slots = product_slots(op, structure.from_parameters)
        if slots is not None:
            sources[op.name] = feeds.get(op.inputs[slots[0]].name, set())
            for name in sources[op.name]:
                readers.setdefault(name, set()).add(op.name)
            names = {op.name}
        else:
            names = set().union(*(feeds.get(value.name, set()) for value in op.inputs))
        if slots is None and names and op.name not in structure.region and not _is_end(graph, op):
            for name in names:  # what leaves the region is whole
                readers.setdefault(name, set()).add(op.name)
            names = set()
        feeds.update((value.name, names) for value in op.outputs)
    return sources, readers


def _is_end(graph: Graph, op: Op) -> bool:
    """Whether no product depends on what the op computes: a language model's loss."""
    return op.name in graph.once(_after_last_product)


def _after_last_product(graph: Graph) -> frozenset[str]:
    structure, before, after = structure_of(graph), set[str](), set[str]()
    for op in reversed(graph.ops):
        is_before = any(value.name in before for value in op.outputs)
        if not is_before and product_slots(op, structure.from_parameters) is None:
            after.add(op.name)
        else:
            before.update(value.name for value in op.inputs)
    return frozenset(after)


def _owner(op: Op, weight: str, model: nn.Module, products: tuple[type[nn.Module], ...]) -> str:
    """The FQN of the module of a product, if torch can split it; of a tied weight the module that calls."""
    for path in (op.module, weight.rpartition(".")[0]):
        module = model.get_submodule(path)
        can_split = type(module) in products if products else type(module) is nn.Linear or is_conv1d(module)
        if path and can_split:
            return path
    return ""


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a product whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_table(model: nn.Module, path: str) -> bool:
    return type(model.get_submodule(path)) is nn.Embedding


def _ties(plans: Sequence[Plan], styles: dict[str, str], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of FQNs (of a module with a style, of another one) of tied parameters, which parallelize_module gives one
    each; a module that would split such a parameter otherwise than the others do loses its style.
    """
    groups = [
        [(name.rpartition(".")[0], name) for name in (item.fqn, *item.aliases)]
        for plan in plans
        for item in plan.graph.of_kind("parameter")
        if item.aliases
    ]
    while True:
        wrong = {
            path
            for group in groups
            for path, _ in group
            if path in styles
            and any(styles.get(other) in (None, ROWS) and not _only_holds(model, other) for other, _ in group)
        }
        if not wrong:
            break
        for path in wrong:
            del styles[path]
    for group in groups:
        first = next((name for path, name in group if path in styles), None)
        yield from ((first, name) for _, name in group if first and name != first)


def _only_holds(model: nn.Module, path: str) -> bool:
    """Whether a module has the parameter for a module inside that computes with it."""
    return any(model.get_submodule(path).children())


def _shard_axes(plans: Sequence[Plan], data: tuple[int, ...]) -> tuple[int, ...]:
    """The data axes on which more than half of all bytes of parameters are split."""
    items = [(plan, item) for plan in plans for item in plan.graph.of_kind("parameter")]
    total = sum(item.value.num_bytes for _, item in items)
    split = {
        axis: sum(x.value.num_bytes for plan, x in items if plan.assignment.layouts[x.value.name][axis].is_split)
        for axis in data
    }
    return tuple(axis for axis in data if 2 * split[axis] > total)


def _is_freed(plans: Sequence[Plan], block: str, blocks: Sequence[str], data: tuple[int, ...]) -> bool:
    """Whether the plans gather more than half of a block's parameters again for backward; "": of those of no block."""
    inside = tuple(f"{name}." for name in ([block] if block else blocks))
    own = again = 0
    for plan in plans:
        for item in plan.graph.of_kind("parameter"):
            if item.fqn.startswith(inside) == bool(block):
                layout = plan.assignment.layouts[item.value.name]
                own += item.value.num_bytes
                is_again = item.value.name in plan.assignment.regathered and any(layout[a].is_split for a in data)
                again += item.value.num_bytes * is_again
    return 2 * again > own


def _is_recomputed(plan: Plan, block: str) -> bool:
    """Whether the plan computes more than half of a block's ops again for backward."""
    again = {name for region in plan.assignment.recomputed for name in region}
    own = [op.name for op in plan.graph.ops if op.module == block or op.module.startswith(f"{block}.")]
    return 2 * len(again.intersection(own)) > len(own) > 0
