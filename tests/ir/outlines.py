"""A model exported in parts beside the same model exported as a whole."""

from autopar.ir.export.run_export import export
from autopar.ir.outline.export_once import Outline, export_outline
from autopar.ir.print_graph import fingerprint, format_graph
from autopar.ir.trace import outline_to_graph


def both(model, args, kwargs):
    """(calls and bodies of the outline, graph by it, graph of the whole export)"""
    outline = export_outline(model, args, kwargs)
    whole = Outline(export(model, args, kwargs))
    return outline, *(outline_to_graph(found, model, args, kwargs) for found in (outline, whole))


def assert_equal(model, args, kwargs, *, calls: int, bodies: int = 1) -> None:
    outline, graph, whole = both(model, args, kwargs)
    assert format_graph(graph) == format_graph(whole)
    assert fingerprint(graph) == fingerprint(whole)
    assert graph.output_spec == whole.output_spec and graph.argument_spec == whole.argument_spec
    assert (len(outline.calls), len(outline.bodies)) == ((calls, bodies) if calls else (0, 0))
