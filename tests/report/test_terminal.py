"""Every command's answer fits the terminal it is read in, says the same there as in a pipe, and passes one guard."""

import csv
import io
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvplan.cli.main import main
from kvplan.core.table import Table, as_text, markdown_text, one_line, wrapped
from kvplan.core.units import UNIT_GAP
from kvplan.report.lines import COMMAND, Paragraph, laid_out, line, plain
from tests.support.cli import Run, config_file, run
from tests.support.policies import policy
from tests.support.recorded_runs import cpu_run, rewritten
from tests.support.server_logs import LLAMA_3090

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GPU = ("--gpu", "h200", "--ctx", "4k")
WIDTHS = (80, 110, 200)
QUANTITY = r"[0-9](?:[0-9.,]*[0-9])?(?:" + UNIT_GAP + r"[^\s,;)]+)?"  # a number and its unit


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(width: int, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of so many columns shows, without colors."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm-256color")
        patch.setattr(sys, "stdout", terminal)
        assert main(argv) in (0, 1)
    return re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())


def commands(folder: Path) -> dict[str, list[str]]:
    """A command for each answer that is shown."""
    recorded = cpu_run(folder / "run")
    log = folder / "server.log"
    log.write_text(LLAMA_3090, encoding="utf-8")
    return {
        "estimate": ["estimate", "llama-3.1-8b", *GPU],
        "estimate, explained": ["estimate", "gpt-oss-20b", *GPU, "--explain"],
        "estimate, too small": ["estimate", "llama-3.1-8b", "--gpu", "l4", "--ctx", "128k"],
        "estimate, a share": ["estimate", "qwen3-0.6b", *GPU, "--gpu-memory-utilization", "0.3"],
        "estimate, contexts": ["estimate", "llama-3.1-8b", "--gpu", "h200", "--ctx", "4k,8k,128k"],
        "estimate, GPUs": ["estimate", "llama-3.1-70b", "--gpu", "l4,a100-80g,h200", "--ctx", "8k"],
        "sweep": ["sweep", "qwen3-32b", "--gpu", "l40s,h200", "--ctx", "4k,8k", "--tensor-parallel-size", "1,2",
                  "--kv-cache-dtype", "auto,fp8", "--quantization", "none,fp8"],
        "recommend": ["recommend", "llama-3.1-70b", "--ctx", "8k", "--users", "50"],
        "recommend, fixed": ["recommend", "llama-3.1-70b", "--gpu", "h200", "--ctx", "8k", "--users", "500"],
        "diff": ["diff", "llama-3.1-8b", "qwen3-8b", *GPU],
        "upgrade": ["upgrade", "qwen3-8b", "--gpu", "l40s", "--ctx", "32k", "--from", "vllm@0.11", "--to", "vllm@0.33"],
        "simulate": ["simulate", "llama-3.1-8b", *GPU, "--trace", str(EXAMPLES / "trace.csv"), "--baseline",
                     "contiguous"],
        "check": ["check", str(policy(folder, rules="fits: true, min_users: 100000"))],
        "trace stats": ["trace", "stats", str(EXAMPLES / "trace.jsonl")],
        "trace stats of a profile": ["trace", "stats", "azure-2023-code"],
        "trace profiles": ["trace", "profiles"],
        "models": ["models", "--family", "qwen3"],
        "models NAME": ["models", "llama-3.1-8b"],
        "gpus": ["gpus"],
        "gpus NAME": ["gpus", "h100-80g"],
        "reconcile": ["reconcile", str(recorded)],
        "reconcile --log": ["reconcile", "--log", str(log)],
        "why": ["why", str(EXAMPLES / "vllm-did-not-start.log")],
        "doctor": ["doctor"],
    }  # fmt: skip


