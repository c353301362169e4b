"""Time to first token with a 900-token prefix that requests share: the first request's against later ones'.

One request at a time asks for one token, so its time is the time to first token without any queue. Two mixes:

* clinical-notes of workloads.yaml: each note behind a prefix that nobody has sent, and behind the one that all
  share. Prompts have 8,902 tokens on average, so of their time about a tenth is the prefix's, and no cache can save
  more: the row "could save" is the shared part of all prompt tokens. The goal is about this mix.
* short notes: 900 + 300 tokens, three quarters of them shared; told beside the goal. Every round has a prefix of its
  own; the first round, which compiles, does not count.
"""

import random
import time
from dataclasses import dataclass, field
from itertools import islice

from benchmarks.gpu_stages.serving import random_tokens, start
from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from engine import Engine, SamplingParams
from kvplan.workloads.profiles import profile

MODEL, WORKLOAD = "llama-3.1-8b", "clinical-notes"
BLOCK_SIZE = 16
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
FIRST, LATER = "time to first token, first request", "time to first token, later requests"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked; tokens.

    prefix, own    that all prompts of a round share, and each prompt's own; rounds; requests after the first
    notes          prompt lengths of the mix, the prefix included
    """

    prefix: int
    own: int
    rounds: int
    later: int
    notes: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.prefix + self.own, *self.notes)

    @property
    def cached(self) -> int:
        """Tokens of the prefix that a cache of whole blocks holds."""
        return self.prefix // BLOCK_SIZE * BLOCK_SIZE


@dataclass(slots=True)
class Times:
    """Milliseconds to the first token; of the same prompt lengths, in the same order, where lengths differ."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)

    def rows(self, mix: str) -> list[Row]:
        return [row(f"{mix}: {FIRST}", "ms", self.first, MODEL), row(f"{mix}: {LATER}", "ms", self.later, MODEL)]


def shape_of(stage: Task) -> Shape:
    drawn = profile(WORKLOAD).requests(rate=1, seed=0)
    notes = tuple(request.prompt_tokens for request in islice(drawn, 2 if stage.is_small else 12))
    if stage.is_small:
        return Shape(90, 20, 2, 2, tuple(length // 100 + 90 for length in notes))
    return Shape(900, 300, 9, 4, notes)


def engine_for(stage: Task, shape: Shape) -> Engine:
    """Its pool holds the longest prompt, and the prefixes of either mix."""
    num_blocks = 2 + 4 * -(-shape.longest // BLOCK_SIZE)
    return start(
        stage, MODEL, max_model_len=shape.longest + 1, max_num_seqs=8, enforce_eager=True, block_size=BLOCK_SIZE,
        max_num_batched_tokens=2048 if stage.is_small else 8192, num_blocks=num_blocks,
    )  # fmt: skip


def one_token(engine: Engine, prompt: list[int], cached: int) -> float:
    """Milliseconds to the first token; raises SystemExit unless so many prompt tokens were found in the cache."""
    begin = time.perf_counter()
    (output,) = engine.generate([prompt], ONE)
    seconds = time.perf_counter() - begin
    if output.error is not None:
        raise SystemExit(output.error)
    if output.num_cached_tokens != cached:
        raise SystemExit(f"prefix: {output.num_cached_tokens} tokens of a prompt were cached, expected {cached}")
    return seconds * 1000


def clinical_notes(engine: Engine, shape: Shape, source: random.Random) -> Times:
    """Of each length once with a prefix that is new and once with the one that all share."""

    def tokens(count: int) -> list[int]:
        return random_tokens(count, engine.spec.vocab_size, source)

    shared, times = tokens(shape.prefix), Times()
    one_token(engine, shared + tokens(max(shape.notes) - shape.prefix), 0)  # compiles, and caches the prefix
    for length in shape.notes:
        note = tokens(length - shape.prefix)
        times.later.append(one_token(engine, shared + note, shape.cached))
        times.first.append(one_token(engine, tokens(shape.prefix) + note, 0))
    return times


def short_notes(engine: Engine, shape: Shape, source: random.Random) -> Times:
    times = Times()
    for number in range(shape.rounds + 1):
        prefix = random_tokens(shape.prefix, engine.spec.vocab_size, source)
        prompts = [prefix + random_tokens(shape.own, engine.spec.vocab_size, source) for _ in range(1 + shape.later)]
        first, *later = [one_token(engine, prompt, shape.cached if i else 0) for i, prompt in enumerate(prompts)]
        if number > 0:
            times.first.append(first)
            times.later += later
    return times


def run(stage: Task) -> None:
    shape, source = shape_of(stage), random.Random(0)
    engine = engine_for(stage, shape)
    short = short_notes(engine, shape, source)
    rows = short.rows(f"{shape.prefix} + {shape.own} tokens")
    lower = 1 - rows[1].value / rows[0].value
    summary = (
        f"{shape.prefix} + {shape.own} tokens {rows[0].value:.1f} ms, later {rows[1].value:.1f}: {lower:.0%} lower"
    )
    short_could = shape.prefix / (shape.prefix + shape.own)
    rows += [
        row(f"{shape.prefix} + {shape.own} tokens: lower by", "share", [lower], MODEL),
        row(f"{shape.prefix} + {shape.own} tokens: could save", "share", [short_could], MODEL),
    ]
    short_goals = {"prefix-short": lower, "prefix-short-bound": short_could}
    numbers = {"prefix": shape.prefix, "own": shape.own, "lower_by": lower, "goals": short_goals}
    stage.save(summary, numbers, rows)
    mix = clinical_notes(engine, shape, source)
    saved = 1 - sum(mix.later) / sum(mix.first)  # of the mean request's time
    could = len(shape.notes) * shape.prefix / sum(shape.notes)
    rows += [
        *mix.rows(WORKLOAD),
        row(
            f"{WORKLOAD}: lower by",
            "share",
            [1 - after / before for after, before in zip(mix.later, mix.first, strict=True)],
            MODEL,
        ),
        row(f"{WORKLOAD}: could save", "share", [could], MODEL),
    ]
    numbers |= {"notes": shape.notes, "notes_lower_by": saved, "notes_could_save": could}
    numbers["goals"] = short_goals | {"prefix": saved, "prefix-bound": could}
    stage.save(
        f"{WORKLOAD} {saved:.1%} lower, of {could:.1%} of their tokens that are shared; {summary}", numbers, rows
    )


if __name__ == "__main__":
    run(task(parser(__doc__)))
