"""`kvplan trace` as a user runs it: what is printed, written, warned of and refused."""

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from kvplan.cli.app import application
from kvplan.cli.profile_load import trace_requests
from kvplan.workloads.profiles import profile_names
from tests.core.test_light import HEAVY
from tests.support.cli import Run, refused, run
from tests.support.readme_blocks import ROOT

__all__ = ["run"]

EXAMPLES = ROOT / "examples"
COMMANDS = ("stats", "profiles", "convert", "sample")
ROWS = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n30,200,20\n90,300,30\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return path


def prefixed(folder: Path) -> Path:
    """Three requests of two runs of 512; the second repeats the first, the third its first run."""
    path = folder / "prefixed.jsonl"
    rows = [(0, [1, 2]), (60_000, [1, 2]), (120_000, [1, 3])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": arrival_s, "input_length": 1000, "output_length": 5, "hash_ids": ids}) + "\n"
            for arrival_s, ids in rows
        )
    )
    return path


# --- stats --------------------------------------------------------------------------------------------------------


def test_stats_of_a_file(run: Run, trace: Path) -> None:
    ran = run("trace", "stats", trace)
    assert (ran.code, ran.err) == (0, "")
    # Gaps 30 and 60: mean 45, deviation 15.
    assert ran.out.splitlines()[1:] == [
        "",
        "requests  3",
        "span      90.0 s",
        "rate      0.02222 requests per second, 0.0333 in the busiest minute, 1 in the busiest second",
        "gaps      interarrival CV 0.33 (1 in a Poisson process, more in bursts)",
        "",
        "tokens   mean  p50  p90  p99  most",
        "prompt  200.0  200  300  300   300",
        "output   20.0   20   30   30    30",
        "",
        "prompt and output  rank correlation 1.00",
    ]


def test_stats_of_prefixes(run: Run, tmp_path: Path) -> None:
    ran = run("trace", "stats", prefixed(tmp_path))
    # Found again: 1,000 of the second, 512 of the third, of 3,000. One run held: the first one, twice.
    assert ran.out.splitlines()[-4:] == [
        "Prompt tokens found again in a prefix cache",
        "tokens held  runs of 512  found again",
        "        512            1        34.1%",
        " everything            3        50.4%",
    ]


def test_stats_as_json_follow_the_schema(run: Run, trace: Path, tmp_path: Path) -> None:
    schema = run("schema", "trace").json
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in (trace, prefixed(tmp_path), EXAMPLES / "trace.jsonl"):
        document = run("trace", "stats", path, "--format", "json").json
        jsonschema.Draft202012Validator(schema).validate(document)
    assert document["num_requests"] == 200
    assert document["prefix"]["block"] == 900


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_as_json_follows_the_schema(run: Run, name: str) -> None:
    schema = run("schema", "workload").json
    document = run("trace", "stats", name, "--format", "json").json
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["name"] == name


def test_stats_as_csv_and_markdown_hold_every_figure_of_the_json(run: Run, tmp_path: Path) -> None:
    path = prefixed(tmp_path)
    document = run("trace", "stats", path, "--format", "json").json
    rows = dict(csv.reader(io.StringIO(run("trace", "stats", path, "--format", "csv").out)))
    assert rows["prefix.curve.0.tokens"] == str(document["prefix"]["curve"][0]["tokens"])
    assert rows["arrivals.span_s"] == str(document["arrivals"]["span_s"])
    assert rows["rank_correlation"] == ""  # outputs never change
    markdown = run("trace", "stats", path, "--format", "markdown").out
    assert markdown.startswith("| figure | value |\n| --- | ---: |\n")
    assert len(markdown.splitlines()) == len(rows) + 1  # the header is one of the rows, the rule is not


