"""A grid of plans as one standalone HTML file: sliders and menus select answers."""

from typing import Final

from kvplan.core.errors import UsageError
from kvplan.documents.explorer import FULL, ExplorerDocument
from kvplan.report.packed import packed_data, script_hash
from kvplan.report.templates import rendered_page, source_of

MOST_BYTES: Final = 2_000_000


def summary(document: ExplorerDocument) -> str:
    """ "2,400 plans of qwen3-8b"."""
    names = ", ".join(dict.fromkeys(chart["model"] for chart in document["charts"]))
    return f"{document['plans']:,} plans of {names}"


def explorer_html(document: ExplorerDocument) -> str:
    """Render the page. Raise UsageError if it would be larger than MOST_BYTES."""
    script = source_of("explorer.js")
    names = ", ".join(dict.fromkeys(chart["model"] for chart in document["charts"]))
    page = rendered_page(
        "explorer.html.jinja",
        servers=[chart["server"] for chart in document["charts"]],
        title=f"{names}: users and memory",
        own_style=source_of("parts.css") + source_of("explorer.css"),
        script=script,
        script_hash=script_hash(script),
        data=packed_data(document | {"full": FULL}),
        plans=f"{document['plans']:,}",
    )
    if len(page.encode()) > MOST_BYTES:
        raise UsageError(
            "explore", f"a page of {len(page.encode()):,} bytes, more than {MOST_BYTES:,}", "use fewer models or GPUs"
        )
    return page
