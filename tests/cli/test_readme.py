"""README.md and docs/: every console block shows what the command prints, every link leads somewhere, every example in
Python runs, and the pictures are today's; and the harness notices a wrong block."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import check_golden
from tests.support.readme_blocks import (
    ROOT,
    BlockError,
    Command,
    commands,
    copy_named_files,
    differences,
    elided,
    rewritten,
    run_kvplan,
)

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = 300  # README's


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_search(command: Command) -> bool:
    """Whether it simulates 2,000 requests a dozen times, which takes most of a minute."""
    return command.argv[1] == "simulate" and "--slo" in command.argv


# That a search prints what it finds, test_cli_simulate.py shows with fewer requests.
@pytest.mark.parametrize("searches", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_console_block_shows_what_is_printed(update: bool, tmp_path: Path, page: Path, searches: bool) -> None:
    text = page.read_text(encoding="utf-8")
    checked = [command for command in commands(text) if is_search(command) == searches]
    if not checked:
        return
    copy_named_files(text, tmp_path)
    run = run_kvplan(tmp_path)
    if update:
        page.write_text(rewritten(text, run), encoding="utf-8", newline="\n")
        return
    wrong = differences(checked, run)
    assert not wrong, "\n\n".join([*wrong, "`pytest --update` rewrites the blocks"])


def test_the_pages_show_searches_and_other_commands() -> None:
    page_commands = [command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))]
    assert {is_search(command) for command in page_commands} == {True, False}


def test_readme_can_be_read_at_once() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, "move the rest to docs/"


def test_readme_leads_to_every_page() -> None:
    linked = {target.partition("#")[0] for target, _ in links(README)}
    assert {name_of(page) for page in PAGES[1:]} | {"CONTRIBUTING.md", "CHANGELOG.md"} <= linked


# --- links ------------------------------------------------------------------------------------------------------------

LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[str, int]]:
    """(target, line) of each link to a file of this source tree, outside of code."""
    text = _FENCED.sub(lambda match: "\n" * match.group().count("\n"), page.read_text(encoding="utf-8"))
    matches = ((match.group(1), text.count("\n", 0, match.start()) + 1) for match in _LINK.finditer(text))
    return [(target, line) for target, line in matches if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    dead = []
    for target, line in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{name_of(page)}:{line}: {target}")
    assert not dead


# --- Python -----------------------------------------------------------------------------------------------------------

_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = [ROOT / "README.md", ROOT / "docs" / "python.md"]


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_the_examples_in_python_run_and_give_what_their_comments_say(page: Path) -> None:
    """The blocks of a page run in order, as in one notebook. A comment `# -> X` is the repr of its line's value."""
    blocks = _PYTHON.findall(page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, Any] = {}
    checked = 0
    for block in blocks:
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            source = ast.get_source_segment(block, statement) or ""
            _, comment, expected = lines[(statement.end_lineno or 0) - 1].partition("  # -> ")
            if comment and isinstance(statement, ast.Expr):
                value = eval(source, names)
                assert repr(value) == expected.strip(), source
                checked += 1
            else:
                exec(compile(ast.Module([statement], []), str(page), "exec"), names)
    assert checked


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_the_pictures_are_those_of_today(update: bool) -> None:
    place = ROOT / "docs" / "pictures"
    spec = importlib.util.spec_from_file_location("pictures", place / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert {path.name for path in place.glob("*.svg")} == set(make.PICTURES)
    for name, draw in make.PICTURES.items():
        check_golden(place / name, draw(), update=update)


# --- the harness itself -----------------------------------------------------------------------------------------------

SAMPLE = """\
# Sample

```console
$ kvplan gpus 'h100 80g'
H100  79.2 GiB

two lines
$ kvplan models \\
    llama
Llama
```

```sh
rm -rf build  # not run
```

```console
$ kvplan quiet
```
"""

PRINTED = {
    "kvplan|gpus|h100 80g": "H100  79.2 GiB   \n\ntwo lines\n\n",  # blanks at line ends and after the end do not count
    "kvplan|models|llama": "Llama\n",
    "kvplan|quiet": "",
}


def _fake(argv: list[str]) -> str:
    return PRINTED["|".join(argv)]


def test_commands_and_their_outputs_are_found() -> None:
    gpus, models, quiet = commands(SAMPLE)
    assert gpus.argv == ("kvplan", "gpus", "h100 80g")
    assert (gpus.line, gpus.output) == (4, "H100  79.2 GiB\n\ntwo lines\n")
    assert models.argv == ("kvplan", "models", "llama")
    assert (models.line, models.output) == (8, "Llama\n")
    assert (quiet.line, quiet.output) == (18, "")


def test_a_right_text_has_no_differences_and_is_left_as_it_is() -> None:
    assert differences(commands(SAMPLE), _fake) == []
    assert rewritten(SAMPLE, _fake) == SAMPLE


@pytest.mark.parametrize(
    ("right", "planted", "line"),
    [
        ("79.2 GiB", "80.0 GiB", 4),
        ("\n\ntwo lines", "\ntwo lines", 4),
        ("    llama\nLlama\n", "    llama\n", 8),
        ("kvplan quiet\n", "kvplan quiet\nnoise\n", 18),
    ],
)
def test_a_planted_wrong_output_is_found_and_put_right(right: str, planted: str, line: int) -> None:
    wrong = SAMPLE.replace(right, planted)
    assert wrong != SAMPLE
    (diff,) = differences(commands(wrong), _fake)
    assert diff.startswith(f"line {line}: $ kvplan")
    assert rewritten(wrong, _fake) == SAMPLE


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("```console\n$ pip install .\n```\n", "line 2: only kvplan commands"),
        ("```console\n$ kvplanner\n```\n", "only kvplan commands"),
        ("```console\n$ kvplan models | head\n```\n", "no pipes"),
        ("```console\nLlama\n```\n", "begins with a command"),
        ("```console\n```\n", "begins with a command"),
        ("  ```console\n  $ kvplan models\n  ```\n", "first column"),
        ("```console title\n$ kvplan models\n```\n", "first column"),
        ("```console\n$ kvplan models\n", "first column"),
    ],
)
def test_a_block_that_cannot_be_checked_is_an_error(block: str, fault: str) -> None:
    with pytest.raises(BlockError, match=fault):
        commands(block)
    with pytest.raises(BlockError, match=fault):
        rewritten(block, _fake)


