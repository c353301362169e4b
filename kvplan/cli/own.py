"""Files that kvplan may overwrite: those that it wrote, recognized by their schema or their format's mark."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvplan.report.formats import FORMS

HEAD = 65_536  # bytes to inspect at either end
COMMENT = b"<!-- kvplan-"  # first bytes of a pull request comment, by which the next run finds it
_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"schema"\s*:\s*"kvplan/(?!run@)')  # a run's manifest is measured data
_SARIF = re.compile(rb'\s*\{\s*"\$schema"\s*:\s*"[^"]*sarif.*"driver"\s*:\s*\{\s*"name"\s*:\s*"kvplan"', re.DOTALL)
_JUNIT = re.compile(rb'<\?xml [^>]*>\s*<testsuites name="kvplan check"')
_HTML = re.compile(rb'<meta name="generator" content="kvplan"')
_TRACE = re.compile(rb'\n[^\n]{1,99}written by kvplan|\{"otherData": \{"generator": "written by kvplan"', re.DOTALL)
_PICTURE = re.compile(rb"\x89PNG.*Software\0kvplan|<svg .*<dc:title>kvplan</dc:title>", re.DOTALL)
# Beginnings of the header rows of each answer; columns may be appended.
_HEADINGS = (
    ("inputs.model.name",),
    ("model", "gpu", "engine", "num_gpus"),
    ("gpu", "num_gpus", "tensor_parallel_size"),
    ("setting", "value"),
    ("server", "engine", "gpu"),
    ("servers", "tensor_parallel_size", "requests_per_s"),
    ("server", "from", "to", "outcome"),
    ("name", "model", "engine", "argument"),
    ("comparison", "part", "name"),
    ("variant", "metric", "value"),
    ("start_s", "running_mean"),
    ("number", "arrival_s", "admitted_s"),
    ("figure", "value"),
    ("figure", "predicted", "low", "high"),
    ("cause", "kind", "flags"),
    ("run", "table", "row", "column"),
    ("from", "name", "unit", "predicted"),
    ("kind", "name", "predicted"),
    ("name", "parameters", "bf16_gb"),
    ("name", "device_name", "total_memory"),
)


def _headings() -> Iterator[bytes]:
    """Yield the beginnings of files of each row-based format."""
    for form in FORMS.values():
        if form.lines is not None:
            yield from (form.lines([names]).rstrip("\n").encode() for names in _HEADINGS)


def _begins(head: bytes, heading: bytes) -> bool:
    return head.startswith(heading) and not head[len(heading) : len(heading) + 1].isalnum()


def is_own(path: Path) -> bool:
    """True if kvplan wrote a file, or if it is empty."""
    with path.open("rb") as file:
        head = file.read(HEAD)
        file.seek(max(0, os.fstat(file.fileno()).st_size - HEAD))
        tail = file.read(HEAD)
    marks = (_JSON, _SARIF, _JUNIT, _TRACE)
    if (
        not head
        or head.startswith(COMMENT)
        or any(mark.match(head) for mark in marks)
        or any(_begins(head, heading) for heading in _headings())
        or _HTML.search(head)
        or _PICTURE.search(head)
    ):
        return True
    last = tail.rstrip()
    return any(form.mark and last.endswith(form.mark.encode()) for form in FORMS.values())
