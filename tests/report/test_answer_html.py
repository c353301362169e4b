"""Any answer as a page: the answer first, the figures of its own Markdown, and nothing that is loaded or run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.table import Table, markdown_text
from kvplan.report.answer_html import html_of, markdown_html, plain, renderer
from kvplan.report.drawing import Bar, Bars, Piece
from kvplan.report.page import code, folded, page
from tests.support.browser import SCHEMES, SIZES, Open, colors, complaints, contrast, is_dark, measured, needs_browser
from tests.support.browser import open_page as open_page
from tests.support.cli import Run
from tests.support.cli import run as run
from tests.support.parts import paired

ROOT = Path(__file__).parents[2]
LLAMA = ("llama-3.1-8b", "--ctx", "32k")
# What is asked, and what the page answers first.
COMMANDS = {
    "estimate": (("estimate", *LLAMA, "--gpu", "h100-80g"), "llama-3.1-8b on h100-80g: 13 users at 32,768 tokens each"),
    "several": (("estimate", *LLAMA, "--gpu", "h100-80g,rtx-4090"),
                "2 of 2 fit: 13 users (h100-80g), 1 user (rtx"),
    "sweep": (("sweep", "qwen3-8b", "--gpu", "l40s,h100-80g", "--ctx", "8k,32k"), "4 of 4 combinations fit"),
    "recommend": (("recommend", "qwen3-8b", "--users", "100", "--ctx", "8k", "--gpus", "l40s,h100-80g"), "100 users"),
    "simulate": (("simulate", "qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--profile", "azure-2023-conv", "--rate", "2",
                  "--num-requests", "50"), "With 2 requests/s"),
    "diff": (("diff", "qwen3-8b", "qwen3-8b-fp8", "--gpu", "l40s", "--ctx", "8k"), "26 users instead of 21: "),
    "why": (("why", "examples/vllm-did-not-start.log", "--gpu", "a100-80g"), "vLLM"),
    "reconcile": (("reconcile", "reports/cpu-2core"), "on cpu: predicted against measured, the weights are exact"),
    "log": (("reconcile", "--log", "examples/vllm-0.10.log", "--gpu", "a100-80g"), "KV cache: predicted 10.79 GiB"),
    "check": (("check", "examples/kvplan.policy.yaml", "--today", "2026-11-22"), "failed"),
    "gpus": (("gpus",), " gpus"),
    "timed": (("recommend", "qwen3-8b", "--rate", "4", "--ctx", "8k", "--profile", "sharegpt", "--slo", "ttft.p90=2s",
               "--gpus", "l40s", "--num-requests", "20"), "Take 1 x l40s"),
    "pack": (("pack", "--gpu", "l40s", "--server", "qwen3-8b --users 2", "--server", "qwen3-0.6b --users 4"),
             "l40s"),
    "upgrade": (("upgrade", "qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--from", "vllm@0.24"), "qwen3-8b"),
}  # fmt: skip
# The release at the foot, where it is not the newest; `reconcile` reads a run of kvplan's own engine.
SERVERS = {
    "log": "Planned for vllm@0.10. ",
    "why": "Planned for vllm@0.23. ",
    "upgrade": "Planned for vllm@0.24 and vllm@0.33. ",
    "reconcile": "",
    "gpus": "",
}
DRAWN = (
    "estimate",
    "several",
    "sweep",
    "recommend",
    "simulate",
    "diff",
    "why",
    "reconcile",
    "log",
    "check",
    "gpus",
    "timed",
)


class Page(HTMLParser):
    """Text of a page by element, and what it would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.answer = ""
        self.details = 0
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.details += tag == "details"
        self.loads += [tag] if tag in ("script", "iframe", "object", "img") else []
        self.loads += [str(value) for name, value in attrs if name in ("src", "srcset") or name.startswith("on")]
        if tag not in ("meta", "link", "br", "hr"):
            self.stack.append((tag, values))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.stack]
        if "td" in tags or "th" in tags:
            self.cells[-1] += data
        if any(values.get("class") == "answer" for _, values in self.stack):
            self.answer += data


