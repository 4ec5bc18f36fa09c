"""The fenced blocks of the site's pages and of the README, and what a test does with each.

The fence says what a block is. `bash`: commands. `console`: commands after `$ `, each followed by what it prints, in
which `...` stands for any text, within a line or for lines. `python`: run on one rank, or on as many as the mark says,
in one namespace a page; with `title="train.py"` a file that later commands use. `json`, `yaml`: read; with a title, a
file. `text`: nothing to run. A mark is an HTML comment on the line above the fence, which no reader sees:

    <!-- run: ranks=4 -->            python, on four gloo ranks
    <!-- run: given=my.py,jobs.csv -->  files of tests/pages/given that the commands name
    <!-- run: setup=model.py -->     a file of tests/pages/given that is run before the python block
    <!-- run: varies -->             numbers that are printed differ from run to run
    <!-- run: status=1 -->           the last command ends so
    <!-- run: clean: REASON -->      run by `make dist-check` alone; here bash reads it
    <!-- run: elsewhere: REASON -->  needs a cluster; here bash or a YAML parser reads it
    <!-- run: stand-ins: REASON -->  as elsewhere, and run with the programs of tests/pages/stand_ins
    <!-- run: copied FILES: REASON --> its lines are those of files that other tests run
    <!-- run: output COMMAND -->     what the command prints
    <!-- part NAME -->               from here on, another folder and another namespace: a test of its own
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIVEN = Path(__file__).with_name("given")
KINDS = {
    "bash": "console",
    "console": "console",
    "python": "python",
    "text": "text",
    "json": "data",
    "yaml": "data",
}  # by language
_FENCE = re.compile(
    r"^<!-- part (?P<part>[\w-]+) -->$"
    r"|^(?:<!-- run: (?P<mark>[^\n]*) -->\n)?(?P<indent>[ ]*)(?P<ticks>```+)(?P<language>\w*)(?P<rest>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line`: of its fence in the page."""

    page: str
    part: str
    line: int
    language: str
    title: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        """For messages: page and line."""
        return f"{self.page}:{self.line}"

    @property
    def ranks(self) -> int:
        """The number of ranks that a python block runs on."""
        found = re.search(r"\branks=(\d)", self.mark)
        return int(found[1]) if found else 1

    @property
    def kind(self) -> str:
        """ "elsewhere", "clean", "copied", "output", "file", "console", "python" or "text"; ValueError if none."""
        for kind in ("elsewhere", "clean", "copied", "output"):
            if self.mark.startswith(kind):
                return kind
        if self.title:
            return "file"
        if self.language not in KINDS:
            raise ValueError(
                f"{self.where}: a block of {self.language!r} without a mark is in no category; see {__name__}"
            )
        return KINDS[self.language]


def pages() -> list[str]:
    """All pages, relative to the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page in order."""
    yield from blocks_in((ROOT / page).read_text(), page)


def blocks_in(text: str, page: str) -> Iterator[Block]:
    """The blocks of a page's text; ValueError if a fence is not closed."""
    part, num_fences = "", len(re.findall(r"^ *```", text, re.MULTILINE))
    for found in _FENCE.finditer(text):
        if found["part"]:
            part = found["part"]
            continue
        num_fences -= 2
        title = re.search(r'title="([^"]+)"', found["rest"])
        body = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, found.start("ticks")) + 1
        yield Block(page, part, line, found["language"], title[1] if title else "", found["mark"] or "", body)
    if num_fences:
        raise ValueError(f"{page}: a fence is not closed, or a block has fences within")


def parts() -> list[tuple[str, str]]:
    """(page, part) of all that has a block."""
    return list(dict.fromkeys((block.page, block.part) for page in pages() for block in blocks_of(page)))


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, what is shown of its output) in order; of `bash` blocks nothing is shown."""
    if block.language == "bash":
        return [(block.text, "")]
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        else:
            raise ValueError(f"{block.where}: output before a command")
    return found


def missing(shown: str, printed: str, *, varies: bool) -> str:
    """The first line that is shown and not printed, after the one before; empty if there is none.

    Widths of spaces and rules do not count; if it `varies`, numbers do not either.
    """
    lines = [_plain(line) for line in printed.splitlines()]
    at = 0
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = _pattern(_plain(line), varies)
        place = next((index for index in range(at, len(lines)) if pattern.fullmatch(lines[index])), None)
        if place is None:
            return line
        at = place + 1
    return ""


def _plain(line: str) -> str:
    return re.sub(r"-{3,}", "---", " ".join(line.split()))


def _pattern(line: str, varies: bool) -> re.Pattern:
    pattern = re.escape(line).replace(re.escape("..."), ".*")
    return re.compile(re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", pattern) if varies else pattern)
