"""Errors carry what they are about, what is wrong and what to do as fields; the line is made of them, once."""

import ast
import pickle
from pathlib import Path

import pytest

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, Mark, UsageError, fields_of
from kvplan.hardware.nvml import DeviceError

ROOT = Path(__file__).resolve().parents[2]


def test_the_line_is_subject_problem_and_remedy() -> None:
    error = UsageError("--ctx 0", "must be 1 or more", "write 32k")
    assert str(error) == error.message == error.unquoted == "--ctx 0 must be 1 or more; write 32k"
    assert (error.subject, error.problem, error.remedy) == ("--ctx 0", "must be 1 or more", "write 32k")
    assert error.keys == ("ctx",)
    assert str(UsageError("", "a tab indents this line")) == "a tab indents this line"


def test_a_place_in_a_file_stands_before_the_line_and_not_in_the_message() -> None:
    error = InvalidInputError("targets", "is empty", "write one", mark=Mark("p.yaml", 3, 5))
    assert str(error) == "p.yaml:3:5: targets is empty; write one"
    assert error.message == "targets is empty; write one"


def test_what_a_file_holds_stays_out_of_a_log_that_strangers_read() -> None:
    error = InvalidInputError("a.csv: line 3", "not a number ('hunter2')", "correct it", public="not a number")
    assert str(error) == "a.csv: line 3: not a number ('hunter2'); correct it"
    assert error.unquoted == "a.csv: line 3: not a number; correct it"
    inside = error.within("target a: workload", Mark("p.yaml", 2, 1))
    assert str(inside) == "p.yaml:2:1: target a: workload: a.csv: line 3: not a number; correct it"
    assert isinstance(inside, InvalidInputError)


@pytest.mark.parametrize(
    ("subject", "line"),
    [
        ("--from-command", "command is cut off; paste it all"),
        ("--from-command --block-size 3", "command: --block-size 3 is cut off; paste it all"),
        ("--from-command: --block-size", "command: --block-size is cut off; paste it all"),
        ("--from-commander", "--from-commander is cut off; paste it all"),
        ("--ctx", "--ctx is cut off; paste it all"),
    ],
)
def test_a_subject_takes_another_name(subject: str, line: str) -> None:
    assert str(UsageError(subject, "is cut off", "paste it all").renamed("--from-command", "command:")) == line


@pytest.mark.parametrize(
    "message",
    [
        "--ctx: no number (x); write 32k",
        "no place at all",
        "a: b",
        "a.json: text_config is null; remove it; or not",
        "",
    ],
)
def test_a_message_in_one_piece_keeps_its_words(message: str) -> None:
    error = UsageError(message)
    assert str(error) == message
    assert str(UsageError(*fields_of(message))) == message


def test_an_error_survives_the_way_back_from_a_worker() -> None:
    for error in (
        InvalidInputError("a", "b (c)", "d", public="b", mark=Mark("f", 1, 2), keys=("model",)),
        DeviceError("GPU 3", "is lost", "reboot", reason="lost"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.__dict__) == (str(error), error.__dict__)


def test_the_kinds_keep_their_exit_codes() -> None:
    assert [kind.exit_code for kind in (KvplanError, UsageError, EnvironmentProblem, DeviceError)] == [2, 2, 3, 3]
    assert EnvironmentProblem("a", "b").within("c").exit_code == 3


def test_errors_are_raised_with_fields() -> None:
    """Counted in the source: calls with one argument leave it to `fields_of` to take the sentence apart."""
    kinds = {"KvplanError", "UsageError", "InvalidInputError", "UnsupportedModelError", "EnvironmentProblem"}
    kinds |= {"DeviceError", "NoServerError", "UnknownNameError"}
    places = []
    for path in sorted((ROOT / "kvplan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[only]) if name in kinds and not isinstance(
                    only, ast.Starred
                ):
                    places.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert places == []
