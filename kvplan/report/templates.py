"""Templates of the HTML pages: one environment, one style sheet, and escaping of text of unknown origin."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

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
