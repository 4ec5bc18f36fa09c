"""DeepSpeed's configurations as hand plans."""

import json

import pytest

from autopar.errors import PlanError
from autopar.planner.handwritten.deepspeed_json import read_deepspeed


def saved(tmp_path, content) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(tmp_path, stage):
    found = read_deepspeed(saved(tmp_path, {"zero_optimization": {"stage": stage}, "train_batch_size": "auto"}))
    assert found.flavour == ("ddp", "zero1", "zero2", "zero3")[stage]
    assert not found.is_state_on_host and found.optimizer == ""


def test_optimizer_and_offload(tmp_path):
    content = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "communication_data_type": "fp32",
        "gradient_accumulation_steps": 4,
        "data_efficiency": {},
    }
    found = read_deepspeed(saved(tmp_path, content))
    assert (found.flavour, found.is_state_on_host) == ("zero2", True)
    assert (found.optimizer, found.reduce_dtype) == ("adamw-master", "float32")
    text = " ".join(found.remarks)
    assert "gradient_accumulation_steps 4" in text and "bf16" in text and "Not priced: data_efficiency" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"zero_optimization": {\n"stage": }}', r"ds_config.json:2: no JSON"),
        ("[]", "the file: expected an object"),
        ({"zero_optimization": {"stage": 4}}, "stage: expected 0, 1, 2 or 3, found 4"),
        ({"zero_optimization": {"stage": True}}, "found True"),
        ({"zero_optimization": 3}, "zero_optimization: expected an object"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device is 'nvme'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "expected none or cpu"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size is no part"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel is no part"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: expected one of"),
        ({"communication_data_type": "int8"}, "communication_data_type: expected one of"),
    ],
)
def test_what_is_no_hand_plan_is_told(tmp_path, content, words):
    with pytest.raises(PlanError, match=words):
        read_deepspeed(saved(tmp_path, content))


def test_no_file(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        read_deepspeed(str(tmp_path / "none.json"))
