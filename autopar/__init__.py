"""autopar: an auto-parallelism compiler; it turns an unmodified `nn.Module` into a sharded one that trains the same."""

import importlib
from typing import Any

# Imported at first use, so that the solver's child process starts without importing torch.
_HOMES = {
    "AutoparError": "autopar.errors",
    "Cluster": "autopar.costmodel.cluster.load_cluster",
    "Plan": "autopar.plans.plan",
    "balance": "autopar.runtime.balance.balance_shares",
    "calibrate_from": "autopar.verify.ledger",
    "compile": "autopar.api",
    "StatefulSampler": "autopar.shares.stateful_sampler",
    "export": "autopar.plain_torch.export_plan",
    "offload_optimizer": "autopar.runtime.offload_optimizer",
    "plan": "autopar.api",
    "register_rule": "autopar.sbp.rules.given",
    "step_on_whole": "autopar.runtime.interop.whole_step",
    "splits": "autopar.sbp.rules.custom_function",
    "unshare": "autopar.ir.unshare",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
