"""`export`: torch.export of a model that leaves the model unchanged, with errors in terms of the model's lines."""

import inspect
import io
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.errors import TraceError
from autopar.ir.attention.keep_flex import flex_attention_kept
from autopar.ir.experts.keep_rows import RowsKept
from autopar.ir.export.custom_functions import functions_kept
from autopar.ir.export.fake_device import as_if_on_cpu
from autopar.ir.export.inplace_ops import batch_norms_traced
from autopar.ir.export.pytree_types import constants_as_texts, register_types
from autopar.ir.export.refused_state import losses_refused
from autopar.ir.export.source_lines import in_own_lines, line_of_error, remedy_of
from autopar.ir.functions.grown_arguments import grown_arguments_refused
from autopar.ir.functions.one_device import on_one_device
from autopar.ir.functions.replaced_methods import replaced_methods_called_once
from autopar.ir.guards.answers_as_run import answers_as_run
from autopar.ir.guards.checked_numbers import has_numbers_in_use
from autopar.ir.guards.example_values import keep_value, stands_for
from autopar.ir.guards.known_values import KnownValues
from autopar.ir.guards.read_indices import indices_read, with_read_indices
from autopar.ir.inference.kv_caches import caches_numbered, check_caches
from autopar.ir.kept_attributes import keeping_no_state
from autopar.ir.loops.guess_steps import steps_guessed
from autopar.ir.outline.batched_calls import with_batches
from autopar.ir.outline.held_beside import read_as_registered
from autopar.ir.outline.replaced_forward import replaced_forward
from autopar.torch_compat import FakeTensor, pytree

# Number of a leaf of (args, kwargs) -> its dims whose sizes are symbols in the exported program.
DynamicDims = Mapping[int, Collection[int]]


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: DynamicDims | None = None,
    *,
    record: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    decides: bool = True,
    idle: bool = False,
    picks: str = "",
) -> ExportedProgram:
    """The training IR of the model's forward. Raises TraceError with the model's line.

    `record`: what runs the forward and gives the program in place of torch.export, which it is without symbols.
    `decides`: the values of the example decide branches, unless sizes are symbols or ops are recorded. `idle`: no mask
    that depends on a parameter selects any row. `picks`: the masks of which the rows are `autopar.picked`, "given" for
    those that follow from arguments, "all" for those that the example does not tell too.
    """
    register_types((args, kwargs))
    check_caches(args, kwargs)
    args, kwargs = pytree.tree_map(_separate, (args, kwargs))
    # The fake tensors of a trace draw no random numbers, but factories with constant sizes may.
    with (
        torch.random.fork_rng(devices=()),
        _outputs_registered(model),
        constants_as_texts(model, args, kwargs) as (args, kwargs),
        caches_numbered(model),
        _without_dump(),
        answers_as_run(model),
        on_one_device(map(type, model.modules())),
        read_as_registered(model),
        functions_kept(),
        replaced_methods_called_once(),
        flex_attention_kept(),
        losses_refused(model),
        grown_arguments_refused(model),
        batch_norms_traced(),
    ):
        if record is not None or dynamic or not decides:  # what the example decides would not hold for other sizes
            rows = RowsKept(lambda _: False, idle=idle)
            return keeping_no_state(model, lambda: _checked_export(model, args, kwargs, dynamic or {}, record, rows))
        return _decided_by_example(model, args, kwargs, idle, picks)


def _decided_by_example(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], idle: bool, picks: str
) -> ExportedProgram:
    """The export in which the example decides branches; integers that are read of arguments are fixed where other ops
    than comparisons use them.
    """
    known = KnownValues(model, args, kwargs, takes_integers=False)

    def exported(known: KnownValues) -> ExportedProgram:
        with known.active(), steps_guessed(model):
            rows = _rows_kept(known, idle, picks)
            return keeping_no_state(model, lambda: _checked_export(model, args, kwargs, {}, None, rows))

    try:
        program = exported(known)
        if not known.symbols or not has_numbers_in_use(program):
            return program
    except TraceError:
        if not known.symbols:
            raise
    return exported(KnownValues(model, args, kwargs, takes_integers=True))


