"""Every console block of README.md shows what the command prints, and the harness notices a wrong block."""

from pathlib import Path

import pytest

from tests.conftest import check_golden
from tests.support.readme_blocks import (
    ROOT,
    BlockError,
    Command,
    commands,
    copy_named_files,
    differences,
    rewritten,
    run_kvplan,
)

README = ROOT / "README.md"


def is_search(command: Command) -> bool:
    """Whether it simulates 2,000 requests a dozen times, which takes most of a minute."""
    return command.argv[1] == "simulate" and "--slo" in command.argv


# That a search prints what it finds, test_cli_simulate.py shows with fewer requests.
@pytest.mark.parametrize("searches", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_console_block_of_the_readme_shows_what_is_printed(update: bool, tmp_path: Path, searches: bool) -> None:
    assert README.exists(), "there is no README.md"
    text = README.read_text(encoding="utf-8")
    checked = [command for command in commands(text) if is_search(command) == searches]
    assert checked, "README.md has no such command, so nothing of the kind is checked"
    copy_named_files(text, tmp_path)
    run = run_kvplan(tmp_path)
    if update:
        README.write_text(rewritten(text, run), encoding="utf-8", newline="\n")
        return
    wrong = differences(checked, run)
    assert not wrong, "\n\n".join([*wrong, "`pytest --update` rewrites the blocks"])


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
