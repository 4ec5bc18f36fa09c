"""`ParameterElsewhere`: what a rank has in the place of a parameter of other stages.

Code that numbers a model's parameters (a learning rate by depth, groups by position, a count of all) must see as many
as on one device, in the same order. What lies elsewhere has shape, dtype and device, and no content.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.checks.count_settings import settings_counted
from autopar.runtime.pipeline.stage_gradient import OF_STAGES_ONLY, StageGradient
from autopar.torch_compat import pytree, without_function_modes

aten = torch.ops.aten
_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__format__", "share_memory_", "apply_")
)


class ParameterElsewhere(torch.Tensor):
    """A parameter that other ranks of the pipeline hold, its gradient, or what was computed of it.

    Writing to it does nothing here: the ranks that hold it do the same to the real one. Reading an entry, or writing
    what depends on it to a tensor that is here, raises AutoparError.
    """

    fqn: str
    is_copy: bool = False  # of a copied module, which has no gradients until it is trained itself

    @staticmethod
    def __new__(cls, like: torch.Tensor, fqn: str, device: torch.device) -> "ParameterElsewhere":
        make: Any = cls._make_wrapper_subclass
        made = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False)
        made.fqn = fqn
        return made

    def __init__(self, like: torch.Tensor, fqn: str, device: torch.device) -> None:
        pass

    @property
    def grad(self) -> "ParameterElsewhere | None":  # type: ignore[override]
        has_gradient = self.requires_grad and not self.is_copy
        return ParameterElsewhere(self.detach(), self.fqn, self.device) if has_gradient else None

    @grad.setter
    def grad(self, value: Any) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:
        return f"ParameterElsewhere({self.fqn}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterElsewhere":
        made = ParameterElsewhere(self, self.fqn, self.device)
        memo[id(self)] = made if not isinstance(self, nn.Parameter) else nn.Parameter(made, self.requires_grad)
        memo[id(self)].is_copy = True
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        raise _not_here(self.fqn, "pickled")

    def full_tensor(self) -> Any:
        """Raises AutoparError: only the ranks that hold the parameter can."""
        raise _not_here(self.fqn, "read by full_tensor()")

    def to_local(self) -> torch.Tensor:
        """This rank's part: no entries."""
        return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("requires_grad_", "__set__"):
            settings_counted()[0] += (
                1  # as of the parameters that are here: a rank is to notice what is frozen elsewhere
            )
        if name == "__set__":  # .data, .requires_grad
            if not isinstance(args[0], cls):
                raise _not_here(args[1].fqn, "assigned to a tensor of this rank's stages")
            return None if "data" in repr(func) else super().__torch_function__(func, types, args, kwargs)
        if func in _READS:
            raise _not_here(_fqn_of(args, kwargs), f"read by {name}")
        if name.startswith("_foreach_"):
            return _each(func, args, kwargs)
        here = [x for x in pytree.tree_leaves((args, kwargs)) if _is_here(x)]
        if here and name != "__get__":
            fqn = _fqn_of(args, kwargs)
            is_written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if any(isinstance(x, StageGradient) for x in here):
                raise AutoparError(OF_STAGES_ONLY)
            if "out" in kwargs or (is_written and _is_here(args[0])):
                raise _not_here(fqn, "written to a tensor that is here")
            if torch.is_grad_enabled() and any(x.requires_grad for x in here):
                raise _not_here(
                    fqn, "joined with parameters of this rank's stages (all in one vector, a penalty on all weights)"
                )
            args, kwargs = pytree.tree_map(
                lambda x: ParameterElsewhere(x.detach(), fqn, x.device) if _is_here(x) else x, (args, kwargs)
            )
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    # pyrefly: ignore[bad-override]: torch calls it with the op first
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fqn = _fqn_of(args, kwargs)
        device = kwargs.get("device") or next(
            x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)
        )
        given: dict[int, torch.Tensor] = {}

        def without_content(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            given[id(made)] = x
            return made

        if func.namespace != "aten" or func is aten._local_scalar_dense.default:
            raise _not_here(fqn, f"read by {func}")
        with without_function_modes():
            args, kwargs = pytree.tree_map(without_content, (args, kwargs))
            kwargs |= {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
            try:
                out = func(*args, **kwargs)
            except NotImplementedError as error:  # the size of the result depends on entries
                raise _not_here(fqn, f"read by {func}") from error
            return pytree.tree_map_only(
                torch.Tensor, lambda x: given[id(x)] if id(x) in given else ParameterElsewhere(x, fqn, device), out
            )


def parameter_elsewhere(like: torch.Tensor, fqn: str, device: torch.device) -> nn.Parameter:
    """A parameter like `like`, called `fqn`, of another stage."""
    return nn.Parameter(ParameterElsewhere(like.detach(), fqn, device), requires_grad=like.requires_grad)


def _is_here(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, ParameterElsewhere)


def _fqn_of(*given: Any) -> str:
    return next(x.fqn for x in pytree.tree_leaves(given) if isinstance(x, ParameterElsewhere))


def _not_here(fqn: str, what: str) -> AutoparError:
    return AutoparError(
        f"{fqn} was {what}; it is a parameter of another stage of the pipeline, of which this rank knows shape and"
        " dtype only. Leave it out, as what is here is a torch.distributed.tensor.DTensor and this is not, or call"
        " model.full_state_dict() on every rank"
    )


def _each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op over lists of tensors: over those that are here, and over the others."""
    is_list = [isinstance(x, (list, tuple)) for x in args]
    rows = list(zip(*(x for x, found in zip(args, is_list) if found)))
    is_here = [not any(isinstance(x, ParameterElsewhere) for x in row) for row in rows]
    made: list[Any] = [None] * len(rows)
    for wanted in (True, False):
        chosen = [number for number, found in enumerate(is_here) if found == wanted]
        if not chosen:
            continue
        own = [[x[number] for number in chosen] if found else x for x, found in zip(args, is_list)]
        out = func(*own, **kwargs) if wanted else torch.Tensor.__torch_function__(func, (), own, kwargs)
        for number, x in zip(chosen, out or ()):
            made[number] = x
    return made if any(x is not None for x in made) else None


@functools.cache
def leave_out_of_optimizers() -> "WeakSet[torch.optim.Optimizer]":
    """From now on optimizers of torch take no `ParameterElsewhere`: a group has the parameters that are here. The
    optimizers that were given parameters since.
    """
    add: Callable[..., None] = torch.optim.Optimizer.add_param_group
    optimizers = WeakSet[torch.optim.Optimizer]()

    @functools.wraps(add)
    def add_own(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params") if isinstance(param_group, dict) else None
        if given is not None and not isinstance(given, (torch.Tensor, set)):
            param_group["params"] = given = list(given)
            parameters = [x[1] if isinstance(x, tuple) else x for x in given]
            _keep(param_group, [i for i, x in enumerate(parameters) if not isinstance(x, ParameterElsewhere)])
        elif isinstance(given, ParameterElsewhere):
            param_group["params"] = []
        add(self, param_group)
        optimizers.add(self)

    torch.optim.Optimizer.add_param_group = add_own  # type: ignore[method-assign]  # torch has no hook for it
    return optimizers


def take_out_of_optimizers(parameters: Iterable[torch.Tensor]) -> None:
    """Leave `parameters`, which are elsewhere from now on, out of the optimizers that were made before."""
    gone = {id(x) for x in parameters}
    for optimizer in leave_out_of_optimizers():
        for group in optimizer.param_groups:
            _keep(group, [number for number, x in enumerate(group["params"]) if id(x) not in gone])


def _keep(group: dict[str, Any], numbers: Sequence[int]) -> None:
    """Leave the parameters of these numbers in a group of an optimizer, and their names, if it has them."""
    for key in ("params", "param_names"):
        if len(group.get(key, ())) > len(numbers):
            group[key] = [group[key][number] for number in numbers]