NAMES = [
    "estimate", "estimate, explained", "estimate, too small", "estimate, a share", "estimate, contexts",
    "estimate, GPUs", "sweep", "recommend", "recommend, fixed", "diff", "upgrade", "simulate", "check", "trace stats",
    "trace stats of a profile", "trace profiles", "models", "models NAME", "gpus", "gpus NAME", "reconcile",
    "reconcile --log", "why", "doctor",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_fits_the_terminal_and_says_all_that_a_pipe_is_told(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = commands(tmp_path)[name]
    piped = run(*argv)
    with monkeypatch.context() as patch:
        patch.setattr("kvplan.report.lines.SCREEN", 10_000)
        patch.setattr("kvplan.report.console.SCREEN", 10_000)
        quantities = set(re.findall(QUANTITY, run(*argv).out))
    assert set(re.findall(QUANTITY, piped.out)) == quantities or name == "doctor"
    for width in WIDTHS:
        screen_text = on_terminal(width, argv, monkeypatch)
        lines = screen_text.splitlines()
        assert [text for text in lines if len(text) > width] == []
        # Of what a pipe is told nothing is missing; paths and long names may be divided, keys stand again.
        left_out = Counter(words(piped.out)) - Counter(words(screen_text)) if name != "doctor" else Counter[str]()
        assert all(len(word) > 24 for word in left_out), left_out
        assert set(re.findall(QUANTITY, screen_text)) == quantities or name == "doctor"


def words(text: str) -> list[str]:
    return [word for word in re.sub(r"[█▏▎▍▌▋▊▉]+", " ", text).split() if word != "\\"]


def test_a_pipe_gets_lines_as_long_as_they_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ran = run("estimate", "llama-3.1-8b", *GPU)
    assert max(map(len, ran.out.splitlines())) > 100


# --- a table ----------------------------------------------------------------------------------------------------------

WIDE = Table.of(
    ("model", "KV per token", "weights", "why"),
    [["a", "128 KiB", "14.96 GiB", "as the server logged it"], ["bb", "64 KiB", "7.48 GiB", ""]],
    left=(0, 3),
)


def test_a_table_that_is_too_wide_has_more_lines() -> None:
    texts = [text for _, text in as_text(WIDE, 40)]
    assert [text.rstrip() for text in texts] == [
        "model   KV per    weights  why",
        "         token",
        "a      128 KiB  14.96 GiB  as the server",
        "                           logged it",
        "bb      64 KiB   7.48 GiB",
    ]


def test_a_table_that_is_too_wide_even_so_comes_in_parts() -> None:
    texts = [text.rstrip() for _, text in as_text(WIDE, 24)]
    assert "" in texts
    assert sum(text.startswith("bb") for text in texts) == texts.count("") + 1  # the key stands in each part
    assert max(map(len, texts)) <= 24


@pytest.mark.parametrize("width", range(1, 60))
def test_no_line_of_a_table_is_wider_than_asked_and_no_word_is_lost(width: int) -> None:
    text = "one request of 32,768 tokens needs 4.00 GiB, is-a-word-of-more-than-the-width-of-this"
    assert max(map(len, wrapped(text, width))) <= width
    assert "".join(wrapped(text, width)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("width", range(20, 60))
@pytest.mark.parametrize(
    "text", ["54.13 GiB of 1,234 GiB/s", "a:54.13 GiB", "outside --gpu-memory-utilization:1,254.13 MiB"]
)
def test_no_line_ends_in_a_number_or_before_its_unit(text: str, width: int) -> None:
    for lines in (wrapped(text, width), [plain(part) for part in laid_out([line(text)], width)]):
        assert re.findall(QUANTITY, " | ".join(lines)) == re.findall(QUANTITY, text)


# --- a line -----------------------------------------------------------------------------------------------------------


def test_a_line_goes_on_below_its_text_and_keeps_its_styles() -> None:
    styled = (("Limit", "bold"), ("  one request needs 4.00 GiB of KV cache", ""))
    folded = list(laid_out([styled], 24))
    assert [plain(part) for part in folded] == ["Limit  one request needs", "       4.00 GiB of KV", "       cache"]
    assert ("Limit", "bold") in folded[0]


def test_a_command_is_still_one_command() -> None:
    command = "vllm serve some/model --max-model-len 4096 --override '{\"a\": [1, 2]}' --enforce-eager"
    for width in (30, 48, 80):
        screen_text = "\n".join(plain(part) for part in laid_out([line(f"  {command}", COMMAND)], width))
        assert shlex.split(screen_text.replace("\\\n", "")) == shlex.split(command)
        assert "\n" in screen_text or width == 80


def test_a_paragraph_is_never_wider_than_prose() -> None:
    paragraph = Paragraph("  a  ", "word " * 60)
    for width, widest in ((None, 100), (200, 100), (60, 60)):
        assert max(len(plain(part)) for part in laid_out([paragraph], width)) <= widest
    short = [plain(part) for part in laid_out([Paragraph("  ", "word " * 60, most=2)], None)]
    assert len(short) == 2
    assert short[-1].endswith(" ...")


# --- the guard --------------------------------------------------------------------------------------------------------

# A name may be so: a formula, a terminal's title and bell, colors, a line of its own, markup, a mention, a table's bar.
NASTY = "=cmd|'C'!A0\x1b]0;pwned\x07\x1b[31m\r\n@SUM(1)\"<b>*x*[y](z)`|"
MARKUP = re.compile(r"(?<!\\)(?:<b>|\*x\*|\[y\]\(|`\|)")


def hostile(folder: Path) -> dict[str, list[str]]:
    """Commands that show a text which is somebody else's."""
    name = NASTY.replace("/", "")
    config_file(folder / name)
    (folder / f"{name}.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n", encoding="utf-8")
    recorded = rewritten(cpu_run(folder / "run"), environment={"python": NASTY, "commit": NASTY, "platform": NASTY})
    log = folder / f"{name}.log"
    log.write_text(f"{LLAMA_3090}{NASTY}\n", encoding="utf-8")
    return {
        "estimate": ["estimate", name, *GPU],
        "estimate, explained": ["estimate", name, *GPU, "--explain"],
        "estimate, GPUs": ["estimate", name, "--gpu", "l4,h200", "--ctx", "4k"],
        "sweep": ["sweep", name, *GPU],
        "recommend": ["recommend", name, "--gpus", "h200", "--ctx", "4k", "--users", "3"],
        "diff": ["diff", name, "llama-3.1-8b", *GPU],
        "upgrade": ["upgrade", f"./{name}", *GPU, "--from", "vllm@0.11", "--to", "vllm@0.33"],
        "simulate": ["simulate", name, *GPU, "--trace", f"{name}.csv"],
        "trace stats": ["trace", "stats", f"{name}.csv"],
        "reconcile": ["reconcile", str(recorded)],
        "reconcile --log": ["reconcile", "--log", str(log), "--gpu", "rtx-3090"],
    }


@pytest.mark.parametrize("name", [
    "estimate", "estimate, explained", "estimate, GPUs", "sweep", "recommend", "diff", "upgrade", "simulate",
    "trace stats", "reconcile", "reconcile --log",
])  # fmt: skip
def test_a_hostile_name_is_text_in_every_format(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = hostile(tmp_path)[name]
    for format in ("table", "json", "csv", "markdown"):
        ran = run(*argv, "--format", format)
        assert ran.code == 0, ran.err
        assert all(text.isprintable() for text in ran.out.split("\n")), format
        if format == "json":
            json.loads(ran.out)
        if format == "csv":
            cells = [cell for row in csv.reader(io.StringIO(ran.out)) for cell in row]
            assert not [cell for cell in cells if cell.startswith(("=", "@"))]
        if format == "markdown":
            outside = re.sub(r"^```\n.*?\n```$|<summary>[^<]*</summary>", "", ran.out, flags=re.MULTILINE | re.DOTALL)
            assert not MARKUP.search(outside), outside
    screen_text = on_terminal(80, argv, monkeypatch)
    assert all(text.isprintable() for text in screen_text.split("\n"))


def test_the_guard_of_each_format() -> None:
    assert one_line("a\x1b[31m\n") == "a\\x1b[31m\\n"
    assert markdown_text("<b> @x *y* $z$ ~a~ a@b") == "\\<b\\> @&#8203;x \\*y\\* \\$z\\$ \\~a\\~ a@b"
    assert [plain(part) for part in laid_out([line("x\x07"), Table.of(("h",), [["\x1b"]])])] == ["x\\x07", "h", "\\x1b"]
