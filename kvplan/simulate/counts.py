"""Event counters of a run."""

from kvplan.core.records import dataclass


@dataclass(slots=True)
class Counts:
    """Event counters of a run."""

    arrived: int = 0
    rejected: int = 0  # prompts longer than the context
    failed: int = 0  # requests larger than the whole pool
    steps: int = 0
    jumped: int = 0  # of those, steps simulated in one batch
    prompt_tokens: int = 0  # computed, counted again after a preemption
    output_tokens: int = 0
