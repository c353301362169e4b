"""Time to first token with a 900-token prefix that requests share: the first request's against later ones'.

One request at a time asks for one token, so its time is the time to first token without any queue. Every round has a
prefix of its own; the first round, in which kernels compile, does not count.
"""

import random
import time
from dataclasses import dataclass

from benchmarks.gpu_stages.stage import Task, parser, row, spec_of, task
from engine import Engine, EngineConfig, SamplingParams

MODEL = "llama-3.1-8b"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens that all prompts of a round share, tokens of a prompt's own, rounds, and requests after the first."""

    prefix: int
    own: int
    rounds: int
    later: int


def one_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, prompt tokens found in the cache)."""
    begin = time.perf_counter()
    (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    seconds = time.perf_counter() - begin
    if output.error is not None:
        raise SystemExit(output.error)
    return seconds, output.num_cached_tokens


def run(stage: Task) -> None:
    shape = Shape(90, 20, 2, 2) if stage.is_small else Shape(900, 300, 9, 4)
    longest = shape.prefix + shape.own
    engine = Engine(
        spec_of(MODEL, is_small=stage.is_small),
        EngineConfig(
            device=str(stage.device), load_format="dummy", max_model_len=longest + 1, max_num_seqs=8,
            max_num_batched_tokens=2048, block_size=BLOCK_SIZE,
            num_blocks=1 + (shape.later + 2) * shape.rounds * -(-longest // BLOCK_SIZE),
        ),
    )  # fmt: skip
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(engine.spec.vocab_size) for _ in range(count)]

    first, later = [], []
    for number in range(shape.rounds + 1):
        prefix = tokens(shape.prefix)
        answers = [one_token(engine, prefix + tokens(shape.own)) for _ in range(1 + shape.later)]
        expected = shape.prefix // BLOCK_SIZE * BLOCK_SIZE
        if [cached for _, cached in answers] != [0] + [expected] * shape.later:
            raise SystemExit(f"prefix: cached tokens {[cached for _, cached in answers]}, expected {expected} each")
        if number > 0:
            first.append(answers[0][0] * 1000)
            later += [seconds * 1000 for seconds, _ in answers[1:]]
    rows = [
        row("time to first token, first request", "ms", first, MODEL),
        row("time to first token, later requests", "ms", later, MODEL),
    ]
    saved = 1 - rows[1].value / rows[0].value
    stage.save(
        f"{rows[0].value:.1f} ms, later {rows[1].value:.1f} ms: {saved:.0%} lower",
        {"prefix": shape.prefix, "own": shape.own, "first_ms": first, "later_ms": later, "lower_by": saved},
        rows,
    )


if __name__ == "__main__":
    run(task(parser(__doc__)))
