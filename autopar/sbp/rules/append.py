"""The rule of `autopar.append`, which gives what `torch.cat` of its two tensors gives, and has no gradient."""

from collections.abc import Callable, Iterable, Mapping

from autopar.ir.graph import Op
from autopar.ir.inference.append_op import APPEND
from autopar.sbp.rules.view import cat
from autopar.sbp.signature import Signature

RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {APPEND: cat}
