"""`record`: the ops of a forward on tensors of other sizes, without an export, as a program that is converted alike.

torch.export takes about eight times as long, with symbols for sizes twenty times, for stack traces, guards and checks.
Whether this sees what an export would is found by comparison with an export for other sizes (`is_of_other_sizes`).
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.ir.autocast import autocast_on
from autopar.ir.export.infer_metas import Meta
from autopar.ir.export.run_export import export
from autopar.ir.outline.export_once import Outline
from autopar.ir.sizes.plain_results import plain_result
from autopar.torch_compat import OpOverload, RecordingMode, as_in_export, pytree, without_function_modes

# what a tensor there answers, by the getter; stubs have the properties as values
_KIND: Any = torch.Tensor
_OF_CPU = {_KIND.device.__get__: torch.device("cpu"), _KIND.is_cpu.__get__: True, _KIND.is_meta.__get__: False}


@dataclass(frozen=True)
class CallSpec:
    """The structure of the arguments, (args, kwargs), and of the result."""

    in_spec: Any
    out_spec: Any


@dataclass(frozen=True)
class RecordedForward:
    """The parts of a torch.export.ExportedProgram that are read: a node for each op, without lines and modules.

    `meta` of a node: "val", its result; "made", the properties of its outputs, and whether they are a tuple;
    "is_no_grad".
    """

    graph: Graph
    graph_signature: ExportGraphSignature
    call_spec: CallSpec
    constants: Mapping[str, torch.Tensor]

    @property
    def graph_module(self) -> "RecordedForward":
        """The object that has the graph; there are no graphs of regions."""
        return self

    def modules(self) -> tuple[nn.Module, ...]:
        """The modules inside."""
        return ()

    @property
    def code(self) -> str:
        """A text, equal for equal graphs."""
        return str(self.graph)


def record_outline(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outline:
    """The recorded forward of `model`, under all the checks of an export. TraceError as of `record`."""
    return Outline(export(model, args, kwargs, record=record))


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedForward:
    """The ops of `model(*args, **kwargs)`; the model and the tensors are on the meta device.

    TraceError where it cannot be recorded: then it has to be exported.
    """
    if autocast_on() is not None:
        raise TraceError("autocast changes no tensors on the meta device")
    recorder = _OpRecorder()
    for kind, named in ((InputKind.PARAMETER, model.named_parameters), (InputKind.BUFFER, model.named_buffers)):
        for fqn, tensor in named(remove_duplicate=False):
            if id(tensor) not in recorder.nodes:
                recorder.add_input(kind, fqn.replace(".", "_"), tensor, fqn)
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        recorder.add_input(InputKind.USER_INPUT, "argument", leaf)
    # an export moves a model on meta to the CPU, and leaves one without tensors where its arguments are
    told = _AsOnCpu() if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) else nullcontext()
    with as_in_export(), RecordingMode(recorder.seen), told:
        result = model(*args, **kwargs)
    outputs, out_spec = pytree.tree_flatten(result)
    nodes = [recorder.node_of(x) if isinstance(x, torch.Tensor) else x for x in outputs]
    recorder.graph.output(tuple(nodes))
    output_specs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(node), None) for node in nodes]
    signature = ExportGraphSignature(recorder.specs, output_specs)
    return RecordedForward(recorder.graph, signature, CallSpec(in_spec, out_spec), recorder.constants)


class _AsOnCpu(TorchFunctionMode):
    """Tells the model that its tensors are on the CPU, as an export does (`fake_device`): it may decide by that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OF_CPU[func] if func in _OF_CPU else func(*args, **(kwargs or {}))


