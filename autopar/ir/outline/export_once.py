"""Export of a model with isomorphic modules: the model around them once, and each kind of module once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.errors import TraceError
from autopar.ir.export.run_export import export
from autopar.ir.gradients.gradient_op import GRADIENT
from autopar.ir.outline.chains import CallChain, ReadLate, Unsure
from autopar.ir.outline.identical_modules import find_alike
from autopar.ir.outline.opaque_calls import TARGET, Body, Record, stand_ins, unnumbered
from autopar.torch_compat import has_hooks_of_all_modules

# The export of a body costs as much as about three calls; with fewer calls there is no gain.
_LEAST_CALLS = 3
_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)
# Under which a module is exported, so that its own forward is called and nothing around it.
INNER = "block"


@dataclass(frozen=True)
class Outline:
    """An exported model whose `program` has an opaque op for calls of isomorphic modules, one after the other.

    `chains`: the calls of each such op. `bodies`: each with its exported program, which
    returns the flat result; its modules and parameters are those of a module called "block".
    """

    program: ExportedProgram
    chains: tuple[CallChain, ...] = ()
    bodies: tuple[tuple[Body, ExportedProgram], ...] = ()

    @property
    def calls(self) -> tuple[str, ...]:
        """The FQNs of the modules that are called."""
        return tuple(fqn for chain in self.chains for fqn in chain.fqns)


class _Alone(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(INNER, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(INNER).forward(*args, **kwargs)


def export_outline(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outline:
    """The training IR of the model's forward, with bodies where that is safe and faster. Errors as `export`."""
    groups = () if has_hooks_of_all_modules() else find_alike(model)
    if groups:
        try:
            try:
                return _export_parts(model, args, dict(kwargs), groups)
            except ReadLate:
                return _export_parts(model, args, dict(kwargs), groups, in_chains=False)
        except (Unsure, TraceError):
            pass  # an error of the model itself is raised below, by the whole export
    return Outline(export(model, args, dict(kwargs)))


def _export_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], groups: Any, *, in_chains: bool = True
) -> Outline:
    with stand_ins(model, groups, in_chains=in_chains) as record:
        program = export(model, args, kwargs)
    _check(program, record)
    bodies = tuple((body, _export_body(model.get_submodule(body.fqn), body)) for body in record.bodies.values())
    return Outline(program, tuple(record.calls), bodies)


def _check(program: ExportedProgram, record: Record) -> None:
    if sum(len(chain.fqns) for chain in record.calls) < _LEAST_CALLS * len(record.bodies):
        raise Unsure("most modules are called in a way of their own")
    numbers = [node.args[1] for node in program.graph.nodes if str(node.target) == TARGET]
    if numbers != list(range(len(record.calls))):
        raise Unsure("modules are called whose results are not used, or called in a region of their own")
    if any(str(node.target) == GRADIENT for node in program.graph.nodes):
        raise Unsure("the model takes a gradient, which an opaque call has not")


def _export_body(module: nn.Module, body: Body) -> ExportedProgram:
    with unnumbered(module, body.alike):
        program = export(_Alone(module), body.args, dict(body.kwargs))
    if any(spec.kind not in _KINDS for spec in program.graph_signature.input_specs):
        raise Unsure("the module reads tensors that are not its parameters, buffers or arguments")
    return program
