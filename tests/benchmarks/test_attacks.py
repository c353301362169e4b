"""A share of every attack in benchmarks/attacks, the same on every run: nothing breaks, and what would is seen."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.attacks import adapters, answers, documents, pages, processes, tier_files, users
from benchmarks.attacks.outcomes import Outcome, Tally
from tests.support.browser import browser as browser
from tests.support.browser import needs_browser
from tests.support.cli import Run, refused
from tests.support.cli import run as run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and ptrace")


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(0, "fits\n", ""), None),
        (Outcome(2, "", "kvplan: error: x\n"), None),
        (Outcome(2, "", "kvplan: error: x\nkvplan: error: x\n"), "2 lines of error, 1 of them different"),
        (Outcome(2, "", "kvplan: error: x\nkvplan: error: y\n"), None),
        (Outcome(3, "", ""), "0 lines of error"),
        (Outcome(None, "", ""), "did not end"),
        (Outcome(70, "", "kvplan: internal error"), "exit code 70"),
        (Outcome(0, "\x1b[31m", ""), "control character"),
        (Outcome(0, "\u202e", ""), "control character"),
        (Outcome(0, "", "", 2 << 20), "took 2,048 MiB"),
    ],
)
def test_what_breaks_a_command_is_seen(outcome: Outcome, problem: str | None) -> None:
    fault = outcome.fault()
    assert fault is None if problem is None else fault is not None and problem in fault


def test_a_valid_command_that_is_refused_has_broken(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    tally.judge("hostile", "a", Outcome(2, "", "kvplan: error: x\n"))
    assert tally.closing() == 0
    tally.judge("valid", "b", Outcome(2, "", "kvplan: error: x\n"))
    assert tally.closing() == 1
    assert "2 tried (1 hostile, 1 valid), 2 refused, 1 broke\nvalid, b: refused" in capsys.readouterr().out


def test_adapters_break_nothing() -> None:
    tally = adapters.attack(count=6, seed=3)
    assert tally.broken == []
    assert (tally.counts["valid"], tally.counts["hostile"]) == (3, 3)


@pytest.mark.full
def test_every_hostile_adapter_breaks_nothing() -> None:
    tally = adapters.attack(count=112, seed=6)
    assert tally.broken == []
    assert tally.counts["refused"] > 30


@needs_linux
def test_processes_break_nothing() -> None:
    tally = processes.attack(count=16, seed=5)
    assert tally.broken == []
    assert 0 < tally.counts["refused"] < 8


@needs_linux
def test_a_fault_that_a_process_has_twice_is_one_line_about_the_process(run: Run, tmp_path: Path) -> None:
    words = ["vllm", "serve", "Qwen/Qwen3-0.6B", "", "", "--max-model-len", "4096"]
    with processes.stopped(words, {}) as pid:
        message = refused(run("check", "--init", "--gpu", "h200", "--from-pid", str(pid), "-o", tmp_path / "p.yaml"))
    assert message == f"--from-pid {pid} has an argument without a flag (''); quote values that contain spaces"


@needs_linux
def test_every_fault_of_a_process_is_about_the_process(run: Run, tmp_path: Path) -> None:
    words = ["vllm", "serve", "Qwen/Qwen3-0.6B", "stray", "other", "--max-model-len", "4096"]
    with processes.stopped(words, {}) as pid:
        ran = run("check", "--init", "--gpu", "h200", "--from-pid", str(pid), "-o", tmp_path / "p.yaml")
    assert [error.startswith(f"kvplan: error: --from-pid {pid} ") for error in ran.errors] == [True, True]


def test_files_of_a_tier_break_nothing() -> None:
    tally = tier_files.attack(seed=5)
    assert tally.broken == []
    assert tally.counts["hostile"] > 40
    assert tally.counts["refused"] == 2  # locks that are a folder or a link; nothing else keeps a tier from its start


def test_another_payload_is_seen() -> None:
    class Forged:
        def read(self, key: object) -> bytes:
            return b"y" * tier_files.CHUNK

    problem = tier_files.used(Forged(), random.Random(0), (tier_files.PAYLOAD, None))  # type: ignore[arg-type]
    assert problem == "read b'yyyyyyyy'"


def test_hubs_break_nothing() -> None:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    modes = ("ok", "index: ok", "half", "etag of a path", "redirect to another host")
    words = [sys.executable, "-m", "benchmarks.attacks.hub", "--modes", ",".join(modes), "--repeats", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.stdout.startswith("5 tried (2 valid, 3 hostile), "), done
    assert done.stdout.endswith(", 0 broke\n")
    assert done.returncode == 0


def test_documents_are_what_their_schemas_say() -> None:
    tally = documents.attack(count=8, seed=5, models=("deepseek-v3",))
    assert tally.broken == []
    assert tally.counts["of the catalog"] == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"schema": "kvplan/gpus@1", "gpus": NaN}', "NaN is no JSON"),
        ('{"schema": "kvplan/gpus@1", "gpus": 5}', "$"),
        ("[]", "no document"),
    ],
)
def test_what_is_no_document_is_seen(text: str, problem: str) -> None:
    fault = documents.schema_fault(Outcome(0, text, ""))
    assert fault is not None
    assert problem in fault


def test_formats_carry_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tally, compared = answers.attack(count=3, seed=2)
    assert tally.broken == []
    assert compared.counts["CSV cells"] > 100
    assert compared.counts["figures of text"] > 5


def test_another_number_in_a_format_is_seen() -> None:
    document = {
        "schema": "kvplan/plan@1", "memory": {"weights": 1 << 30}, "kv": {"num_blocks": 5, "tokens": 80},
        "concurrency": {"users": 7, "max": 7.5},
    }  # fmt: skip
    assert [value for _, *value in answers.of_csv(document, "memory.weights,kv.tokens\n1073741824,81\n")] == [
        ["1073741824", 1 << 30], ["81", 80],
    ]  # fmt: skip
    assert not answers.is_same("81", 80)
    text = (
        "a: 8 users at 10 tokens\n\nWhere the memory goes\n  weights   1.01 GiB\n\n  pool  5 blocks of 16, 80 tokens\n"
    )
    figures = {line.split()[0]: (figure, value) for line, figure, value, _ in answers.of_text(document, text)}
    assert figures == {"a:": (8.0, 7), "weights": (1.01, 1.0), "pool": (80.0, 80)}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("answered", "refused"),
    [
        (users.ANSWERED[1:2], users.REFUSED[2:3]),
        pytest.param(users.ANSWERED, users.REFUSED, marks=pytest.mark.full),
    ],
)
def test_a_user_who_owns_nothing_breaks_nothing(
    answered: tuple[tuple[str, ...], ...], refused: tuple[tuple[str, ...], ...]
) -> None:
    tally = users.attack(answered, refused)
    assert tally.broken == []
    assert tally.counts["refused"] == 3 * len(refused)


@needs_browser
@pytest.mark.full
def test_pages_of_hostile_names_break_nothing(browser: "Browser") -> None:
    tally = pages.attack(lambda: browser, 2)
    assert tally.broken == []
    assert tally.counts["hostile"] == 2 * len(pages.KINDS)


@needs_browser
def test_a_plan_of_a_hostile_name_breaks_nothing(browser: "Browser") -> None:
    tally = pages.attack(lambda: browser, 1, ("plan",))
    assert tally.broken == []
    assert (tally.counts["valid"], tally.counts["hostile"]) == (1, 1)


@needs_browser
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (f"<title>x</title><script>{pages.RUN}</script>", "a script ran"),
        ("<script>x(</script>", "the console has"),
        ("<iframe src='other.html'></iframe>", "it loads"),
        ("<a href='javascript:x'>x</a>", "it links to"),
        ("<svg onload='0'></svg>", "elements of a name"),
        ("<button onclick=\"document.title='RAN'\">x</button>", "a script ran"),
    ],
)
def test_a_page_that_breaks_is_seen(browser: "Browser", tmp_path: Path, body: str, problem: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html>{body}", encoding="utf-8")
    (tmp_path / "other.html").write_text("", encoding="utf-8")
    fault = pages.fault_of(browser, path)
    assert fault is not None
    assert fault.startswith(problem)
