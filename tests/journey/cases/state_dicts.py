"""State dicts: what is written, read and left out."""

import copy
import io
from typing import Any

import torch
from torch import nn

from tests.journey.case import DDP, FORWARD, PP, SETTINGS, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


class Headed(Stack):
    """A head behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().body(x))


def keys_of(error: RuntimeError) -> torch.Tensor:
    """How many keys the error names as missing, and as unexpected."""
    lines = [line for line in str(error).splitlines() if "key(s) in state_dict" in line]
    count = {word: sum(line.count('"') // 2 for line in lines if line.strip().startswith(word)) for word in WORDS}
    return torch.tensor([count[word] for word in WORDS])


WORDS = ("Missing", "Unexpected")


@case()
def keys_missing_and_unexpected(run: Run) -> Numbers:
    """load_state_dict of a state without some keys and with others: an error that names all of them"""
    model = run.compile(Headed(), args=batch())
    state = Stack().state_dict()
    del state["blocks.0.up.weight"], state["blocks.2.down.bias"]
    state["odd"] = torch.zeros(3)
    try:
        run.inner(model).load_state_dict(state)
    except RuntimeError as error:
        return {"keys": keys_of(error)} | run.parameters(run.compile(Stack(), args=batch()))
    return {}


@case()
def loaded_without_strictness(run: Run) -> Numbers:
    """load_state_dict(strict=False): what is missing stays, what is unexpected is left out, both are returned"""
    args = batch()
    model = run.compile(Headed(), args=args)
    torch.manual_seed(11)
    state = Stack().state_dict()
    del state["blocks.0.up.weight"], state["blocks.2.down.bias"]
    state["odd"] = torch.zeros(3)
    found = run.inner(model).load_state_dict(state, strict=False)
    numbers = {"missing": torch.tensor(len(found.missing_keys)), "odd": torch.tensor(len(found.unexpected_keys))}
    return numbers | {"loss": run.step(model, *args)} | run.parameters(model)


@case(peers=False)
def keys_of_ddp(run: Run) -> Numbers:
    """A state dict of DistributedDataParallel, whose keys begin with "module.": an error, unless they are stripped"""
    model = run.compile(Stack(), args=batch())
    torch.manual_seed(11)
    state = {f"module.{fqn}": x for fqn, x in Stack().state_dict().items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        found = {"keys": keys_of(error)}
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    return found | run.parameters(model)


@case()
def shapes_that_differ(run: Run) -> Numbers:
    """load_state_dict of a weight of another shape: an error, and the model stays as it was"""
    model = run.compile(Stack(), args=batch())
    state = Stack().state_dict()
    state = {"blocks.1.up.weight": state["blocks.1.up.weight"][:4]}
    try:
        run.inner(model).load_state_dict(state, strict=False)
    except RuntimeError as error:
        assert "size mismatch for blocks.1.up.weight" in str(error), error
        return run.parameters(model)
    return {}


class Counting(Block):
    """Its number of calls is kept as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = 1.0, torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale * self.table

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "table": self.table}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale, self.table = state["scale"], state["table"]


@case(refused={PP: "table.* changed after the model was cut into stages"})
def extra_state(run: Run) -> Numbers:
    """get_extra_state and set_extra_state: a number and a tensor that forward reads"""
    args = batch()
    model = run.compile(Stack(Counting), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    state = copy.deepcopy(run.inner(model).state_dict())
    state["blocks.0._extra_state"] = {"scale": 0.5, "table": torch.arange(WIDTH) / WIDTH}
    run.inner(model).load_state_dict(state)
    return {"first": first, "second": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def loaded_by_assignment(run: Run) -> Numbers:
    """load_state_dict(assign=True) of whole tensors"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    torch.manual_seed(11)
    state = Stack().state_dict()
    if run.setting in (*SETTINGS, "one device", DDP):
        run.inner(model).load_state_dict(state, assign=True)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Renamed(Stack):
    """Reads checkpoints that called its blocks layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for fqn in [fqn for fqn in state if fqn.startswith(f"{prefix}layers.")]:
            state[fqn.replace("layers.", "blocks.")] = state.pop(fqn)


@case()
def names_of_before(run: Run) -> Numbers:
    """register_load_state_dict_pre_hook: a checkpoint with old names"""
    model = run.compile(Renamed(), args=batch())
    torch.manual_seed(11)
    state = {fqn.replace("blocks.", "layers."): x for fqn, x in Stack().state_dict().items()}
    run.inner(model).load_state_dict(state)
    return run.parameters(model)


class Scaled(Stack):
    """Writes its weights in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for fqn in state:
            state[fqn] = state[fqn] * 0.5


@case()
def hook_of_the_state_dict(run: Run) -> Numbers:
    """register_state_dict_post_hook that changes what is written"""
    model = run.compile(Scaled(), args=batch())
    return {fqn: run.whole(x.detach()) for fqn, x in run.inner(model).state_dict().items()}


@case(refused="cannot be pickled whole.*save its state_dict")
def pickled_whole(run: Run) -> Numbers:
    """torch.save(model) of the whole compiled module"""
    args = batch()
    model = run.compile(Stack(), args=args)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {"loss": run.step(torch.load(file, weights_only=False), *args)}
