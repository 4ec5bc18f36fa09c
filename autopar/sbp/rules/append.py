"""The rules of inference's ops in place, which give what `torch.cat` and `index_copy` give, and have no gradient."""

from collections.abc import Callable, Iterable, Mapping

from autopar.ir.graph import Op
from autopar.ir.inference.append_op import APPEND, WRITE
from autopar.sbp.rules.index import index_copy
from autopar.sbp.rules.view import cat
from autopar.sbp.signature import Signature

RULES: Mapping[str, Callable[[Op], Iterable[Signature]]] = {APPEND: cat, WRITE: index_copy}
