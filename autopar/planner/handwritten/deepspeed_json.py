"""`read_deepspeed`: DeepSpeed's configuration as a hand plan."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.costmodel.training import OPTIMIZER_STATES
from autopar.errors import PlanError

_FLAVOURS = ("ddp", "zero1", "zero2", "zero3")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bfp16": "bfloat16", "bf16": "bfloat16"}
# What lays out tensors in ways that no plan of data axes alone has.
_REFUSED = ("tensor_parallel", "pipeline", "sequence_parallel_size", "compression_training", "hybrid_engine")
_REFUSED_OF_ZERO = ("zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size", "zero_hpz_partition_size")
# What changes neither layouts nor bytes of the example's batch.
_NO_LAYOUT = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "steps_per_print", "dump_state",
    "wall_clock_breakdown", "scheduler", "zero_allow_untested_optimizer", "prescale_gradients", "tensorboard", "wandb",
    "csv_monitor", "comms_logger", "flops_profiler", "zero_force_ds_cpu_optimizer", "gradient_predivide_factor",
}  # fmt: skip


@dataclass(frozen=True)
class DeepSpeedPlan:
    """A configuration: the flavour of the hand plan, the optimizer and the dtype of sums ("" if it says nothing of
    them), whether the optimizer's state is on the host, and `remarks` on what is not priced.
    """

    flavour: str
    optimizer: str
    reduce_dtype: str
    is_state_on_host: bool
    remarks: tuple[str, ...]


def read_deepspeed(path: str) -> DeepSpeedPlan:
    """The plan of a DeepSpeed configuration: ZeRO 0 to 3 on all axes, with the optimizer's state on the host if it
    says so. "auto", which transformers fills in, counts as not said.

    PlanError, with the key, for a file that is none, and for what lays out tensors in other ways.
    """
    content = _section(_loaded(path), path, "the file")
    zero = _section(content.get("zero_optimization", {}), path, "zero_optimization")
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage < len(_FLAVOURS):
        raise PlanError(f"{path}: zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
    for keys, where, prefix in ((_REFUSED, content, ""), (_REFUSED_OF_ZERO, zero, "zero_optimization.")):
        if used := [key for key in keys if where.get(key) not in (None, False, 0, 1, -1, "auto", {})]:
            raise PlanError(f"{path}: {prefix}{used[0]} is no part of any hand plan: leave it out to price the rest")
    if (device := _device(zero, "offload_param", path)) != "none":
        raise PlanError(
            f"{path}: zero_optimization.offload_param.device is {device!r}: plans keep parameters on the device; leave"
            " it out to price the rest"
        )
    state = _device(zero, "offload_optimizer", path)
    if state not in ("none", "cpu"):
        raise PlanError(f"{path}: zero_optimization.offload_optimizer.device: expected none or cpu, found {state!r}")
    dtype = content.get("communication_data_type")
    if dtype not in (None, "auto", *_DTYPES):
        raise PlanError(f"{path}: communication_data_type: expected one of {', '.join(_DTYPES)}, found {dtype!r}")
    optimizer, remarks = _optimizer(content, path), tuple(_remarks(content, zero, path))
    return DeepSpeedPlan(_FLAVOURS[stage], optimizer, _DTYPES.get(str(dtype), ""), state == "cpu", remarks)


def _loaded(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"no hand plan {path}: {error.strerror}; give a DeepSpeed configuration") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is no DeepSpeed configuration: {error}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: no JSON: {error.msg}; expected a DeepSpeed configuration") from error


def _section(value: Any, path: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{path}: {name}: expected an object of JSON, found {value!r:.60}")
    return value


def _device(zero: Mapping[str, Any], key: str, path: str) -> str:
    """The device of an offload; "none" if there is none."""
    if zero.get(key) in (None, "auto"):
        return "none"
    return str(_section(zero[key], path, f"zero_optimization.{key}").get("device", "none") or "none")


def _optimizer(content: Mapping[str, Any], path: str) -> str:
    """The optimizer by autopar's name: with a float32 copy of each parameter for training in half precision."""
    if content.get("optimizer") in (None, "auto"):
        return ""
    name = str(_section(content["optimizer"], path, "optimizer").get("type", "")).lower()
    if name in ("", "auto"):
        return ""
    is_half = any(_is_on(content, key, path) for key in ("bf16", "fp16"))
    found = name + "-master" * is_half
    if found not in OPTIMIZER_STATES:
        known = ", ".join(one for one in OPTIMIZER_STATES if "-" not in one)
        raise PlanError(
            f"{path}: optimizer.type: expected one of {known}, found {name!r}: leave it out, give --optimizer"
        )
    return found


def _is_on(content: Mapping[str, Any], key: str, path: str) -> bool:
    return content.get(key) not in (None, "auto") and _section(content[key], path, key).get("enabled") is True


def _remarks(content: Mapping[str, Any], zero: Mapping[str, Any], path: str) -> Iterator[str]:
    if (steps := content.get("gradient_accumulation_steps", 1)) not in (1, "auto"):
        yield f"gradient_accumulation_steps {steps}: priced is one pass over the whole batch of the example."
    if half := [key for key in ("bf16", "fp16") if _is_on(content, key, path)]:
        yield f"{half[0]}: priced is the model in its own dtype, with the optimizer's state in float32."
    if zero:
        yield "Bucket sizes of zero_optimization are not read: priced are the fastest ones."
    known = _NO_LAYOUT | {"zero_optimization", "optimizer", "bf16", "fp16", "communication_data_type"}
    if others := sorted(set(content) - known - {"gradient_accumulation_steps", *_REFUSED}):
        yield f"Not priced: {', '.join(others)}."
