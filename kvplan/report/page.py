"""A page of Markdown: paragraphs, tables and folded sections, for a pull request."""

from collections.abc import Iterable, Sequence
from typing import Final

from kvplan.core.table import Markdown, Table, as_markdown, markdown_text

COMMAND: Final = "<!-- the command -->"  # placeholder for the command that wrote a page, filled in by the file writer
Block = str | Table  # text is escaped unless it is already Markdown


def page(blocks: Iterable[Block]) -> str:
    """Join the blocks with blank lines."""
    return "\n\n".join(block_text(block) for block in blocks) + "\n"


def block_text(block: Block) -> Markdown:
    return as_markdown(block) if isinstance(block, Table) else markdown_text(block)


def size_of(block: Block) -> int:
    """Bytes of a block and the blank line after it."""
    return len(block_text(block).encode()) + 2


def heading(level: int, text: str) -> Markdown:
    return Markdown(f"{'#' * level} {markdown_text(text)}")


def bold(text: str) -> Markdown:
    return Markdown(f"**{markdown_text(text)}**")


def bullets(texts: Iterable[str], sign: str = "-") -> Markdown:
    return Markdown("\n".join(f"{sign} {markdown_text(text)}" for text in texts))


def code(text: str) -> Markdown:
    """A fenced block that its content cannot close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return Markdown(f"{fence}\n{text}\n{fence}")


def folded(title: str, blocks: Sequence[Block]) -> list[Block]:
    """Blocks in a collapsed section."""
    return [Markdown(f"<details><summary>{html_text(title)}</summary>"), *blocks, Markdown("</details>")]


def html_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def with_own_names(table: Table, left: int | tuple[int, ...] = 1) -> Table:
    """The table with its first column unescaped: kvplan's own names, which contain no markup."""
    rows = ((Markdown(first), *others) if first.isidentifier() else (first, *others) for first, *others in table.rows)
    return Table.of(table.names, rows, left=left)
