"""Every fenced block of the site and of the README is run, or checked by what can be checked here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.blocks import Block, blocks_in, blocks_of, commands, missing, parts
from tests.pages.run_blocks import on_rank, run_part
from tests.workers import Ranks

HERE = Path(sys.executable).parent


@pytest.fixture(scope="session")
def ranks1() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.mark.multirank
@pytest.mark.parametrize("page, part", parts(), ids=lambda value: value or "all")
def test_blocks(page: str, part: str, ranks1: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    pools = {1: ranks1, 4: ranks4}

    def run_python(block: Block, folder: Path) -> None:
        text = "\n" * block.line + block.text  # tracebacks name the page's line
        pools[block.ranks].run(on_rank, block.where, text, str(folder))

    blocks = [block for block in blocks_of(page) if block.part == part]
    run_part(blocks, tmp_path, run_python, bin_folder=HERE, clean=False)


def the_block(text: str) -> Block:
    (block,) = blocks_in(text, "page.md")
    return block


def run(text: str, folder: Path) -> None:
    run_part(blocks_in(text, "page.md"), folder, lambda *_: None, bin_folder=HERE, clean=False)


def test_a_block_of_no_category_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page.md:1: a block of 'rust' without a mark is in no category"):
        _ = the_block("```rust\n1\n```").kind
    with pytest.raises(ValueError, match="is in no category"):
        _ = the_block("```\n1\n```").kind


def test_a_fence_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page.md: a fence is not closed"):
        list(blocks_in("```bash\nls\n```\n```bash\n", "page.md"))


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md:2: false(.|\n)*ended with 1, not 0"):
        run("\n```bash\nfalse\ntrue\n```", tmp_path)


def test_what_is_shown_must_be_printed(tmp_path: Path) -> None:
    run("```console\n$ echo a  12; echo b\n...\na 12\nb\n```", tmp_path)
    with pytest.raises(AssertionError, match="shown and not printed: 'a 13'"):
        run("```console\n$ echo a 12\na 13\n```", tmp_path)
    with pytest.raises(AssertionError, match="shown and not printed: 'a'"):
        run("```console\n$ echo a; echo b\nb\na\n```", tmp_path)


def test_figures_that_vary_may_differ_and_words_may_not() -> None:
    assert not missing("step 12.5 ms", "step 7 ms", varies=True)
    assert missing("step 12.5 ms", "step 7 ms", varies=False)
    assert missing("step 12.5 ms", "stop 7 ms", varies=True)
    assert not missing("at ... ms", "at 7 or 8 ms", varies=False)


def test_commands_may_have_several_lines() -> None:
    assert commands(the_block("```console\n$ a \\\n  b\nc\n$ d\n```")) == [("a \\\n  b", "c\n"), ("d", "")]


def test_a_file_that_no_block_uses_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no block after it uses train\.py"):
        run('```python title="train.py"\n1\n```\n```bash\nls\n```', tmp_path)


def test_what_runs_elsewhere_is_read_and_has_a_reason(tmp_path: Path) -> None:
    run("<!-- run: elsewhere: no SLURM -->\n```bash\nsbatch a.sh\n```", tmp_path)
    with pytest.raises(AssertionError, match="syntax error"):
        run("<!-- run: elsewhere: no SLURM -->\n```bash\nif sbatch a.sh\n```", tmp_path)
    with pytest.raises(AssertionError, match="gives no reason"):
        run("<!-- run: elsewhere -->\n```bash\nsbatch a.sh\n```", tmp_path)


def test_a_copy_that_differs_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not what copied"):
        run("<!-- run: copied examples/gpt.py: tested -->\n```python\nno_such_line()\n```", tmp_path)
