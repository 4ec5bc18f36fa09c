"""Every error a user can meet: what failed, where, what was expected, what was found, what to do."""


class AutoparError(Exception):
    """Base of all errors autopar raises on purpose."""


class TraceError(AutoparError):
    """The model cannot be traced; the message names the model's line."""


class UnsupportedOp(AutoparError):
    """A traced op cannot be run on shards or on a mesh at all."""


class MeshError(AutoparError):
    """The mesh is malformed or does not fit the world or the cluster."""


class PinError(AutoparError):
    """A user pin names an unknown parameter or axis, or a layout the parameter cannot have."""


class InfeasibleError(AutoparError):
    """No plan meets the constraints; the message says which binds and the least that would do."""


class PlanError(AutoparError):
    """A plan does not belong to this model or mesh, or its file is damaged."""


class RankMismatch(AutoparError):
    """The ranks were given different models, inputs or plans."""


class PeerFailed(AutoparError):
    """Another rank failed or died while this one waited for it."""


class MicrobatchError(AutoparError):
    """The batch cannot be run in so many microbatches with the numbers of the whole; the message names the op and
    why.
    """