def _rows_kept(known: KnownValues, idle: bool, picks: str) -> RowsKept:
    if not picks:
        return RowsKept(known.knows, idle=idle)

    def is_known(mask: torch.Tensor) -> bool:
        return known.knows(mask) and not known.is_given(mask)

    picked = known.is_given if picks == "given" else lambda mask: not is_known(mask)
    return RowsKept(is_known, idle=idle, picks=picked, is_answered=known.is_answered)


def _checked_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: DynamicDims, record: Any, rows: RowsKept
) -> ExportedProgram:
    try:
        with rows:
            if record is None:
                with indices_read():
                    program = _export(model, args, kwargs, dynamic)
            else:
                program = record(model, args, kwargs)
        rows.check()
    except GuardOnDataDependentSymNode as error:
        raise TraceError(_data_dependent(error)) from None
    except Exception as error:
        _check_signature(model, args, kwargs)
        line, text = line_of_error(error)
        where = f"{line}: `{text}`" if line else type(model).__name__
        if isinstance(error, TraceError):  # a refusal, which says all there is
            raise TraceError(f"{where}: {error}") from None
        told = f"{where} cannot be traced: {type(error).__name__}: {error}{remedy_of(error)}"
        raise TraceError(told) from in_own_lines(error)
    with_batches(program.graph_module)
    with_read_indices(program.graph_module)
    return program


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: DynamicDims) -> ExportedProgram:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    if not given and not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return _torch_export(model, args, kwargs, dynamic)
    with as_if_on_cpu(model) as fake:
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        return _torch_export(model, args, kwargs, dynamic)


def _torch_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: DynamicDims
) -> ExportedProgram:
    """The program with symbols for the `dynamic` dims; a size that the model fixes stays a number."""
    if not dynamic:
        return torch.export.export(model, args, kwargs, strict=False)
    shapes = ShapesCollection()
    for number, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if number in dynamic:
            shapes[leaf] = dict.fromkeys(dynamic[number], Dim.AUTO)
    with _all_keywords_named(model, kwargs):
        sizes = shapes.dynamic_shapes(model, args, kwargs)
        return torch.export.export(model, args, kwargs, dynamic_shapes=sizes, strict=False)


def _all_keywords_named(model: nn.Module, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    """A context in which the signature of the forward names all of `kwargs`: torch.export matches dynamic dims to
    arguments by it, and fails for those that it has as **kwargs.
    """
    named = inspect.signature(model.forward).parameters
    known = [each for each in named.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(known) == len(named):
        return nullcontext()
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in named]
    return replaced_forward(model, model.forward, inspect.Signature([*known, *more]))


def _check_signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TraceError if the signature of the forward is the reason why a call failed.

    It is not checked before the call, since decorators may take more arguments than their signature shows.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__} cannot be called so: {error}; its forward takes {signature}"
        ) from None


def _separate(leaf: Any) -> Any:
    """A distinct tensor object for a leaf: export treats one object that is passed twice as one input."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return keep_value(leaf.detach().requires_grad_(leaf.requires_grad), stands_for(leaf))


def _data_dependent(error: Exception) -> str:
    line, text = line_of_error(error)
    return (
        f"{line}: `{text}` branches on the values of a tensor; a plan needs one fixed program: "
        "use torch.where or a mask, or decide it from shapes and Python values before the call"
    )


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _without_dump() -> Iterator[None]:
    """A context that drops the dump of the graph, thousands of lines, that torch.export prints if a model branches.

    Other text on stderr is passed on.
    """
    said, dump, log = io.StringIO(), "", logging.getLogger("torch.fx.experimental.symbolic_shapes")
    try:
        log.addFilter(_is_error)  # it says that it finds no line of the user's, which the error names
        with redirect_stderr(said):
            yield
    except TraceError as error:
        if (graph := getattr(error.__context__, "partial_fx_graph", None)) is not None:
            dump = f"{graph}\n"
        raise
    finally:
        log.removeFilter(_is_error)
        sys.stderr.write(said.getvalue().replace(dump, "") if dump else said.getvalue())


@contextmanager
def _outputs_registered(model: nn.Module) -> Iterator[None]:
    """A context in which the types of the model's outputs are registered before export flattens them."""
    hook = model.register_forward_hook(lambda module, args, output: register_types(output))
    try:
        yield
    finally:
        hook.remove()
