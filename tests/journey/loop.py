"""The training loop as people write it."""

import torch

from tests.journey.case import Numbers, Run, case
from tests.journey.stack import Stack, batch


@case()
def three_steps(run: Run) -> Numbers:
    """Three steps of SGD with momentum"""
    model = run.compile(Stack(), args=batch())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}
    for number, args in enumerate([batch() for _ in range(3)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)
