"""The engine's logits and greedy tokens against transformers, for every family it runs, saved by transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine import Engine, EngineConfig, SamplingParams
from engine.batch import BatchArrays
from engine.rotary import frequencies, rotary_table
from engine.sampler import SampledTokens
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import DynamicScaling, HeadAttention, Rotary
from kvplan.serve.real import inputs_of
from kvplan.servers.bundled.rules import predict
from tests.support import small_engines, small_models
from tests.support.parts import some

# float32 on both sides: sums in another order differ by rounding, far below this share of the largest logit.
BOUND = 1e-4
PROMPT_LENS = (5, 17, 40)
NUM_TOKENS = 250  # the smallest vocabulary among the families
STEPS = 64
# In every run; `make test-full` has the rest. Of rows: a norm, a layout of norms and a feed-forward part of each kind.
WITH_LOGITS = (
    *small_models.FAMILIES, "olmo2", "cohere2", "starcoder2", "phi3", "glm4_moe", "opt", "phimoe", "minimax_m2",
    "cohere_normed", "llama_dynamic",
)  # fmt: skip
WITH_TOKENS = list(small_models.FAMILIES)[::5]


def prompts(seed: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(3, NUM_TOKENS, (n,), generator=source).tolist() for n in PROMPT_LENS]


def engine_for(folder: Path, **changes: Any) -> Engine:
    """Small blocks and a small budget: every prompt is prefilled in chunks, beside the others' decodes."""
    options = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 400, "max_model_len": 256,
        "max_num_seqs": 8, "max_num_batched_tokens": 24, **changes,
    }  # fmt: skip
    return Engine(folder, EngineConfig(**options))


@dataclass(slots=True)
class Forced:
    """Runs an engine on texts whose every token is given, and keeps the logits it would have sampled from."""

    engine: Engine
    texts: list[list[int]]
    logits: dict[tuple[int, int], torch.Tensor]  # (text, position) -> [vocab_size]

    def run(self, arrays: BatchArrays, params: list[SamplingParams]) -> SampledTokens:
        rows = self.engine.runner.logits(arrays)
        tokens = []
        for seq, row in zip(arrays.seqs, rows, strict=True):
            text, position = int(seq.request_id), seq.num_computed_tokens - 1
            self.logits[text, position] = row.clone()  # a graph's output is overwritten by the next step
            tokens.append(self.texts[text][min(position + 1, len(self.texts[text]) - 1)])
        return SampledTokens(tokens, [False] * len(tokens), [None] * len(tokens))


def teacher_forced(engine: Engine, texts: list[list[int]], prompt_lens: tuple[int, ...]) -> list[torch.Tensor]:
    """Per text the logits [len(text) - prompt_len, vocab_size] that predict its tokens after the prompt."""
    forced = Forced(engine, texts, {})
    engine.runner.run = torch.inference_mode()(forced.run)  # type: ignore[method-assign, assignment]
    for i, (text, n) in enumerate(zip(texts, prompt_lens, strict=True)):
        engine.add_request(text[:n], SamplingParams(max_tokens=len(text) - n, ignore_eos=True), request_id=str(i))
    while engine.has_unfinished:
        engine.step()
    return [
        torch.stack([forced.logits[i, position] for position in range(n - 1, len(text) - 1)])
        for i, (text, n) in enumerate(zip(texts, prompt_lens, strict=True))
    ]


@torch.inference_mode()
def reference_logits(model: Any, text: list[int], prompt_len: int) -> torch.Tensor:
    """The same from one forward pass of transformers, without a cache."""
    logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, prompt_len - 1 : -1]
    return logits


@pytest.mark.parametrize("family", some({**small_models.FAMILIES, **small_models.ROWS}, WITH_LOGITS))
def test_teacher_forced_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = small_models.save_small_model(family, tmp_path / family)
    reference = small_models.load_reference(folder)
    source = torch.Generator().manual_seed(7)
    texts = [prompt + torch.randint(3, NUM_TOKENS, (STEPS,), generator=source).tolist() for prompt in prompts(3)]
    logits = teacher_forced(engine_for(folder), texts, PROMPT_LENS)
    for text, n, ours in zip(texts, PROMPT_LENS, logits, strict=True):
        theirs = reference_logits(reference, text, n)
        assert ours.shape == theirs.shape
        assert len(ours) == STEPS
        worst = (ours - theirs).abs().max() / theirs.abs().max()
        assert worst < BOUND, f"logits differ by {worst:.1e} of the largest"


