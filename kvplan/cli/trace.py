"""`kvplan trace`: statistics of a trace, conversion, and sampling; and the list of known workloads."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.trace_options import SUFFIXES, ConvertOptions, ProfilesOptions, SampleOptions, StatsOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import from_fields
from kvplan.core.table import Markdown, Table, flattened, percent
from kvplan.core.units import parse_count, parse_duration, parse_fraction, parse_tokens, plural
from kvplan.documents import trace as typed
from kvplan.documents.listing import WorkloadRow
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Line, Part, line
from kvplan.report.page import Block
from kvplan.workloads.profiles import POINTS, Profile, has_profile, parse_rate, profile, profile_names
from kvplan.workloads.stats import LengthStats, TraceStats, trace_stats
from kvplan.workloads.trace import WRITERS, Trace, read

Document = Mapping[str, object]
DEFAULT_REQUESTS = 1000  # of a profile
MAX_DRAWN = 5_000_000  # requests; as many as a file may hold, drawn within a minute


# --- reading and writing ----------------------------------------------------------------------------------------------


def profile_named(text: str) -> Profile | None:
    """Profile with this name, even if a file has the same name, or None if there is none."""
    if not has_profile(text):
        return None
    if exists(text):
        output.tell("note", f"{text} is read as the profile of that name; write ./{text} for the file")
    return profile(text)


def refuse_name(text: str) -> None:
    """Refuse a name that is not a file, a path or a profile, with near matches."""
    try:
        profile(text)
    except UsageError as error:
        raise error.changed(subject=printable(repr(text)), problem="no such trace file or profile") from None


def exists(text: str) -> bool:
    try:
        return text != "" and (Path(text).exists() or Path(text).is_symlink())  # a link cycle is not a profile
    except (OSError, ValueError):  # name too long, or contains a NUL
        return False


def trace_of(text: str) -> Trace:
    """Read a trace; warns of changes by its reader."""
    if not exists(text) and not any(sign in text for sign in "./\\"):
        refuse_name(text)
    trace = read(Path(text))
    for note in trace.notes:
        output.tell("warning", f"{printable(text, 400)}: {note}")
    return trace


def save(options: ConvertOptions | SampleOptions, make: Callable[[], Trace]) -> int:
    """Make a trace and write all of it or nothing; print what was written, and what could not be represented."""
    path = options.output
    form = form_of(path)
    with output.report_files([path], "--output", SUFFIXES, force=True) as (file,):
        if file.target.exists() and not options.force:
            raise UsageError(f"--output {file.label}", "exists", "name another file, or replace it with --force")
        trace = make()
        if form == "csv" and trace.prefix_block is not None:
            output.tell("warning", f"{file.label}: prefix ids cannot be stored in CSV; write .jsonl to keep them")
        data = WRITERS[form](trace).encode("ascii")
        file.save(gzip.compress(data, mtime=0) if path.lower().endswith(".gz") else data)
    output.tell("note", f"{printable(path, 400)}: {plural(len(trace.requests), 'request')} written")
    return 0


def form_of(path: str) -> str:
    """Format by the suffix before .gz: csv or jsonl."""
    inner = Path(path[:-3] if path.lower().endswith(".gz") else path).suffix.lower()
    if SUFFIXES.get(inner) not in WRITERS:
        raise UsageError(
            f"--output {printable(path, 400)}",
            f"unknown file type ({inner!r})",
            "use .csv, .jsonl, .csv.gz or .jsonl.gz",
        )
    return SUFFIXES[inner]


def seed_of(text: str | None) -> int:
    return 0 if text is None else parse_count(text, "--seed", 2**62, least=0)


# --- convert and sample -----------------------------------------------------------------------------------------------


def convert(options: ConvertOptions) -> int:
    if (known := profile_named(options.file)) is not None:
        return save(options, drawing(known, options))
    for name in ("num_requests", "rate", "seed", "shared_prefix"):
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            other = "; `kvplan trace sample` takes a part of a file" if name == "num_requests" else ""
            raise UsageError(flag, "works with a profile, not with a file", f"remove it{other}")
    return save(options, lambda: trace_of(options.file))


def drawing(of: Profile, options: ConvertOptions) -> Callable[[], Trace]:
    """Return a function that draws the requests; the options are parsed immediately."""
    number = parse_count(options.num_requests or str(DEFAULT_REQUESTS), "--num-requests", MAX_DRAWN)
    rate = None if options.rate is None else parse_rate(options.rate, "--rate")
    if rate is None and of.rate_per_s is None:
        raise UsageError(f"profile {of.name}", "no rate is published", "add one: --rate 2")
    shared = None if options.shared_prefix is None else prefix_tokens(options.shared_prefix)
    seed = seed_of(options.seed)
    return lambda: of.trace(number, rate, seed, shared)


def prefix_tokens(text: str) -> int:
    return 0 if text == "0" else parse_tokens(text, "--shared-prefix")


def sample(options: SampleOptions) -> int:
    from kvplan.workloads.sample import share_of, span_of, thinned

    choices = [name for name in ("num_requests", "share", "span") if getattr(options, name) is not None]
    if len(choices) != 1:
        what = "none is given" if not choices else "more than one is given"
        raise UsageError("--num-requests, --share and --span", what, "give one of them")
    if options.start is not None and options.span is None:
        raise UsageError("--start", "needs --span", "remove it")
    seed = seed_of(options.seed)
    if options.span is not None:
        length = parse_duration(options.span, "--span")
        start = None if options.start is None else parse_duration(options.start, "--start", 0.0)
        return save(options, lambda: span_of(trace_of(options.file), length, start, seed))
    if options.num_requests is not None:
        number = parse_count(options.num_requests, "--num-requests")
        return save(options, lambda: thinned(trace_of(options.file), number, seed))
    share = parse_fraction(options.share or "", "--share")
    return save(options, lambda: share_of(trace_of(options.file), share, seed))


# --- stats ------------------------------------------------------------------------------------------------------------


def stats(options: StatsOptions) -> int:
    if (known := profile_named(options.file)) is not None:
        output.answer(shapes(profile_document(known), profile_lines(known)), options.format, options.color)
        return 0
    trace = trace_of(options.file)
    statistics = trace_stats(trace)
    output.answer(
        shapes(stats_document(statistics, trace.notes), stats_lines(statistics)), options.format, options.color
    )
    return 0


def profiles(options: ProfilesOptions) -> int:
    rows = [profile_row(profile(name)) for name in profile_names()]
    from kvplan.report.listing_text import listed

    response = listed(rows, "workloads", lambda: profiles_lines(rows), lambda: [profiles_list(rows)])
    output.answer(response, options.format, options.color)
    return 0


def shapes(document: Document, parts: list[Part]) -> CommandAnswer:
    return CommandAnswer(
        lambda _: parts, lambda: document, lambda: figures_table(document), lambda: figures_page(document)
    )


def figures_table(document: Document) -> Table:
    """Path of each figure in the JSON document, and its value."""
    return Table.of(("figure", "value"), flattened(document))


def figures_page(document: Document) -> list[Block]:
    """The same as Markdown; empty cells for missing values."""
    rows = ((Markdown(path), "" if value is None else str(value)) for path, value in flattened(document))
    return [Table.of(("figure", "value"), rows)]


def stats_document(of: TraceStats, notes: tuple[str, ...]) -> typed.TraceDocument:
    """Build kvplan/trace@1: seconds, tokens, and fractions of all prompt tokens."""
    arrivals, prefix = of.arrivals, of.prefix
    return {
        "schema": "kvplan/trace@1",
        "source": of.source,
        "num_requests": of.num_requests,
        "arrivals": None if arrivals is None else from_fields(typed.Arrivals, arrivals),
        "prompt": _lengths(of.prompt),
        "output": _lengths(of.output),
        "rank_correlation": of.rank_correlation,
        "prefix": None
        if prefix is None
        else from_fields(
            typed.Prefix, prefix, curve=[{"tokens": tokens, "share": share} for tokens, share in prefix.curve]
        ),
        "notes": list(notes),
    }


def _lengths(of: LengthStats) -> typed.Lengths:
    return from_fields(typed.Lengths, of)


def profile_document(of: Profile) -> typed.WorkloadDocument:
    """Build kvplan/workload@1: published data, and lengths by percentile of the requests."""
    return from_fields(
        typed.WorkloadDocument,
        of,
        schema="kvplan/workload@1",
        prompt=_points(of.prompt),
        output=_points(of.output),
        joint=[list(row) for row in of.joint],
        prefix_requests=list(of.prefix_requests),
        notes=list(of.notes),
    )


def _points(lengths: Sequence[int]) -> list[typed.Point]:
    return [{"percent": point, "tokens": tokens} for point, tokens in zip(POINTS, lengths, strict=True)]


# --- tables -----------------------------------------------------------------------------------------------------------


def stats_lines(of: TraceStats) -> list[Part]:
    facts = [("requests", f"{of.num_requests:,}")]
    if (arrivals := of.arrivals) is None:
        facts.append(("arrivals", "none in the file"))
    else:
        facts.append(("span", f"{arrivals.span_s:,.1f} s"))
        facts.append(("rate", rates_text(arrivals.rate_per_s, arrivals.peak_minute_per_s, arrivals.peak_second)))
        facts.append(("gaps", gaps_text(arrivals.interarrival_cv)))
    lines: list[Part] = [line(printable(of.source, 1000), "bold"), line(), *fact_lines(facts), line()]
    lines.append(lengths_table(of.prompt, of.output))
    lines += [line(), *fact_lines([("prompt and output", correlation_text(of.rank_correlation))])]
    if (prefix := of.prefix) is not None:
        lines += [
            line(),
            line("Prompt tokens found again in a prefix cache", "bold"),
            Table.of(
                ("tokens held", f"runs of {prefix.block:,}", "found again"),
                [
                    *((f"{size:,}", f"{size // prefix.block:,}", percent(share)) for size, share in prefix.curve),
                    ("everything", f"{prefix.distinct_tokens // prefix.block:,}", percent(prefix.repeated)),
                ],
                left=0,
            ),
        ]
    return lines


def profile_lines(of: Profile) -> list[Part]:
    def lengths(points: tuple[int, ...], mean: float) -> LengthStats:
        percentiles = dict(zip(POINTS, points, strict=True))
        return LengthStats(mean, percentiles[50], percentiles[90], percentiles[99], percentiles[100])

    facts = [("source", of.source), ("license", of.licence)]
    if of.num_requests is not None:
        facts.append(("requests", f"{of.num_requests:,}"))
    facts.append(("rate", rates_text(of.rate_per_s, of.peak_minute_per_s, of.peak_second)))
    if of.interarrival_cv is not None:
        facts.append(("gaps", gaps_text(of.interarrival_cv)))
    if of.shared_prefix is not None:
        facts.append(("prefix", prefix_text(of.shared_prefix, of.prefix_requests)))
    facts += [("note", note) for note in of.notes]
    return [
        line(f"{of.name}: {of.summary} ({of.kind})", "bold"),
        line(),
        lengths_table(lengths(of.prompt, of.prompt_mean), lengths(of.output, of.output_mean)),
        line(),
        *fact_lines([("prompt and output", drawing_text(of))]),
        *fact_lines(facts, width=len("prompt and output")),
    ]


def fact_lines(facts: list[tuple[str, str]], width: int = 0) -> list[Line]:
    width = max(width, *(len(name) for name, _ in facts))
    return [((f"{name:<{width}}  ", "bold"), (text, "")) for name, text in facts]


def lengths_table(prompt: LengthStats, output_: LengthStats) -> Table:
    rows = [
        (name, f"{of.mean:,.1f}", *(f"{figure:,}" for figure in (of.p50, of.p90, of.p99, of.most)))
        for name, of in (("prompt", prompt), ("output", output_))
    ]
    return Table.of(("tokens", "mean", "p50", "p90", "p99", "most"), rows)


def rates_text(mean: float | None, minute: float | None, second: int | None) -> str:
    if mean is None:
        return "none: all at once" if second is not None else "none published"
    text = f"{mean:,.4g} requests per second"
    if minute is not None:
        text += f", {minute:,.3g} in the busiest minute"
    return text + ("" if second is None else f", {second:,} in the busiest second")


def gaps_text(cv: float | None) -> str:
    return "no gaps" if cv is None else f"interarrival CV {cv:.2f} (1 in a Poisson process, more in bursts)"


def correlation_text(correlation: float | None) -> str:
    if correlation is None:
        return "no rank correlation: one of them never changes"
    return f"rank correlation {round(correlation, 2) + 0.0:.2f}"  # + 0.0: no "-0.00"


def drawing_text(of: Profile) -> str:
    how = "drawn by their joint tenths" if of.joint else "drawn apart"
    return how if of.rank_correlation is None else f"{how} ({correlation_text(of.rank_correlation)})"


def prefix_text(tokens: int, sharers: tuple[int, ...]) -> str:
    if len(sharers) == 1:
        return f"{tokens:,} tokens that all prompts begin with"
    parts = ", ".join(percent(count / sum(sharers)) for count in sharers)
    return f"{tokens:,} tokens, one of {len(sharers)} beginnings ({parts} of the requests)"


def profile_row(of: Profile) -> WorkloadRow:
    middle = POINTS.index(50)
    ends = {"prompt_most": of.prompt[-1], "output_most": of.output[-1]}
    return from_fields(WorkloadRow, of, prompt_p50=of.prompt[middle], output_p50=of.output[middle], **ends)


def profiles_list(rows: list[WorkloadRow]) -> Table:
    headers = ("name", "rate/s", "prompt", "most", "output", "most", "prefix", "")
    is_assumed = {"published": "", "assumed": " (assumed)"}
    cells = [
        (
            row["name"],
            "-" if row["rate_per_s"] is None else f"{row['rate_per_s']:.2f}",
            f"{row['prompt_mean']:,.0f}",
            f"{row['prompt_most']:,}",
            f"{row['output_mean']:,.0f}",
            f"{row['output_most']:,}",
            "-" if row["shared_prefix"] is None else f"{row['shared_prefix']:,}",
            row["summary"] + is_assumed[row["kind"]],
        )
        for row in rows
    ]
    return Table.of(headers, cells, left=(0, 7))


def profiles_lines(rows: list[WorkloadRow]) -> list[Part]:
    return [
        profiles_list(rows),
        line(),
        line("Mean and maximum tokens of prompts and outputs; tokens of a shared prefix (`kvplan trace stats NAME`)"),
    ]