@pytest.fixture
def pages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page of a command, and what it prints beside it as Markdown."""
    monkeypatch.chdir(ROOT)

    def written(name: str) -> tuple[Path, str]:
        path = tmp_path / f"{name}.html"
        words = COMMANDS[name][0]
        ran = run(*words, "--report", path, "--format", "markdown")
        assert ran.code in (0, 1), ran
        return path, ran.out

    return written


def words(cell: str) -> str:
    """The text of a cell of a Markdown table."""
    (inline,) = renderer().parseInline(cell.strip())
    return " ".join("".join(child.content for child in inline.children or []).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_answers_first_and_shows_every_cell_of_the_markdown(name: str, pages: Any) -> None:
    path, markdown = pages(name)
    text = path.read_text(encoding="utf-8")
    parser = Page(text)
    assert COMMANDS[name][1] in parser.answer.replace("\xa0", " ")
    assert parser.loads == []
    assert "default-src 'none'" in text
    assert f"kvplan {' '.join(COMMANDS[name][0][:1])}" in text
    foot = text[text.index("<footer>") :]
    assert f"</p>{SERVERS.get(name, 'Planned for vllm@0.33. ')}Written by kvplan" in foot
    rows = [line for line in markdown.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]
    expected = [words(cell) for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1] if cell.strip()]
    cells = [" ".join(cell.split()) for cell in parser.cells]
    assert len(expected) > 3 or name == "why"  # which has no table
    assert [cell for cell in expected if cell not in cells] == []
    assert ('class="bars"' in text or "<svg" in text) == (name in DRAWN)


@pytest.mark.parametrize("name", ["models", "gpus"])
def test_columns_are_named_as_on_the_screen(name: str, run: Run) -> None:
    """A screen's first line is its heads; a page had the fields of the JSON there."""
    heads = run(name, "--format", "markdown").out.splitlines()[2].strip("| ").split(" | ")
    assert heads == [head.strip() for head in re.split(" {2,}", run(name).out.splitlines()[0]) if head.strip()]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    """Two bars on one scale: 3 + 1 of 4, and 2 of 4, with a line at 3."""
    first = Bar("a", (Piece("x", 3, "3 GiB", "weights"), Piece("y", 1, "1 GiB", "kv_cache")), "4", mark=3)
    text = markdown_html("Answer", "", [Bars("Sizes", (first, Bar("b", (Piece("z", 2, "2"),))))])
    assert re.findall(r'<i class="(\w+)" style="width: ([\d.]+)%', text) == [
        ("weights", "75.0000"), ("kv_cache", "25.0000"), ("plain", "50.0000"),
    ]  # fmt: skip
    assert 'style="left: 75.0000%"' in text


EVIL = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "<details open>")


@pytest.mark.parametrize("evil", EVIL)
def test_foreign_text_is_text(evil: str) -> None:
    """A name from a config, a log or a policy goes through the same guard as in Markdown."""
    table = Table.of(("name", "value"), [[evil, evil]], left=2)
    blocks = [markdown_text(evil), table, code(evil), *folded(evil, ["inside"])]
    parser = Page(markdown_html(markdown_text(evil), page(blocks)))
    assert parser.loads == []
    assert parser.answer == evil
    assert parser.details == 1  # the page's own, and no other
    assert evil in parser.cells
    assert "javascript:" not in re.sub(r"\[x\]\(javascript[^<]*", "", html_of(page(blocks)))


def test_a_page_needs_its_libraries(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.cli.drawing.find_spec", lambda name: None)
    ran = run("estimate", *LLAMA, "--gpu", "h100-80g", "--report", tmp_path / "x.html")
    assert ran.code == 3
    assert "jinja2 and markdown_it is not installed" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_kvplans_own_and_may_be_written_again(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    for context in ("32k", "16k"):
        assert run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", context, "--report", path).code == 0
    assert "at 16,384 tokens each" in path.read_text()
    path.write_text("<html>mine</html>")
    assert run("estimate", *LLAMA, "--gpu", "h100-80g", "--report", path).code == 2
    assert path.read_text() == "<html>mine</html>"


@needs_browser
@pytest.mark.full
@pytest.mark.parametrize(("size", "scheme"), paired(SIZES, SCHEMES))
def test_pages_fit_a_phone_and_a_desktop(size: str, scheme: str, pages: Any, open_page: Open) -> None:
    for name in ("estimate", "several", "simulate", "check", "why"):
        opened = open_page(pages(name)[0], size, scheme)
        seen = measured(opened)
        assert complaints(opened) == []
        assert seen["loads"] == []
        assert seen["width"] == seen["window"] == SIZES[size][0], name
        assert min(seen["texts"]) >= 12  # pixels
        assert bool(seen["drawn"]) == (name == "simulate")
        assert min(seen["drawn"], default=13) > 12.99
        pairs = colors(opened, "body", "h1", "footer")
        assert min(contrast(*pair) for pair in pairs) >= 4.5  # WCAG AA for text
        assert is_dark(pairs[0]) == (scheme == "dark")


def test_the_foot_names_the_command_as_it_was_typed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a b.html"
    words = ("estimate", *LLAMA, "--gpu", "h100-80g", "--report", str(path))
    assert run(*words).code == 0
    foot = re.search(r"<p>Command: <code>(.*?)</code>", path.read_text())
    assert foot
    assert foot[1] == f"kvplan {' '.join(words[:-1])} &#x27;{path}&#x27;"


def test_why_has_every_format(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    document = json.loads(run("why", "examples/vllm-did-not-start.log", "--format", "json").out)
    rows = run("why", "examples/vllm-did-not-start.log", "--format", "csv").out.splitlines()
    assert len(rows) == 1 + len(document["cures"])
    assert document["summary"] in plain(run("why", "examples/vllm-did-not-start.log", "--format", "markdown").out)
