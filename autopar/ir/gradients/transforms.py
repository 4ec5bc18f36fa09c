"""While a model is exported, `torch.func.grad`, `grad_and_value`, `vjp` and `jvp` are calls of `torch.autograd.grad`.

They are differentiated at copies of what they are given, so that what the function reads besides is held. A product
with the Jacobian is the derivative of a product with its transpose, which is linear in the direction u: of u -> u J
with respect to u, along v, it is J v.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autopar.torch_compat import pytree

Function = Callable[..., Any]


@contextmanager
def transforms_kept() -> Iterator[None]:
    """Inside, these transforms are calls of `torch.autograd.grad`."""
    with ExitStack() as stack:
        for function in (grad, grad_and_value, vjp, jvp):
            stack.enter_context(patch.object(torch.func, function.__name__, function))
        yield


def grad(func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Function:
    """`torch.func.grad`."""
    both = grad_and_value(func, argnums, has_aux)

    def of_value(*args: Any, **kwargs: Any) -> Any:
        gradients, value = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return of_value


def grad_and_value(func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Function:
    """`torch.func.grad_and_value`."""

    def of_value(*args: Any, **kwargs: Any) -> Any:
        wanted = args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)
        leaves, spec = pytree.tree_flatten(wanted)
        is_tracked = torch.is_grad_enabled()
        with torch.enable_grad():
            copies = [_copy(x) for x in leaves]
            chosen = pytree.tree_unflatten(copies, spec)
            numbers = (argnums,) if isinstance(argnums, int) else argnums
            given = dict(zip(numbers, (chosen,) if isinstance(argnums, int) else chosen))
            count = len(args)
            changed = {number % count: x for number, x in given.items()}
            result = func(*(changed.get(number, x) for number, x in enumerate(args)), **kwargs)
            value = result[0] if has_aux else result
            gradients = torch.autograd.grad(value, copies, create_graph=True, materialize_grads=True)
        return _given_out((pytree.tree_unflatten(list(gradients), spec), result), is_tracked)

    return of_value


def vjp(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """`torch.func.vjp`."""
    leaves, spec = pytree.tree_flatten(primals)
    is_tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        copies = [_copy(x) for x in leaves]
        result = func(*pytree.tree_unflatten(copies, spec))
    ends = pytree.tree_leaves(result[0] if has_aux else result)

    def transposed(cotangents: Any, **_: Any) -> Any:
        is_tracked = torch.is_grad_enabled()
        with torch.enable_grad():
            directions = pytree.tree_leaves(cotangents)
            found = torch.autograd.grad(ends, copies, directions, create_graph=True, materialize_grads=True)
        return _given_out(pytree.tree_unflatten(list(found), spec), is_tracked)

    out = _given_out(result, is_tracked)
    return (out[0], transposed, out[1]) if has_aux else (out, transposed)


def jvp(
    func: Function, primals: tuple[Any, ...], tangents: tuple[Any, ...], *, strict: bool = False, has_aux: bool = False
) -> Any:
    """`torch.func.jvp`."""
    leaves, spec = pytree.tree_flatten(primals)
    is_tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        copies = [_copy(x) for x in leaves]
        result = func(*pytree.tree_unflatten(copies, spec))
        ends, ends_spec = pytree.tree_flatten(result[0] if has_aux else result)
        along = _along(ends, copies, pytree.tree_leaves(tangents))
    out, derivative = _given_out((result, pytree.tree_unflatten(along, ends_spec)), is_tracked)
    return (out[0], derivative, out[1]) if has_aux else (out, derivative)


def _along(
    ends: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The derivatives of `ends` where `copies` move along `tangents`."""
    directions = [_copy(torch.zeros_like(y)) for y in ends]
    transposed = torch.autograd.grad(ends, copies, directions, create_graph=True, allow_unused=True)
    used = [(each, v) for each, v in zip(transposed, tangents) if each is not None]
    if not used:
        return [torch.zeros_like(y) for y in ends]
    products, given = zip(*used)
    return list(torch.autograd.grad(products, directions, given, create_graph=True, materialize_grads=True))


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` with respect to which to differentiate, which is `x` to what differentiates further."""
    return x.clone() if x.requires_grad else x.detach().clone().requires_grad_()


def _given_out(results: Any, is_tracked: bool) -> Any:
    """The `results` of what is followed by autograd, outside of it."""
    return results if is_tracked else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results)
