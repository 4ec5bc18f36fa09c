"""torchtitan on a machine without a GPU, which its modules ask for as they are imported: to be imported before them."""

import os
from types import SimpleNamespace
from unittest.mock import patch

import torch

os.environ.setdefault("LOCAL_RANK", "0")
with patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan.tools import utils

# What torch.cpu lacks of torch.cuda; torch.distributed.set_timeout, for the last of these, is not in torch 2.13.
_KNOWN = {"current_device": 0, "get_device_name": "CPU", "reset_peak_memory_stats": None, "empty_cache": None}
_KNOWN |= {"get_device_properties": SimpleNamespace(total_memory=2**30), "memory_stats": {}}
utils.device_module = SimpleNamespace(
    **vars(torch.cpu) | {name: lambda *_, known=known: known for name, known in _KNOWN.items()}
)
