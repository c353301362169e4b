"""Bad files end in one line that names the file and the place; none hangs, crashes or is believed."""

import errno
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError
from kvplan.core.files import load_json, parse_json, printable, read_text
from tests.support.counted_reads import reads_of


def refusal(tmp_path: Path, data: bytes, max_bytes: int = 1 << 20) -> str:
    """What load_json says about these bytes, behind the path."""
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError) as caught:
        load_json(path, max_bytes)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message.startswith(f"{path}: ")
    assert message.isprintable()  # so it is one line
    return message.removeprefix(f"{path}: ")


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert load_json(path) == {"a": 1}


def test_what_json_allows_is_read_as_json_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    value = {"a": [1, -2.5, 1e9, None, True, {"\u00e9": "\U0001f600", 'b\\"': "\n"}], "big": 2**63, "{": "}:,NaN"}
    path.write_text(json.dumps(value), encoding="utf-8")
    assert load_json(path) == value


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty file (line 1 column 1); expected a JSON object"),
        (b" \n ", "empty file (line 1 column 1); expected a JSON object"),
        (b"\xef\xbb\xbf", "empty file (line 1 column 1); expected a JSON object"),
        (b"[]", "the top level is a list (line 1 column 1); expected a JSON object"),
        (b"null", "the top level is null (line 1 column 1); expected a JSON object"),
        (b"true", "the top level is a boolean (line 1 column 1); expected a JSON object"),
        (b"32", "the top level is a number (line 1 column 1); expected a JSON object"),
        (b'"x"', "the top level is a string (line 1 column 1); expected a JSON object"),
        (b'{"a": 1,\n "b', "line 2 column 2: not JSON, unterminated string; the file is cut short, fetch it again"),
        (b'{"a": 1,\n "b": ', "line 2 column 7: not JSON, expecting value; the file is cut short, fetch it again"),
        (b'{"a": 1', "line 1 column 8: not JSON, expecting ',' delimiter; the file is cut short, fetch it again"),
        (b"{'a': 1}", "line 1 column 2: not JSON, expecting property name enclosed in double quotes; correct it"),
        (b'{"a": 1} x', "line 1 column 10: not JSON, extra data; correct it"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 or UTF-32 text, not UTF-8 (byte 0); convert it to UTF-8"),
        ('{"a": 1}'.encode("utf-16-be"), "not text, contains a NUL (byte 0); expected UTF-8"),
        (b'{"a": "\0"}', "not text, contains a NUL (byte 7); expected UTF-8"),
        (b'{"a": "\xe9"}', "not UTF-8 (byte 7 is 0xe9); convert it"),
        (b'\xef\xbb\xbf{"a": "\xe9"}', "not UTF-8 (byte 10 is 0xe9); convert it"),
        (b'{"a": NaN}', "a: non-finite number; write a finite number or null"),
        (b'{"a":\n\n -Infinity}', "a: non-finite number; write a finite number or null"),
        (b'{"a": [1, 1e999]}', "a: non-finite number; write a finite number or null"),
        (b'{"a": [[1], [{"b": [2, NaN]}]]}', "b: non-finite number"),
        (b'{"time_step_limit": [0, NaN]}', "time_step_limit: non-finite number"),
        (b'{"time_step_limit": [0, {"a": Infinity}]}', "a: non-finite number"),
        (b'{"time_step_limit": [0, Infinity], "a": -1e999}', "a: non-finite number"),
        (b'{"a": 1, "b": {"c": 2},\n "a": 3}', "duplicate key 'a'; keep one of them"),
        (b'{"a": 1, "\\u0061": 3}', "duplicate key 'a'; keep one of them"),
        (b'{"\\u001b[2J": 1, "\\u001b[2J": 3}', r"duplicate key '\x1b[2J'; keep one of them"),
        (b'{"a": "\\ud800"}', "line 1 column 8: half of a surrogate pair, not a character; correct it"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5,000 digits (999999999999999999999...)"),
        (b'{"a": -' + b"9" * 5000 + b"}", "an integer of 5,000 digits (-99999999999999999999...)"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 levels deep"),
        (b'{"a": ' + b"[" * 100_000, "nested more than 100 levels deep"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100 levels deep"),
        (b'{"a":' * 100_000, "nested more than 100 levels deep"),
    ],
)
def test_a_bad_file_is_refused_with_its_place_or_key(tmp_path: Path, data: bytes, problem: str) -> None:
    assert refusal(tmp_path, data).startswith(problem)


def test_an_infinite_time_step_limit_is_read() -> None:
    # nvidia/Nemotron-H-56B-Base-8K, config.json, writes it so; no size depends on it.
    assert parse_json('{"time_step_limit": [0.0, Infinity]}', "x") == {"time_step_limit": [0.0, math.inf]}


def test_a_hundred_levels_are_still_read() -> None:
    assert parse_json('{"a":' * 100 + "1" + "}" * 100, "x")["a"]  # the hundredth level is the last one allowed


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = b'{"a": [1, 2.5, "\xc3\xa9"], "b": {"c": null, "d": true}, "e": 10}'
    for cut in range(1, len(whole)):
        message = refusal(tmp_path, whole[:cut])
        assert message.endswith("the file is cut short, fetch it again") or message.startswith("not UTF-8 (byte"), cut


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(), st.lists, max_leaves=8))
def test_any_json_value_is_read_back(value: Any) -> None:
    try:
        text = json.dumps({"value": value}, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return
    assert parse_json(text, "x") == {"value": value}


@given(st.text(alphabet='{}[]:,"\\u0dNaInftyE+-.19 \n', max_size=60))
def test_any_text_is_an_object_or_a_refusal(text: str) -> None:
    message = "x: read"
    try:
        parse_json(text, "x")
    except KvplanError as error:
        message = str(error)
    assert message.startswith("x: ")
    assert message.isprintable()


def test_a_gibibyte_is_refused_by_its_size_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes no disk
    lengths = reads_of(monkeypatch, "kvplan.core.files")
    with pytest.raises(InvalidInputError, match=r"too large \(1,073,741,824 bytes, at most 10,485,760\)"):
        load_json(path)
    assert lengths == []


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 10, encoding="utf-8")
    assert read_text(path, 10) == "x" * 10
    with pytest.raises(InvalidInputError, match=r"too large \(10 bytes, at most 9\)"):
        read_text(path, 9)


