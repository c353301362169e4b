"""Traces of every form against rows worked by hand, every way a file can be wrong, and statistics by brute force."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.workloads import stats as figures
from kvplan.workloads.lengths import parse_lengths
from kvplan.workloads.sample import families, share_of, span_of, thinned
from kvplan.workloads.trace import Trace, TraceRequest, csv_text, jsonl_text, read, read_full_lengths
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.parts import some

# The first two rows of Azure's conversation trace. vidur (MLSys 2024) made 0.0 and 4.314579 s of these times.
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
VIDUR = b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
PLAIN = b"arrival_s,prompt_tokens,output_tokens\n0,374,44\n4.314579,396,109\n"
MILLIS = b"prompt_len,arrival_ms,output_len\n374,7000,44\n396,11314.579,109\n"
BURST = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,,3.1,ChatGPT,374,44,418,API log\n7,1,0.2,GPT-4,900,0,900,Conversation log\n"
    b'9.314579,1,9,"GPT-4, new",396,109,505,Conversation log\n'
)
CHAT = {"type": "text", "turn": 1, "input_length": 374, "output_length": 44}
BAILIAN = (
    json.dumps({"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.0, **CHAT, "hash_ids": list(range(24))})
    + "\n"
    + json.dumps({"chat_id": 2, "parent_chat_id": 1, "timestamp": 65.314579, "input_length": 396, "output_length": 109})
    + "\n"
).encode()
MOONCAKE = (
    b'{"timestamp": 27000, "input_length": 374, "output_length": 44, "hash_ids": [46]}\n'
    b'{"timestamp": 31314.579, "input_length": 396, "output_length": 109, "hash_ids": [46]}\n'
)
RESULT = {
    "date": "20260101-000000",
    "request_rate": "inf",
    "input_lens": [374, 20, 396],
    "output_lens": [44, 0, 109],
    "ttfts": [0.1, 0.0, 0.2],
    "itls": [[0.01], [], [0.02]],
    "start_times": [5001.25, 0.0, 5005.564579],
    "generated_texts": ["a", "", "b"],
    "errors": ["", "timed out", ""],
}
BENCH = json.dumps(RESULT).encode()
FORMS = {
    "azure": AZURE, "vidur": VIDUR, "plain": PLAIN, "milliseconds": MILLIS, "burstgpt": BURST, "bailian": BAILIAN,
    "mooncake": MOONCAKE, "bench": BENCH, "bench indented": json.dumps(RESULT, indent=2).encode(),
}  # fmt: skip
TraceRow = tuple[float, int, int]
ROWS: list[TraceRow] = [(0.0, 374, 44), (4.314579, 396, 109)]


def written(folder: Path, data: bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def rows_of(trace: Trace) -> list[TraceRow]:
    return [(round(request.arrival_s, 6), request.prompt_tokens, request.output_tokens) for request in trace.requests]


def line(**values: Any) -> bytes:
    """One line of JSON, a request of two runs of 512 tokens unless said."""
    return json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 1} | values).encode() + b"\n"


# --- forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_two_requests(tmp_path: Path, form: str, packed: bool) -> None:
    data = FORMS[form]
    trace = read(written(tmp_path, gzip.compress(data, mtime=0) if packed else data))
    assert rows_of(trace) == ROWS
    assert trace.has_arrivals
    assert trace.source.endswith("trace.txt (2 requests)")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.removesuffix(b"\n"),
        lambda data: b"\n \n" + data.replace(b"\n", b"\n\n"),
    ],
    ids=["CRLF", "byte order mark", "no last newline", "blank lines"],
)
@pytest.mark.parametrize("form", FORMS)
def test_line_ends_marks_and_blank_lines_change_nothing(
    tmp_path: Path, form: str, change: Callable[[bytes], bytes]
) -> None:
    assert rows_of(read(written(tmp_path, change(FORMS[form])))) == ROWS


def test_prefix_ids_are_of_512_tokens_in_mooncakes_form_and_of_16_in_bailians(tmp_path: Path) -> None:
    mooncake, bailian = read(written(tmp_path, MOONCAKE)), read(written(tmp_path, BAILIAN, "b"))
    assert (mooncake.prefix_block, bailian.prefix_block) == (512, 16)
    assert [request.prefix_ids for request in mooncake.requests] == [(46,), (46,)]
    assert [len(request.prefix_ids) for request in bailian.requests] == [24, 0]  # 374 / 16 = 23.4


def test_another_length_of_runs_may_be_stated(tmp_path: Path) -> None:
    trace = read(written(tmp_path, line(hash_ids=[7, 8, 9], block_size=100)))
    assert (trace.prefix_block, trace.requests[0].prefix_ids) == (100, (7, 8, 9))


def test_dates_may_carry_a_time_zone(tmp_path: Path) -> None:
    # Azure's trace of 2024: one hour apart although the clock shows the same.
    data = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 01:00:00.00+01:00,5,5\n2024-05-10 01:00:00+00:00,6,6\n"
    assert rows_of(read(written(tmp_path, data))) == [(0.0, 5, 5), (3600.0, 6, 6)]


@pytest.mark.parametrize(
    "data", [b"prompt_tokens,output_tokens\n5,6\n7,8\n", b'{"input_length": 5, "output_length": 6}\n']
)
def test_a_file_of_lengths_has_no_arrivals(tmp_path: Path, data: bytes) -> None:
    trace = read(written(tmp_path, data))
    assert not trace.has_arrivals
    assert trace.requests[0] == TraceRequest(0.0, 5, 6)


def test_rows_out_of_order_are_sorted_and_this_is_noted(tmp_path: Path) -> None:
    trace = read(written(tmp_path, b"arrival_s,prompt_tokens,output_tokens\n9,1,1\n4,2,2\n9,3,3\n"))
    assert rows_of(trace) == [(0.0, 2, 2), (5.0, 1, 1), (5.0, 3, 3)]  # equal times keep their order
    assert trace.notes == ("the rows were not in order of time and are sorted by arrival",)


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    # BurstGPT's README: "some failure that `Response tokens` are `0`s"; vLLM's benchmark has 0 and an error.
    for data in (BURST, BENCH):
        (note,) = read(written(tmp_path, data)).notes
        assert note.startswith("left out 1 of 3 requests, with 0 output tokens")


def test_lengths_of_a_json_trace_are_a_distribution_too(tmp_path: Path) -> None:
    lengths = read_full_lengths(written(tmp_path, MOONCAKE), 450)
    assert lengths.points == ((418, 0.5), (450, 0.5))  # 374 + 44; 396 + 109 = 505, above the limit
    assert parse_lengths(str(written(tmp_path, PLAIN)), 10**6, read_full_lengths).mean == (418 + 505) / 2


def test_a_name_too_long_is_no_file() -> None:
    with pytest.raises(UsageError, match="neither a distribution nor a file"):
        parse_lengths("a" * 5000, 10**6)
    with pytest.raises(InvalidInputError, match="the name is too long"):
        parse_lengths("a" * 5000 + ".csv", 10**6, read_full_lengths)


# --- refusals -----------------------------------------------------------------------------------------------------

HEAD = b"arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEAD, "no rows"),
        (HEAD + b"0,5,0\n", "no request has any output"),
        (b"when,what\n0,1\n", "line 1: no columns of lengths in the header"),
        (b"tokens\n5\n", "line 1: one length per request"),
        (b"5\n6\n", "line 1: one length per request"),
        (b"1,2,3\n", r"line 1: 3 columns of numbers and no header \('1,2,3'\); put a line above that names them"),
        (b"0.5,2,3\n1.5,4,5\n", "line 1: 3 columns of numbers and no header"),
        (b"prompt_tokens,prompt_tokens,output_tokens\n1,2,3\n", "line 1: the header names a column of tokens twice"),
        (HEAD + b"0,5\n", r"line 2: too few columns \(2 of 3\)"),
        (HEAD + b"0,5,5\n0,5,5,5\n", r"line 3: more columns than the header \(4, not 3\)"),
        (HEAD + b"1,000,5,5\n", "line 2: more columns than the header"),  # a comma within a number
        (HEAD + b"0,0,5\n", "line 2: a prompt of 0 tokens"),
        (HEAD + b"0,5,5\n1,-5,5\n", "line 3: not a whole number of tokens"),
        (HEAD + b"0,5.0,5\n", "line 2: not a whole number of tokens"),
        (HEAD + b"0,1e3,5\n", "line 2: not a whole number of tokens"),
        (HEAD + b"0," + "٣".encode() + b",5\n", "line 2: not a whole number of tokens"),
        (HEAD + b"0,1000000000,5\n", "line 2: a request of more than 16,777,216 tokens"),
        (HEAD + b"0," + b"9" * 5000 + b",5\n", "line 2: not a whole number of tokens"),
        (HEAD + b"-1,5,5\n", "line 2: not a time of 0 or more"),
        (HEAD + b"nan,5,5\n", "line 2: not a time"),
        (HEAD + b"inf,5,5\n", "line 2: not a time"),
        (HEAD + b"1_0,5,5\n", "line 2: not a time"),
        (HEAD + b"1e300,5,5\n", "line 2: not a time"),
        (HEAD + b",5,5\n", "line 2: not a time"),
        (HEAD + b'0,"5,5\n', "line 2 is not CSV"),
        (HEAD + b"0,5,5\n\xff\n", "line 3 is not UTF-8"),
        (HEAD + b"0,5,5\n\0\n", "line 3 holds a NUL"),
        (HEAD + b"0," + b"1" * 2**20 + b"\n", "line 2: longer than"),
        (b"timestamp,input_length,output_length\n27000,5,5\n", "line 2: the timestamp is a number without a unit"),
        (b"timestamp,input_length,output_length\nnoon,5,5\n", r"line 2: the timestamp is not a date \('noon'\)"),
        (b"timestamp,input_len,output_len\n2023-11-16 18:15:46,5,5\nnoon,5,5\n", "line 3: .* not a date as in the"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n12.5,5,5\n", "line 3: the timestamp is"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:46Z,5,5\n", "line 3"),
        (gzip.compress(PLAIN, mtime=0)[:-9], "broken gzip"),
        (gzip.compress(MOONCAKE, mtime=0)[:40], "broken gzip"),
        (b"\x1f\x8b nothing", "broken gzip"),
    ],
)  # fmt: skip
def test_a_faulty_csv_is_refused_with_its_line(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint) as error:
        read(written(tmp_path, data))
    assert_one_line(error.value)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"[1, 2]\n", "line 1: a JSON list"),
        (line() + b"[1]\n", "line 2 column 1"),
        (line() + b"5\n", "line 2 column 1"),
        (line() + b'{"timestamp": 1\n', "line 2 column"),
        (line(input_length=None), "line 1: input_length: not a whole number"),
        (line(input_length=True), "line 1: input_length: not a whole number"),
        (line(input_length="5"), "line 1: input_length: not a whole number"),
        (line(input_length=5.0), "line 1: input_length: not a whole number"),
        (line() + line(output_length=-1), "line 2: output_length: not a whole number"),
        (line() + line(input_length=10**9), "line 2: a request of more than"),
        (line() + line(input_length=10**4000), "line 2: input_length: not a whole number"),
        (line() + b'{"timestamp": 0, "input_length": ' + b"9" * 5000 + b"}\n", "line 2: an integer of 5,000"),
        (line() + b'{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 2: timestamp: non-finite"),
        (line() + b'{"timestamp": 1e999, "input_length": 1, "output_length": 1}\n', "line 2: timestamp: not a time"),
        (line() + line(timestamp=10**400), "line 2: timestamp: not a time"),
        (line() + line(timestamp=-1), "line 2: timestamp: not a time"),
        (line() + line(timestamp="1"), "line 2: timestamp: not a time"),
        (line() + b'{"input_length": 1, "output_length": 1}\n', "line 2: timestamp: not a time"),
        (b'{"input_length": 1, "output_length": 1}\n' + line(), "line 2 has a time, which the first line lacks"),
        (line() + b'{"timestamp": 1, "timestamp": 2}\n', "line 2: duplicate key"),
        (line() + b"[" * 100_000 + b"\n", "line 2: nested"),
        (line() + b'{"a":' * 100_000 + b"\n", "line 2: nested"),
        (line() + line(delay=500), "line 2: delay: a time after another request"),
        (line(hash_ids={"sys": [1]}), "line 1: hash_ids: not a list"),
        (line(hash_ids=["a", "b"]), "line 1: hash_ids: not a list"),
        (line(hash_ids=[1.5, 2]), "line 1: hash_ids: not a list"),
        (line(hash_ids=[1, 2, 3]), r"line 1: hash_ids: 3 of them do not go with 1,000 tokens in runs of 512 \(2\)"),
        (line(input_length=2000, hash_ids=[1, 2]), "line 1: hash_ids: 2 of them do not go with"),  # runs of 1,024?
        (line(hash_ids=[1], block_size=0), "line 1: block_size"),
        (line(hash_ids=[1], block_size=600) + line(block_size=700), "line 2: another block_size"),
        (b'{"time": 1, "tokens": 5}\n', r"line 1: no lengths among the keys \(time, tokens\)"),
        (line() + b'{"x": "' + b"y" * 2**20 + b'"}\n', "line 2: longer than"),
        (b'{"completed": 3, "total_input_tokens": 5}\n', "save it with --save-detailed"),
        (json.dumps({**RESULT, "output_lens": [1]}).encode(), r"differ in length \(3, 1, 3\)"),
        (json.dumps({**RESULT, "output_lens": [1, 2, "3"]}).encode(), "request 3: output_lens: not a whole number"),
        (json.dumps({**RESULT, "start_times": [0, -1, 0]}).encode(), "request 2: start_times: not a time"),
        (BENCH + b"\n" + BENCH, "line 2: more after the first result"),
        (b'{\n"input_lens": [1,\n', "not JSON"),
        (b"{\n}\n", "save it with --save-detailed"),
    ],
)  # fmt: skip
def test_a_faulty_json_is_refused_with_its_line(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint) as error:
        read(written(tmp_path, data))
    assert_one_line(error.value)


def assert_one_line(error: KvplanError) -> None:
    text = str(error)
    assert text.isprintable()
    assert len(text) < 1000
    assert ";" in text  # the next step


def test_what_the_file_holds_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="line 4: more than 2 requests"):
        read(written(tmp_path, HEAD + b"0,5,5\n" * 3), 2)
    monkeypatch.setattr("kvplan.workloads.trace.MAX_PREFIX_IDS", 3)
    with pytest.raises(InvalidInputError, match="line 2: more than 2 requests or 3 prefix ids"):
        read(written(tmp_path, line(hash_ids=[1, 2]) * 2), 2)
    with pytest.raises(InvalidInputError, match="line 9: more than 8 lines"):
        read(written(tmp_path, gzip.compress(b"\n" * 1000, mtime=0)), 4)
    monkeypatch.setattr("kvplan.workloads.trace.MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(InvalidInputError, match="more than 100 characters of one JSON object"):
        read(written(tmp_path, json.dumps(RESULT, indent=2).encode()))


def test_a_bomb_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.workloads.lengths.MAX_FILE_BYTES", 1000)
    with pytest.raises(InvalidInputError, match="sample the rows"):
        read(written(tmp_path, gzip.compress(HEAD + b"0,0,0\n" * 10_000, mtime=0)))


@pytest.mark.parametrize("unit", some([b"0,1,1\n", b"\n", b"0,1,1\r\n"], [b"\n"]))
def test_a_small_file_of_endless_lines_is_refused_before_they_are_read(tmp_path: Path, unit: bytes) -> None:
    member = gzip.compress(unit * 200_000, 9, mtime=0)
    packed = (gzip.compress(HEAD, mtime=0) + member * (256 * 1024 // len(member) + 1))[: 256 * 1024]
    unpacked = []

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        unpacked.append(line_read := original(self, size))
        return line_read

    original = gzip.GzipFile.readline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gzip.GzipFile, "readline", counted)
        with pytest.raises(InvalidInputError, match="unpacks to more lines than it has bytes"):
            read(written(tmp_path, packed))
    assert len(unpacked) == len(packed) + 1


def test_a_compressed_file_may_always_have_a_hundred_thousand_lines(tmp_path: Path) -> None:
    packed = gzip.compress(HEAD + b"0,1,1\n" * 99_999, 9, mtime=0)
    assert len(packed) < 10_000
    assert len(read(written(tmp_path, packed)).requests) == 99_999
    with pytest.raises(InvalidInputError, match=r"more lines than it has bytes \(over 100,000\)"):
        read(written(tmp_path, gzip.compress(HEAD + b"0,1,1\n" * 100_000, 9, mtime=0)))


# --- whatever the bytes -------------------------------------------------------------------------------------------


def outcome(path: Path) -> Trace | KvplanError:
    """The trace or the refusal, checked for what both promise."""
    try:
        trace = read(path)
    except KvplanError as error:
        assert_one_line(error)
        return error
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times)
    assert times[0] == 0
    assert all(math.isfinite(arrival_s) for arrival_s in times)
    assert all(request.prompt_tokens > 0 < request.output_tokens for request in trace.requests)
    for request in trace.requests:
        assert len(request.prefix_ids) * (trace.prefix_block or 0) < request.prompt_tokens + (trace.prefix_block or 1)
    return trace


JUNK = (
    b"\0", b"\xff", b"NaN", b'"', b"[", b"]", b"{", b"}", b"1e999", b",", b"\n", b"-", b"9" * 25, b"null", b"\r", b"\\",
    b"\xef\xbb\xbf", b"\x1f\x8b", b"\xed\xa0\x80", b"true", b"0", b" ", b":", b"hash_ids", b"2023-11-16 18:15:46+09:00",
)  # fmt: skip


@given(data=st.data())
def test_a_file_changed_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    for _ in range(data.draw(st.integers(1, 3))):
        offset, cut = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 12))
        content = content[:offset] + data.draw(st.sampled_from(JUNK) | st.binary(max_size=4)) + content[offset + cut :]
    if data.draw(st.booleans()):
        content = gzip.compress(content, mtime=0)[: data.draw(st.integers(2, 400))]
    outcome(written(tmp_path_factory.getbasetemp(), content, "changed"))


@given(values=st.dictionaries(
    st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "chat_id", "block_size", "input_lens"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 2000) | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
))  # fmt: skip
def test_any_value_of_json_in_any_key_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    outcome(written(tmp_path_factory.getbasetemp(), line() + line(**values), "second"))
    outcome(written(tmp_path_factory.getbasetemp(), line(**values) + line(), "first"))


QUARTER_MIB = 2**18


@pytest.mark.parametrize(
    "unit",
    [b"\n", b",", b'"', b"[", b"{", b'{"a":', b"9", b"\r\n", b"1,1\n", b"a", b'""', b"\\", b'{"a":[', b" ", b"{}\n"],
)
@pytest.mark.parametrize("head", [b"", HEAD, line(), b"{\n", b'{"x": '])
def test_a_quarter_mebibyte_of_one_thing_is_refused(tmp_path: Path, head: bytes, unit: bytes) -> None:
    content = head + unit * (QUARTER_MIB // len(unit))
    result = outcome(written(tmp_path, content))
    assert isinstance(result, KvplanError) or (head == line() and not unit.strip())  # one request, then blanks


# --- writing ------------------------------------------------------------------------------------------------------

requests = st.builds(
    TraceRequest,
    st.integers(0, 10**9).map(lambda micros: micros / 10**6),
    st.integers(1, 3000),
    st.integers(1, 500),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """By arrival, the first at 0; with ids of whole prompts, of beginnings, or none."""
    block = draw(st.sampled_from([None, 16, 100, 512]))
    drawn = []
    for request in draw(st.lists(requests, min_size=1, max_size=6)):
        runs = 0 if block is None else draw(st.integers(0, -(-request.prompt_tokens // block)))
        ids = draw(st.lists(st.integers(0, 5), min_size=runs, max_size=runs))
        drawn.append(TraceRequest(request.arrival_s, request.prompt_tokens, request.output_tokens, tuple(ids)))
    drawn.sort(key=lambda request: request.arrival_s)
    start = drawn[0].arrival_s
    moved = [
        TraceRequest(
            round(request.arrival_s - start, 6), request.prompt_tokens, request.output_tokens, request.prefix_ids
        )
        for request in drawn
    ]
    return Trace(tuple(moved), "", block if any(request.prefix_ids for request in moved) else None, draw(st.booleans()))


def same(trace: Trace, *, with_ids: bool) -> tuple[Any, ...]:
    times = [round(request.arrival_s, 6) if trace.has_arrivals else 0.0 for request in trace.requests]
    lengths = [(request.prompt_tokens, request.output_tokens) for request in trace.requests]
    ids = [request.prefix_ids for request in trace.requests] if with_ids else None
    return times, lengths, ids, trace.prefix_block if with_ids else None, trace.has_arrivals


@given(traces())
def test_what_is_written_reads_as_it_was(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    folder = tmp_path_factory.getbasetemp()
    as_csv = read(written(folder, csv_text(trace).encode(), "w.csv"))
    as_json = read(written(folder, jsonl_text(trace).encode(), "w.jsonl"))
    assert same(as_csv, with_ids=False) == same(trace, with_ids=False)
    assert same(as_json, with_ids=True) == same(trace, with_ids=True)


def test_mooncakes_form_is_written_as_mooncake_writes_it(tmp_path: Path) -> None:
    lines = jsonl_text(read(written(tmp_path, MOONCAKE))).splitlines()
    assert [json.loads(text) for text in lines] == [
        {"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [46]},
        {"timestamp": 4314.579, "input_length": 396, "output_length": 109, "hash_ids": [46]},
    ]


# --- statistics ---------------------------------------------------------------------------------------------------


def test_arrivals_by_hand() -> None:
    # Gaps 1, 1, 58, 30: mean 22.5, variance (21.5^2 * 2 + 35.5^2 + 7.5^2) / 4 = 560.25.
    stats = figures.arrival_stats([10.0, 11.0, 12.0, 70.0, 100.0])
    assert stats.span_s == 90
    assert stats.rate_per_s == 4 / 90
    assert stats.interarrival_cv == pytest.approx(math.sqrt(560.25) / 22.5)
    assert stats.peak_minute_per_s == 3 / 60  # 10 to 70 s holds three, 70 itself begins the next
    assert stats.peak_second == 1
    assert figures.arrival_stats([0.0, 0.0]) == figures.ArrivalStats(0.0, None, None, None, 2)


def test_lengths_by_nearest_rank() -> None:
    stats = figures.length_stats(list(range(1, 201)))
    assert stats == figures.LengthStats(100.5, 100, 180, 198, 200)
    assert figures.length_stats([7]) == figures.LengthStats(7, 7, 7, 7, 7)


def test_rank_correlation_by_hand() -> None:
    # Squared rank differences 1 + 1 + 1 + 1 + 0: 1 - 6 * 4 / (5 * 24).
    assert figures.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    # Ranks 0.5, 0.5, 2 against 0, 1, 2: covariance 1.5, variances 1.5 and 2.
    assert figures.rank_correlation([1, 1, 2], [10, 20, 30]) == pytest.approx(1.5 / math.sqrt(3))
    assert figures.rank_correlation([5, 5, 5], [1, 2, 3]) is None


def chain(prompt: int, *ids: int) -> TraceRequest:
    return TraceRequest(0.0, prompt, 1, ids)


def test_prefix_reuse_by_hand() -> None:
    # Runs of 10: "1 2 3(5)" again and longer, then "9 2": its 2 stands behind another run, so nothing is found.
    requests = [chain(25, 1, 2, 3), chain(25, 1, 2, 3), chain(40, 1, 2, 4), chain(20, 9, 2)]
    stats = figures.prefix_stats(requests, 10)
    assert stats.repeated == (25 + 20) / 110  # all of the second, two runs of the third
    assert stats.distinct_tokens == 60  # 1, 1-2, 1-2-3, 1-2-4, 9, 9-2
    assert stats.curve == ((10, 20 / 110), (40, 45 / 110))  # one run held: the first


def by_brute_force(requests: tuple[TraceRequest, ...], block: int, size: int) -> int:
    """Tokens found again: whole beginnings as keys, each stamped with its last use, the oldest stamp leaves."""
    last_use: dict[tuple[int, ...], tuple[int, int]] = {}
    tokens = 0
    for number, request in enumerate(requests):
        beginnings = [request.prefix_ids[:depth] for depth in range(1, len(request.prefix_ids) + 1)]
        runs = next((depth for depth, key in enumerate(beginnings) if key not in last_use), len(beginnings))
        tokens += min(runs * block, request.prompt_tokens)
        last_use |= {key: (number, -len(key)) for key in beginnings}
        while len(last_use) > size:
            del last_use[min(last_use, key=lambda key: last_use[key])]
    return tokens


id_chains = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=25)


@given(id_chains, st.integers(1, 12))
def test_prefix_reuse_by_brute_force(chains: list[list[int]], size: int) -> None:
    requests = tuple(chain(10 * len(ids) + 3, *ids) for ids in chains)
    hits = figures.found_again(requests, figures.prefix_chains(requests), 10, size)
    assert hits == by_brute_force(requests, 10, size)


@given(id_chains)
def test_a_larger_cache_never_finds_less(chains: list[list[int]]) -> None:
    requests = tuple(chain(10 * len(ids) + 3, *ids) for ids in chains)
    numbered = figures.prefix_chains(requests)
    hits = [figures.found_again(requests, numbered, 10, size) for size in range(1, 40)]
    assert hits == sorted(hits)


# --- parts --------------------------------------------------------------------------------------------------------


def regular(number: int, ids: Callable[[int], tuple[int, ...]] = lambda index: ()) -> Trace:
    """A request per second; ids by its index."""
    even_requests = tuple(TraceRequest(float(index), 100 + index, 1, ids(index)) for index in range(number))
    return Trace(even_requests, "regular", 10 if any(request.prefix_ids for request in even_requests) else None)


def test_a_span_keeps_gaps_and_order() -> None:
    part = span_of(regular(100), 10, 20)
    assert [request.prompt_tokens for request in part.requests] == list(range(120, 130))
    assert [request.arrival_s for request in part.requests] == list(range(10))


@given(st.integers(0, 1000), st.integers(1, 99))
def test_a_span_drawn_by_a_seed_lies_within_the_trace(seed: int, length: int) -> None:
    part = span_of(regular(100), length, seed=seed)
    assert part == span_of(regular(100), length, seed=seed)
    assert len(part.requests) in (length, length + 1)  # a start drawn on a second has one more


def test_thinning_keeps_times_and_as_many_as_asked() -> None:
    trace = regular(1000)
    part = thinned(trace, 100, seed=3)
    indices = [request.prompt_tokens - 100 for request in part.requests]  # the index, which is the second
    assert len(indices) == 100
    assert indices == sorted(set(indices))
    assert [request.arrival_s for request in part.requests] == [index - indices[0] for index in indices]
    assert part != thinned(trace, 100, seed=4)
    assert share_of(trace, 0.1, seed=3) == part
    assert len(share_of(regular(3), 0.01).requests) == 1


def test_requests_that_share_a_rare_run_stay_together() -> None:
    # Conversations of five turns, all begun by the same system prompt 7.
    trace = regular(500, lambda index: (7, 1000 + index // 5, 9000 + index))
    part = thinned(trace, 100)
    turns: dict[int, int] = {}
    for request in part.requests:
        turns[request.prefix_ids[1]] = turns.get(request.prefix_ids[1], 0) + 1
    assert set(turns.values()) == {5}
    assert len(turns) == 20


def test_a_run_that_many_share_makes_no_family() -> None:
    assert len(set(families(regular(500, lambda index: (7,)).requests))) == 500
    assert len(set(families(regular(500, lambda index: (7, index // 10)).requests))) == 50
    assert len(set(families(regular(20, lambda index: (7,)).requests))) == 1  # twenty at most are one


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (lambda: span_of(regular(10), 60), r"--span 60s is more than the trace has \(9 s\)"),
        (lambda: span_of(regular(10), 0.5, 3.2), "no request came from 3.2 s to 3.7 s"),
        (lambda: span_of(regular(10), 5, 100), "no request came"),
        (lambda: thinned(regular(10), 11), "--num-requests 11: the trace has 10 requests"),
        (lambda: span_of(Trace(regular(3).requests, "lengths.csv", has_arrivals=False), 1), "has no arrival times"),
    ],
)
def test_a_part_that_is_not_there_is_refused(part: Callable[[], Trace], complaint: str) -> None:
    with pytest.raises((UsageError, InvalidInputError), match=complaint) as error:
        part()
    assert_one_line(error.value)


# --- published traces ---------------------------------------------------------------------------------------------


@needs_oracle_data
@pytest.mark.parametrize("name", ["conv", "synth"])
def test_prefix_reuse_of_a_published_trace_by_brute_force(name: str) -> None:
    trace = read(DATA / "traces" / f"mooncake_{name}_first400.jsonl")
    numbered = figures.prefix_chains(trace.requests)
    assert (len(trace.requests), trace.prefix_block) == (400, 512)
    for size in (64, 10**6):
        hits = figures.found_again(trace.requests, numbered, 512, size)
        assert hits == by_brute_force(trace.requests, 512, size)


@needs_oracle_data
def test_published_rows_are_read_whole() -> None:
    # NOTICE.txt: rows with 600 s <= t < 900 s, the first 400 lines, every 50th row.
    folder = DATA / "traces"
    for name in ("code", "conv"):
        path = folder / f"azure2023_{name}_300s.csv"
        trace = read(path)
        assert len(trace.requests) == len(path.read_text().splitlines()) - 1
        assert 290 < trace.span_s < 300
    assert read(folder / "mooncake_conv_first400.jsonl").span_s == 141  # 141000 ms in its last line
    assert not read(folder / "arxiv_summ_every50th.csv").has_arrivals
