"""The formats of a judged policy, each read back by a reader that nobody here wrote, or by the format's own rules."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import JUnitXml, TestCase, TestSuite
from junitparser.junitparser import Failure, Skipped
from markdown_it import MarkdownIt  # rich brings it
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as SarifLog

from kvplan.core.units import GIB
from kvplan.policy.result import RULES, CheckResult, Figures, Finding, Outcome, TargetResult
from kvplan.report import github
from kvplan.report.github import append_summary, github_lines, step_summary
from kvplan.report.junit import junit_xml
from kvplan.report.policy_text import markdown, marker
from kvplan.report.sarif import sarif

NASTY = (
    "a|b `c` <script>x</script> &amp; [d](e) *f* \\ %0A 100% :, ]]> \x1b[31m\n## no\r @someone ~~g~~ \ud800 \ufffe é"
)


def finding(outcome: Outcome, rule: str = "min_concurrency", target: str = "chat", **changes: Any) -> Finding:
    usual = Finding(
        RULES[rule][0], rule, target, outcome, "9.1 full-length requests < 12", None, 12, 7, 12, 9.1, "requests"
    )
    return replace(usual, **changes)


def figures(**changes: Any) -> Figures:
    usual = Figures(
        fits=True, weights=16 * GIB, kv_cache=40 * GIB, kv_bytes_per_token=131_072, kv_tokens=327_680,
        concurrency=10.0, headroom=6 * GIB, lora=0,
    )  # fmt: skip
    return replace(usual, **changes)


def checked(*findings: Finding, path: str = "kvplan.policy.yaml", **changes: Any) -> CheckResult:
    """A result with one target for each name among the findings."""
    names = list(dict.fromkeys(item.target for item in findings))
    targets = [
        TargetResult(
            name, 3, f"llama on a100-80g: {name}", tuple(f for f in findings if f.target == name), figures(), None
        )
        for name in names
    ]
    return replace(CheckResult(path, tuple(targets), ()), **changes)


ONE_OF_EACH = checked(
    finding("pass", "fits"),
    finding("warn", "min_headroom", fix="lower --gpu-memory-utilization"),
    finding("fail", fix="use --kv-cache-dtype fp8 (gives 18.2)"),
    finding("skip", "max_preemption_rate", "batch", message="no workload is named", actual=None, limit=0.01),
    finding("warn", "max_weights", "batch", waiver="until the H200 move, INFRA-12"),
    warnings=("waiver batch/max_lora_bytes: expired on 2026-10-01",),
)
EVERYTHING_NASTY = checked(
    *(finding(o, "fits", NASTY, message=NASTY, fix=NASTY, waiver=NASTY) for o in ("fail", "warn", "skip", "pass")),
    warnings=(NASTY,),
)

# --- GitHub annotations -----------------------------------------------------------------------------------------------


def read_command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it: `::name key=value,key=value::data`, percent signs undone last."""
    head, data = re.fullmatch(r"::([^:]*)::(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr] # an annotation
    name, _, pairs = head.partition(" ")
    properties = dict(pair.split("=", 1) for pair in pairs.split(","))

    def undone(text: str, signs: Mapping[str, str]) -> str:
        for code, sign in signs.items():
            text = text.replace(code, sign)
        return text

    data_signs = {"%0D": "\r", "%0A": "\n", "%25": "%"}
    return (
        name,
        {key: undone(value, {"%3A": ":", "%2C": ",", **data_signs}) for key, value in properties.items()},
        undone(data, data_signs),
    )


def test_an_annotation_stands_on_the_line_of_its_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lines = github_lines(ONE_OF_EACH)
    assert lines[0] == (
        "::error file=kvplan.policy.yaml,line=12,col=7,title=KVP012 min_concurrency chat::"
        "9.1 full-length requests < 12; use --kv-cache-dtype fp8 (gives 18.2)"
    )
    assert [line.split(" ")[0] for line in lines[:-1]] == ["::error", "::warning", "::warning", "::notice"]
    assert "(waived: until the H200 move, INFRA-12)" in lines[2]
    assert lines[-1] == "kvplan check: 1 failed, 2 warned, 1 skipped, 1 passed"


def test_what_would_end_a_command_is_escaped_and_read_back_whole() -> None:
    text = "50% of 100%25, a:b\r\n::error::c"
    result = checked(finding("fail", target=text, message=text, fix=None), path="odd, 5%:x\n.yaml")
    (line, _) = github_lines(result)
    assert "\n" not in line
    assert "\r" not in line
    assert read_command(line) == (
        "error",
        {"file": "odd, 5%:x\n.yaml", "line": "12", "col": "7", "title": f"KVP012 min_concurrency {text}"},
        text,
    )


def test_control_characters_of_a_policy_do_not_reach_the_log() -> None:
    for line in github_lines(EVERYTHING_NASTY):
        assert line.isprintable()


@pytest.mark.parametrize(("failing", "warning", "num_shown", "more"), [(3, 7, 10, 0), (3, 8, 9, 2), (25, 4, 9, 20)])
def test_at_most_ten_annotations_are_shown_the_worst_and_then_how_many_more(
    failing: int, warning: int, num_shown: int, more: int
) -> None:
    many = [finding("warn", target=f"w{i}", line=i + 1) for i in range(warning)]
    lines = github_lines(checked(*many, *(finding("fail", target=f"f{i}", line=i + 1) for i in range(failing))))
    commands = [line for line in lines if line.startswith("::")]
    levels = [line.split(" ")[0] for line in commands[:num_shown]]
    assert levels == (["::error"] * failing + ["::warning"] * warning)[:num_shown]
    assert len(commands) == 10
    if more:
        assert commands[-1] == (
            f"::notice title=kvplan check::{more} more: the full table is in the summary of this step"
        )


def test_what_is_the_same_for_several_targets_is_one_annotation_and_counts_as_many() -> None:
    rule = "baseline.weights"
    same = [finding("skip", rule, f"t{i}", message="there is no baseline") for i in range(3)]
    lines = github_lines(checked(*same, finding("skip", rule, "t3", message="the baseline lacks it")))
    assert [line.partition("::")[2].partition("title=")[2] for line in lines[:-1]] == [
        "KVP101 baseline.weights t0%2C t1%2C t2::there is no baseline",
        "KVP101 baseline.weights t3::the baseline lacks it",
    ]  # fmt: skip
    fails = [finding("fail", target=f"f{i}", line=i + 1) for i in range(10)]
    assert "::notice title=kvplan check::4 more: " in "\n".join(github_lines(checked(*fails, *same)))


def test_passing_rules_need_no_annotation() -> None:
    assert github_lines(checked(finding("pass"))) == ["kvplan check: 1 passed"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("kvplan.policy.yaml", "deploy/kvplan.policy.yaml"),
        ("../kvplan.policy.yaml", "kvplan.policy.yaml"),
        ("./sub/../kvplan.policy.yaml", "deploy/kvplan.policy.yaml"),
        ("../../elsewhere.yaml", None),
    ],
)
def test_a_file_is_named_from_the_root_of_the_repository(
    path: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "repository" / "deploy"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(here.parent))
    assert github.repository_path(path) == named


