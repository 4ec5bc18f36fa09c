"""The shape of the code base itself: docs/architecture.md and the style are kept by these tests."""

import ast
import importlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from types import FunctionType

import pytest

import autopar
from tests.conftest import LONG, THOROUGH

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "autopar").rglob("*.py"))
EVERYTHING = PACKAGE + sorted(
    path for folder in ("tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
PUBLIC_NAMES = {"compile", "plan"}

FILE_CAP, FILE_MEDIAN = 400, 150
FOLDER_CAP, LARGE_FOLDERS = 14, {"sbp/rules"}  # a file for each family of ops
FUNCTION_CAP, FUNCTION_MEDIAN = 50, 10
PARAMETER_CAP, TORCH_SIGNATURES = 8, ROOT / "autopar" / "sbp" / "local_ops"  # an op's local form has its parameters
# A plan explains itself, and a module measures itself, by what stands above it, when it is asked to.
UPWARDS = {
    ("autopar.plans.base_plan", "autopar.explain.explain_plan"),
    ("autopar.runtime.sharded_module", "autopar.verify.ledger"),
}
VAGUE = {"helper", "helpers", "info", "mgr", "misc", "tmp", "util", "utils"}
# Words of no field, and sentences whose subject is no noun; docs/glossary.md has the terms to use instead.
DIALECT = re.compile(
    r"\b(wish(es)?|bought|those (that|of which) meet|hands? (it |them )?on|handed on|lets? go( of)?|nought|all told|"
    r"kin|stood in for|(is|are) waited for|com(e|es) to be|what is (made|met) of|its (like|fellow))\b"
)
NO_NOUN = re.compile(r"(What|Whatever|Those|That of)\b")  # at the beginning of a docstring
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|raise NotImplemented" + r"Error")
# Packages come from whatever registry pip is set up for; naming one here would bind users to it.
REGISTRY_HOST = re.compile(r"https?://[^\s)>\"']*(pypi|pythonhosted|anaconda|download\.pytorch)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def ladder() -> dict[str, int]:
    """Layer of each part of the package, lowest first, read from the line "errors, mesh < ir < ..." of the document."""
    line = re.search(r"^`(errors.*<.*)`$", ARCHITECTURE, re.MULTILINE)
    assert line, "docs/architecture.md lost its import ladder"
    return {part: level for level, layer in enumerate(line[1].split("<")) for part in re.findall(r"\w+", layer)}


def part_of(module: str) -> str:
    """'autopar.sbp.rules.view' -> 'sbp'; the package itself is 'autopar'."""
    return module.split(".")[1] if "." in module else module


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def num_parameters(function: Function) -> int:
    """The parameters of a function but for `self`."""
    named = function.args
    names = [one.arg for one in (*named.posonlyargs, *named.args, *named.kwonlyargs)]
    return len(names) + bool(named.vararg) + bool(named.kwarg) - (names[:1] in (["self"], ["cls"]))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file."""
    return tuple(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_of_this_module() -> Iterator[None]:
    """Forgotten behind the last test, for every collection of garbage would visit the millions of nodes."""
    yield
    nodes.cache_clear()
    tree.cache_clear()


def imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (
                [f"autopar.{alias.name}" for alias in node.names] if node.module == "autopar" else [str(node.module)]
            )


def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, Function)]


def length(function: Function) -> int:
    """Lines of code: signature and body without the docstring."""
    doc = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_imports_point_one_way(path):
    levels, here = ladder(), part_of(module_name(path))
    if here in ("autopar", "__main__"):
        return
    assert here in levels, f"{path.name}: give autopar.{here} its place in the ladder of docs/architecture.md"
    for name in imported(path):
        there = part_of(name)
        if name.split(".")[0] == "autopar" and there != here and (module_name(path), name) not in UPWARDS:
            same = levels[there] == levels[here] == 0
            assert levels[there] < levels[here] or same, f"{path}: {here} must not import {name}"


def test_what_the_package_imports_is_installed_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in project["dependencies"]} | {"autopar"}
    for path in PACKAGE:
        known = installed | {
            "check_placements.py": {"spmd_types"},
            "picture.py": {"matplotlib"},
            "pictures.py": {"matplotlib"},
        }.get(path.name, set())
        # transformers only where a model of it is asked for
        foreign = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - known - {"transformers"}
        assert not foreign, f"{path} imports {foreign}, which pyproject.toml does not install"


def test_search_knows_no_torch_and_no_graph():
    for path in sorted((ROOT / "autopar" / "search").rglob("*.py")):
        for name in imported(path):
            assert name.split(".")[0] != "torch", f"{path} imports {name}"
            assert not name.startswith("autopar") or part_of(name) in ("search", "errors"), f"{path} imports {name}"


def test_public_names():
    assert set(autopar.__all__) >= PUBLIC_NAMES
    assert all(hasattr(autopar, name) for name in autopar.__all__)


def test_plan_is_the_function_and_not_the_package_of_that_name():
    importlib.import_module("autopar.plans.plan")
    assert isinstance(autopar.plan, FunctionType)


def test_stages_of_the_document_exist():
    stages = re.findall(r"^\s+\| ([a-z_.]+)\.([a-z_]+)\(", ARCHITECTURE, re.MULTILINE)
    assert len(stages) >= 9
    for module, function in stages:
        path = ROOT / "autopar" / Path(*module.split(".")).with_suffix(".py")
        assert path.exists(), f"docs/architecture.md names {module}, there is no {path}"
        assert function in [node.name for node in functions(path)], f"{path} has no {function}"


def test_places_that_the_glossary_names_exist() -> None:
    terms = re.findall(r"^- \*\*", GLOSSARY, re.MULTILINE)
    places = re.findall(r"`([a-z_/]+\.py)(?:: (\w+))?`", GLOSSARY)
    assert len(terms) >= 40 and len(places) >= len(terms)
    for file, name in places:
        path = ROOT / "autopar" / file
        assert path.exists(), f"docs/glossary.md names {file}, there is no {path}"
        assert not name or re.search(rf"^\s*((def|class) {name}\b|{name}\b.* = )", path.read_text(), re.MULTILINE), (
            f"docs/glossary.md names {name}, which {path} does not define"
        )


@pytest.mark.parametrize("path", EVERYTHING, ids=module_name)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= FILE_CAP
    long = [f"{node.name} ({length(node)})" for node in functions(path) if length(node) > FUNCTION_CAP]
    assert not long, f"{path}: longer than {FUNCTION_CAP} lines: {', '.join(long)}"


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_functions_have_few_parameters(path: Path) -> None:
    """All but the public calls, whose options are keywords, and local forms of torch's ops."""
    many = {node.name: num_parameters(node) for node in functions(path) if num_parameters(node) > PARAMETER_CAP}
    assert not many or PUBLIC_NAMES.issuperset(many) or TORCH_SIGNATURES in path.parents, f"{path}: {many}"


def test_folders_stay_small_and_names_say_which_module_is_meant():
    modules = [path.relative_to(ROOT / "autopar") for path in PACKAGE if not path.stem.startswith("__")]
    folders = Counter(str(path.parent) for path in modules)
    assert not {name: count for name, count in folders.items() if count > FOLDER_CAP and name not in LARGE_FOLDERS}
    assert not [name for name, count in Counter(path.stem for path in modules).items() if count > 1]


def test_typical_sizes():
    assert median(len(path.read_text().splitlines()) for path in PACKAGE if path.name != "__init__.py") <= FILE_MEDIAN
    assert median(length(node) for path in PACKAGE for node in functions(path)) <= FUNCTION_MEDIAN


def test_a_class_name_has_one_meaning() -> None:
    """Private and nested classes too; `_Name` and `Name` would be two meanings of one name."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(f"{module_name(path)}:{node.lineno}")
    assert len(places) > 100
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_public_functions_are_documented_and_typed(path):
    for node in tree(path).body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [argument.arg for argument in arguments if argument.annotation is None]
            assert node.returns is not None and not untyped, (
                f"{path}:{node.lineno} {node.name} is not fully typed: {untyped}"
            )


@pytest.mark.parametrize("path", EVERYTHING, ids=module_name)
def test_words(path):
    text = path.read_text()
    names = [node.name for node in nodes(path) if isinstance(node, Function | ast.ClassDef)]
    vague = [name for name in [path.stem, *names] if VAGUE & set(name.lower().split("_"))]
    assert not vague, f"{path}: names that say nothing: {vague}"
    assert not UNFINISHED.search(text), f"{path}: unfinished: {UNFINISHED.search(text)[0]}"
    assert not REGISTRY_HOST.search(text), f"{path}: names a package registry"


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_docstrings_and_comments_speak_the_language_of_the_field(path: Path) -> None:
    text = path.read_text()
    scopes = [node for node in nodes(path) if isinstance(node, Function | ast.ClassDef | ast.Module)]
    documents = [" ".join(document.split()) for node in scopes if (document := ast.get_docstring(node))]
    comments = " ".join(re.findall(r"# (.*)", text))
    for document in (*documents, comments):
        assert not (word := DIALECT.search(document)), f"{path}: {word[0]!r} in {document[:80]!r}; see docs/glossary.md"
    for document in documents:
        assert not NO_NOUN.match(document), f"{path}: expected a noun as the subject of {document[:80]!r}"


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_caches_of_modules_are_bounded(path: Path) -> None:
    for node in tree(path).body:
        names = {ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())}
        if names & {"cache", "functools.cache"}:
            assert isinstance(node, Function) and not ast.unparse(node.args), (
                f"{path}:{node.lineno} {node.name}: give its cache a size"
            )


@pytest.mark.parametrize("listing", [THOROUGH, LONG], ids=lambda path: path.stem)
def test_every_test_that_is_named_as_thorough_or_long_is_there(listing: Path) -> None:
    for line in listing.read_text().splitlines():
        path, name = line.split("[")[0].split("::")
        assert name in {function.name for function in functions(ROOT / path)}, f"{listing}: {line} is no test"


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_warnings_point_to_the_line_of_the_user(path: Path) -> None:
    if path != ROOT / "autopar" / "errors.py":
        assert not re.search(r"warnings\.warn\w*\(|import warn\b.*warnings", path.read_text()), (
            f"{path}: use autopar.errors.warn, which finds the user's line"
        )


@pytest.mark.parametrize("path", PACKAGE, ids=module_name)
def test_only_one_file_touches_what_is_private_in_torch(path: Path) -> None:
    if path.name != "torch_compat.py":
        private = re.findall(
            r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*|^from torch\S* import .*\b_[a-z]\w*", path.read_text(), re.MULTILINE
        )
        assert not private, f"{path}: expected these in autopar/torch_compat.py, with the reason: {private}"
