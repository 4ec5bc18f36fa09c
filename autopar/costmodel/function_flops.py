"""Flops of custom autograd functions: counted by running them on the meta device, as nothing else is known of them."""

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.call_args import fill
from autopar.ir.graph import Op, resolve
from autopar.torch_compat import pytree

Shapes = tuple[tuple[int, ...], ...]


def function_flops(op: Op, inputs: Shapes) -> tuple[float, float]:
    """Flops of one forward and of one backward run on tensors of these shapes; 0 for what does not run without data."""
    return _counted(op.nameless, inputs)


@lru_cache(maxsize=4096)
def _counted(op: Op, inputs: Shapes) -> tuple[float, float]:
    tensors = [
        torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.needs_grad)
        for shape, value in zip(inputs, op.inputs)
    ]
    counts = []
    try:
        with torch.enable_grad():
            with FlopCounterMode(display=False) as counter:
                results = pytree.tree_leaves(resolve(op.target)(*fill(op.args, tensors)))
            counts.append(float(counter.get_total_flops()))
            tracked = [x for x in results if x.requires_grad]
            with FlopCounterMode(display=False) as counter:
                torch.autograd.backward(tracked, [torch.empty_like(x) for x in tracked])
            counts.append(float(counter.get_total_flops()))
    except Exception:  # the user's code, which was written for tensors with data
        counts += [0.0, 0.0]
    return counts[0], counts[1]
