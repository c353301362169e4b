"""The atlas: each page's document is the command line's, nothing is written twice, every link leads to a page, and a
reader finds a pair in two clicks.
"""

import csv
import gzip
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvplan.report import atlas, proof
from tests.support.browser import needs_browser
from tests.support.cli import Run
from tests.support.cli import run as run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

MODELS = "llama-3.1-8b,llama-3.1-8b-awq,gpt-oss-120b,bge-m3,qwen2.5-0.5b"
GPUS = "t4,rtx-4090,h100-80g,mi300x"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvplan.cli.main import main

    folder = tmp_path_factory.mktemp("atlas") / "site"
    words = ["--models", MODELS, "--gpus", GPUS, "--jobs", "1", "-q", "--url", "https://example.org/a"]
    assert main(["atlas", *words, "--prices", "examples/prices.yaml", "-o", str(folder)]) == 0
    return folder


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_pair_has_a_page_and_a_document(site: Path) -> None:
    expected = {f"models/{model}/{gpu}" for model in MODELS.split(",") for gpu in GPUS.split(",")}
    for suffix in (".html", ".json.gz"):
        written = {str(path.relative_to(site))[: -len(suffix)] for path in site.glob(f"models/*/*{suffix}")}
        assert (
            written - {f"models/{model}/{name}" for model in MODELS.split(",") for name in ("index", "explorer")}
            == expected
        )


@pytest.mark.parametrize("pair", ["llama-3.1-8b/t4", "gpt-oss-120b/h100-80g", "bge-m3/mi300x", "qwen2.5-0.5b/rtx-4090"])
def test_a_pages_document_is_what_the_command_prints_byte_for_byte(site: Path, run: Run, pair: str) -> None:
    page = (site / "models" / f"{pair}.html").read_text(encoding="utf-8")
    (command,) = re.findall(r"kvplan sweep [^<]*--format json", page)
    printed = run(*shlex.split(command)[1:]).out
    assert gzip.decompress((site / "models" / f"{pair}.json.gz").read_bytes()).decode() == printed
    json.loads(printed)


def test_what_no_server_plans_has_a_page_with_the_error_that_is_printed(run: Run) -> None:
    pair = atlas.pair_of("jamba-v0.1", "t4", [4096], engines=["sglang"])
    ran = run(*shlex.split(pair.command)[1:])
    assert pair.document == ran.out
    if not pair.rows:
        assert ran.code != 0
        assert pair.answer.startswith("jamba-v0.1 on t4 cannot be planned: ")


def test_documents_of_models_and_gpus_are_the_commands(site: Path, run: Run) -> None:
    commands = {
        "models.json": "models",
        "gpus.json": "gpus",
        "models/bge-m3/model.json": "models bge-m3",
        "gpus/t4.json": "gpus t4",
    }
    for name, words in commands.items():
        assert (site / name).read_text(encoding="utf-8") == run(*words.split(), "--format", "json").out, name


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if name in ("href", "src") and value]


def links_of(page: Path) -> list[str]:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links.hrefs


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        for href in links_of(page):
            if href.startswith(("https://", "data:")):
                continue
            assert (page.parent / href.partition("#")[0]).resolve().exists(), (page, href)
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img)[^>]*https?:", text), page


def test_the_sitemap_has_every_page(site: Path) -> None:
    text = (site / "sitemap.xml").read_text(encoding="utf-8")
    places = {place.removeprefix("https://example.org/a/") for place in re.findall(r"<loc>(.*?)</loc>", text)}
    assert places == {str(page.relative_to(site)) for page in pages(site)}


def test_a_second_run_writes_nothing_and_a_smaller_one_removes_what_left(site: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    words = ["atlas", "--gpus", "t4,l4", "--jobs", "1", "-q", "-o", folder, "--models"]
    assert run(*words, "qwen2.5-0.5b,bge-m3").code == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert run(*words, "qwen2.5-0.5b,bge-m3").out.endswith(" 0 of them written\n")
    same = {path for path in before if path.stat().st_mtime_ns == before[path]}
    assert {path.name for path in set(before) - same} <= {"atlas.json"}
    assert run(*words, "bge-m3").code == 0
    assert not (folder / "models" / "qwen2.5-0.5b" / "t4.html").exists()
    assert (folder / "models" / "bge-m3" / "t4.html").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--models", "nosuch"], "model 'nosuch': not in the catalog"),
        (["--gpus", "nosuch"], "gpu 'nosuch': not in the catalog"),
        (["--models", "bge-m3,"], "--models contains an empty name"),
        (["--url", "example.org"], "--url example.org is no address"),
        (["-o", "taken"], "contains files that kvplan did not write"),
        (["-o", "file"], "is not a folder"),
    ],
)
def test_what_cannot_be_written_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    ran = run("atlas", "-q", *words)
    assert ran.code == 2
    assert problem in ran.err
    assert not (tmp_path / "site").exists()


def test_a_pair_that_was_logged_says_by_how_much_it_was_missed(site: Path) -> None:
    """The row of llm-d planner's document on Llama 3.1 8B: 51.38 GiB logged."""
    page = (site / "models/llama-3.1-8b/h100-80g.html").read_text(encoding="utf-8")
    rows = [row for row in proof.proofs() if (row.model, row.gpu) == ("llama-3.1-8b", "h100-80g")]
    assert {row.logged for row in rows} >= {"51.38"}
    assert "1 server of this pair has been logged" in page
    assert all(f'<a href="{row.url}">' in page for row in rows)
    unlogged = (site / "models/llama-3.1-8b/mi300x.html").read_text(encoding="utf-8")
    assert "No server of this pair has been logged." in unlogged


def test_published_figures_are_those_of_the_facts(site: Path) -> None:
    with Path("tests/facts/published_figures.csv").open(encoding="utf-8", newline="") as file:
        facts = list(csv.DictReader(file))
    published = [row for row in proof.proofs() if row.kind == "published"]
    assert [(row.source, row.logged, row.theirs) for row in published] == [
        (row["source"], row["logged"], row["theirs"]) for row in facts
    ]
    page = (site / "figures.html").read_text(encoding="utf-8")
    assert "626,949" in page
    assert "972,134 (+55.1%)" in page


def test_errors_of_a_proof_are_shares_of_what_was_logged() -> None:
    row = proof.Proof("published", "", "s", "", "m", "m", "g", "v", 1, "tokens", "200", "190", "300", "X", "")
    assert row.error == pytest.approx(-0.05)
    assert row.their_error == pytest.approx(0.5)


SEARCHES = {
    "llama 8b 4090": "models/llama-3.1-8b/rtx-4090.html",
    "4090 gpt-oss": "models/gpt-oss-120b/rtx-4090.html",
    "openai/gpt-oss-120b": "models/gpt-oss-120b/index.html",
    "h100": "gpus/h100-80g.html",
}


@needs_browser
def test_a_search_finds_a_page_on_its_first_line_and_no_page_is_wider_than_the_window(
    site: Path, browser: "Browser"
) -> None:
    for width in (390, 1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))  # noqa: B023 -- called in this turn
        page.on("pageerror", lambda error: problems.append(str(error)))  # noqa: B023
        page.goto((site / "index.html").as_uri())
        for words, target in SEARCHES.items():
            page.fill("#box", words)
            assert page.get_attribute("#hits a >> nth=0", "href") == target
        for name in ("index.html", "figures.html", "models/gpt-oss-120b/h100-80g.html", "gpus/t4.html"):
            page.goto((site / name).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == width, name
            assert page.evaluate("getComputedStyle(document.querySelector('main')).maxWidth") != "none", name
        assert problems == []
        page.close()
