"""The options of `kvplan rightsize`."""

from kvplan.cli.fields import COLOR, FORCE, FORMAT, REPORT, Color, Text, Texts, argument, option
from kvplan.core.records import dataclass
from kvplan.report.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsizeOptions:
    """Options of `kvplan rightsize`."""

    first: Text = argument("FIRST", "vLLM server's /metrics page: file or URL.")
    second: Text = argument("SECOND", "The same page at a later time. Default: the URL FIRST is read twice.")
    interval: Text = option(
        "--interval TIME", "Time between the two pages, e.g. 10m. A URL is read again after this time (default: 1m)."
    )
    growth: Text = option("--growth FACTOR", "Plan for this multiple of the measured load, e.g. 2.")
    format: Format = option(*FORMAT, "table")
    report: Texts = option(*REPORT)
    force: bool = option(*FORCE, False)
    color: Color = option(*COLOR, "auto")
