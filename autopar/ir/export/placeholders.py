"""Conversion of an exported program's placeholders to inputs of a Graph."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from autopar.errors import TraceError
from autopar.ir.export.functionalise import View, whole
from autopar.ir.export.op_builder import OpBuilder
from autopar.ir.export.source_lines import quote_stack
from autopar.ir.graph import Input, Value
from autopar.torch_compat import FakeTensor, pytree


@dataclass(frozen=True)
class Placeholders:
    """The inputs of a graph under construction.

    `env`: placeholder node -> its view or constant; `arguments`: for each flat argument the name of its input, or its
    constant; `state`: each FQN of a parameter or buffer -> its view.
    """

    inputs: list[Input] = field(default_factory=list)
    views: dict[str, View] = field(default_factory=dict)
    state: dict[str, View] = field(default_factory=dict)
    env: dict[Node, Any] = field(default_factory=dict)
    arguments: list[Any] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def mutations(self) -> tuple[tuple[str, Value], ...]:
        """(FQN, last value) of each written buffer and parameter."""
        state = [item for item in self.inputs if item.kind in ("parameter", "buffer")]
        stored = [(item.fqn, self.views[item.value.name].storage) for item in state]
        return tuple((fqn, storage.value) for fqn, storage in stored if storage.version > 0)


def read_placeholders(
    program: ExportedProgram, model: nn.Module, leaves: list[Any], builder: OpBuilder
) -> Placeholders:
    """The inputs of a program, one for each tensor: tied parameters share one.

    `leaves`: the flat arguments of the call. All parameters and buffers of the model come first, including those that
    the program does not read.
    """
    placeholders = Placeholders()
    _add_state(placeholders, model, builder)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    remaining = iter(leaves)
    for node, spec in zip(nodes, program.graph_signature.input_specs):
        if spec.kind is InputKind.USER_INPUT:
            _add_argument(placeholders, node, next(remaining), builder)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            _add_constant(placeholders, node, spec, program, builder)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            placeholders.env[node] = placeholders.state[spec.target or ""]
        else:
            raise TraceError(
                f"input {node.name} of the exported program is a {spec.kind.name}; only tensors can be laid out on a"
                " mesh. Draw by the default generator, not by a torch.Generator made in forward, or outside of it"
            )
    return placeholders


def _add_state(placeholders: Placeholders, model: nn.Module, builder: OpBuilder) -> None:
    transient = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for kind, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        fqns: dict[int, list[str]] = {}
        tensors = {}
        for fqn, tensor in named(remove_duplicate=False):
            fqns.setdefault(id(tensor), []).append(fqn)
            tensors[id(tensor)] = tensor
        for key, (first, *aliases) in fqns.items():
            x = tensors[key]
            value = Value(builder.unique(first.replace(".", "_")), tuple(x.shape), x.dtype, x.requires_grad)
            view = _add(
                placeholders, Input(kind, value, first, tuple(aliases), first not in transient), f"{kind} {first}"
            )
            placeholders.state.update((fqn, view) for fqn in (first, *aliases))


def _add(placeholders: Placeholders, item: Input, owner: str) -> View:
    view = whole(item.value, owner)
    placeholders.inputs.append(item)
    placeholders.views[item.value.name] = view
    return view


def _add_constant(
    placeholders: Placeholders, node: Node, spec: InputSpec, program: ExportedProgram, builder: OpBuilder
) -> None:
    name = str(spec.target)
    tensor = program.constants[name]
    if isinstance(tensor, FakeTensor):
        line = next(filter(None, (quote_stack(user.meta.get("stack_trace") or "") for user in node.users)), "the model")
        raise TraceError(
            f"{line}: reads a tensor that was made while the model was traced, and whose making was not recorded; make"
            " it with tensor ops in forward, and take .detach() in place of .data"
        )
    value = Value(builder.unique(name.replace(".", "_")), tuple(tensor.shape), tensor.dtype, False)
    # What export lifts out of the forward ("lifted_tensor_3") is made anew by each call; an attribute of the model is
    # not.
    owner = "" if name.rpartition(".")[2].startswith("lifted_tensor_") else f"tensor attribute {name}"
    placeholders.constants[value.name] = tensor
    placeholders.env[node] = _add(placeholders, Input("constant", value, name), owner)


def _add_argument(placeholders: Placeholders, node: Node, leaf: Any, builder: OpBuilder) -> None:
    if not isinstance(leaf, torch.Tensor):
        placeholders.env[node] = leaf
        placeholders.arguments.append(leaf)
        return
    value = Value(builder.unique(node.name), tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    placeholders.arguments.append(value.name)
    placeholders.env[node] = _add(placeholders, Input("argument", value, node.name), f"argument {node.name}")


def flat_arguments(spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call in the order of `spec`, for any order of keywords; ValueError for another structure."""
    names = spec.child(1).context if spec.num_children == 2 else []
    ordered = {name: kwargs[name] for name in names if name in kwargs} | kwargs
    leaves, given = pytree.tree_flatten((tuple(args), ordered))
    if given != spec:
        raise ValueError(
            f"the call does not have the structure the model was traced with: expected {spec}, found {given}"
        )
    return leaves