def test_a_workspace_that_is_a_link_is_the_repository_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "link"))
    assert github.repository_path("kvplan.policy.yaml") == "kvplan.policy.yaml"


# --- the summary of a step --------------------------------------------------------------------------------------------


def test_the_summary_is_appended_to_what_other_steps_wrote(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("# earlier\n", encoding="utf-8")
    assert append_summary(str(file), step_summary(ONE_OF_EACH)) is None
    assert file.read_text(encoding="utf-8") == f"# earlier\n{step_summary(ONE_OF_EACH)}\n"


def test_a_summary_that_cannot_be_written_is_a_remark_not_a_failure(tmp_path: Path) -> None:
    assert "cannot be written" in (append_summary(str(tmp_path), "x") or "")
    assert "cannot be written" in (append_summary(str(tmp_path / "none" / "summary.md"), "x") or "")
    assert "cannot be written" in (append_summary("a\0b", "x") or "")


def test_a_summary_never_grows_beyond_what_github_takes(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * ((1 << 20) - 10))
    assert append_summary(str(file), "y" * 9) is None  # with its line end exactly 1 MiB
    assert "larger than GitHub accepts" in (append_summary(str(file), "") or "")
    assert file.stat().st_size == 1 << 20


# --- Markdown ---------------------------------------------------------------------------------------------------------


class Cells(HTMLParser):
    """The tags of a page, and the text of its table cells row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def rendered(text: str) -> Cells:
    page = Cells()
    page.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))
    return page


def test_the_comment_begins_with_its_mark_and_says_the_worst_first() -> None:
    lines = markdown(ONE_OF_EACH).splitlines()
    assert lines[0] == marker("kvplan.policy.yaml") == "<!-- kvplan-check: kvplan.policy.yaml -->"
    assert lines[1] == "### kvplan check: 1 failed, 2 warned, 1 skipped, 1 passed"
    rows = rendered("\n".join(lines)).rows
    assert rows[0] == ["", "rule", "target", "result", "fix"]
    assert rows[1] == [
        "fail", "KVP012 min_concurrency", "chat", "9.1 full-length requests < 12",
        "use --kv-cache-dtype fp8 (gives 18.2)",
    ]  # fmt: skip
    assert [row[0] for row in rows[1:5]] == ["fail", "warn", "warn", "skip"]
    assert rows[3][3] == "9.1 full-length requests < 12 (waived: until the H200 move, INFRA-12)"


def test_passing_rules_are_folded_and_render_as_a_table_inside() -> None:
    text = markdown(ONE_OF_EACH)
    folded = text[text.index("<details>") :]
    assert folded.startswith("<details>\n<summary>1 passed</summary>\n\n")
    assert folded.endswith("\n\n</details>\n")
    assert rendered(folded).rows[1] == ["KVP001 fits", "chat", "9.1 full-length requests < 12"]


def test_each_target_shows_its_change_since_the_baseline() -> None:
    target = TargetResult(
        "chat", 3, "llama on a100-80g", (finding("pass"),),
        figures(), figures(weights=15 * GIB + GIB // 2, kv_tokens=409_600, concurrency=12.5, headroom=0),
    )  # fmt: skip
    rows = rendered(markdown(CheckResult("p.yaml", (target,), ()))).rows
    assert rows[:7] == [
        ["", "now", "baseline", "change"],
        ["weights", "16.00 GiB", "15.50 GiB", "+512 MiB (+3.2%)"],  # 0.5 / 15.5
        ["KV cache", "40.00 GiB", "40.00 GiB", "="],
        ["headroom", "6.00 GiB", "0.00 GiB", "+6 GiB"],  # no share of nothing
        ["KV per token", "128 KiB", "128 KiB", "="],
        ["tokens", "327,680", "409,600", "-81,920 (-20.0%)"],
        ["concurrency", "10.00", "12.50", "-2.50 (-20.0%)"],
    ]


def test_what_is_skipped_for_the_same_reason_is_one_row() -> None:
    rules, targets = ("baseline.weights", "baseline.lora"), ("a", "b", "c")
    skips = [finding("skip", rule, target, message="no baseline") for target in targets for rule in rules]
    skips.append(finding("skip", "baseline.weights", "d", message="no baseline"))
    rows = [row for row in rendered(markdown(checked(*skips))).rows if row[0] == "skip"]
    assert rows == [
        ["skip", "KVP101 baseline.weights, KVP103 baseline.lora", "a, b, c", "no baseline", ""],
        ["skip", "KVP101 baseline.weights", "d", "no baseline", ""],
    ]


def test_a_target_without_a_baseline_or_a_plan_shows_what_there_is() -> None:
    alone = TargetResult("chat", 3, "llama on a100-80g", (finding("pass"),), figures(fits=False, kv_cache=0), None)
    none = TargetResult("runs", 9, "runs/latest", (finding("skip", "max_prediction_error", "runs"),), None, None)
    text = markdown(CheckResult("p.yaml", (alone, none), ()))
    assert "llama on a100-80g: **does not fit**" in text
    assert "#### runs" not in text
    assert ["weights", "16.00 GiB"] in rendered(text).rows


def test_user_text_cannot_break_out_of_its_cell() -> None:
    plain = rendered(markdown(checked(*(finding(o, "fits") for o in ("fail", "warn", "skip", "pass")))))
    page = rendered(markdown(EVERYTHING_NASTY))
    assert [len(row) for row in page.rows] == [len(row) for row in plain.rows]
    assert set(page.tags) - set(plain.tags) <= {"ul", "li"}  # the list of warnings
    # What is shown is what was written, control characters spelled out and a space of no width after the @.
    printed = NASTY.replace("\x1b", r"\x1b").replace("\n", r"\n").replace("\r", r"\r").replace("\ud800", r"\ud800")
    assert page.rows[1][2] == printed.replace("\ufffe", r"\ufffe").replace("@", "@\u200b")


def test_a_path_cannot_end_the_mark() -> None:
    line = marker("a --> <b> é\n.yaml")
    assert re.fullmatch(r"<!-- kvplan-check: ([!-;=?-~]*) -->", line)
    assert unquote(line.split()[2]) == "a --> <b> é\n.yaml"


def test_a_comment_stays_below_githubs_limit_and_says_what_it_leaves_out() -> None:
    many = checked(*(finding("fail", target=f"target-{i}", message="é" * 300, fix="x" * 300) for i in range(500)))
    text = markdown(many)
    assert len(text) < 65_536
    assert len(text.encode()) < 65_536
    rows = [row for row in rendered(text).rows if row[0] == "fail"]
    targets = text.count("\n#### ")
    note = f"*Shortened to GitHub's limit: {500 - len(rows):,} rows and {500 - targets:,} targets not shown; "
    assert text.splitlines()[-1].startswith(note)
    assert len(rows) > 50


def test_a_step_summary_holds_more_than_a_comment() -> None:
    many = checked(*(finding("fail", target=f"target-{i}", message="é" * 300) for i in range(500)))
    text = step_summary(many)
    assert "not shown" not in text
    assert len(text.encode()) <= 1 << 20
    assert step_summary(ONE_OF_EACH) == markdown(ONE_OF_EACH)


# --- JUnit ------------------------------------------------------------------------------------------------------------


def suites_of(text: str) -> list[TestSuite]:
    parsed = JUnitXml.fromstring(text.encode())
    assert isinstance(parsed, JUnitXml)
    return list(parsed)


def test_a_junit_reader_counts_what_was_judged() -> None:
    parsed = JUnitXml.fromstring(junit_xml(ONE_OF_EACH).encode())
    assert (parsed.tests, parsed.failures, parsed.errors, parsed.skipped) == (5, 1, 0, 1)
    suites = suites_of(junit_xml(ONE_OF_EACH))
    assert [(suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) for suite in suites] == [
        ("chat", 3, 1, 0, 0),
        ("batch", 2, 0, 0, 1),
    ]
    for suite in suites:  # the counts that are written are those of the cases
        written = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()  # type: ignore[no-untyped-call] # its author gave it no types
        assert (suite.tests, suite.failures, suite.errors, suite.skipped) == written


def test_a_junit_reader_sees_each_rule_as_a_case() -> None:
    cases = {case.name: case for suite in suites_of(junit_xml(ONE_OF_EACH)) for case in suite}
    assert all(isinstance(case, TestCase) for case in cases.values())
    (failure,) = cases["KVP012 min_concurrency"].result
    assert isinstance(failure, Failure)
    assert (failure.message, failure.type) == ("9.1 full-length requests < 12", "KVP012")
    assert failure.text == (
        "kvplan.policy.yaml:12:7: fail: 9.1 full-length requests < 12\nuse --kv-cache-dtype fp8 (gives 18.2)"
    )
    (skipped,) = cases["KVP009 max_preemption_rate"].result
    assert isinstance(skipped, Skipped)
    assert skipped.message == "no workload is named"
    assert cases["KVP001 fits"].is_passed
    assert cases["KVP001 fits"].classname == "chat"
    warned = cases["KVP006 max_weights"]
    assert warned.is_passed
    assert "waived: until the H200 move, INFRA-12" in (warned.system_out or "")


def test_the_mean_and_the_p99_are_cases_and_alerts_of_their_own_whatever_their_order() -> None:
    both = [finding("fail", "min_users", key=key) for key in ("mean", "p99")]
    (suite,) = suites_of(junit_xml(checked(*both)))
    assert [case.name for case in suite] == ["KVP004 min_users.mean", "KVP004 min_users.p99"]

    def alert(result: CheckResult, index: int) -> str:
        fingerprint: str = read_sarif(result)["runs"][0]["results"][index]["partialFingerprints"]["kvplanTargetRule/v1"]
        return fingerprint

    assert alert(checked(*both), 0) == alert(checked(*reversed(both)), 1) != alert(checked(*both), 1)
    assert "title=KVP004 min_users.p99 chat::" in github_lines(checked(both[1]))[0]


def test_two_findings_of_one_name_are_two_cases() -> None:
    twice = checked(finding("pass", "min_users"), finding("fail", "min_users"))
    (suite,) = suites_of(junit_xml(twice))
    assert [case.name for case in suite] == ["KVP004 min_users", "KVP004 min_users #2"]


def test_what_xml_forbids_is_spelled_out() -> None:
    every = "".join(map(chr, [*range(0x20), 0x7F, *range(0xD800, 0xD804), 0xFFFE, 0xFFFF, 0x10FFFF]))
    result = checked(finding("fail", target=every, message=every, fix=every), finding("warn", waiver=every))
    (first, _) = suites_of(junit_xml(result))
    assert (first.name or "").startswith(r"\x00\x01\x02")
    assert (first.name or "").isprintable()


# --- SARIF ------------------------------------------------------------------------------------------------------------


def read_sarif(result: CheckResult) -> Any:
    """The document through JSON and through models made from the standard's schema, which refuse unknown keys."""
    text = json.dumps(sarif(result), allow_nan=False)
    SarifLog.model_validate_json(text)
    return json.loads(text)


@pytest.mark.parametrize("result", [ONE_OF_EACH, EVERYTHING_NASTY, checked(finding("pass"))])
def test_a_sarif_document_follows_the_standards_schema(result: CheckResult) -> None:
    assert read_sarif(result)["version"] == "2.1.0"


def test_the_sarif_models_refuse_what_the_standard_does() -> None:
    broken = sarif(ONE_OF_EACH)
    broken["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(ValueError, match="level"):
        SarifLog.model_validate_json(json.dumps(broken))


def test_a_result_names_its_rule_its_place_and_its_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (run,) = read_sarif(ONE_OF_EACH)["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [code for code, _ in RULES.values()]
    results = [(row["ruleId"], row["kind"], row["level"]) for row in run["results"]]
    assert results == [
        ("KVP002", "fail", "warning"),
        ("KVP012", "fail", "error"),
        ("KVP009", "open", "none"),  # SARIF 2.1.0, 3.27.10: what is not "fail" has the level "none"
        ("KVP006", "fail", "warning"),
    ]
    for row in run["results"]:
        assert rules[row["ruleIndex"]]["id"] == row["ruleId"]
        (location,) = row["locations"]  # GitHub refuses a result without one
        assert location["physicalLocation"] == {
            "artifactLocation": {"uri": "kvplan.policy.yaml", "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": 12, "startColumn": 7},
        }
    for rule in rules:  # what GitHub's code scanning requires beyond the schema
        assert all(rule[key]["text"] for key in ("shortDescription", "fullDescription", "help"))
    assert run["results"][3]["suppressions"] == [{"kind": "external", "justification": "until the H200 move, INFRA-12"}]
    assert "suppressions" not in run["results"][1]
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"].startswith("waiver batch/")


def test_a_fingerprint_outlives_another_line_and_another_number() -> None:
    def prints(result: CheckResult) -> list[str]:
        return [row["partialFingerprints"]["kvplanTargetRule/v1"] for row in read_sarif(result)["runs"][0]["results"]]

    first = checked(finding("fail"), finding("fail", "fits"), finding("fail", target="b"), finding("fail", target="b"))
    moved = [replace(item, line=90, actual=1.0, message="other", outcome="warn") for item in first.findings]
    assert prints(first) == prints(checked(*moved))
    assert len(set(prints(first))) == 4


def test_a_path_is_a_uri(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)

    def uri(path: str) -> dict[str, str]:
        result = read_sarif(checked(finding("fail"), path=path))["runs"][0]["results"][0]
        location: dict[str, str] = result["locations"][0]["physicalLocation"]["artifactLocation"]
        return location

    assert uri("a b/é#?.yaml") == {"uri": "a%20b/%C3%A9%23%3F.yaml", "uriBaseId": "%SRCROOT%"}
    assert uri("/etc/x y.yaml") == {"uri": "file:///etc/x%20y.yaml"}


# --- all of them ------------------------------------------------------------------------------------------------------


def test_a_result_without_findings_is_written_in_every_format() -> None:
    empty = CheckResult("p.yaml", (TargetResult("chat", 3, "title", (), figures(), None),), ())
    assert "nothing to check" in markdown(empty)
    assert github_lines(empty) == ["kvplan check: nothing to check"]
    assert suites_of(junit_xml(empty))[0].tests == 0
    assert read_sarif(empty)["runs"][0]["results"] == []


anything = st.text(st.characters() | st.sampled_from("|`<>&\\\n\r%:,@*_[]()!~$#\ud800\ufffe\x00\x1b"), max_size=60)


@given(anything.filter(bool), anything, anything, anything, anything.filter(lambda path: "\0" not in path))
def test_any_text_is_written_in_every_format_and_read_back(
    target: str, message: str, fix: str, waiver: str, path: str
) -> None:
    outcomes: tuple[Outcome, ...] = ("fail", "warn", "skip", "pass")
    findings = [finding(outcome, "fits", target, message=message, fix=fix, waiver=waiver) for outcome in outcomes]
    result = checked(*findings, path=path, warnings=(message,))
    (suite,) = suites_of(junit_xml(result))
    assert (suite.tests, suite.failures, suite.skipped) == (4, 1, 1)
    assert len(read_sarif(result)["runs"][0]["results"]) == 3
    lines = github_lines(result)
    assert [line.partition(" ")[0] for line in lines[:-1]] == ["::error", "::warning", "::notice"]
    assert all(line.isprintable() for line in lines)
    page = rendered(markdown(result))
    assert [len(row) for row in page.rows] == [5] * 4 + [2] * 7 + [3] * 2
    assert not set(page.tags) & {"a", "img", "script", "em", "code", "s"}


def test_the_formats_load_no_heavy_library() -> None:
    import subprocess

    code = (
        "import sys, kvplan.report.github, kvplan.report.junit, kvplan.report.sarif\n"
        "print(*sorted({'numpy', 'pandas', 'torch', 'matplotlib', 'jinja2', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.strip() == ""