EXPLAINED = "Llama: 14 users\n\nBlocks\n  2,048\n\nWeights\n  15 GiB\n\nUsers\n  14\n"


def test_paragraphs_may_be_left_out() -> None:
    excerpt = "Llama: 14 users\n\n...\n\nWeights\n  15 GiB\n\n...\n"
    assert elided(EXPLAINED, excerpt) == excerpt
    assert elided(EXPLAINED, excerpt.replace("15", "16")) == excerpt
    assert elided(EXPLAINED, excerpt.replace("Weights", "Weight")) == "Llama: 14 users\n\n...\n\n...\n"
    assert elided(EXPLAINED, "...\n\nWeights\n  15 GiB\n") == "...\n\nWeights\n  15 GiB\n\nUsers\n  14\n"
    assert elided(EXPLAINED, "Llama: 14 users\n\nWeights\n  15 GiB\n") == EXPLAINED


def test_an_output_that_would_break_the_block_is_an_error() -> None:
    with pytest.raises(BlockError, match="would end the block"):
        differences(commands(SAMPLE), lambda argv: "```\n")


def test_files_that_a_command_names_are_at_hand(tmp_path: Path) -> None:
    copy_named_files("```console\n$ kvplan estimate pyproject.toml ../etc /etc/hosts . nosuch\n```\n", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_a_golden_file_is_compared_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "answers" / "plan.txt"
    with pytest.raises(pytest.fail.Exception, match="no such golden file"):
        check_golden(path, "13 users\n", update=False)
    check_golden(path, "13 users\n", update=True)
    check_golden(path, "13 users\n", update=False)
    with pytest.raises(pytest.fail.Exception, match=r"-13 users\n\+14 users"):
        check_golden(path, "14 users\n", update=False)
