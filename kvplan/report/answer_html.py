"""Any answer as one HTML file: the answer, what can be drawn of it, then its tables; no script, no network."""

from collections.abc import Sequence
from typing import Final

from markdown_it import MarkdownIt

from kvplan.report.drawing import Bars, Figure
from kvplan.report.formats import COMMAND
from kvplan.report.page import Block, block_text
from kvplan.report.templates import rendered_page, source_of

FOLDED: Final = ("<details>", "</details>", "<summary>", "</summary>")  # the only tags that a page of Markdown has


def answer_html(blocks: Sequence[Block], figures: Sequence[Figure] = ()) -> str:
    """The page of an answer whose first block is the answer itself."""
    first, *others = [block_text(block) for block in blocks]
    return markdown_html(first, "\n\n".join(others), figures)


def markdown_html(answer: str, below: str, figures: Sequence[Figure] = ()) -> str:
    """The page of an answer and what stands below it, both as Markdown that shows foreign text as it is."""
    return rendered_page(
        "answer.html.jinja",
        title=plain(answer),
        own_style=source_of("parts.css") + source_of("answer.css"),
        answer=plain(answer),
        drawings=[(isinstance(figure, Bars), figure) for figure in figures],
        body=html_of(below),
        command=COMMAND,
    )


def html_of(text: str) -> str:
    """Markdown as HTML: a page has no tags but those that fold."""
    page: str = renderer().render(text)
    for tag in FOLDED:
        page = page.replace(tag.replace("<", "&lt;").replace(">", "&gt;"), tag)
    return page.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")


def plain(text: str) -> str:
    """The words of one paragraph of Markdown."""
    tokens = renderer().parse(text)
    children = [child for token in tokens for child in token.children or []]
    return "".join(" " if child.type in ("softbreak", "hardbreak") else child.content for child in children).strip()


def renderer() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table").enable("strikethrough")
