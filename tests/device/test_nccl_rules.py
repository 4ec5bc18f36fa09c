"""Models trained on a device that is not the host, by process groups that keep NCCL's rules: one device's numbers, and
nothing that would hang.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.device.cases import CASES
from tests.device.emulated import NAME, MixedDevices
from tests.device.nccl_rules import RuleBroken, Transfer, stuck
from tests.device.steps import PP_ONLY, outcome
from tests.journey.case import DP, DP_TP, FREE, PP, Run
from tests.journey.runs import difference
from tests.workers import Ranks

INTERLEAVED, ZERO_BUBBLE, GPIPE = ({"schedule": name} for name in ("interleaved", "zero-bubble", "gpipe"))


CASES_ON = [
    ("three steps", DP, {}),
    ("three steps", DP_TP, {}),
    ("three steps", FREE, {"check": "strict"}),
    ("three steps", FREE, {"num_microbatches": 4}),
    ("clip", DP_TP, {}),
    ("clip of torch", DP_TP, {}),
    ("full state dict", DP_TP, {}),
    ("copied", DP_TP, {}),
    ("evaluated", DP, {}),
    ("normed", DP, {}),
    ("normed", DP_TP, {}),
    ("loaded", DP_TP, {}),
    ("loaded", PP, {}),
    ("other weights", DP_TP, {}),
    ("on meta", DP_TP, {}),
    ("already there", DP_TP, {}),
    ("deep", PP, {}),
    ("deep", PP, GPIPE),
    ("deep", PP, INTERLEAVED),
    ("deep", PP, ZERO_BUBBLE),
    ("deep", PP_ONLY, {}),
    ("deep", PP_ONLY, INTERLEAVED),
    ("tied", PP, {}),
    ("tied", PP_ONLY, {}),
    ("full state dict", PP, {}),
    ("without gradient", PP, {}),
    ("without gradient", PP_ONLY, INTERLEAVED),
]


def case_id(name: str, setting: str, options: dict) -> str:
    return "-".join((name, setting, *map(str, options.values()))).replace(" ", "_")


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "setting", "options"), [pytest.param(*each, id=case_id(*each)) for each in CASES_ON])
def test_steps_on_a_device_by_nccls_rules(device_ranks: Ranks, name: str, setting: str, options: dict) -> None:
    torch.manual_seed(0)
    expected = CASES[name](Run())
    found = device_ranks.run(outcome, name, setting, options)
    assert difference([each for each, _ in found], expected) == ""
    assert stuck([launches for _, launches in found]) == ""
    if setting in (PP, PP_ONLY):
        assert all(launches for _, launches in found), "the stages have sent nothing"


def broken(rule: str) -> str:
    """What the group says, on this rank, of a collective that breaks a rule."""
    mesh = init_device_mesh(NAME, (dist.get_world_size(),), mesh_dim_names=("a",))
    group, rank = mesh.get_group(), dist.get_rank()
    x = torch.ones(4, 4).to(NAME)
    try:
        match rule:
            case "a tensor on cpu":
                dist.all_reduce(torch.ones(4), group=group)
            case "not contiguous":
                dist.all_reduce(x.T[1:], group=group)
            case "no sums of bool":
                dist.all_reduce(x > 0, group=group)
            case "not so on all":
                dist.all_reduce(x[: 1 + (rank == 2)], group=group)
            case "tensors of the device":
                x + torch.ones(4, 4)
    except (RuleBroken, MixedDevices) as error:
        return str(error)
    return ""


@pytest.mark.multirank
@pytest.mark.parametrize(
    "rule", ["a tensor on cpu", "not contiguous", "no sums of bool", "not so on all", "tensors of the device"]
)
def test_a_broken_rule_is_an_error(device_ranks: Ranks, rule: str) -> None:
    assert all(rule in text for text in device_ranks.run(broken, rule))


def test_two_ranks_that_both_send_first_are_stuck() -> None:
    there, back = Transfer(0, 1, 8), Transfer(1, 0, 8)
    alone = [[("g:0:1", (there,)), ("g:0:1", (back,))], [("g:0:1", (back,)), ("g:0:1", (there,))]]
    assert "rank 0" in stuck(alone)
    assert stuck([alone[0], alone[0]]) == ""
    assert stuck([[("g", (there, back))], [("g", (back, there))]]) == ""


def test_a_send_alone_and_a_receive_in_a_batch_do_not_meet() -> None:
    there, back = Transfer(0, 1, 8), Transfer(1, 0, 8)
    assert stuck([[("g:0:1", (there,))], [("g", (there,))]]) != ""
    assert stuck([[("up:0:1", (there,)), ("down:0:1", (back,))], [("down:0:1", (back,)), ("up:0:1", (there,))]]) == ""
