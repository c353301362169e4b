"""An animation of a run's KV pool: one HTML file with cells by owner, a scrubber and the queue."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

from kvplan.report.templates import scripted_page, source_of
from kvplan.simulate.film import FIRST, Film

MOST_BYTES: Final = 5_000_000


def film_html(
    films: Mapping[str, Film], title: str, seconds: Literal["planned", "measured"], servers: Sequence[str] = ()
) -> str:
    """Render the page. Raise UsageError if it would be larger than MOST_BYTES."""
    return scripted_page(
        "film",
        {"first": FIRST, "films": [film_data(name, film) for name, film in films.items()]},
        MOST_BYTES,
        "--film",
        "use a smaller pool",
        servers=servers,
        title=title,
        seconds=seconds,
        answer=sentence(films),
        own_style=source_of("film.css"),
    )


def film_data(name: str, film: Film) -> dict[str, Any]:
    """Frames as columns; changes as flat lists of (block minus the previous block, owner)."""
    frames = film.frames
    return {
        "name": name,
        "blocks": film.num_blocks,
        "block_size": film.block_size,
        "seconds": [round(frame.seconds, 6) for frame in frames],
        "running": [frame.running for frame in frames],
        "waiting": [frame.waiting for frame in frames],
        "tokens": [frame.tokens for frame in frames],
        "preemptions": [frame.preemptions for frame in frames],
        "changes": [
            [number for (last, _), (block, owner) in pairwise([(0, 0), *step]) for number in (block - last, owner)]
            for step in film.changes
        ],
    }


def sentence(films: Mapping[str, Film]) -> str:
    """Summary of the animations: "paged: 2,000 steps, 61 s, at most 19 requests at once; contiguous: ..."."""
    parts = []
    for name, film in films.items():
        frames = film.frames
        max_running = max((frame.running for frame in frames), default=0)
        last = frames[-1] if frames else None
        ends = f"{last.preemptions:,} preemptions" if last else "nothing runs"
        seconds = f"{last.seconds:,.1f} s" if last else "0 s"
        first = "the first " if film.is_full else ""
        parts.append(
            f"{name}: {first}{len(frames):,} steps in {seconds}, at most {max_running:,} requests at once, {ends}"
        )
    return "; ".join(parts)
