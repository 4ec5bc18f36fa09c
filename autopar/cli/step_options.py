"""The options of a step: of training, and of inference, a call without gradients."""

import argparse
from dataclasses import replace

from autopar.costmodel.training import INFERENCE, PARAM_DTYPES, REDUCE_DTYPES, Training
from autopar.errors import AutoparError
from autopar.models.catalogue import Example
from autopar.models.inference import inference_example
from autopar.models.target import load_target
from autopar.planner.request import training_in
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan


def add_training(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of training."""
    parser.add_argument(
        "--optimizer", default="adamw", help="the optimizer whose state counts as memory (default adamw)"
    )
    parser.add_argument(
        "--reduce-dtype",
        choices=REDUCE_DTYPES,
        default="",
        help="the dtype in which gradients of parameters are summed over ranks (default: their own)",
    )
    parser.add_argument(
        "--param-dtype",
        choices=PARAM_DTYPES,
        default="",
        help="the dtype in which the model computes, over parameters as they are, with sums in float32 by default",
    )


def add_inference(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of inference."""
    parser.add_argument(
        "--inference",
        action="store_true",
        help=(
            "plan a call without gradients instead of a training step; of a built-in language model that of prefill,"
            " which gives the key-value cache and the last token's logits"
        ),
    )
    parser.add_argument(
        "--decode",
        type=int,
        metavar="T",
        help="inference of one token of each sample, with T tokens before it in the key-value cache (built-in models)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="global number of samples (of a function: its parameter batch)"
    )


def is_inference(options: argparse.Namespace) -> bool:
    """Whether a command is about inference; AutoparError for options of training besides."""
    is_asked = getattr(options, "inference", False) or getattr(options, "decode", None) is not None
    if is_asked and (options.optimizer != "adamw" or options.reduce_dtype):
        raise AutoparError("--inference: expected no --optimizer and no --reduce-dtype, for nothing is trained")
    return is_asked


def example_of(options: argparse.Namespace) -> Example:
    """The model and the batch of a command: those of the target, or of a built-in model the call in inference."""
    sizes = {} if options.batch is None else {"batch": options.batch}
    example = load_target(options.target, sizes=sizes)
    if not is_inference(options):
        return example
    if ":" not in options.target:
        return inference_example(options.target, example, options.decode)
    if options.decode is not None:
        raise AutoparError(
            f"--decode is for built-in models: let the function of {options.target} return a call of one token with its"
            " key-value cache, and give --inference"
        )
    return example


def training_of(options: argparse.Namespace) -> Training:
    """The step that a command is about, of training or of inference."""
    if is_inference(options):
        return replace(INFERENCE, param_dtype=options.param_dtype)
    dtypes = PARAM_DTYPES.get(options.param_dtype), REDUCE_DTYPES.get(options.reduce_dtype)
    return training_in(*dtypes, options.optimizer)


def check_kind(plan: Plan | StagedPlan, options: argparse.Namespace) -> None:
    """AutoparError if the plan of a file is of training and the command of inference, or otherwise."""
    if plan.training.trains is is_inference(options):
        of = "training: leave out" if plan.training.trains else "inference: give"
        raise AutoparError(f"--plan {options.plan} is a plan for {of} --inference")
