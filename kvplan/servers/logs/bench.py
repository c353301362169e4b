"""A server's own load generator: its command line and result files, as defined in each server's bench.py."""

from collections.abc import Callable

from kvplan.core.records import dataclass

Spread = Callable[[int, float], tuple[int, int]]  # (length, range ratio) -> (shortest, longest)


@dataclass(frozen=True, slots=True)
class Generator:
    """One load generator.

    is_called  what its command looks like
    spread     how `--random-range-ratio` draws lengths
    whole      the key for end-to-end latency in its result files; marks: keys that only they have
    """

    name: str
    is_called: str
    dataset: str
    output_len: int
    spread: Spread
    num_prompts: int = 1000
    input_len: int = 1024
    whole: str = "e2el"
    marks: tuple[str, ...] = ()
