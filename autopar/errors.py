"""The exceptions that autopar raises on purpose; each message says what failed, where, why, and what to do."""


class AutoparError(Exception):
    """Base class of all errors that autopar raises on purpose."""


class TraceError(AutoparError):
    """The model cannot be traced; the message names the line of the model."""


class UnsupportedOp(AutoparError):
    """An op of the graph cannot be run on shards, or not on a mesh at all."""


class MeshError(AutoparError):
    """The mesh is malformed, or does not match the number of ranks or the cluster."""


class PinError(AutoparError):
    """A pin names an unknown parameter or mesh axis, or a layout that the parameter cannot have."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; the message says which one binds and the smallest limit that would do."""


class PlanError(AutoparError):
    """A plan does not belong to this model or mesh, or its file is damaged."""


class RankMismatch(AutoparError):
    """The ranks were given different models, inputs or plans."""


class PeerFailed(AutoparError):
    """Another rank failed or died while this rank waited for it."""


class MicrobatchError(AutoparError):
    """The batch cannot be run in this number of microbatches with the same result; the message names the op and why."""
