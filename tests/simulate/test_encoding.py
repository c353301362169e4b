"""Budgets of an encoder: what a step may compute, what is kept, and what could never be computed."""

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from engine.block_manager import FullGroup
from engine.scheduler import Batch, Extension, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.simulate.encoding import (
    EncoderCache,
    EncoderInput,
    EncoderRules,
    EncoderStep,
    Encoding,
    ImageSequence,
    inputs_of,
)
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler

SAMPLED = 1


def config(**changes: Any) -> SimulatedConfig:
    plain = SimulatedConfig(16, 4, 64, encoder=EncoderRules(compute_budget=10, cache_size=20))
    return replace(plain, **changes)


def prompt(name: str, length: int, *images: EncoderInput, max_tokens: int = 2) -> Sequence:
    return ImageSequence(name, list(range(100, 100 + length)), max_tokens, encoder_inputs=images)


def scheduler(**changes: Any) -> Scheduler:
    return simulated_scheduler(config(**changes), 40, (FullGroup(4),))


def encoding(scheduler: Scheduler) -> Encoding:
    extension = scheduler.extension(Encoding)
    assert extension is not None
    return extension


def test_without_rules_of_an_encoder_none_of_it_runs() -> None:
    assert scheduler(encoder=None).extension(Encoding) is None


def test_a_prompt_stops_before_the_image_that_the_budget_lacks() -> None:
    """6 of the budget's 10 embeddings go to the first image; the second, of 5, is computed in the next step."""
    sched = scheduler()
    sched.add(prompt("a", 15, EncoderInput(0, 6, "x"), EncoderInput(8, 5, "y")))
    batch = sched.schedule()
    assert list(batch.num_tokens.values()) == [8]
    assert list(batch.extra(EncoderStep).inputs.values()) == [[0]]
    sched.update(batch, {})
    batch = sched.schedule()
    assert list(batch.num_tokens.values()) == [7]
    assert list(batch.extra(EncoderStep).inputs.values()) == [[1]]


def test_ranges_of_an_image_are_what_takes_embeddings() -> None:
    item = EncoderInput(10, 20, "x", ((2, 5), (10, 20)))
    assert (item.end, item.num_embeds, item.embeds_in(0, 2), item.embeds_in(4, 12)) == (30, 13, 0, 3)


@pytest.mark.parametrize(
    ("image", "changes", "says"),
    [
        (
            EncoderInput(0, 11, "x"),
            {},
            "a: an image of 11 embeddings is larger than the encoder's budget or cache (10)",
        ),
        (
            EncoderInput(0, 9, "x"),
            {"max_num_batched_tokens": 8, "encoder": EncoderRules(10, 20, chunks_inputs=False)},
            "a: an image of 9 tokens does not fit into a step (8) and must not be cut; raise max_num_batched_tokens",
        ),
    ],
)
def test_an_image_that_no_step_could_compute_is_refused(
    image: EncoderInput, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        scheduler(**changes).add(prompt("a", 15, image))
    assert str(caught.value).startswith(says)


def test_images_of_one_name_and_two_sizes_end_the_second_request() -> None:
    sched = scheduler(enable_prefix_caching=False)
    first, second = prompt("a", 12, EncoderInput(0, 6, "x")), prompt("b", 12, EncoderInput(0, 4, "x"))
    sched.add(first)
    sched.add(second)
    batch = sched.schedule()
    assert list(batch.num_tokens) == [first]
    assert (second.finish_reason, second.error) == (
        "error",
        "b: image 0 is called 'x' and has 4 embeddings, another of that name 6; name images by their content",
    )
    sched.check_invariants()


def test_images_are_not_scheduled_beside_an_offload_tier() -> None:
    with pytest.raises(UsageError, match=r"^kv_offloading_size cannot be combined with images in prompts; remove it$"):
        simulated_scheduler(config(), 40, (FullGroup(4),), Extension())


@pytest.mark.parametrize("seed", range(12))
def test_the_cache_adds_up_whatever_comes(seed: int) -> None:
    """Random prompts, aborts and preemptions: all finish, nothing stays held, and no step asks for more."""
    source = random.Random(seed)
    sched = scheduler(batch_queue_depth=source.randint(1, 2), enable_prefix_caching=source.random() < 0.7)
    seqs: list[Sequence] = []
    in_flight: deque[Batch] = deque()
    for turn in range(400):
        if turn < 40 and source.random() < 0.4:
            start, images = source.randint(0, 3), []
            for _ in range(source.randint(0, 3)):
                length = source.randint(1, 9)
                images.append(EncoderInput(start, length, f"{length} {source.randint(0, 2)}"))
                start += length + source.randint(0, 4)
            seqs.append(prompt(f"r{turn}", start + source.randint(1, 5), *images, max_tokens=source.randint(1, 5)))
            sched.add(seqs[-1])
        if seqs and source.random() < 0.05:
            (sched.abort if source.random() < 0.5 else sched.preempt)(source.choice(seqs).request_id)
        batch = sched.schedule()
        sched.check_invariants()
        encoding(sched).cache.check_invariants()
        encoded = batch.extra(EncoderStep).inputs.items()
        num_embeds = sum(inputs_of(seq)[number].num_embeds for seq, numbers in encoded for number in numbers)
        assert num_embeds <= encoding(sched).rules.compute_budget
        in_flight.append(batch)
        if len(in_flight) == sched.config.batch_queue_depth or not batch.num_tokens:
            oldest = in_flight.popleft()
            sched.update(oldest, {seq.request_id: [SAMPLED] for seq in oldest.samples})
            sched.check_invariants()
            encoding(sched).cache.check_invariants()
    assert all(seq.is_finished for seq in seqs)
    assert encoding(sched).cache.num_freeable == 20


def test_an_output_is_held_until_its_last_equal_image_is_passed() -> None:
    cache, seq = EncoderCache(10), prompt("a", 15, EncoderInput(0, 4, "x"), EncoderInput(6, 4, "x"))
    cache.add(seq, 0)
    assert cache.use(seq, 1)
    cache.leave(seq, 0)
    assert (cache.num_free, cache.num_freeable) == (6, 6)
    cache.leave(seq, 1)
    assert (cache.num_free, cache.num_freeable) == (6, 10)
    assert cache.make_room(8)
    assert cache.take_evicted() == ["x"]
