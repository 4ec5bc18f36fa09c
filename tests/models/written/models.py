"""All models written by hand, as "by-hand:name"."""

import torch

from tests.models.written import sciences, sequences, structures, vision
from tests.models.written.draws import Built

_MODELS = vision.MODELS | sequences.MODELS | structures.MODELS | sciences.MODELS
PREFIX = "by-hand:"
WRITTEN = [PREFIX + name for name in _MODELS]


def build_written(name: str) -> Built:
    """The model and the keywords of a call, of the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _MODELS[name.removeprefix(PREFIX)]()
