"""Propagation: one signature for each op on one mesh axis, in a forward walk from seeds, with little communication."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial

from autopar.ir.graph import Graph, Op, Value
from autopar.ir.inference.for_inference import tracked
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES
from autopar.sbp.analysis.expert_routing import routed_signatures
from autopar.sbp.analysis.megatron_pairs import Structure, base_name, product_slots
from autopar.sbp.analysis.stacked_weights import stacked_products
from autopar.sbp.placement import I, P, Placement, R
from autopar.sbp.redistribute import CONVERSIONS, NEVER_BYTES
from autopar.sbp.signature import Signature

_WHOLE = ("I", "R")
_SAME_ELEMENTS = RESHAPES | PERMUTATIONS


@dataclass(frozen=True)
class Option:
    """A signature on one axis, and the bytes that its inner collectives on this axis move."""

    signature: Signature
    inner_bytes: int


Options = Callable[[Op], tuple[Option, ...]]
# value name -> placement in which it is produced; absent: a parameter, or computed from parameters, not yet chosen
Placed = dict[str, Placement]


def follow_batch(
    graph: Graph, representative: Mapping[str, str], options: Options, batch: Placed, *, is_by_expert: bool = False
) -> dict[str, Signature]:
    """Op name -> its signature under data parallelism; `batch`: placements of the arguments. Parameters are whole.

    `is_by_expert`: rows are exchanged by expert where they can be, and the weights of experts split.
    """
    at_experts = _at_experts(graph, options) if is_by_expert else {}
    stacks = graph.once(stacked_products) if is_by_expert and not at_experts else {}
    routed = graph.once(routed_signatures).keys() if at_experts else frozenset[str]()
    options = partial(_of_kind, partial(_by_stack, options, stacks), at_experts, routed)
    placed = {item.value.name: batch.get(item.value.name, I) for item in graph.inputs}
    placed.update((item.value.name, R if item.value.needs_grad else I) for item in graph.of_kind("parameter"))
    chosen: dict[str, Signature] = {}
    for op in graph.ops:
        known = chosen.get(representative[op.name])
        _take(op, known or _cheapest(op, options(op), placed), chosen, placed)
    return chosen


def follow_tensors(
    graph: Graph, structure: Structure, representative: Mapping[str, str], options: Options, sequence: Mapping[str, int]
) -> dict[str, Signature]:
    """Op name -> its signature under tensor parallelism, with the column and row products of `structure`.

    Ops between them follow, all others are whole. Values in `sequence` are split along that dim wherever an op allows
    it (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
    """
    options, is_tracked = partial(_with_all_tokens, options), graph.once(tracked)
    untracked = (item for item in graph.inputs if item.kind != "parameter" or item.value.name not in is_tracked)
    placed = {item.value.name: I for item in untracked}
    chosen: dict[str, Signature] = {}
    producer = {value.name: op for op in graph.ops for value in op.outputs}
    for op in graph.ops:
        if _is_for_consumer(op, structure):
            continue  # its reader decides
        known = chosen.get(representative[op.name])
        fits = () if known else _seeded(op, options(op), structure, placed, sequence, is_tracked)
        signature = known or _cheapest(op, fits, placed, structure)
        _take(op, signature, chosen, placed)
        for value, placement in zip(op.inputs, signature.inputs):
            _settle(value, placement, options, producer, chosen, placed)
    for op in graph.ops:
        if op.name not in chosen:
            _take(op, _cheapest(op, options(op), placed, structure), chosen, placed)
    return chosen


def _by_stack(options: Options, stacks: Mapping[str, tuple[int, Signature]], op: Op) -> tuple[Option, ...]:
    """The option of a product with a stack of weights that splits it, and all of other ops."""
    found = options(op)
    wanted = stacks[op.name][1] if op.name in stacks else None
    return tuple(option for option in found if option.signature == wanted) or found


def _of_kind(options: Options, at_experts: Mapping[str, str], routed: Set[str], op: Op) -> tuple[Option, ...]:
    """The options of an op at the experts with its role there (`_at_experts`), of others `routed` with them those that
    have a rank's own tokens, also where the batch is whole, and of all others all elsewhere.
    """
    if op.name not in at_experts:
        elsewhere = tuple(option for option in options(op) if not _is_at_experts(option))
        own = tuple(option for option in elsewhere if is_own(option)) if op.name in routed else ()
        return own or elsewhere
    there = (option for option in options(op) if _is_at_experts(option))
    return tuple(option for option in there if option.signature.role == at_experts[op.name])


def _is_at_experts(option: Option) -> bool:
    return any(placement.kind == "E" for placement in option.signature.inputs + option.signature.outputs)


def _at_experts(graph: Graph, options: Options) -> dict[str, str]:
    """Op name -> its role where rows are at their experts for as long as they can be, from the first grouped product on
    to the last; "" for ops without role.

    None at all if a value in between is read in the rank's own order too.
    """
    roles: dict[str, str] = {}
    there: set[str] = set()  # values that are read at the experts
    for op in reversed(graph.ops):
        fits = [option.signature for option in options(op) if _is_at_experts(option)]
        ends = there & {value.name for value in op.outputs}
        wanted = "E" if ends else "L"
        one = next((fit for fit in fits if fit.outputs[0].kind == wanted), None)
        if one is not None:
            roles[op.name] = one.role
            there.update(value.name for value, placement in zip(op.inputs, one.inputs) if placement.kind == "E")
        elif ends:
            return {}
    return {} if any(value.name in there and op.name not in roles for op in graph.ops for value in op.inputs) else roles


def is_own(option: Option) -> bool:
    """Whether a rank has rows of its own tokens, in its own order."""
    return any(placement.is_own for placement in option.signature.inputs + option.signature.outputs)


def _with_all_tokens(options: Options, op: Op) -> tuple[Option, ...]:
    """The options in which no rank has tokens of its own."""
    return tuple(option for option in options(op) if not is_own(option))


def _is_for_consumer(op: Op, structure: Structure) -> bool:
    is_of_parameters = bool(op.inputs) and all(value.name in structure.from_parameters for value in op.inputs)
    return is_of_parameters or any(value.name in structure.positional for value in op.outputs)


def _take(op: Op, signature: Signature, chosen: dict[str, Signature], placed: Placed) -> None:
    chosen[op.name] = signature
    placed.update((value.name, placement) for value, placement in zip(op.outputs, signature.outputs))


def _settle(
    value: Value,
    placement: Placement,
    options: Options,
    producer: Mapping[str, Op],
    chosen: dict[str, Signature],
    placed: Placed,
) -> None:
    """Choose signatures that yield `placement` for the ops that compute
    `value` from parameters alone, if they exist.
    """
    op = producer.get(value.name)
    if op is None or op.name in chosen:
        return
    index = op.outputs.index(value)
    matching = [option for option in options(op) if option.signature.outputs[index] == placement]
    signature = _cheapest(op, tuple(matching) or options(op), placed)
    _take(op, signature, chosen, placed)
    for source, wanted in zip(op.inputs, signature.inputs):
        _settle(source, wanted, options, producer, chosen, placed)


def _seeded(
    op: Op,
    options: tuple[Option, ...],
    structure: Structure,
    placed: Placed,
    sequence: Mapping[str, int],
    is_tracked: Set[str],
) -> tuple[Option, ...]:
    """The options of the kind that `structure` gives `op`; all options if it gives none or no option has it."""
    kind = "vocabulary" if op.name in structure.vocabulary else structure.kinds.get(op.name, base_name(op))
    slots = product_slots(op, structure.from_parameters)
    fits = [option for option in options if is_kind(kind, op, option.signature, slots)]
    if kind == "scaled_dot_product_attention":  # only if slicing its inputs is free
        fits = [option for option in fits if _moved_bytes(op, option, placed) == 0]
    elif op.name in structure.region:
        fits = [option for option in options if _stays_inside(op, option.signature, placed, is_tracked)]
    elif any(value.name in structure.gathered for value in op.inputs):
        fits = [option for option in options if all(p == I for p in option.signature.inputs)]
    elif not fits or kind == "whole":
        fits = _along_sequence(op, options, placed, sequence) or fits
    return tuple(fits) or options


def _stays_inside(op: Op, signature: Signature, placed: Placed, is_tracked: Set[str]) -> bool:
    """Whether the values between a column and a row product stay split, or whole and read by split ops.

    They may be gathered, but not split in another way.
    """
    pairs = [(placed.get(x.name, p), p) for x, p in zip(op.inputs, signature.inputs) if x.name in is_tracked]
    return all(dst != I and not (src.is_split and dst.is_split and src != dst) for src, dst in pairs)


def _along_sequence(op: Op, options: tuple[Option, ...], placed: Placed, sequence: Mapping[str, int]) -> list[Option]:
    """The options that split every value of the residual stream along its sequence.

    A view that cannot reads the gathered value, whose gradient is scattered again.
    """
    wanted = {
        slot: Placement("S", sequence[value.name]) for slot, value in enumerate(op.inputs) if value.name in sequence
    }
    fits = [
        option for option in options if wanted and all(option.signature.inputs[slot] == p for slot, p in wanted.items())
    ]
    fits = [option for option in fits if not option.signature.role]
    if (
        not fits
        and op.target in _SAME_ELEMENTS
        and any(placed[op.inputs[slot].name] == p for slot, p in wanted.items())
    ):
        return [option for option in options if all(placement == R for placement in option.signature.inputs)]
    return fits


def is_kind(kind: str, op: Op, signature: Signature, slots: tuple[int, int] | None) -> bool:
    """Whether it is the signature of a "column" or "row" product, a "vocabulary" lookup or attention split by heads."""
    inputs, output = signature.inputs, signature.outputs[0]
    match kind:
        case "vocabulary":
            return inputs[0] == Placement("S", 0) and output == P
        case "scaled_dot_product_attention":
            return output == Placement("S", len(op.outputs[0].shape) - 3)  # heads
        case "whole":
            return all(placement == I for placement in inputs)
    if slots is None or not inputs[slots[1]].is_split:
        return False
    activation = inputs[slots[0]]
    return output == P and activation.is_split if kind == "row" else output.is_split and activation.kind in _WHOLE


def _cheapest(op: Op, options: tuple[Option, ...], placed: Placed, structure: Structure | None = None) -> Signature:
    """The signature with the fewest bytes moved, then the fewest changes of placement, then the first of the rule.

    Of two that change nothing, data parallelism and a tensor-parallel region take the one that splits, ops outside the
    region the one that does not. A pending sum may be viewed, and is reduced before anything but a product's bias is
    added to it, as in plans that people write.
    """

    def is_textbook(signature: Signature) -> bool:
        if structure is not None and op.target in _SAME_ELEMENTS:
            return True
        pending = [value for value, placement in zip(op.inputs, signature.inputs) if placement == P]
        return all(
            structure is not None and op.name in structure.kinds and v.name in structure.from_parameters
            for v in pending
        )

    prefers_split = structure is None or op.name in structure.region

    def key(option: Option) -> tuple[int, int, bool]:
        signature = option.signature
        changes = sum(placed.get(value.name, _free(p)) != p for value, p in zip(op.inputs, signature.inputs))
        return _moved_bytes(op, option, placed), changes, any(p.is_split for p in signature.outputs) != prefers_split

    return min([option for option in options if is_textbook(option.signature)] or options, key=key).signature


def _moved_bytes(op: Op, option: Option, placed: Placed) -> int:
    moved = sum(
        _conversion_bytes(v, placed.get(v.name, _free(p)), p) for v, p in zip(op.inputs, option.signature.inputs)
    )
    return moved + option.inner_bytes


def _free(wanted: Placement) -> Placement:
    """The placement in which a parameter is stored for a use in `wanted`: never `R`, `P` or in sections."""
    return wanted if wanted.is_split and not wanted.sections else I


def _conversion_bytes(value: Value, src: Placement, dst: Placement) -> int:
    if src == dst:
        return 0
    if src.is_own or dst.is_own:
        return NEVER_BYTES
    forward, backward = CONVERSIONS[src.kind, dst.kind]
    return value.num_bytes * (bool(forward) + (bool(backward) and value.needs_grad))
