"""All models written by hand, as "by-hand:name"."""

import torch

from tests.models.written import (
    flows,
    gradients,
    habits,
    loops,
    mechanisms,
    objectives,
    sciences,
    sequences,
    structures,
    tables,
    vision,
)
from tests.models.written.draws import Built

_THEMES = (vision, sequences, objectives, structures, tables, sciences, flows, gradients, habits, loops, mechanisms)
_MODELS = {name: build for theme in _THEMES for name, build in theme.MODELS.items()}
PREFIX = "by-hand:"
# Models that are refused, and words of the reason.
REFUSED = {f"{PREFIX}mapped": "transforms of torch.func"}
WRITTEN = [PREFIX + name for name in _MODELS if PREFIX + name not in REFUSED]


def build_written(name: str, seed: int = 0) -> Built:
    """The model and the keywords of a call, of the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MODELS[name.removeprefix(PREFIX)]()
