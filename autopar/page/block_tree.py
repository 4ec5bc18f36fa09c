"""`block_tree`: the model as blocks within blocks, by module, with equal copies of a block folded into one."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.page.leaves import Leaf

_MOST_LAYOUTS = 5  # of a module's band


@dataclass(frozen=True)
class ModelBlock:
    """A module with its copies, which are alike, or an op or tensor of it.

    `names`: of the first copy and of all others, within the module around them. `times`: how often it is in the model.
    `stages`: of all copies. `leaf`: None of a module. `blocks`: what is within one copy.
    """

    names: tuple[str, ...]
    leaf: Leaf | None = None
    blocks: tuple["ModelBlock", ...] = ()
    stages: frozenset[int] = frozenset()
    times: int = 1

    @cached_property
    def time_s(self) -> float:
        """Seconds of one copy in a step."""
        return self.leaf.time_s if self.leaf else sum(len(block.names) * block.time_s for block in self.blocks)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one copy on a device that holds all of it."""
        return self.leaf.num_bytes if self.leaf else sum(len(block.names) * block.num_bytes for block in self.blocks)

    @cached_property
    def likeness(self) -> Hashable:
        """A key that is equal for blocks that are alike."""
        return self.leaf.likeness if self.leaf else tuple((block.names, block.likeness) for block in self.blocks)

    @cached_property
    def seconds_by_layout(self) -> dict[tuple[str, ...], float]:
        """Layout of results -> seconds of one copy."""
        if self.leaf:
            return {self.leaf.layout: self.leaf.time_s} if self.leaf.kind == "op" else {}
        total = defaultdict[tuple[str, ...], float](float)
        for block in self.blocks:
            for layout, seconds in block.seconds_by_layout.items():
                total[layout] += len(block.names) * seconds
        return total


@dataclass
class _Module:
    """A module while its leaves are collected, in the order in which they run."""

    tensors: list[Leaf] = field(default_factory=list)
    inside: dict[str, Any] = field(default_factory=dict)  # name -> _Module, number of an op -> Leaf

    def at(self, path: Iterable[str]) -> "_Module":
        here = self
        for name in path:
            here = here.inside.setdefault(f".{name}", _Module())
        return here


def block_tree(found: Iterable[Leaf]) -> ModelBlock:
    """The root of the model's blocks.

    Modules beside each other are copies if their names differ in digits alone and all within them is alike, wherever
    they stand: first and last layers often have plans of their own.
    """
    root, tensors = _Module(), []
    for leaf in found:
        if leaf.kind != "op":
            tensors.append(leaf)
            continue
        module = root.at(leaf.module.split(".") if leaf.module else ())
        module.inside[str(len(module.inside))] = leaf
    for leaf in tensors:
        root.at(leaf.module.split(".") if leaf.module else ()).tensors.append(leaf)
    return _counted(_built("", root), 1)


def _built(name: str, module: _Module) -> ModelBlock:
    blocks = [_of_leaf(leaf) for leaf in module.tensors]
    for key, each in module.inside.items():
        blocks.append(_built(key[1:], each) if isinstance(each, _Module) else _of_leaf(each))
    inside = _folded(blocks)
    return ModelBlock((name,), None, inside, frozenset().union(*(block.stages for block in inside)))


def _of_leaf(leaf: Leaf) -> ModelBlock:
    return ModelBlock((leaf.name,), leaf, stages=frozenset({leaf.stage} - {-1}))


def _folded(blocks: list[ModelBlock]) -> tuple[ModelBlock, ...]:
    """The blocks with all copies of a module in the place of the first."""
    alike = defaultdict[Hashable, list[ModelBlock]](list)
    for number, block in enumerate(blocks):
        key = number if block.leaf else (re.sub(r"\d+", "*", block.names[0]), block.likeness)
        alike[key].append(block)
    return tuple(
        replace(
            same[0],
            names=tuple(name for block in same for name in block.names),
            stages=frozenset().union(*(block.stages for block in same)),
        )
        for same in alike.values()
    )


def _counted(block: ModelBlock, outside: int) -> ModelBlock:
    """The block with how often it, and each block within it, is in the model; `outside`: the same of what is around."""
    times = outside * len(block.names)
    return replace(block, times=times, blocks=tuple(_counted(inside, times) for inside in block.blocks))


def block_json(block: ModelBlock) -> dict[str, Any]:
    """The block as plain data; what is empty is left out."""
    leaf, by_layout = block.leaf, block.seconds_by_layout
    layouts = sorted(by_layout.items(), key=lambda item: -item[1])[:_MOST_LAYOUTS]
    told = {
        "names": list(block.names),
        "kind": leaf.kind if leaf else "module",
        "times": block.times,
        "time_s": block.time_s,
        "bytes": block.num_bytes,
        "stages": sorted(block.stages),
        "layouts": [[list(layout), seconds] for layout, seconds in layouts if seconds] if not leaf else [],
        "blocks": [block_json(inside) for inside in block.blocks],
    }
    if leaf:
        told |= {
            "called": leaf.called,
            "line": leaf.line,
            "value": leaf.value,
            "layout": list(leaf.layout),
            "signatures": list(leaf.signatures),
            "remarks": list(leaf.remarks),
            "seconds": dict(leaf.seconds),
            "collectives": [
                {
                    "phase": r.phase,
                    "kind": r.kind,
                    "axis": r.axis,
                    "bytes": r.num_bytes,
                    "count": r.count,
                    "s": r.time_s,
                }
                for r in leaf.collectives
            ],
        }
    return {key: x for key, x in told.items() if x or key in ("names", "kind")}
