"""Requests to send to the bundled engine or to a server."""

import random
from dataclasses import dataclass

from kvplan.workloads.lengths import Lengths


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the workload: token counts, and arrival time in seconds after the start."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


def from_lengths(lengths: Lengths, num_seqs: int, output_tokens: int, seed: int) -> tuple[PlannedRequest, ...]:
    """Draw num_seqs requests; their full lengths follow the distribution and end with up to output_tokens of output."""
    source = random.Random(seed)
    totals = source.choices([n for n, _ in lengths.points], [p for _, p in lengths.points], k=num_seqs)
    return tuple(
        PlannedRequest(max(1, total - output_tokens), max(1, min(output_tokens, total - 1))) for total in totals
    )
