"""A figure's history as a line of characters."""

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.:-=+*#"  # for a terminal that lacks block characters


def sparkline(values: Sequence[float | None], cells: int, *, top: float | None = None, blocks: bool = True) -> str:
    """Draw the last values in this many cells, the newest rightmost, blank if missing.

    0 is the lowest character and anything above it a higher one, up to the highest at `top`; None: the largest value.
    """
    drawn = values[-cells:]
    levels = BLOCKS if blocks else ASCII
    largest = max((value for value in drawn if value is not None), default=0.0) if top is None else top
    return "".join(" " if value is None else levels[_level(value, largest)] for value in drawn).rjust(cells)


def _level(value: float, top: float) -> int:
    if value <= 0:
        return 0
    steps = len(BLOCKS) - 1
    return steps if value >= top else max(1, round(steps * value / top))
