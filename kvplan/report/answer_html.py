"""Any answer as one HTML file: the answer, its charts, then its tables; no script, no network."""

import re
from collections.abc import Sequence
from typing import Final

from markdown_it import MarkdownIt

from kvplan.report.drawing import Bars, Figure
from kvplan.report.page import Block, block_text
from kvplan.report.templates import rendered_page, source_of

FOLD: Final = "\ue000"  # a private-use character; escaped in text of unknown origin
FOLDING: Final = re.compile(r"(?:<details>)?(?:<summary>[^<]*</summary>)?|</details>")  # a folding line


def answer_html(blocks: Sequence[Block], figures: Sequence[Figure] = (), servers: Sequence[str] = ()) -> str:
    """Page of an answer whose first block is the answer itself, planned for these servers."""
    first, *others = [block_text(block) for block in blocks]
    return markdown_html(first, "\n\n".join(others), figures, servers)


def markdown_html(answer: str, below: str, figures: Sequence[Figure] = (), servers: Sequence[str] = ()) -> str:
    """Page of an answer and the Markdown below it; foreign text in both is already escaped."""
    return rendered_page(
        "answer.html.jinja",
        servers=servers,
        title=plain(answer),
        own_style=source_of("parts.css") + source_of("answer.css"),
        answer=plain(answer),
        drawings=[(isinstance(figure, Bars), figure) for figure in figures],
        body=html_of(below),
    )


def html_of(text: str) -> str:
    """Convert Markdown to HTML. The only tags allowed are the page's own folding lines; elsewhere tags are text."""
    folds: list[str] = []
    lines, fence = [], ""
    for line in text.split("\n"):
        ticks = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            fence = "" if line == fence else fence
        elif len(ticks) >= 3:
            fence = ticks
        elif line and FOLDING.fullmatch(line):
            folds.append(line)
            lines += ["", f"{FOLD}{len(folds) - 1}{FOLD}", ""]
            continue
        lines.append(line)
    page: str = renderer().render("\n".join(lines))
    for number, tags in enumerate(folds):
        page = page.replace(f"<p>{FOLD}{number}{FOLD}</p>", tags)
    return page.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")


def plain(text: str) -> str:
    """Text of one paragraph of Markdown without markup."""
    tokens = renderer().parse(text)
    children = [child for token in tokens for child in token.children or []]
    return "".join(" " if child.type in ("softbreak", "hardbreak") else child.content for child in children).strip()


def renderer() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table").enable("strikethrough")