@pytest.mark.full
@pytest.mark.parametrize("family", small_models.ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_of_rows_holds_what_is_planned(family: str, dtype: str) -> None:
    engine = small_engines.engine_for(family, dtype=dtype)
    memory, predicted = engine.memory_report(), predict(engine.spec, inputs_of(engine))
    assert (memory.weights, memory.buffers) == (predicted.weights, predicted.buffers)


WIDE = ("starcoder2", "cohere2", "olmo2", "glm4", "phi", "opt", "stablelm", "lfm2")


@pytest.mark.parametrize("family", some(WIDE, ["starcoder2", "opt"]))
def test_a_wide_feed_forward_part_takes_what_is_planned(family: str, tmp_path: Path) -> None:
    """16 times as wide as the stream, so that a step's peak is there: to the byte what the profile run measures."""
    config = small_models.small_config(family, **{"ffn_dim" if family == "opt" else "intermediate_size": 1024})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    engine = small_engines.engine_for(tmp_path, load_format="dummy")
    assert engine.memory_report().activations == predict(engine.spec, inputs_of(engine)).activations


@pytest.mark.parametrize("positions", [64, 512])
def test_dynamic_rope_turns_as_transformers_does_at_the_longest_request(positions: int) -> None:
    """256 tokens, of which 64 are the model's own; within its own nothing is changed."""
    changes = {"max_position_embeddings": positions}
    theirs = ROPE_INIT_FUNCTIONS["dynamic"](small_models.small_config("llama_dynamic", **changes), seq_len=256)[0]
    ours = frequencies(Rotary(16, 10000.0, DynamicScaling(4.0, positions)), 256)
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert torch.allclose(ours, frequencies(Rotary(16, 10000.0), 256)) == (positions == 512)


@pytest.mark.parametrize("num_positions", [200, 400])
def test_each_list_of_phi_3_5_moe_has_a_strength_of_its_own(num_positions: int) -> None:
    """As vLLM 0.33 has them; transformers takes the short list with the long strength."""
    attention = load_spec(small_engines.saved_model("phimoe")).decoder.layers[0].attention
    assert isinstance(attention, HeadAttention)
    assert attention.rotary is not None
    table = rotary_table(attention.rotary, num_positions, torch.device("cpu"))
    assert table[0, :8].tolist() == [1.25 if num_positions == 200 else 1.5] * 8  # cos 0


@pytest.mark.parametrize("family", some({**small_models.FAMILIES, **small_models.ROWS}, WITH_TOKENS))
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Identical, except where the reference's two best logits are closer than the bound: at most 1% of the steps."""
    folder = small_models.save_small_model(family, tmp_path / family, seed=1)
    reference = small_models.load_reference(folder)
    greedy = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    outputs = engine_for(folder).generate(prompts(4), greedy)
    ties = 0
    for output in outputs:
        text = output.prompt_token_ids + output.token_ids
        theirs = reference_logits(reference, text, len(output.prompt_token_ids))
        for step, token in enumerate(output.token_ids):  # on our own text, so that one tie does not spoil the rest
            best, second = theirs[step].topk(2).values
            if best - second < BOUND * theirs.abs().max():
                ties += 1
            else:
                assert token == theirs[step].argmax(), f"step {step} of the prompt of {len(output.prompt_token_ids)}"
    print(f"{family}: {ties} near ties in {STEPS * len(outputs)} steps")
    assert ties <= 0.01 * STEPS * len(outputs), f"{ties} near ties"


def test_a_sharded_checkpoint_reads_like_a_whole_one(tmp_path: Path) -> None:
    whole = small_models.save_small_model("llama", tmp_path / "whole")
    sharded = small_models.save_small_model("llama", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs, other = (engine_for(folder).generate(prompts(5), greedy) for folder in (whole, sharded))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in other]
