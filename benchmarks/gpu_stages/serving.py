"""What the engine's stages share: engines of random weights, random prompts, and another scheduler over one engine."""

import random
from dataclasses import replace
from typing import Any

from benchmarks.gpu_stages.stage import Task, spec_of
from benchmarks.throughput import BenchRequest
from engine import Engine, EngineConfig
from engine.extensions import ExtendedConfig, scheduler_of


def start(stage: Task, model: str, **options: Any) -> Engine:
    """An engine of a catalog model with random weights on the stage's device."""
    config = EngineConfig(device=str(stage.device), load_format="dummy", **options)
    engine = Engine(spec_of(model, is_small=stage.is_small), config)
    stage.fallbacks.update(engine.memory_report().fallbacks)
    return engine


def random_tokens(count: int, vocab_size: int, source: random.Random) -> list[int]:
    return source.choices(range(vocab_size), k=count)


def requests_of(lengths: list[tuple[int, int]], vocab_size: int, source: random.Random) -> list[BenchRequest]:
    """Requests of (prompt, output) tokens, their tokens random: no prompt begins as another does."""
    return [BenchRequest(random_tokens(prompt, vocab_size, source), output) for prompt, output in lengths]


def reschedule(engine: Engine, num_blocks: int | None = None, **changes: Any) -> None:
    """Give an idle engine a scheduler of other rules, so that two ways of scheduling share weights, pool and graphs.

    num_blocks  of the pool that it may use, at most all of it (None)
    changes     of its scheduler's config: allocator, batch_queue_depth (2: a step is launched while another runs)
    """
    whole = engine.memory_report().num_blocks
    if engine.has_unfinished or not 1 < (num_blocks or whole) <= whole:
        raise ValueError(f"reschedule: the engine is busy, or has no {num_blocks} blocks")
    rules = tuple(group.rule for group in engine.runner.groups)
    config = engine.scheduler.config
    assert isinstance(config, ExtendedConfig)
    engine.scheduler = scheduler_of(replace(config, **changes), num_blocks or whole, rules)


def first_line(error: Exception) -> str:
    """What went wrong, for a stage that goes on with the rest."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
