"""However the engine batches, chunks, caches, preempts, pads or stores, the tokens are the model's."""

import sys
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams, cuda_graphs
from engine.batch import BatchArrays
from engine.request import RequestOutput
from engine.sampler import SampledTokens
from engine.step import step_tensors
from tests.support import small_models
from tests.support.parts import paired, some
from tests.support.small_engines import (
    FAMILIES,
    ROUNDING,
    engine_for,
    faults,
    greedy,
    random_tokens,
    reference_logits,
    run_dry,
    saved_model,
)

LENS = (5, 17, 33, 50)  # prompts; none is a whole number of blocks
NUM_TOKENS = 24
EVEN, ODD = FAMILIES[::2], FAMILIES[1::2]  # the half that a test has in every run; `make test-full` has both


# --- equivalences: each against one forward pass of transformers over the whole text ------------------------------

HOW: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "contiguous": {"allocator": "contiguous"},
    "static": {"allocator": "static", "max_num_seqs": 2},
    "chunked": {"max_num_batched_tokens": 7, "long_prefill_token_threshold": 5},
    "large blocks": {"block_size": 32},
}


@pytest.mark.parametrize(("family", "how"), paired(FAMILIES, HOW))
def test_tokens_do_not_depend_on_how_they_are_computed(family: str, how: str) -> None:
    engine = engine_for(family, **HOW[how])
    outputs = engine.generate(random_tokens(*LENS), greedy(NUM_TOKENS))
    assert faults(family, outputs, NUM_TOKENS) == []
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize(("family", "allocator"), paired(FAMILIES, ["paged", "contiguous"]))
def test_a_request_that_was_preempted_gives_the_same_tokens(family: str, allocator: str) -> None:
    engine = engine_for(family, allocator=allocator, enable_prefix_caching=False, max_num_batched_tokens=16)
    ids = [engine.add_request(prompt, greedy(NUM_TOKENS)) for prompt in random_tokens(*LENS)]
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
        if step % 3 == 0:
            engine.scheduler.preempt(ids[step % len(ids)])
    assert engine.stats().num_preemptions > len(ids)
    assert faults(family, [outputs[request_id] for request_id in ids], NUM_TOKENS) == []


@pytest.mark.parametrize("family", some(FAMILIES, EVEN))
def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens(family: str) -> None:
    num_groups = len(engine_for(family).runner.groups)
    # Six prompts take 6 * 3 blocks of each group's 20 and are all admitted; with their answers they want 6 * 9, or in
    # a group with a window of 12 tokens 6 * 4.
    engine = engine_for(family, num_blocks=1 + 20 * num_groups, enable_prefix_caching=False)
    outputs = engine.generate(random_tokens(*[10] * 6), greedy(NUM_TOKENS))
    assert engine.stats().num_preemptions > 0
    assert faults(family, outputs, NUM_TOKENS) == []


@pytest.mark.parametrize("family", some(FAMILIES, ODD))
def test_a_prefix_found_in_the_cache_gives_the_same_tokens(family: str) -> None:
    engine = engine_for(family)
    shared, *ends = random_tokens(42, 3, 5, 7, 9)
    outputs = [engine.generate(shared + end, greedy(NUM_TOKENS))[0] for end in ends]
    # Groups with windows keep only the blocks at the first one's end: the second shows where the prompts part,
    # and from the third on that place is found.
    assert outputs[0].num_cached_tokens == 0
    assert [output.num_cached_tokens for output in outputs[2:]] == [40, 40]
    assert faults(family, outputs, NUM_TOKENS) == []


@pytest.mark.parametrize("family", some(FAMILIES, EVEN))
def test_a_prefix_shared_within_one_step_gives_the_same_tokens(family: str) -> None:
    engine = engine_for(family, max_num_batched_tokens=256)
    shared, *ends = random_tokens(30, 3, 5, 7)
    outputs = engine.generate([shared + end for end in ends] * 2, greedy(NUM_TOKENS))
    assert faults(family, outputs, NUM_TOKENS) == []


