"""Help: the commands in groups with examples that run, and a command's options in panels."""

import shlex
from pathlib import Path

import pytest

from kvplan.cli.app import COMMANDS
from kvplan.cli.help import GROUPS, MORE, NEEDS
from tests.support.cli import Run, run

__all__ = ["run"]
EXAMPLES = {name: example for examples in GROUPS.values() for name, example in examples.items()}


def test_bare_kvplan_shows_every_command_with_an_example(run: Run) -> None:
    ran = run()
    assert (ran.code, ran.err) == (0, "")
    assert set(EXAMPLES) == {*COMMANDS, "trace"}
    assert all(example in ran.out for example in EXAMPLES.values())


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NEEDS])
def test_an_example_runs(run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # check --init writes a policy
    shown = run(name, "--help").out
    for example in (EXAMPLES[name], *MORE.get(name, ())):
        assert run(*shlex.split(example)[1:]).code == 0, example
        assert name == "trace" or f"\n  {example}\n" in shown


def test_help_lists_options_in_panels(run: Run) -> None:
    text = run("estimate", "--help").out
    titles = ["Options:", "Model, GPU and server:", "Parallelism:", "Quantization:", "SGLang:", "Output:"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