def test_a_file_that_says_it_is_empty_cannot_smuggle_more_in() -> None:
    # Files of /proc have size 0 and content; the limit holds for what is read.
    with pytest.raises(InvalidInputError, match="too large"):
        read_text(Path("/proc/self/status"), 5)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "no such file or directory; check the path"),
        (lambda path: path.mkdir(), "is a directory, not a file; name the file in it"),
        (os.mkfifo, "not a regular file; copy its content to a file first"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file; copy its content to a file first"),
        (lambda path: path.symlink_to(path), "the symbolic links form a loop; check the path"),
        (lambda path: path.symlink_to(path.parent / "gone"), "no such file or directory; check the path"),
    ],
    ids=["missing", "directory", "fifo", "device", "loop", "dangling"],
)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Any, problem: str) -> None:
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(InvalidInputError) as caught:
        read_text(path, 100)
    assert str(caught.value) in (f"{path}: {problem}", f"{path} {problem}")


def test_a_fifo_that_takes_the_place_of_a_file_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda *_: os.stat_result((0o100644, *[0] * 9)))  # was a file a moment ago
    with pytest.raises(InvalidInputError, match="not a regular file"):
        read_text(path, 100)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (Path("a\0b"), "not a file name"),
        (Path("x" * 5000), "the name is too long"),
        (Path("/dev/null/config.json"), "a part of the path is not a directory"),
        (Path("\x1b[2J\u202e"), r"\x1b[2J\u202e: no such file"),
    ],
)
def test_a_path_that_is_none_is_refused(path: Path, problem: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_text(path, 100)
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "permission denied; make it readable for this user"),
        (OSError(errno.EIO, "Input/output error"), "cannot be read (Input/output error); check the disk"),
    ],
)
@pytest.mark.parametrize("call", ["open", "read"])
def test_what_the_machine_denies_is_an_environment_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, problem: str, call: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")

    class Failing(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise error

    def fail(*_: Any) -> int:
        raise error

    if call == "open":
        monkeypatch.setattr("kvplan.core.files.os.open", fail)
    else:
        monkeypatch.setattr("kvplan.core.files.os.fdopen", Failing)
    with pytest.raises(EnvironmentProblem) as caught:
        load_json(path)
    assert str(caught.value) in (f"{path}: {problem}", f"{path} {problem}")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("a\x1b[31m\n\t\x7f\x9b", r"a\x1b[31m\n\t\x7f\x9b"),
        ("a\u202e\u2066\u200b\u2028\ud800", r"a\u202e\u2066\u200b\u2028\ud800"),
        ("\u6a21\u578b caf\u00e9", "\u6a21\u578b caf\u00e9"),
        ("x" * 120, "x" * 120),
        ("x" * 121, "x" * 117 + "..."),
        ("\0" * 120, r"\x00" * 29 + r"\..."),
        ("x" * 10_000_000, "x" * 117 + "..."),
    ],
)
def test_untrusted_names_are_made_safe_to_print(text: str, printed: str) -> None:
    assert printable(text) == printed
    assert printable(text).isprintable()
    assert len(printable(text)) <= 120


def test_reading_files_loads_no_heavy_library() -> None:
    heavy = {"torch", "numpy", "pandas", "transformers", "safetensors", "gguf", "huggingface_hub", "yaml"}
    code = "import sys, kvplan.core.files, kvplan.models.checkpoint, kvplan.models.hub; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert heavy & set(done.stdout.split()) == set()
