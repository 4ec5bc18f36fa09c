"""How a plan is trained: what the optimizer holds, and how the batch is cut into microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass

# Bytes of state per element, held in float32 as mixed-precision training does. "-master": with a float32 copy of each
# parameter besides.
OPTIMIZER_STATE_BYTES: Mapping[str, int] = {
    "none": 0,
    "sgd": 0,
    "momentum": 4,
    "adagrad": 4,
    "adam": 8,
    "adamw": 8,
    "sgd-master": 4,
    "momentum-master": 8,
    "adam-master": 12,
    "adamw-master": 12,
}


@dataclass(frozen=True, slots=True)
class Training:
    """A step of `optimizer` after `num_microbatches` passes over the graph that is priced, which is of one microbatch;
    `num_in_flight` of them are between their forward and their backward at the worst time, and of `num_waiting` the
    gradients of weights are still to be made, as in zero-bubble schedules. ValueError for an unknown optimizer or a
    count below 1.
    """

    optimizer: str = "adamw"
    num_microbatches: int = 1
    num_in_flight: int = 1
    num_waiting: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            raise ValueError(
                f"optimizer: expected one of {known}, found {self.optimizer!r}; take the one with as much state"
            )
        if not 1 <= self.num_in_flight <= self.num_microbatches or not 0 <= self.num_waiting <= self.num_microbatches:
            raise ValueError(
                "training: expected 1 <= num_in_flight <= num_microbatches and as many waiting at most, found"
                f" {self.num_in_flight} in flight, {self.num_waiting} waiting, of {self.num_microbatches} microbatches"
            )

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per element of a parameter."""
        return OPTIMIZER_STATE_BYTES[self.optimizer]


# AdamW, the batch in one pass.
WHOLE_BATCH = Training()