@pytest.mark.parametrize("family", some(FAMILIES, ODD))
def test_decode_steps_replayed_in_larger_graphs_are_the_same_and_write_nothing_else(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU records and replays, a CPU runs again: on the same tensors, with rows of older steps behind."""
    monkeypatch.setattr(cuda_graphs, "capture", lambda run, pool: run)
    engine = engine_for(family, max_num_batched_tokens=256)
    runner, worst, steps = engine.runner, [], 0
    graphs = runner._capture_graphs()
    assert set(graphs.replays) == {1, 2, 4, 8}

    def compare(arrays: BatchArrays) -> torch.Tensor:
        nonlocal steps
        plain = runner.forward(step_tensors(arrays, runner.device))
        pool = [tensor.clone() for tensor in runner.kv.tensors]
        hidden = graphs(arrays)
        if hidden is None:
            return plain
        steps += 1
        replayed = runner.model.logits(hidden)
        worst.append(float((replayed - plain).abs().max() / plain.abs().max()))
        # The same tokens' KV again, up to the rounding of a larger batch.
        worst.extend(float((a - b).abs().max()) for a, b in zip(pool, runner.kv.tensors, strict=True))
        return replayed

    runner.logits = compare  # type: ignore[method-assign]
    # Requests end one by one, so that smaller batches follow larger ones.
    prompts = random_tokens(*LENS)
    outputs = engine.generate(prompts, [greedy(NUM_TOKENS - i) for i in range(len(prompts))])
    assert steps == NUM_TOKENS - 1
    assert max(worst) < ROUNDING
    assert [fault for i, output in enumerate(outputs) for fault in faults(family, [output], NUM_TOKENS - i)] == []


def test_a_seeded_request_draws_the_same_beside_others_in_chunks_and_after_preemption() -> None:
    prompt, *others = random_tokens(21, 9, 30, 14)
    drawn = SamplingParams(temperature=1.5, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    other = SamplingParams(temperature=2.0, top_k=50, max_tokens=30, ignore_eos=True)
    alone = engine_for("llama").generate(prompt, drawn)[0].token_ids
    beside = engine_for("llama", seed=5).generate([*others, prompt], [other, other, other, drawn])[3].token_ids
    chunked = engine_for("llama", max_num_batched_tokens=4).generate(prompt, drawn)[0].token_ids
    engine = engine_for("llama", enable_prefix_caching=False)
    request_id = engine.add_request(prompt, drawn)
    for _ in range(10):
        engine.step()
    engine.scheduler.preempt(request_id)
    resumed = run_dry(engine)[request_id].token_ids
    assert alone == beside == chunked == resumed
    assert alone != engine_for("llama").generate(prompt, greedy(NUM_TOKENS))[0].token_ids


# --- the KV's dtype -----------------------------------------------------------------------------------------------

UNIT_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "fp8_e4m3": 2**-4}  # half a unit in the last place, relative
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def teacher_forced_logits(engine: Engine, text: list[int], prompt_len: int) -> torch.Tensor:
    """[len(text) - prompt_len, vocab_size], prefill and decode, with the text's own tokens fed."""
    rows: list[torch.Tensor] = []

    def forced(arrays: BatchArrays, params: list[SamplingParams]) -> SampledTokens:
        done = arrays.seqs[0].num_computed_tokens
        logits = engine.runner.logits(arrays)
        if done >= prompt_len:
            rows.append(logits[0])
        return SampledTokens([text[min(done, len(text) - 1)]], [False], [None])

    engine.runner.run = torch.inference_mode()(forced)  # type: ignore[method-assign, assignment]
    engine.generate(text[:prompt_len], greedy(len(text) - prompt_len))
    return torch.stack(rows)


def round_keys_and_values(model: Any, dtype: str, scale: float, patch: pytest.MonkeyPatch) -> None:
    """Have transformers attend over K and V (of MLA: latents and rope keys) rounded to `dtype`."""
    largest = torch.finfo(TORCH[dtype]).max

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x / scale).clamp(-largest, largest).to(TORCH[dtype]).to(x.dtype) * scale

    module = sys.modules[type(model).__module__]
    if model.config.model_type == "deepseek_v3":
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, inputs, output: rounded(output))
        rotate = module.apply_rotary_pos_emb_interleave

        def rotated(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
            q, k = rotate(q, k, *args, **kwargs)
            return q, rounded(k)

        patch.setattr(module, "apply_rotary_pos_emb_interleave", rotated)
        return
    attend = module.eager_attention_forward

    def attention(layer: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return attend(layer, q, rounded(k), rounded(v), *args, **kwargs)

    patch.setattr(module, "eager_attention_forward", attention)


@pytest.mark.parametrize(
    ("family", "dtype", "scale"),
    [
        ("llama", "float16", 1.0),
        ("llama", "bfloat16", 1.0),
        ("llama", "fp8_e4m3", 1.0),
        ("llama", "fp8_e4m3", 0.05),
        ("gpt_oss", "float16", 1.0),
        ("gpt_oss", "fp8_e4m3", 0.5),
        ("gemma3_text", "bfloat16", 1.0),
        ("deepseek_v3", "float16", 1.0),
        ("deepseek_v3", "bfloat16", 1.0),
    ],
)
def test_a_kv_cache_of_another_dtype_rounds_and_does_nothing_else(
    family: str, dtype: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers with K and V rounded alike.

    What is left: where float32's own rounding moves a number over a rounding boundary, it lands one step of the
    dtype away. If all did, every number would be off by its unit roundoff; so that share of the largest logit is
    the bound.
    """
    text = random_tokens(60)[0]
    exact = reference_logits(family, text, 20)
    engine = engine_for(family, kv_cache_dtype=dtype, kv_scale=scale, max_num_batched_tokens=16)
    logits = teacher_forced_logits(engine, text, 40)
    model = small_models.load_reference(saved_model(family))
    round_keys_and_values(model, dtype, scale, monkeypatch)
    with torch.inference_mode():
        theirs = model(torch.tensor([text]), use_cache=False).logits[0, 39:-1]
    largest = theirs.abs().max()
    assert (logits - theirs).abs().max() < UNIT_ROUNDOFF[dtype] * largest
    assert (logits - exact).abs().max() > UNIT_ROUNDOFF[dtype] * largest, "the bound is too wide to see rounding"


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("float16", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e4m3", 1)])
def test_the_pool_takes_the_bytes_of_its_dtype(dtype: str, size: int) -> None:
    engine = engine_for("llama", kv_cache_dtype=dtype, num_blocks=10)
    # 3 layers, K and V, 10 blocks of 4 tokens, 2 KV heads of 16
    assert engine.runner.kv.num_bytes == 3 * 2 * 10 * 4 * 2 * 16 * size
    assert engine.memory_report().kv_cache == engine.runner.kv.num_bytes


def test_latents_are_stored_once_for_all_heads() -> None:
    engine = engine_for("deepseek_v3", kv_cache_dtype="float16", num_blocks=10)
    # layers, blocks, tokens, latent and rope key, bytes
    assert engine.memory_report().kv_cache == 3 * 10 * 4 * (64 + 16) * 2
