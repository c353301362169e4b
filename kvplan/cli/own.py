"""Which files kvplan may write over: those that it wrote, by their schema or their format's own mark."""

import os
import re
from pathlib import Path

HEAD = 65_536  # bytes that are looked at on either side
MARKDOWN = "<!-- kvplan -->"  # the last line of a Markdown file, which no page shows
COMMENT = b"<!-- kvplan-"  # the first of a comment on a pull request, by which the next one finds it
_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"schema"\s*:\s*"kvplan/(?!run@)')  # a run's manifest is measured data
_SARIF = re.compile(rb'\s*\{\s*"\$schema"\s*:\s*"[^"]*sarif.*"driver"\s*:\s*\{\s*"name"\s*:\s*"kvplan"', re.DOTALL)
_JUNIT = re.compile(rb'<\?xml [^>]*>\s*<testsuites name="kvplan check"')
_HTML = re.compile(rb'<meta name="generator" content="kvplan"')
_PICTURE = re.compile(rb"\x89PNG.*Software\0kvplan|<svg .*<dc:title>kvplan</dc:title>", re.DOTALL)
# How the header of each CSV begins; columns may be added behind.
_CSV = re.compile(
    rb"inputs\.model\.name,|model,gpu,engine,num_gpus,|gpu,num_gpus,tensor_parallel_size,|setting,value,"
    rb"|comparison,part,name,|variant,metric,value\b|start_s,running_|number,arrival_s,admitted_s,|figure,value\b"
    rb"|run,table,row,column,|from,name,unit,predicted,|kind,name,predicted,"
)


def is_own(path: Path) -> bool:
    """Whether kvplan wrote a file, or nothing is in it."""
    with path.open("rb") as file:
        head = file.read(HEAD)
        file.seek(max(0, os.fstat(file.fileno()).st_size - HEAD))
        tail = file.read(HEAD)
    marks = (_JSON, _SARIF, _JUNIT, _CSV)
    if (
        not head
        or head.startswith(COMMENT)
        or any(mark.match(head) for mark in marks)
        or _HTML.search(head)
        or _PICTURE.search(head)
    ):
        return True
    return tail.rstrip().endswith(MARKDOWN.encode("ascii"))
