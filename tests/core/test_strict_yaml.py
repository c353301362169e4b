"""Strict YAML: every value as text with its place, and what readers disagree on refused where it stands."""

import datetime
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core import strict_yaml
from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.strict_yaml import Items, Mark, Scalar, Table, parse


def refusal(text: str) -> str:
    with pytest.raises(InvalidInputError) as caught:
        parse(text, "p.yaml")
    assert str(caught.value).isprintable()
    return str(caught.value)


def value(text: str) -> Scalar:
    node = parse(f"k: {text}\n", "p.yaml").values["k"]
    assert isinstance(node, Scalar)
    return node


def test_every_key_and_value_knows_its_line_and_column() -> None:
    top = parse("# a comment\na: 32k\nb:\n  - {c: '5%', d: é, e: 1}\n  - x\n", "p.yaml")
    assert str(top.keys["a"]) == "p.yaml:2:1"
    assert str(top.values["a"].mark) == "p.yaml:2:4"
    items = top.values["b"]
    assert isinstance(items, Items)
    first, second = items.values
    assert isinstance(first, Table)
    assert str(first.keys["c"]) == "p.yaml:4:6"
    assert str(first.keys["e"]) == "p.yaml:4:21"  # columns count characters: é is one
    assert str(second.mark) == "p.yaml:5:5"


@pytest.mark.parametrize("text", ["32k", "5%", "16GiB", "0.92", "-1", "0", "vllm@0.33", "./a b.json", "true", "5.5/s"])
def test_values_stay_as_they_were_written(text: str) -> None:
    assert value(text).text == text
    assert value(text).is_plain
    assert not value(f"'{text}'").is_plain


def test_a_command_may_go_over_several_lines() -> None:
    node = parse("k: >-\n  vllm serve x\n  -tp 2\n", "p.yaml").values["k"]
    assert isinstance(node, Scalar)
    assert node.text == "vllm serve x -tp 2"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("010", "octal"),  # 8 in YAML 1.1, 10 in YAML 1.2
        ("1e9", "number by some"),  # text for PyYAML, a number for others
        ("1.5e3", "number by some"),
        ("0x10", "number by some"),
        ("0o17", "number by some"),
        ("1_000", "number by some"),
        ("1:30", "base-60"),  # 90 in YAML 1.1
        ("yes", "write true or false"),
        ("NO", "write true or false"),
        ("off", "write true or false"),
        (".nan", "not a finite number"),
        ("-.Inf", "not a finite number"),
        ("~", "not a value"),
        ("null", "not a value"),
        ("*a", "alias"),
        ("&a 1", "anchor"),
        (
            "!!python/object/apply:os.system [ls]",
            "the tag !!python/object/apply:os.system is not plain YAML; write keys and values out",
        ),
        ("!x 1", "the tag !x"),
        ("&a {b: 1}", "anchor"),
    ],
)
def test_what_readers_disagree_on_is_refused_at_its_place(text: str, what: str) -> None:
    message = refusal(f"a: 1\nb:\n  c: {text}\n")
    assert message.startswith("p.yaml:3:6: ")
    assert what in message


@pytest.mark.parametrize("text", ["010", "yes", "1:30", "~", "2027-01-31", ".nan", "1e9"])
def test_quoted_it_is_text(text: str) -> None:
    node = value(f'"{text}"')
    assert (node.text, strict_yaml.text(node, "k")) == (text, text)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: 1\nb: 2\na: 3\n", "p.yaml:3:1: duplicate key 'a', first in line 1"),
        ("a: {b: 1, b: 1}\n", "p.yaml:1:11: duplicate key 'b'"),
        ("a: 1\n'a': 2\n", "p.yaml:2:1: duplicate key 'a'"),
        ("a: 1\n<<: {b: 1}\n", "p.yaml:2:1: a merge key (<<) is not plain YAML"),
        ("? [a]\n: 1\n", "p.yaml:1:3: a list is used as a key"),
        ("{a: {: 1}}\n", "p.yaml:1:6:"),
        ("- a\n", "p.yaml:1:1: the top level is a list"),
        ("just words\n", "p.yaml:1:1: the top level is the value"),
        ("", "p.yaml:1:1: the file is empty"),
        ("# only a comment\n\n", "p.yaml:1:1: the file is empty"),
        ("---\n", "p.yaml:1:1: the file is empty"),
        ("a: 1\n---\nb: 2\n", "p.yaml:2:1: a second document is not plain YAML"),
        ("%YAML 1.1\n---\na: 1\n", "p.yaml:1:1: a % directive is not plain YAML"),
        ("a:\n\tb: 1\n", "p.yaml:2:1: a tab indents"),
        ("a:\n  \tb: 1\n", "p.yaml:2:3: a tab indents"),
        ("a: 1\nb: 'x\n", "p.yaml:3:1: the file is not YAML"),
        ("a: b: c\n", "p.yaml:1:5: the file is not YAML"),
        ("a: [1, 2\n", "p.yaml:2:1: the file is not YAML"),
        ("a: @x\n", "p.yaml:1:4: the file is not YAML"),
        (
            'a: "\\ud800"\n',
            "p.yaml:1:",
        ),  # half a character; the reader in C says where in the text, the other its start
        ("a: 1\nb: \x07\n", "p.yaml:2:4: the file contains a character that YAML does not allow (U+0007)"),
        ("a: \x85\n", "p.yaml:1:4: the file contains a character"),
        ("a: \u2028\n", "p.yaml:1:4: the file contains a character"),
        ("a: \ufeff\n", "p.yaml:1:4: the file contains a character"),
        ("a: " + "[" * 60 + "]" * 60, "p.yaml:1:53: the file is nested more than 50"),  # 1 table and 49 lists are 50
    ],
)
def test_a_fault_of_the_file_is_refused_at_its_place(text: str, start: str) -> None:
    assert refusal(text).startswith(start)


