"""`Training`: the optimizer of a step, and its microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.ir.graph import Graph
from autopar.ir.inference.for_inference import for_inference
from autopar.ir.passes.sum_dtype import summed_in

# Tensors of state as large as each parameter, kept in its dtype by torch.optim; "-master": in float32 where that is
# wider, with a copy of the parameter among them. Counts of steps, 4 bytes for each parameter, are left out.
OPTIMIZER_STATES: Mapping[str, int] = {
    "none": 0,
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "adam": 2,
    "adamw": 2,
    "sgd-master": 1,
    "momentum-master": 2,
    "adam-master": 3,
    "adamw-master": 3,
}

# Dtypes in which backends sum.
REDUCE_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Dtypes in which parameters can be computed beside the one in which they are stored.
PARAM_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Training:
    """A training step: `num_microbatches` passes over the priced graph, which is of one microbatch, and an update.

    `num_in_flight`: the most microbatches between their forward and their backward at a time; `num_waiting`: those
    whose weight gradients are put off, as in zero-bubble schedules. `reduce_dtype`: name of the dtype in which the
    gradients of parameters are summed over ranks; "": their own. `param_dtype`: name of that in which parameters and
    inputs are computed, other than they are stored in (`ir.precision`); "": in their own. `in_stages`: whether other
    ranks run other stages, and parameters are gathered before all microbatches and reduced with the last of them, even
    of a single one. `trains`: False of inference, a forward alone, which has no gradients, no update and one
    microbatch. ValueError for an unknown optimizer or dtype, a count below 1, or an optimizer or microbatches of
    inference.
    """

    optimizer: str = "adamw"
    num_microbatches: int = 1
    num_in_flight: int = 1
    num_waiting: int = 0
    reduce_dtype: str = ""
    in_stages: bool = False
    param_dtype: str = ""
    trains: bool = True

    def __post_init__(self) -> None:
        for name, known in (("reduce_dtype", REDUCE_DTYPES), ("param_dtype", PARAM_DTYPES)):
            if (found := getattr(self, name)) not in ("", *known):
                raise ValueError(f"{name}: expected one of {', '.join(known)}, found {found!r}")
        if self.optimizer not in OPTIMIZER_STATES:
            known = ", ".join(OPTIMIZER_STATES)
            raise ValueError(
                f"optimizer: expected one of {known}, found {self.optimizer!r}; take the one with as much state"
            )
        if not 1 <= self.num_in_flight <= self.num_microbatches or not 0 <= self.num_waiting <= self.num_microbatches:
            raise ValueError(
                "training: expected 1 <= num_in_flight <= num_microbatches and as many waiting at most, found"
                f" {self.num_in_flight} in flight, {self.num_waiting} waiting, of {self.num_microbatches} microbatches"
            )

        if not self.trains and replace(self, trains=True, param_dtype="") != Training("none"):
            raise ValueError(f"training: inference has no optimizer, sums of gradients or microbatches, found {self}")

    def staged(
        self, num_microbatches: int, num_ranks: int, *, num_in_flight: int = 1, num_waiting: int = 0
    ) -> "Training":
        """The step with so many microbatches and ranks along the pipeline; the counts are those of a stage."""
        counts = num_microbatches, num_in_flight, num_waiting
        dtypes = {"reduce_dtype": self.reduce_dtype, "param_dtype": self.param_dtype}
        return Training(self.optimizer, *counts, **dtypes, in_stages=num_ranks > 1)

    @property
    def of_one_pass(self) -> "Training":
        """The step with the whole batch in one pass, without stages."""
        return replace(self, num_microbatches=1, num_in_flight=1, num_waiting=0, in_stages=False)

    @property
    def is_split(self) -> bool:
        """Whether parameters are gathered before the passes of all microbatches, and reduced with the last of them."""
        return self.num_microbatches > 1 or self.in_stages

    @property
    def described(self) -> str:
        """The optimizer, and the dtypes of parameters and of sums where they were chosen."""
        optimizer = self.optimizer if self.trains else "none (inference)"
        computed = f"computed in {self.param_dtype}" * bool(self.param_dtype)
        summed = f"gradients summed in {self.reduce_dtype}" * bool(self.reduce_dtype)
        return ", ".join(filter(None, (optimizer, computed, summed)))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """`param_dtype`, None for their own."""
        return PARAM_DTYPES.get(self.param_dtype)

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """`reduce_dtype`, None for their own."""
        return REDUCE_DTYPES.get(self.reduce_dtype)

    def reduced(self, graph: Graph) -> Graph:
        """`graph` with the gradients of its parameters summed in `reduce_dtype`; of inference without gradients."""
        return summed_in(graph, self.sum_dtype) if self.trains else graph.once(for_inference)

    @property
    def has_state(self) -> bool:
        """Whether the optimizer keeps state."""
        return OPTIMIZER_STATES[self.optimizer] > 0

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of optimizer state for each element of a parameter that is stored in `itemsize` bytes an element."""
        if self.optimizer.endswith("-master"):
            itemsize = max(itemsize, torch.float32.itemsize)
        return OPTIMIZER_STATES[self.optimizer] * itemsize


# AdamW, with the batch in one pass.
WHOLE_BATCH = Training()
# A forward alone.
INFERENCE = Training("none", trains=False)
