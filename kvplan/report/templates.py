"""Templates of the HTML pages: one environment, one style sheet, and escaping of text of unknown origin; for pages with
a script, data as base64 of gzip, and the hash that allows only the page's script.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from kvplan.core.errors import UsageError
from kvplan.core.git import release
from kvplan.core.units import UNIT_GAP
from kvplan.report.page import COMMAND

NO_BREAK = "\N{NO-BREAK SPACE}"  # between a number and its unit


def rendered_page(template: str, *, servers: Sequence[str] = (), **values: Any) -> str:
    """Render a template of this folder; every value is escaped unless the template marks it `safe`.

    servers  planned servers with their releases, for the foot of the page
    """
    return template_of(template).render(
        style=source_of("page.css"),
        version=kvplan_version(),
        command=COMMAND,
        planned_for=planned_for(servers),
        **values,
    )


def scripted_page(
    name: str, data: Mapping[str, object], most_bytes: int, subject: str, remedy: str, **values: Any
) -> str:
    """Render NAME.html.jinja with NAME.js and its data. Raise UsageError if it would be larger than `most_bytes`."""
    script = source_of(f"{name}.js")
    page = rendered_page(
        f"{name}.html.jinja", script=script, script_hash=script_hash(script), data=packed_data(data), **values
    )
    size = len(page.encode())
    if size > most_bytes:
        raise UsageError(subject, f"a page of {size:,} bytes, more than {most_bytes:,}", remedy)
    return page


def packed_data(document: Mapping[str, object]) -> str:
    """A document as base64 of gzip; reproducible byte for byte."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_hash(script: str) -> str:
    """Hash for the page's Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def template_of(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(unbroken=unbroken)
    return environment.from_string(source_of(name))


def planned_for(servers: Sequence[str]) -> str:
    """ "Planned for vllm@0.33 and sglang@0.5. "."""
    names = list(dict.fromkeys(servers))
    return f"Planned for {' and '.join(', '.join(names).rsplit(', ', 1))}. " if names else ""


@cache
def source_of(name: str) -> str:
    """Text of a file in this package."""
    return files("kvplan.report").joinpath(name).read_text(encoding="utf-8")


@cache
def kvplan_version() -> str:
    return release() or "(not installed)"


def unbroken(sentence: str) -> str:
    """Replace spaces between a number and its unit with no-break spaces."""
    return re.sub(UNIT_GAP, NO_BREAK, sentence)
