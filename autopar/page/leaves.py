"""`leaves`: each op and each stored tensor of a plan, with its place in the model, layout, bytes and seconds."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.activations.saved_activations import region_of_ops
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.step_cost import OpCost, op_cost
from autopar.explain.report import CollectiveRow, collective_rows
from autopar.ir.graph import Input, Op, Value, call_key, short_dtype
from autopar.ir.op_facts import family, is_view
from autopar.plans.plan import Plan
from autopar.sbp.placement import Layout


@dataclass(frozen=True, slots=True)
class Leaf:
    """An op, a parameter or another input of a plan.

    `module`: FQN of its module; `name`: within it. `kind`: "op" or that of an input. `called`: the name in the graph.
    `value`: dtype and shape of the whole tensor. `layout`: a placement for each mesh axis, as stored or as produced;
    `signatures`: of an op, for each axis. `remarks`: what else was decided of it. `num_bytes`: of a device, what an op
    saves for backward, or a tensor with its gradient and optimizer state. `seconds`: of compute in a step, by phase.
    `stage`: its number, -1 without stages.
    """

    module: str
    name: str
    kind: str
    called: str
    line: str
    value: str
    layout: tuple[str, ...]
    signatures: tuple[str, ...]
    remarks: tuple[str, ...]
    num_bytes: int
    seconds: Mapping[str, float]
    collectives: tuple[CollectiveRow, ...]
    stage: int = -1

    @property
    def time_s(self) -> float:
        """Seconds of compute and of collectives in a step."""
        return sum(self.seconds.values()) + sum(row.time_s for row in self.collectives)

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for what a page shows alike: all but the names of copies, their stage, and rounding."""
        collectives = tuple((row.phase, row.kind, row.axis, row.num_bytes, row.count) for row in self.collectives)
        what = (self.name, self.kind, self.line, self.value, self.layout, self.signatures, self.remarks)
        return (*what, self.num_bytes, f"{self.time_s:.6g}", collectives)


def leaves(plan: AnyPlan) -> Iterator[Leaf]:
    """The leaves in the order of the graph, tensors in front of ops; views that take no time are left out.

    A tensor that several stages hold has the leaf of the first.
    """
    if isinstance(plan, Plan):
        yield from _of_part(plan, -1, {})
        return
    seen, priced = set[tuple[str, str]](), dict[Hashable, OpCost]()
    for number, part in enumerate(plan.stages):
        for leaf in _of_part(part, number, priced):
            if leaf.kind == "op" or (leaf.module, leaf.name) not in seen:
                seen.add((leaf.module, leaf.name))
                yield leaf


def _of_part(plan: Plan, stage: int, priced: dict[Hashable, OpCost]) -> Iterator[Leaf]:
    issued = _by_owner(plan)
    for item in plan.graph.inputs:
        if item.kind != "argument" or stage <= 0:
            yield _of_input(plan, item, issued.get(item.value.name, ()), stage)
    again, moved = (frozenset(region_of_ops(x)) for x in (plan.assignment.recomputed, plan.assignment.offloaded))
    for op in plan.graph.ops:
        rows, cost = issued.get(op.name, ()), _cost(plan, op, priced)
        is_quiet = (is_view(op.target) or family(op.target) == "aten.clone") and not rows
        if not is_quiet or cost.forward_s + cost.backward_s > 0:
            yield _of_op(plan, op, rows, stage, cost, (op.name in again, op.name in moved))


def _cost(plan: Plan, op: Op, priced: dict[Hashable, OpCost]) -> OpCost:
    strategy = plan.assignment.strategies[op.name]
    key = call_key(op), id(strategy), plan.mesh.shape
    if key not in priced:
        is_split = plan.training.num_waiting > 0
        priced[key] = op_cost(op, strategy, plan.mesh.shape, plan.cluster, is_split=is_split)
    return priced[key]


def _of_op(
    plan: Plan, op: Op, rows: tuple[CollectiveRow, ...], stage: int, cost: OpCost, saves: tuple[bool, bool]
) -> Leaf:
    """The leaf of an op; `saves`: whether it is recomputed, and whether its activations are offloaded."""
    strategy, num = plan.assignment.strategies[op.name], plan.costs.num_microbatches
    is_again, is_moved = saves
    return Leaf(
        module=op.module,
        name=family(op.target).removeprefix("aten."),
        kind="op",
        called=f"%{op.name}",
        line=op.line,
        value=", ".join(map(_shaped, op.outputs)),
        layout=_texts(strategy.output_layout(0)) if op.outputs else (),
        signatures=tuple(map(str, strategy.signatures)),
        remarks=("recomputed in backward",) * is_again + ("offloaded to the host",) * is_moved,
        num_bytes=0 if is_again or is_moved else cost.saved_bytes * plan.training.num_in_flight,
        seconds={"forward": num * cost.forward_s, "backward": num * (cost.backward_s + is_again * cost.forward_s)},
        collectives=rows,
        stage=stage,
    )


def _of_input(plan: Plan, item: Input, rows: tuple[CollectiveRow, ...], stage: int) -> Leaf:
    name, chosen = item.value.name, plan.assignment
    is_stored = item.kind in ("parameter", "buffer")
    module, _, last = item.fqn.rpartition(".") if is_stored else ("", "", item.fqn or name)
    held = input_bytes(item, chosen.layouts[name], plan.mesh.shape, plan.training)
    remarks = {
        "gathered again in backward": name in chosen.regathered,
        "optimizer state on the host": name in chosen.state_on_host,
        "in a bucket": name in chosen.parameter_buckets,
        **{f"tied to {alias}": True for alias in item.aliases},
    }
    return Leaf(
        module=module,
        name=last,
        kind=item.kind,
        called=item.fqn or name,
        line="",
        value=_shaped(item.value),
        layout=_texts(chosen.layouts[name]),
        signatures=(),
        remarks=tuple(text for text, holds in remarks.items() if holds),
        num_bytes=sum(size for kind, size in held.items() if kind != "optimizer" or name not in chosen.state_on_host),
        seconds={},
        collectives=rows,
        stage=stage,
    )


def _texts(layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, layout))


def _shaped(value: Value) -> str:
    return f"{short_dtype(value.dtype)}{list(value.shape)}"


def _by_owner(plan: Plan) -> dict[str, tuple[CollectiveRow, ...]]:
    """Op or input -> rows of the collectives on its values."""
    owners = {value.name: op.name for op in plan.graph.ops for value in op.outputs}
    found = defaultdict[str, list](list)
    for planned in plan.costs.collectives:
        found[owners.get(planned.where, planned.where)].append(planned)
    return {owner: collective_rows(planned, plan.costs, plan.mesh) for owner, planned in found.items()}
