"""Help: the commands in groups with examples that run, and a command's options in panels."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.app import COMMANDS, TRACE, application
from kvplan.cli.fields import option
from kvplan.cli.help import GROUPS, MORE, NEEDS, examples_of
from tests.support.cli import Run, run

__all__ = ["run"]
STAND_INS = ("before.json", "kvplan.policy.yaml")  # for files of the reader's own
EXAMPLES = {name: example for examples in GROUPS.values() for name, example in examples.items()}


def test_bare_kvplan_shows_every_command_with_an_example(run: Run) -> None:
    ran = run()
    assert (ran.code, ran.err) == (0, "")
    assert set(EXAMPLES) == {*COMMANDS, "trace"}
    assert all(example in ran.out for example in EXAMPLES.values())


@pytest.mark.parametrize("name", [*COMMANDS, "trace", *(f"trace {name}" for name in TRACE)])
def test_help_ends_with_three_examples_that_can_be_read(run: Run, name: str) -> None:
    examples = examples_of(name)
    text = run(*name.split(), "--help").out
    assert len(examples) >= 3
    assert text.endswith("\nExamples:\n" + "".join(f"  {example}\n" for example in examples))
    for example in examples:
        parse(shlex.split(example.rpartition(" | ")[2].partition(" < ")[0])[1:])


def parse(words: list[str]) -> None:
    """Read a command line and run nothing; raises for an option or value that there is not."""
    command, context = application(), None
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    context = command.make_context(command.name, words)
    assert context.command is command


@pytest.mark.parametrize("name", [name for name in dict.fromkeys((*EXAMPLES, *MORE)) if name not in NEEDS])
def test_an_example_runs(run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # check --init writes a policy
    Path("examples").symlink_to(Path(__file__).parents[2] / "examples")
    for example in examples_of(name):
        if not any(word in example for word in STAND_INS):
            assert run(*shlex.split(example)[1:]).code == 0, example


def test_help_lists_options_in_panels(run: Run) -> None:
    text = run("estimate", "--help-all").out
    titles = ["Options:", "Model, GPU and server:", "Parallelism:", "Quantization:", "vLLM:", "SGLang:", "Output:"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def test_help_starts_with_the_options_that_are_used_first(run: Run) -> None:
    """--help-all lists every option, among them those of --help."""
    first, every = run("estimate", "--help").out, run("estimate", "--help-all").out
    names, all_names = (re.findall(r"^  (-\S+)", text, re.MULTILINE) for text in (first, every))
    assert len(names) < 30
    assert set(names) < set(all_names)
    assert re.search(r"^Arguments:\n  \[?MODEL\b", first, re.MULTILINE)  # typer 0.24 prints [MODEL]
    count = int(re.findall(r"^All (\d+) options: kvplan estimate --help-all$", first, re.MULTILINE)[0])
    assert count == len(all_names) + 1  # and MODEL


def test_no_sentence_of_the_list_of_commands_is_cut(run: Run) -> None:
    assert "..." not in run("--help").out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("usage", "names", "placeholder"),
    [
        ("--rate N", ("--rate",), "N"),
        ("--max-model-len, --ctx TOKENS", ("--max-model-len", "--ctx"), "TOKENS"),
        ("--quiet, -q", ("--quiet", "-q"), None),
        ("--fp8/--no-fp8", ("--fp8/--no-fp8",), None),
    ],
)
def test_usage_of_an_option_states_its_names_and_placeholder(
    usage: str, names: tuple[str, ...], placeholder: str | None
) -> None:
    defined: Any = option(usage, "Help.")
    assert (defined.metadata["names"], defined.metadata["typer"].metavar, defined.default) == (names, placeholder, None)


def test_default_stated_in_the_help_is_printed_once(run: Run) -> None:
    text = run("explore", "--help").out
    assert text.count("explore.html") == 1  # no [default: explore.html]
    assert "Output format.  [default: table]" in run("estimate", "--help").out
