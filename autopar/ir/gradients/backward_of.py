"""`backward_of`: the backward of one op as an fx graph of torch's ops, which can be differentiated again."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.errors import TraceError
from autopar.ir.call_args import call, fill
from autopar.ir.gradients.twice_differentiable import WRITTEN_OUT, backward_decompositions
from autopar.ir.graph import Op, arguments_of
from autopar.ir.op_facts import is_random
from autopar.torch_compat import FakeTensorMode

_TAKEN = "torch.autograd.grad in forward goes through {} ({}), {}"


def backward_of(op: Op, given: tuple[bool, ...], wanted: tuple[int, ...], line: str) -> GraphModule:
    """The gradients with respect to the inputs at the places `wanted`, from the op's inputs and the gradients of the
    outputs that are `given`; shapes are those of `op`. TraceError, with the op's `line`, if it has no such graph.
    """
    if not op.target.startswith("aten."):
        raise TraceError(_TAKEN.format(op.target, line, "whose backward is not known as ops; write it in torch's ops"))
    if is_random(op):
        why = "which draws random numbers: draw them outside of what is differentiated, or take p=0"
        raise TraceError(_TAKEN.format(op.target, line, why))
    try:
        return _traced(op, given, wanted)
    except (RuntimeError, NotImplementedError) as error:
        raise TraceError(_TAKEN.format(op.target, line, f"which has no backward: {error}")) from error


@lru_cache(maxsize=1024)
def _traced(op: Op, given: tuple[bool, ...], wanted: tuple[int, ...]) -> GraphModule:
    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, gradients = tensors[: len(op.inputs)], iter(tensors[len(op.inputs) :])
        results = _called(op, inputs)
        pairs = [(x, next(gradients)) for x, is_given in zip(results, given) if is_given]
        pairs = [(x, gradient) for x, gradient in pairs if x.requires_grad]
        starts = [inputs[slot] for slot in wanted]
        if not pairs:  # such as ones_like
            return (None,) * len(starts)
        ends, directions = zip(*pairs)
        return torch.autograd.grad(ends, starts, directions, create_graph=True, allow_unused=True)

    mode = FakeTensorMode()
    with torch.enable_grad(), mode, sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        tensors = [torch.empty(v.shape, dtype=v.dtype, requires_grad=i in wanted) for i, v in enumerate(op.inputs)]
        tensors += [
            torch.empty(v.shape, dtype=v.dtype, requires_grad=True)
            for v, is_given in zip(op.outputs, given)
            if is_given
        ]
        graph_module = make_fx(backward, decomposition_table=backward_decompositions())(*tensors)
    return _without_detached(graph_module)


def _called(op: Op, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    written_out = WRITTEN_OUT.get(op.target)
    if written_out is None:
        return call(op, inputs)
    result = written_out({name: fill(value, inputs) for name, value in arguments_of(op).items()})
    return result if op.is_tuple else (result,)


def _without_detached(graph_module: GraphModule) -> GraphModule:
    """The graph as autograd sees it: what a backward saved comes with a detach in a trace, which would end the second
    derivative, and lines of the model are those of the gradient.
    """
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        if str(node.target) == "aten._linalg_check_errors.default":  # the op itself has checked
            graph_module.graph.erase_node(node)
        for key in ("stack_trace", "nn_module_stack"):
            node.meta.pop(key, None)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module
