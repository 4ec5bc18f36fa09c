"""The stacks of a model's blocks, and the Python expressions that name its modules."""

import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from torch import nn


@dataclass(frozen=True)
class BlockStack:
    """The blocks of a list of modules: `path` of the list in the model, and the class of all `size` blocks."""

    path: str
    block: str
    size: int

    def names(self) -> list[str]:
        """The FQNs of the blocks."""
        return [f"{self.path}.{number}" for number in range(self.size)]


def stacks_of(model: nn.Module) -> tuple[BlockStack, ...]:
    """The outermost lists whose members are all of one class, at least two, with modules and parameters inside."""
    found: list[BlockStack] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_is_in(name, one.path) for one in found):
            continue
        blocks, classes = list(module), {type(block) for block in module}
        is_deep = all(list(block.children()) and list(block.parameters()) and _is_called(block) for block in blocks)
        if name and len(blocks) > 1 and len(classes) == 1 and is_deep:
            found.append(BlockStack(name, classes.pop().__name__, len(blocks)))
    return tuple(found)


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own, as lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


Setting = TypeVar("Setting")


def by_block(
    settings: Mapping[str, Setting], stacks: Sequence[BlockStack]
) -> tuple[dict[str, Setting], list[tuple[BlockStack, range, dict[str, Setting]]]]:
    """(settings of modules outside of all stacks, runs of neighbouring blocks with equal settings of their modules).

    `settings`: FQN -> setting; those of a run are by the name inside of the block, "" for the block itself.
    """
    outside = {n: s for n, s in settings.items() if not any(_is_in(n, stack.path) for stack in stacks)}
    runs = []
    for stack in stacks:
        inside = [
            {n.removeprefix(name).removeprefix("."): s for n, s in settings.items() if _is_in(n, name)}
            for name in stack.names()
        ]
        for own, members in groupby(range(stack.size), key=lambda number: inside[number]):
            numbers = list(members)
            if own:
                runs.append((stack, range(numbers[0], numbers[-1] + 1), own))
    return outside, runs


def expression(root: str, path: str) -> str:
    """The Python expression of the submodule `path` of the variable `root`; a name is never code.

    >>> expression("model", "model.layers")
    'model.model.layers'
    >>> expression("model", "a b")
    "model.get_submodule('a b')"
    """
    text = root
    for part in path.split(".") if path else ():
        if not _is_name(part):
            return f"{root}.get_submodule({path!r})"
        text += f".{part}"
    return text


def members(root: str, stack: BlockStack, numbers: range) -> str:
    """The expression of some blocks of a stack: the list itself, or a slice of it."""
    text = expression(root, stack.path)
    if numbers == range(stack.size):
        return text
    return f"{text}[{numbers.start or ''}:{numbers.stop if numbers.stop < stack.size else ''}]"


def _is_name(part: str) -> bool:
    return part.isidentifier() and part.isascii() and not keyword.iskeyword(part) and not part.startswith("__")


def wrapped(words: str, width: int) -> Iterator[str]:
    """Lines of at most `width` characters, if no word is longer."""
    line = ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line
