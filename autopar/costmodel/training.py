"""`Training`: the optimizer of a step, and its microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass

# Bytes of state for each element, in float32 as mixed-precision training has it. "-master": with a float32 copy of each
# parameter too.
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
    """A training step: `num_microbatches` passes over the priced graph, which is of one microbatch, and an update.

    `num_in_flight`: the most microbatches between their forward and their backward at a time; `num_waiting`: those
    whose weight gradients are put off, as in zero-bubble schedules. ValueError for an unknown optimizer or a count
    below 1.
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
        """Bytes of optimizer state for each element of a parameter."""
        return OPTIMIZER_STATE_BYTES[self.optimizer]


# AdamW, with the batch in one pass.
WHOLE_BATCH = Training()
