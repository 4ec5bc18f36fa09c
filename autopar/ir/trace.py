"""From a model and example inputs to a normalised Graph."""

from typing import Any

from torch import nn

from autopar.ir.export.from_fx import Region, convert_region
from autopar.ir.export.functionalise import View, read
from autopar.ir.export.op_builder import Emitter, Origin
from autopar.ir.export.placeholders import flat_arguments, read_placeholders
from autopar.ir.graph import Graph
from autopar.ir.outline.export_once import Outline, export_outline
from autopar.ir.outline.inline_bodies import expander
from autopar.ir.passes.normalise import normalise


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The forward of `model` in its present mode for inputs like these; the model may be on the meta device.

    Tensors become inputs of fixed shape, all other leaves are baked in; keywords count in any order. Raises TraceError
    naming the model's line.
    """
    return normalise(to_graph(model, args, dict(sorted(kwargs.items()))))


def to_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The exported forward as functional ops, nothing simplified yet."""
    return outline_to_graph(export_outline(model, args, kwargs), model, args, kwargs)


def outline_to_graph(outline: Outline, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """`to_graph` of what was exported of the model for this call."""
    program, emitter = outline.program, Emitter()
    spec = program.call_spec
    found = read_placeholders(program, model, flat_arguments(spec.in_spec, args, kwargs), emitter)
    region = Region(program.graph_module, found.env, False, expander(outline, found.state))
    results = convert_region(region, emitter)
    outputs = tuple(read(item, emitter, Origin("output")) if isinstance(item, View) else item for item in results)
    return Graph(
        inputs=tuple(found.inputs),
        ops=tuple(emitter.ops),
        outputs=outputs,
        mutations=found.mutations(),
        constant_ops=(),
        constants=found.constants,
        arguments=tuple(found.arguments),
        argument_spec=spec.in_spec,
        output_spec=spec.out_spec,
    )
