"""One training step of a split program: parameters are made ready once, and once the gradients of all its microbatches
go back.
"""

import torch

from autopar.runtime.load_program import Loaded

# variable of the generated functions -> what `gather` made, in the graph of autograd
Results = dict[str, torch.Tensor]


def open_step(loaded: Loaded) -> Results:
    """Run `gather` and put leaves in `loaded.used`, which share its results' memory and gather gradients from call to
    call of `function`.

    The results are for `close_step`. The leaves are plain tensors in the order of the results; whoever differentiates
    with respect to named tensors finds them there.
    """
    results = loaded.gather(loaded)
    loaded.used.clear()
    loaded.used.update((name, result.detach().requires_grad_(result.requires_grad)) for name, result in results.items())
    return results


def close_step(loaded: Loaded, results: Results) -> None:
    """Lead the gradients of the leaves through the conversions into those of the parameters, where they are added to
    what is there.

    One group of `Gather.results` after the other, the same on every rank: each holds its copies and gradients until its
    turn is over. `loaded.used` and `results` are empty afterwards.
    """
    for group in loaded.program.gather.results:
        pairs = [(results.pop(one.name), loaded.used.pop(one.name)) for one in group]
        found = [(result, leaf.grad) for result, leaf in pairs if leaf.grad is not None]
        del pairs
        if found:
            torch.autograd.backward(*zip(*found))
        del found
