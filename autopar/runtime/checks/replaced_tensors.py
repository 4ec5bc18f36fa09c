"""Parameters and buffers that a user still holds after sharded ones replaced them in their module."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_compat import pytree


class ReplacedParameter(nn.Parameter):
    """A parameter that is no longer one: every use but `repr` raises AutoparError with the name it had."""

    fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        used = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ReplacedParameter))
        raise AutoparError(
            f"this tensor was parameter {used.fqn!r} until autopar.compile put a sharded one in its place: an"
            " optimizer or average made of it would train and save nothing; make it of model.parameters() after"
            " autopar.compile, or after the first call where the parameter was set in between (or compile a"
            " copy.deepcopy of the model)"
        )

    def __repr__(self, **_: Any) -> str:
        return f"<parameter {self.fqn!r}, replaced by autopar.compile>"


def mark_replaced(parameter: torch.Tensor, fqn: str) -> None:
    """Turn `parameter`, of exactly the type nn.Parameter, into a `ReplacedParameter` without memory of its own."""
    if type(parameter) is nn.Parameter:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.__class__ = ReplacedParameter
        vars(parameter)["fqn"] = fqn


class ReplacedBuffer(torch.Tensor):
    """A buffer that is no longer one and whose content is old: every use but `repr` raises AutoparError."""

    fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        used = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ReplacedBuffer))
        raise AutoparError(
            f"this tensor was buffer {used.fqn!r} until autopar.compile put a sharded one in its place, to which the"
            f" model writes since: take it from the model, model.get_buffer({used.fqn!r})"
        )

    def __repr__(self, **_: Any) -> str:
        return f"<buffer {self.fqn!r}, replaced by autopar.compile>"


@dataclass
class ReplacedBuffers:
    """The buffers of a model that sharded ones replaced and that somebody still holds, with their versions by FQN."""

    held: dict[str, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)

    def add(self, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
        """Watch those of the buffers `before` that are none of the buffers `now`."""
        kept = set(map(id, now.values()))
        plain = {fqn: x for fqn, x in before.items() if type(x) is torch.Tensor and id(x) not in kept}
        self.held |= {fqn: (weakref.ref(x), x._version) for fqn, x in plain.items() if not x.is_inference()}

    def mark(self, written: Iterable[str]) -> None:
        """Turn those that the model writes to into `ReplacedBuffer`s."""
        for fqn in written:
            if (entry := self.held.pop(fqn, None)) and (buffer := entry[0]()) is not None:
                buffer.__class__ = ReplacedBuffer
                vars(buffer)["fqn"] = fqn

    def check(self) -> None:
        """AutoparError if one was written to, which changes nothing in the model."""
        for fqn, (reference, version) in [*self.held.items()]:
            if (buffer := reference()) is None:
                del self.held[fqn]
            elif buffer._version != version:
                raise AutoparError(
                    f"a tensor was written to that was buffer {fqn!r} until autopar.compile put a sharded one in its"
                    f" place: write to the model's own, model.get_buffer({fqn!r}), with a DTensor of its layout, or"
                    " give the whole tensor to model.load_state_dict"
                )
