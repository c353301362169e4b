"""Requests that `kvplan profile` sends to its own engine or to a server, and the directory of a run."""

from pathlib import Path

from kvplan.cli import output
from kvplan.cli.run_options import ProfileOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import path_text
from kvplan.core.units import parse_count, parse_tokens
from kvplan.workloads.lengths import parse_lengths
from kvplan.workloads.planned import PlannedRequest, from_lengths
from kvplan.workloads.trace import read as read_trace
from kvplan.workloads.trace import read_full_lengths

DEFAULT_SEQS, DEFAULT_PROMPT, DEFAULT_OUTPUT = 16, 128, 64


def requests_of(options: ProfileOptions) -> tuple[tuple[PlannedRequest, ...], int]:
    """(requests, length of their shared prefix): of one length, drawn from a distribution, or from a trace."""
    num_seqs = parse_count(options.num_seqs or str(DEFAULT_SEQS), "--num-seqs", 10**6)
    output_tokens = parse_tokens(options.output_tokens or str(DEFAULT_OUTPUT), "--output-tokens")
    if options.trace is not None:
        requests = trace_requests(Path(options.trace))
    elif options.lengths is not None:
        lengths = parse_lengths(options.lengths, 2**24, read_full_lengths)
        requests = from_lengths(lengths, num_seqs, output_tokens, seed_of(options))
    else:
        prompt = parse_tokens(options.prompt_tokens or str(DEFAULT_PROMPT), "--prompt-tokens")
        requests = (PlannedRequest(prompt, output_tokens),) * num_seqs
    shared = 0 if options.shared_prefix is None else parse_tokens(options.shared_prefix, "--shared-prefix")
    shortest = min(request.prompt_tokens for request in requests)
    if shared > shortest:
        raise UsageError(
            f"--shared-prefix {shared}", f"is longer than the shortest prompt ({shortest} tokens)", "shorten it"
        )
    return requests, shared


def trace_requests(path: Path) -> tuple[PlannedRequest, ...]:
    """A trace's requests; warns of changes by the reader and of omitted requests."""
    trace = read_trace(path)
    for note in trace.notes:
        output.tell("warning", f"--trace {path_text(path)}: {note}")
    if trace.prefix_block is not None:
        output.tell(
            "note",
            f"--trace {path_text(path)}: its prefix ids are not replayed; use --shared-prefix for a common prefix",
        )
    return tuple(
        PlannedRequest(request.prompt_tokens, request.output_tokens, request.arrival_s) for request in trace.requests
    )


def seed_of(options: ProfileOptions) -> int:
    return 0 if options.seed in (None, "0") else parse_count(str(options.seed), "--seed", 2**62)


def default_dir(name: str) -> Path:
    """The first of runs/MODEL-1, -2, ... that does not exist."""
    stem = "".join(c if c.isalnum() or c in "-._" else "-" for c in name.rsplit("/", 1)[-1])[:60] or "model"
    return next(path for n in range(1, 10**6) if not (path := Path("runs") / f"{stem}-{n}").exists())