class _OpRecorder:
    """Adds each op that is called inside to a graph, before autograd sees it."""

    def __init__(self) -> None:
        self.graph, self.nodes, self.held = Graph(), dict[int, Node](), list[Any]()
        self.known = dict[Any, tuple[list[torch.Tensor], Any]]()  # likeness of a call -> tensors like its results
        self.fresh = dict[int, Node]()  # by storage, of tensors that were made of none
        self.specs, self.constants = list[InputSpec](), dict[str, torch.Tensor]()

    def add_input(self, kind: InputKind, name: str, x: Any, target: str | None = None) -> Node:
        """A placeholder; a leaf of the arguments that is no tensor has one too."""
        node = self.graph.placeholder(name)
        node.meta["val"] = x
        is_saved = True if kind is InputKind.BUFFER else None  # that a buffer is not saved is read of the model
        self.specs.append(InputSpec(kind, _argument(node if isinstance(x, torch.Tensor) else x), target, is_saved))
        if isinstance(x, torch.Tensor):
            self._note(x, node)
        return node

    def node_of(self, x: torch.Tensor) -> Node:
        """The node whose result `x` is; TraceError if no op gave it."""
        node = self.nodes.get(id(x))
        if node is None:  # torch wraps what a factory gives in another tensor once the op is over
            node = self.fresh.pop(x.untyped_storage()._cdata, None)
            self._note(x, node)
        if node is None:
            raise TraceError(f"a tensor of shape {tuple(x.shape)} was made by no op that is recorded")
        return node

    def seen(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`record`, for which tensors are where they are."""
        with without_function_modes():
            return self.record(func, args, kwargs)

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op, which is added to the graph."""
        if func is torch.ops.aten.lift_fresh.default:
            func, args = torch.ops.aten.lift_fresh_copy.default, (self._lifted(*args),)
        given = tuple(map(self._nodes_in, args)), {name: self._nodes_in(x) for name, x in kwargs.items()}
        node = self.graph.create_node("call_function", func, *given, name=func.overloadpacket.__name__)
        is_no_grad = not torch.is_grad_enabled()
        result = self._run(func, *_on_meta(node, args, kwargs))
        is_tuple = isinstance(result, (tuple, list))
        made = result if is_tuple else (result,)
        node.meta = {"val": result, "is_no_grad": is_no_grad}
        if all(isinstance(x, torch.Tensor) for x in made):
            node.meta["made"] = tuple(Meta(tuple(x.shape), x.dtype, x.requires_grad) for x in made), is_tuple
        if not is_tuple:
            self._note(result, node)
            if not node.all_input_nodes and isinstance(result, torch.Tensor):
                self.fresh[result.untyped_storage()._cdata] = node
            return result
        for index, x in enumerate(made):
            part = self.graph.create_node("call_function", operator.getitem, (node, index))
            part.meta["val"] = x
            self._note(x, part)
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call. Many ops are Python on the meta device: of equal calls the first alone is run."""
        if func.is_view:  # of the very tensor that is given
            return func(*args, **kwargs)
        key = (func, _likeness(args), _likeness(tuple(kwargs.items())), torch.is_grad_enabled())
        if (known := self.known.get(key)) is not None:
            # a leaf that needs a gradient could not be written to
            made = [x.clone() if x.requires_grad else _empty_like(x) for x in known[0]]
            return type(known[1])(made) if isinstance(known[1], (tuple, list)) else made[0]
        result = plain_result(func, args, kwargs)
        if result is not None:
            return result
        result = func(*args, **kwargs)
        made = result if isinstance(result, (tuple, list)) else (result,)
        inside = {x.untyped_storage()._cdata for x in _tensors_in((args, tuple(kwargs.values())))}
        is_plain = all(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in inside for x in made)
        if inside and is_plain and not func._schema.is_mutable:
            self.known[key] = [_empty_like(x).requires_grad_(x.requires_grad) for x in made], result
        return result

    def _lifted(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that the forward makes of numbers, which have to be known."""
        if x.is_meta:
            raise TraceError("a tensor is made of numbers on the meta device, which keeps none")
        name = f"lifted_tensor_{len(self.constants)}"
        self.constants[name] = x
        on_meta = torch.empty_like(x, device="meta")
        self.add_input(InputKind.CONSTANT_TENSOR, name, on_meta, name)
        return on_meta

    def _nodes_in(self, x: Any) -> Any:
        """An argument of an op with nodes for its tensors."""
        if isinstance(x, torch.Tensor):
            return self.node_of(x)
        return type(x)(map(self._nodes_in, x)) if type(x) in (tuple, list) else x

    def _note(self, x: Any, node: Node | None) -> None:
        if isinstance(x, torch.Tensor) and node is not None:
            self.nodes[id(x)] = node
            self.held.append(x)


def _likeness(x: Any) -> Any:
    """A key of the properties of `x` on which the results of a call can depend."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.requires_grad
    return (type(x), *map(_likeness, x)) if isinstance(x, (tuple, list)) else (type(x), x)


def _tensors_in(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from _tensors_in(item)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _on_meta(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by which it gives tensors on the meta device, whatever device it asks for."""
    func: Any = node.target
    placed = tuple("meta" if isinstance(x, torch.device) else x for x in args)
    named = {name: "meta" if isinstance(x, torch.device) else x for name, x in kwargs.items()}
    if not node.all_input_nodes and any(arg.name == "device" and arg.kwarg_only for arg in func._schema.arguments):
        named["device"] = "meta"
    return placed, named


def _argument(x: Any) -> Any:
    return TensorArgument(x.name) if isinstance(x, Node) else ConstantArgument("", x)
