"""Requests to send: to the bundled engine, or to a server."""

import random
from dataclasses import dataclass

from kvplan.workloads.lengths import Lengths


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the workload: token counts, and seconds after the start at which it comes."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


def from_lengths(lengths: Lengths, num_seqs: int, output_tokens: int, seed: int) -> tuple[PlannedRequest, ...]:
    """num_seqs requests whose full lengths are drawn from the distribution; each ends with output_tokens."""
    source = random.Random(seed)
    totals = source.choices([n for n, _ in lengths.points], [p for _, p in lengths.points], k=num_seqs)
    return tuple(
        PlannedRequest(max(1, total - output_tokens), max(1, min(output_tokens, total - 1))) for total in totals
    )
