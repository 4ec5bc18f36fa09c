"""`trace`: the normalised Graph of a model for example inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from autopar.errors import TraceError
from autopar.ir.autocast import Autocast, autocast_on, without_autocast
from autopar.ir.experts.check_idle import check_idle, selects_rows
from autopar.ir.experts.row_numbers import row_numbers
from autopar.ir.export.from_fx import ConvertedRegion, convert_region
from autopar.ir.export.functionalise import View, check_thawed, read
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.export.placeholders import flat_arguments, read_placeholders
from autopar.ir.export.pytree_types import constant_of
from autopar.ir.export.run_export import export
from autopar.ir.graph import Graph
from autopar.ir.guards.add_guards import has_sizes_of_values, with_guards
from autopar.ir.guards.answers_as_run import masks_as_run
from autopar.ir.loops.guess_steps import with_guessed_steps
from autopar.ir.masks.reduce_rows import NotByRow, reduce_rows
from autopar.ir.outline.export_once import Outline, export_outline
from autopar.ir.outline.inline_bodies import expander
from autopar.ir.passes.normalise import normalise
from autopar.ir.rarely_collected import rarely_collected


@rarely_collected()
def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of `model`'s forward, in its present mode, for inputs such as `args` and `kwargs`.

    The model may be on the meta device. Tensors become inputs of fixed shape, all other leaves constants of the graph;
    the order of keywords does not matter. TraceError names the line of the model.
    """
    return with_guessed_steps(lambda: normalise(to_graph(model, args, dict(sorted(kwargs.items())))))


def to_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outlined: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Outline] = export_outline,
) -> Graph:
    """The `outlined` forward as functional ops, before any pass. Autocast that is on here becomes ops that cast."""
    try:
        graph = _graph_of(model, args, kwargs, outlined)
    except TraceError:
        graph = _with_all_rows(model, args, kwargs, "all") if outlined is export_outline else None
        if graph is None:
            raise
        return graph
    if outlined is export_outline and has_sizes_of_values(graph):
        # masks may follow from what another mask wrote, which the example does not tell once rows are any number
        found = (_with_all_rows(model, args, kwargs, picks) for picks in ("given", "all"))
        graph = next((each for each in found if each is not None), graph)
    return graph


def _graph_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outlined: Callable[..., Outline], picks: str = ""
) -> Graph:
    def converted(outlined: Callable[..., Outline]) -> Graph:
        with masks_as_run():
            outline = outlined(model, args, kwargs)
        autocast = autocast_on()
        with without_autocast():
            return reduce_rows(outline_to_graph(outline, model, args, kwargs, autocast))

    graph = converted(outlined)
    if (picks or outlined is export_outline) and selects_rows(graph):
        check_idle(graph, converted(partial(_export_whole, idle=True, picks=picks)))
    return graph


def _with_all_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], picks: str) -> Graph | None:
    """The graph that computes all rows where masks pick some, if that changes no number."""
    try:
        return _graph_of(model, args, kwargs, partial(_export_whole, picks=picks), picks)
    except (NotByRow, TraceError):
        return None


def _export_whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, idle: bool = False, picks: str = ""
) -> Outline:
    return Outline(export(model, args, kwargs, idle=idle, picks=picks))


def outline_to_graph(
    outline: Outline,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast | None = None,
    number_of: Callable[[Any], Any] | None = None,
) -> Graph:
    """The graph of `model`, called with `args` and `kwargs` within `autocast`, from its exported `outline`, before any
    pass. `number_of`: the values of symbolic sizes, if it has any.
    """
    program, builder = outline.program, OpBuilder()
    spec = program.call_spec
    placeholders = read_placeholders(program, model, flat_arguments(spec.in_spec, args, kwargs), builder)
    expand = expander(outline, placeholders.state)
    region = ConvertedRegion(
        program.graph_module,
        placeholders.env,
        False,
        expand,
        autocast=autocast,
        number_of=row_numbers(program.graph_module, number_of),
    )
    results = convert_region(region, builder)
    outputs = tuple(
        read(item, builder, Origin("output")) if isinstance(item, View) else constant_of(item) for item in results
    )
    outputs = with_guards(outputs, builder)
    check_thawed(placeholders.state.values())
    return Graph(
        inputs=tuple(placeholders.inputs),
        ops=tuple(builder.ops),
        outputs=outputs,
        mutations=placeholders.mutations(),
        constant_ops=(),
        constants=placeholders.constants,
        arguments=tuple(placeholders.arguments),
        argument_spec=spec.in_spec,
        output_spec=spec.out_spec,
    )
