"""Numbers of an exported graph that only its checks read."""

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Ops that only check or describe; no op uses their results.
NOISE = frozenset(
    (
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
        "_guards_fn",
    )
)
# Ops that read a number of a tensor.
READS = frozenset(f"aten.{name}.default" for name in ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"))


def is_only_checked(node: Node) -> bool:
    """Whether the node gives a number, or nothing, that only checks read."""
    if str(node.target) in NOISE:
        return True
    is_number = isinstance(node.meta.get("val"), SIZES) or str(node.target) in READS
    return is_number and all(map(is_only_checked, node.users))


def has_numbers_in_use(program: ExportedProgram) -> bool:
    """Whether an op of the program reads a number that was read of a tensor."""
    modules = [program.graph_module, *program.graph_module.modules()]
    nodes = (node for module in modules if isinstance(module, GraphModule) for node in module.graph.nodes)
    return any(isinstance(node.meta.get("val"), SIZES) and not is_only_checked(node) for node in nodes)
