"""Prefixes cached beside recurrent states: the same tokens with a cache and without, also after states were evicted."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from engine.llm import Engine
from engine.request import RequestOutput
from engine.state_slots import StateBlocks, StateShape, StateSlots, with_room_for_states
from engine.states import MambaGroup, StateBlockManager
from kvplan.models import catalog
from kvplan.serve.real import inputs_of
from kvplan.servers.bundled.rules import predict
from tests.support.small_engines import engine_for, greedy, poison, random_tokens, run_dry, wrong_greedy_tokens

FULL = pytest.mark.full
(SHARED,) = random_tokens(64, seed=5)
PROMPTS = [SHARED[:n] + tail for n, tail in zip((64, 64, 64, 40), random_tokens(9, 21, 3, 14, seed=6), strict=True)]


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5", marks=FULL)])
@pytest.mark.parametrize("num_blocks", [pytest.param(400, marks=FULL), 40])
def test_tokens_are_the_models_when_states_are_found_and_after_they_were_evicted(family: str, num_blocks: int) -> None:
    """Each prompt twice, one after the other: the second time all but its last block's tokens are there, unless the
    pool of 40 blocks has given the state away."""
    engine = engine_for(family, num_blocks=num_blocks)
    plain = engine_for(family, enable_prefix_caching=False)
    hits = []
    for prompt in PROMPTS * 2:
        (output,) = engine.generate([prompt], greedy(6))
        engine.scheduler.check_invariants()
        hits.append(output.num_cached_tokens)
        assert output.token_ids == plain.generate([prompt], greedy(6))[0].token_ids
        assert wrong_greedy_tokens(family, prompt, output.token_ids) == []
    assert engine.config.block_size == 8
    # The second reaches where the first left it, and stores the state that the third and later ones find there.
    assert hits[:3] == [0, 0, 64]
    assert hits[4] == (64 if num_blocks == 40 else 72)  # the state at 72 was given away
    assert isinstance(engine.scheduler.blocks, StateBlockManager)
    assert (engine.scheduler.blocks.pool.num_evictions > 0) == (num_blocks == 40)


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=FULL), True])
def test_tokens_are_the_models_beside_others_and_when_sequences_give_way(is_async: bool) -> None:
    engine = engine_for(
        "qwen3_next", num_blocks=42, max_num_seqs=3, max_num_batched_tokens=20, async_scheduling=is_async
    )
    for i, prompt in enumerate(PROMPTS * 2):
        engine.add_request(prompt, greedy(14), request_id=str(i))
    outputs = run_dry(engine)
    assert engine.scheduler.num_preemptions
    assert sum(output.num_cached_tokens for output in outputs.values()) > 0
    for i, prompt in enumerate(PROMPTS * 2):
        assert wrong_greedy_tokens("qwen3_next", prompt, outputs[str(i)].token_ids) == []


def test_without_a_cache_states_lie_in_slots_and_nothing_of_blocks_runs() -> None:
    engine = engine_for("qwen3_next", enable_prefix_caching=False)
    assert engine.config.block_size == 4
    assert not any(isinstance(group.rule, MambaGroup) for group in engine.runner.groups)
    assert not isinstance(engine.scheduler.blocks, StateBlockManager)
    assert {type(kv).__name__ for kv in engine.runner.kv.layers.values()} == {"StateSlots", "HeadKV"}


@pytest.mark.parametrize("allocator", ["contiguous", pytest.param("static", marks=FULL)])
def test_an_allocator_that_caches_nothing_has_slots_too(allocator: Any) -> None:
    engine = engine_for("qwen3_next", allocator=allocator)
    assert any(isinstance(kv, StateSlots) for kv in engine.runner.kv.layers.values())
    (output,) = engine.generate([PROMPTS[0]], greedy(6))
    assert wrong_greedy_tokens("qwen3_next", PROMPTS[0], output.token_ids) == []


def test_what_nan_reached_is_not_found_again() -> None:
    """A prompt that shares 64 tokens with one that turns to nan begins anew, in blocks that are clean."""
    engine = engine_for("qwen3_next", num_blocks=40)
    bad = 255
    prompts = [[token if token != bad else 3 for token in prompt] for prompt in PROMPTS]
    engine.generate([prompts[0]], greedy(4))
    poison(engine, bad)
    (failed,) = engine.generate([[*prompts[1], bad, 7]], greedy(4))
    assert failed.finish_reason == "error"
    for prompt in prompts:
        (output,) = engine.generate([prompt], greedy(4))
        assert wrong_greedy_tokens("qwen3_next", prompt, output.token_ids) == []


@pytest.mark.parametrize(
    ("name", "unit", "tokens"),
    [
        # 3 x 8,192 inputs and 32 matrices of 128 x 128, in bfloat16: 1,097,728 bytes, of 2,048 for a token: 536.
        ("qwen3-next-80b-a3b", 32, 544),
        ("qwen3-next-80b-a3b", 64, 576),
        # 3 x 10,240 inputs in bfloat16, 48 matrices of 128 x 128 in float32: 3,207,168 bytes, of 4,096: 783.
        ("qwen3.5-27b", 64, 832),
    ],
)
def test_a_block_has_the_tokens_that_a_state_takes(name: str, unit: int, tokens: int) -> None:
    """The next multiple of the size asked for, as vLLM 0.33 raises it: block_size_after_backend with --block-size 32 on
    an L40S (tests/facts/tune_settings.jsonl), and where its kernels want multiples of 64."""
    config = with_room_for_states(catalog.load(name), EngineConfig(device="cpu", block_size=unit))
    assert config.block_size == tokens
    off = EngineConfig(device="cpu", enable_prefix_caching=False)
    assert with_room_for_states(catalog.load(name), off) is off


def test_the_pool_is_as_planned_to_the_byte() -> None:
    """4 layers, of one block each: 8 tokens of 2 x 2 heads of 32 in float32 are 4,096 bytes."""
    engine = engine_for("qwen3_next")
    memory = engine.memory_report()
    predicted = predict(engine.spec, inputs_of(engine))
    assert memory.block_bytes == predicted.block_bytes == 8 * 2 * 2 * 32 * 4
    assert memory.kv_cache == predicted.kv_cache == 800 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_comes_out_of_a_block_as_it_went_in(dtype: torch.dtype) -> None:
    """Across the tensors of keys and values, whatever lies in the bytes behind it."""
    shape = StateShape((6, 3), (2, 4, 3), dtype, torch.float32)
    tensors = [torch.full((5, 3, 2, 7), 9.0, dtype=dtype) for _ in range(2)]
    blocks = StateBlocks(tensors, shape, 0)
    inputs, states = torch.randn(2, 6, 3).to(dtype), torch.randn(2, 2, 4, 3)
    blocks.write(torch.tensor([4, 1]), inputs, states)
    out = blocks.read(torch.tensor([1, 4]))
    assert torch.equal(out[0], inputs.flip(0))
    assert torch.equal(out[1], states.flip(0))
    assert all(bool((tensor[[0, 2, 3]] == 9).all()) for tensor in tensors)


def test_an_engine_of_a_directory_serves_with_a_cache_by_default(tmp_path: Path) -> None:
    """What `kvplan serve DIR` builds; states that follow chunks of any length."""
    engine = engine_for("qwen3_next", max_num_batched_tokens=5)
    assert isinstance(engine, Engine)
    (first,) = engine.generate([PROMPTS[1]], greedy(4))
    (second,) = engine.generate([PROMPTS[1]], greedy(4))
    assert first.token_ids == second.token_ids
    assert second.num_cached_tokens == 80


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite_h", {"kv_offloading_size": 0.001}),
        pytest.param("nemotron_h", {"enable_prefix_caching": False}, marks=FULL),
        pytest.param("granite_h_moe", {"async_scheduling": True}, marks=FULL),
        pytest.param("qwen3_next", {"async_scheduling": True, "kv_offloading_size": 0.001}, marks=FULL),
    ],
)
def test_two_hundred_requests_of_which_some_are_aborted_leave_nothing_behind(
    family: str, changes: dict[str, Any]
) -> None:
    """Prompts with prefixes in common, in chunks, in a pool too small for three; every tenth answer is the model's."""
    draw = random.Random(7)
    is_cached = changes.get("enable_prefix_caching", True)
    size = engine_for(family, num_blocks=2).config.block_size if is_cached else 24
    longest, num_blocks = 5 * size, 20 if is_cached else 40  # without a cache, of 4 tokens
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "max_model_len": longest, "num_blocks": num_blocks}
    engine = engine_for(family, **options, **changes)
    prefixes = random_tokens(3 * size, 2 * size + 3, 3 * size - 1, seed=9)
    texts, outputs = dict[str, list[int]](), dict[str, RequestOutput]()
    for i in range(200):
        texts[str(i)] = draw.choice(prefixes)[: draw.randrange(4, 3 * size)] + random_tokens(draw.randrange(1, size))[0]
        engine.add_request(texts[str(i)], greedy(draw.randrange(1, 10)), request_id=str(i))
        for _ in range(draw.randrange(4)):
            outputs |= {output.request_id: output for output in engine.step()}
        if draw.random() < 0.4:
            engine.abort(str(draw.randrange(max(0, i - 5), i + 1)))
    outputs |= run_dry(engine)
    assert engine.scheduler.num_preemptions
    reasons = Counter(output.finish_reason for output in outputs.values())
    assert reasons.keys() <= {"length", "abort"}
    assert reasons["length"] > 100
    assert engine.scheduler.num_used_blocks == 0
    if isinstance(engine.scheduler.blocks, StateBlockManager):
        assert engine.scheduler.blocks._tables == {}
    engine.generate([[5, 6]], greedy(1))  # rows, and the slots that go with them, come free with the next batch
    assert len(engine._batches._free_rows) == options["max_num_seqs"] - 1
    if engine.tiers is not None:
        assert engine.tiers.external_cache_stats.hits > 0
        engine.tiers.close()
        pool = engine.tiers.connector.pool
        assert (pool.num_writing, pool.num_evictable) == (0, pool.num_resident)
    done = [name for name, output in outputs.items() if output.finish_reason == "length"]
    for name in done[::10]:
        assert wrong_greedy_tokens(family, texts[name], outputs[name].token_ids) == []
