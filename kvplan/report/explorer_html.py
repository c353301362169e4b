"""A grid of plans as one standalone HTML file: sliders and menus select answers."""

from typing import Final

from kvplan.documents.explorer import FULL, ExplorerDocument
from kvplan.report.templates import scripted_page, source_of

MOST_BYTES: Final = 2_000_000


def summary(document: ExplorerDocument) -> str:
    """ "2,400 plans of qwen3-8b"."""
    names = ", ".join(dict.fromkeys(chart["model"] for chart in document["charts"]))
    return f"{document['plans']:,} plans of {names}"


def explorer_html(document: ExplorerDocument) -> str:
    """Render the page. Raise UsageError if it would be larger than MOST_BYTES."""
    names = ", ".join(dict.fromkeys(chart["model"] for chart in document["charts"]))
    return scripted_page(
        "explorer",
        document | {"full": FULL},
        MOST_BYTES,
        "explore",
        "use fewer models or GPUs",
        servers=[chart["server"] for chart in document["charts"]],
        title=f"{names}: users and memory",
        own_style=source_of("parts.css") + source_of("explorer.css"),
        plans=f"{document['plans']:,}",
    )