@pytest.mark.parametrize("escape", ["\\0", "\\e[31m", "\\x85", "\\u2028", "\\uFEFF"])
def test_an_escape_that_would_smuggle_such_a_character_is_refused(escape: str) -> None:
    assert refusal(f'a: "x{escape}"\n').startswith("p.yaml:1:4: an escape sequence produces a control char")


def test_fifty_levels_are_read() -> None:
    assert "a" in parse("a: " + "[" * 49 + "]" * 49, "p.yaml").values


@pytest.mark.parametrize("text", ["[" * 200_000, "a: " + "{a: " * 60_000, "- " * 100_000, "a: &a [*a]"])
def test_depth_breaks_nothing(text: str) -> None:
    refusal(text)


def test_a_file_is_refused_that_is_too_large_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("a: 1\n" + "#" * strict_yaml.MAX_BYTES)
    with pytest.raises(InvalidInputError, match="too large"):
        strict_yaml.read(path)
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        strict_yaml.read(path)
    path.write_bytes("a: 1\n".encode("utf-16"))
    with pytest.raises(InvalidInputError, match="UTF-16"):
        strict_yaml.read(path)
    with pytest.raises(InvalidInputError, match="is a directory"):
        strict_yaml.read(tmp_path)


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert str(strict_yaml.read(path).values["b"].mark).endswith("p.yaml:2:4")


# --- reading ----------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    top = parse("max_model_lem: 1\nzzz: 2\ntp: 2\n", "p.yaml")
    known = ("max_model_len", "max_num_seqs", "tensor_parallel_size")
    with pytest.raises(InvalidInputError, match=r"p\.yaml:1:1: target has no key 'max_model_lem'; did you mean max_m"):
        strict_yaml.table(top, "target", known)
    assert strict_yaml.nearest("zzz", known, {}) == f"known keys: {', '.join(known)}"
    assert strict_yaml.nearest("max-num-seqs", known, {}) == "did you mean max_num_seqs?"
    assert strict_yaml.nearest("tp", known, {"tp": "tensor_parallel_size"}) == "did you mean tensor_parallel_size?"


@pytest.mark.parametrize("text", ["2027-01-31", "'2027-01-31'"])
def test_a_day_is_read_quoted_or_not(text: str) -> None:
    assert strict_yaml.date(value(text), "expires") == datetime.date(2027, 1, 31)


@pytest.mark.parametrize(
    "text", ["2027-02-30", "2027-1-31", "tomorrow", "2027-01-31 10:00:00", "[2027-01-31]", "20270131"]
)
def test_what_is_no_day_is_refused(text: str) -> None:
    node = parse(f"k: {text}\n", "p.yaml").values["k"]
    with pytest.raises(InvalidInputError, match=r"p\.yaml:1:4: expires: not a date"):
        strict_yaml.date(node, "expires")


def test_a_date_does_not_belong_elsewhere() -> None:
    with pytest.raises(InvalidInputError, match="is a date"):
        strict_yaml.text(value("2027-01-31"), "model")


@pytest.mark.parametrize(("text", "read"), [("true", True), ("false", False), ("'true'", True)])
def test_a_switch_is_true_or_false(text: str, read: bool) -> None:
    assert strict_yaml.switch(value(text), "enforce_eager") is read


@pytest.mark.parametrize("text", ["True", "1", "maybe", "''"])
def test_another_switch_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="neither true nor false"):
        strict_yaml.switch(value(text), "enforce_eager")


def test_a_node_of_another_kind_is_refused() -> None:
    top = parse("a: [1]\nb: {c: 1}\nd: 1\ne:\n", "p.yaml")
    with pytest.raises(InvalidInputError, match=r":1:4: a is a list; write one value"):
        strict_yaml.text(top.values["a"], "a")
    with pytest.raises(InvalidInputError, match=r":2:4: b is a mapping; write a list"):
        strict_yaml.items(top.values["b"], "b")
    with pytest.raises(InvalidInputError, match=r":3:4: d is the value '1'; write `key: value`"):
        strict_yaml.table(top.values["d"], "d")
    with pytest.raises(InvalidInputError, match=r"e has no value"):
        strict_yaml.text(top.values["e"], "e")


def test_the_error_of_a_reader_of_values_gets_its_place() -> None:
    mark = parse("a: 5 potatoes\n", "p.yaml").values["a"].mark
    with pytest.raises(InvalidInputError, match=r"^p\.yaml:1:4: a: not a size$"), strict_yaml.located(mark):
        raise UsageError("a: not a size")


@pytest.mark.parametrize("unit", ["9", "9.", "9_", "1:2", "+", "0", "1e", ".", "-1", "~"])
@pytest.mark.parametrize("tail", ["", "%", "e", "x"])
def test_a_value_as_long_as_a_file_is_read(unit: str, tail: str) -> None:
    """Among them those that make a pattern try every division of 250,000 digits; benchmarks/hostile.py times them."""
    value = unit * (250_000 // len(unit)) + tail
    with suppress(InvalidInputError):  # some are what YAML readers disagree on
        assert parse(f"a: {value}\n", "p.yaml").values["a"] == Scalar(value, True, Mark("p.yaml", 1, 4))


@given(st.text(alphabet=st.sampled_from(list("ab:-[]{}&*!'\"#|>%@`~,? \n\t0é\x00\u2028<")), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        outcome: Table | KvplanError = parse(text, "p.yaml")
    except KvplanError as error:
        outcome = error
    assert isinstance(outcome, Table) or (str(outcome).startswith("p.yaml:") and str(outcome).isprintable())
