"""What happened in a run, in numbers."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened, in numbers."""

    arrived: int = 0
    rejected: int = 0  # a prompt that the context does not hold
    failed: int = 0  # larger than the whole pool
    steps: int = 0
    jumped: int = 0  # of those, the ones run together
    prompt_tokens: int = 0  # computed, those of preempted sequences again
    output_tokens: int = 0