def test_a_file_of_lengths_says_that_it_has_no_arrivals(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n5,6\n")
    assert "arrivals  none in the file" in run("trace", "stats", path).out
    assert run("trace", "stats", path, "--format", "json").json["arrivals"] is None


def test_what_the_reader_changed_is_warned_of(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n9,1,1\n4,2,2\n5,3,0\n")
    ran = run("trace", "stats", path, "--format", "json")
    assert ran.code == 0
    assert [line.rpartition(f"{path}: ")[2] for line in ran.err.splitlines()] == ran.json["notes"]
    assert len(ran.json["notes"]) == 2
    assert ran.err.startswith("kvplan: warning: ")


def test_a_profile_shows_its_source_and_what_is_not_reproduced(run: Run) -> None:
    out = run("trace", "stats", "mooncake-conv").out
    assert "kvcache-ai/Mooncake@3b5a594" in out
    assert "Apache-2.0" in out
    assert "replay it for that" in out
    assert "assumed" in run("trace", "stats", "clinical-notes").out.splitlines()[0]


def test_a_file_with_the_name_of_a_profile_is_not_passed_over_in_silence(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    trace.rename("rag")
    ran = run("trace", "stats", "rag")
    assert ran.err == "kvplan: note: rag is read as the profile of that name; write ./rag for the file\n"
    assert "requests  3\n" in run("trace", "stats", "./rag").out


@pytest.mark.parametrize("format", ["table", "csv", "json", "markdown"])
def test_profiles_lists_them_all(run: Run, format: str) -> None:
    ran = run("trace", "profiles", "--format", format)
    assert ran.code == 0
    assert all(name in ran.out for name in profile_names())
    if format == "json":
        assert [row["name"] for row in ran.json["workloads"]] == profile_names()
    if format == "table":
        assert max(map(len, ran.out.splitlines())) <= 120


# --- convert ------------------------------------------------------------------------------------------------------


def test_convert_to_json_lines_and_back(run: Run, trace: Path, tmp_path: Path) -> None:
    lines, back = tmp_path / "o.jsonl.gz", tmp_path / "o.csv"
    ran = run("trace", "convert", trace, "-o", lines)
    assert (ran.code, ran.out, ran.err) == (0, "", f"kvplan: note: {lines}: 3 requests written\n")
    assert json.loads(gzip.decompress(lines.read_bytes()).splitlines()[1]) == {
        "timestamp": 30000, "input_length": 200, "output_length": 20,
    }  # fmt: skip
    assert run("trace", "convert", lines, "-o", back).code == 0
    assert back.read_text() == ROWS


def test_a_csv_without_prefix_ids_is_warned_of(run: Run, tmp_path: Path) -> None:
    ran = run("trace", "convert", prefixed(tmp_path), "-o", tmp_path / "o.csv")
    assert ran.code == 0
    assert "prefix ids cannot be stored in CSV; write .jsonl" in ran.err


@pytest.mark.parametrize(
    ("example", "argv"),
    [
        ("trace.csv", ("azure-2023-conv", "--rate", "2", "--num-requests", "300", "--seed", "1")),
        ("trace.jsonl", ("clinical-notes", "--rate", "0.5", "--num-requests", "200", "--seed", "1")),
    ],
)
def test_the_examples_are_drawn_from_profiles(run: Run, tmp_path: Path, example: str, argv: tuple[str, ...]) -> None:
    assert run("trace", "convert", *argv, "-o", tmp_path / example).code == 0
    assert (tmp_path / example).read_bytes() == (EXAMPLES / example).read_bytes()


def test_nothing_is_overwritten_unless_said(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.csv"
    out.write_text("old")
    assert "exists; name another file" in refused(run("trace", "convert", trace, "-o", out))
    assert "exists" in refused(run("trace", "sample", trace, "--share", "50%", "-o", out))
    assert out.read_text() == "old"
    assert run("trace", "convert", trace, "-o", out, "--force").code == 0
    assert out.read_text() == ROWS
    assert run("trace", "convert", out, "-o", out, "--force").code == 0  # onto itself
    assert out.read_text() == ROWS


def test_a_refusal_leaves_the_old_file_and_no_other(run: Run, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.csv", tmp_path / "o.csv"
    bad.write_text(ROWS + "x,1,1\n")
    out.write_text("old")
    assert "line 5: not a time" in refused(run("trace", "convert", bad, "-o", out, "--force"))
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "o.csv"]


@pytest.mark.parametrize("name", ["o.txt", "o", "o.gz", "o.csv.bz2", "o.json", "nowhere/o.csv"])
def test_a_path_that_cannot_be_written_is_refused_before_reading(run: Run, tmp_path: Path, name: str) -> None:
    assert "--output" in refused(run("trace", "convert", tmp_path / "absent.csv", "-o", tmp_path / name))
    assert "--output" in refused(run("trace", "sample", tmp_path / "a.csv", "--span", "1s", "-o", tmp_path / name))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("arxiv-summarization",), "no rate is published; add one: --rate 2"),
        (("rag", "--rate", "0"), "--rate: not requests per second"),
        (("rag", "--num-requests", "0"), "--num-requests must be at least 1"),
        (("rag", "--num-requests", "6000000"), "--num-requests must be at most 5,000,000"),
        (("rag", "--seed", "-1"), "--seed must be at least 0 ('-1')"),
        (("rag", "--shared-prefix", "x"), "--shared-prefix: not a token count"),
        (("ragg",), "'ragg': no such trace file or profile; did you mean rag?"),
        (("",), "no such trace file or profile"),
        (("no/such.csv",), "no/such.csv: no such file"),
        ((".",), "is a directory"),
        (("TRACE", "--rate", "2"), "--rate works with a profile"),
        (("TRACE", "--num-requests", "2"), "`kvplan trace sample` takes a part"),
        (("TRACE", "--shared-prefix", "2"), "--shared-prefix works with a profile"),
    ],
)
def test_what_convert_refuses(run: Run, trace: Path, tmp_path: Path, argv: tuple[str, ...], complaint: str) -> None:
    words = [str(trace) if word == "TRACE" else word for word in argv]
    assert complaint in refused(run("trace", "convert", *words, "-o", tmp_path / "o.csv"))
    assert not (tmp_path / "o.csv").exists()


def test_names_are_printed_safely(run: Run, tmp_path: Path) -> None:
    assert "\\x1b" in refused(run("trace", "stats", f"{tmp_path}/\x1b[31m.csv"))
    assert "\\x1b" in refused(run("trace", "stats", "\x1b[31m"))
    assert "\\x00" in refused(run("trace", "stats", "a\0b"))
    assert "\\x00" in refused(run("trace", "stats", "./a\0b"))
    assert "the name is too long" in refused(run("trace", "stats", "./" + "a" * 5000))
    assert "no such trace file or profile" in refused(run("trace", "stats", "a" * 5000))
    assert "cannot be written" in refused(run("trace", "convert", "rag", "-o", "a" * 5000 + ".csv"))


# --- sample -------------------------------------------------------------------------------------------------------


def test_a_span_is_kept_as_it_was(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.csv"
    assert run("trace", "sample", trace, "--span", "70s", "--start", "20s", "-o", out).code == 0
    assert out.read_text() == "arrival_s,prompt_tokens,output_tokens\n0,200,20\n"  # 30 s; 90 s is past 20 to 90
    assert run("trace", "sample", trace, "--span", "1.5m", "--start", "0s", "-o", tmp_path / "p.csv").code == 0
    assert (tmp_path / "p.csv").read_text() == ROWS.replace("90,300,30\n", "")


def test_a_number_or_a_share_is_drawn(run: Run, tmp_path: Path) -> None:
    for argv, number in ((("--num-requests", "50"), 50), (("--share", "10%"), 30), (("--share", "0.5"), 150)):
        out = tmp_path / f"{number}.jsonl"
        ran = run("trace", "sample", EXAMPLES / "trace.csv", *argv, "--seed", "9", "-o", out)
        assert ran.err == f"kvplan: note: {out}: {number} requests written\n"
        assert len(out.read_text().splitlines()) == number


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "--num-requests, --share and --span: none is given; give one of them"),
        (("--share", "10%", "--span", "1m"), "more than one is given"),
        (("--share", "0"), "--share must be greater than 0"),
        (("--share", "110%"), "--share must be greater than 0"),
        (("--span", "2h"), "--span 7200s is more than the trace has (90 s)"),
        (("--span", "0s"), "--span: less than"),
        (("--span", "1s", "--start", "5s"), "no request came from 5 s to 6 s"),
        (("--share", "10%", "--start", "5s"), "--start needs --span"),
        (("--num-requests", "4"), "--num-requests 4: the trace has 3 requests"),
    ],
)
def test_what_sample_refuses(run: Run, trace: Path, tmp_path: Path, argv: tuple[str, ...], complaint: str) -> None:
    assert complaint in refused(run("trace", "sample", trace, *argv, "-o", tmp_path / "o.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


# --- the group ----------------------------------------------------------------------------------------------------


def test_every_subcommand_and_option_has_a_help_text(run: Run) -> None:
    group = application().commands["trace"]
    assert tuple(group.commands) == COMMANDS
    for name, command in group.commands.items():
        assert run("trace", name, "--help").out.startswith(f"Usage: kvplan trace {name}")
        assert command.help
        assert all(param.help for param in command.params), name


def test_a_wrong_or_missing_subcommand_is_refused_with_the_near_one(run: Run) -> None:
    assert refused(run("trace", "stat")) == "stat: no such command; did you mean stats?"
    assert refused(run("trace")) == "COMMAND: missing; see `kvplan trace --help`"
    assert "FILE|PROFILE: missing" in refused(run("trace", "stats"))
    assert "--output: missing" in refused(run("trace", "convert", "rag"))


def test_stats_load_no_heavy_library() -> None:
    code = (
        "import sys\nfrom kvplan.cli.main import main\n"
        f"code = main(['trace', 'stats', {str(EXAMPLES / 'trace.jsonl')!r}])\n"
        "print(code, *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *HEAVY, "rich"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr == "0\n"
    assert "requests  200" in done.stdout


def test_other_commands_read_what_the_reader_reads(run: Run, tmp_path: Path) -> None:
    ran = run("estimate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--lengths", prefixed(tmp_path))
    assert ran.code == 0
    assert "prefixed.jsonl (3 requests)" in ran.out


def test_profile_replays_what_the_reader_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = trace_requests(prefixed(tmp_path))
    assert [(request.arrival_s, request.prompt_tokens, request.output_tokens) for request in requests] == [
        (0.0, 1000, 5), (60.0, 1000, 5), (120.0, 1000, 5),
    ]  # fmt: skip
    assert "its prefix ids are not replayed" in capsys.readouterr().err
