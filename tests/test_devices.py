"""docs/devices.md names every use of a device's streams, memory, random state and autocast in the package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "devices.md").read_text()
NAMES = {
    *("Stream", "stream", "current_stream", "wait_stream", "record_stream", "record_event", "wait_event", "Event"),
    *("synchronize", "pin_memory", "is_pinned", "non_blocking", "current_device", "set_device", "device_count"),
    *("manual_seed", "fork_rng", "get_rng_state", "set_rng_state", "default_generator", "default_generators"),
    *("initial_seed", "autocast", "is_autocast_enabled", "get_autocast_dtype", "is_autocast_available"),
    *("is_autocast_cache_enabled", "set_autocast_enabled", "cuda", "accelerator", "get_device_name", "barrier"),
}


@cache
def uses() -> frozenset[tuple[str, str, str]]:
    """(file, function, name) of each use in the package."""
    paths = (ROOT / "autopar").rglob("*.py")
    names = ((ast.parse(path.read_text()), path.relative_to(ROOT / "autopar").as_posix()) for path in paths)
    return frozenset(use for tree, file in names for use in _uses(tree, file, ""))


def _uses(node: ast.AST, file: str, function: str) -> Iterator[tuple[str, str, str]]:
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inside = f"{function}.{child.name}".lstrip(".") if is_scope else function
        found = {ast.Attribute: "attr", ast.keyword: "arg", ast.Name: "id"}.get(type(child))
        if found and getattr(child, found) in NAMES and _is_of_torch(child):
            yield file, inside, getattr(child, found)
        yield from _uses(child, file, inside)


def _is_of_torch(node: ast.AST) -> bool:
    """Whether `autocast` is torch's; all other names are."""
    if "autocast" not in (getattr(node, "attr", ""), getattr(node, "arg", ""), getattr(node, "id", "")):
        return True
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"


def named() -> set[tuple[str, str, str]]:
    """(file, function, name) that the page's table has a row for."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]*)` \| ([^|]*) \| [^|]+ \|$", PAGE, re.MULTILINE)
    return {(file, function, name) for file, function, names in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_use_of_a_device_is_named_with_its_reason() -> None:
    new = uses() - named()
    assert not new, f"docs/devices.md has no row for {sorted(new)}: say there why it is right on a GPU"


def test_the_page_names_no_use_that_is_gone() -> None:
    gone = named() - uses()
    assert not gone, f"docs/devices.md names {sorted(gone)}, which the package does not have"


def test_a_new_use_would_be_seen() -> None:
    source = "class A:\n def f(self):\n  torch.cuda.current_stream().wait_stream(x.copy_(y, non_blocking=True))"
    found = {name for _, function, name in _uses(ast.parse(source), "a.py", "") if function == "A.f"}
    assert found == {"cuda", "current_stream", "wait_stream", "non_blocking"}
