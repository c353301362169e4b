"""The options of `kvplan trace stats|profiles|convert|sample`."""

from typing import Final

from kvplan.cli.fields import COLOR, FORMAT, REQUIRED, Color, Text, argument, complete_profile, option
from kvplan.core.records import dataclass
from kvplan.report.formats import Format

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".gz": "gz"}

TRACE_FILE: Final = ("FILE|PROFILE", "Trace (CSV, JSON Lines or saved benchmark, optionally gzipped) or profile name.")
OUTPUT: Final = ("--output, -o OUT", "File to write: .csv or .jsonl, optionally .gz.")
OVERWRITE: Final = ("--force", "Overwrite OUT if it exists.")
NUM_REQUESTS: Final = ("--num-requests N", "Number of requests to write.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """Options of `kvplan trace stats`."""

    file: str = argument(*TRACE_FILE, REQUIRED, complete=complete_profile)
    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesOptions:
    """Options of `kvplan trace profiles`."""

    format: Format = option(*FORMAT, "table")
    color: Color = option(*COLOR, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `kvplan trace convert`; the last four only apply to a profile. None: not given."""

    file: str = argument(*TRACE_FILE, REQUIRED, complete=complete_profile)
    output: str = option(*OUTPUT, REQUIRED)
    force: bool = option(*OVERWRITE, False)
    num_requests: Text = option(*NUM_REQUESTS)
    rate: Text = option("--rate N", "Requests per second. Default: the published rate.")
    seed: Text = option("--seed N", "Random seed. Default: 0.")
    shared_prefix: Text = option("--shared-prefix TOKENS", "Length of the prefix that all prompts share.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options of `kvplan trace sample`. None: not given."""

    file: str = argument("FILE", "Trace, as for stats.", REQUIRED)
    output: str = option(*OUTPUT, REQUIRED)
    force: bool = option(*OVERWRITE, False)
    num_requests: Text = option(*NUM_REQUESTS)
    share: Text = option("--share SHARE", "Fraction of the requests to keep, e.g. 10%.")
    span: Text = option("--span TIME", "Keep a time span unchanged, e.g. 10m.")
    start: Text = option("--start TIME", "Start of the span, after the first request. Default: random.")
    seed: Text = option("--seed N", "Random seed. Default: 0.")
