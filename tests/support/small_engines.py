"""Engines of small random models, and what transformers says their greedy tokens are."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.request import RequestOutput
from kvplan.simulate.scheduling import SimulatedConfig
from tests.support import small_models

torch.set_num_threads(1)  # tensors this small only wait for more threads

# One of each kind: plain, window, hybrid groups, sinks and biases, latents, experts.
FAMILIES = ("llama", "qwen2_window", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral")
# float32 on both sides: sums in another order differ by rounding, far below this share of the largest logit.
ROUNDING = 1e-4


@cache
def saved_model(family: str) -> Path:
    """The family's directory, made once per process; not to be written to."""
    folder = Path(tempfile.mkdtemp(prefix="kvplan-small-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return small_models.save_small_model(family, folder / family)


@cache
def reference(family: str) -> Any:
    return small_models.load_reference(saved_model(family))


def engine_for(model: str | Path, **changes: Any) -> Engine:
    """An engine of a family, or of a directory: blocks of 4 tokens, a step of 64 tokens, 96 tokens per request, 8
    sequences or as many as a step has tokens."""
    options = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 800, "max_model_len": 96,
        "max_num_seqs": min(8, changes.get("max_num_batched_tokens", 8)), "max_num_batched_tokens": 64, **changes,
    }  # fmt: skip
    return Engine(model if isinstance(model, Path) else saved_model(model), EngineConfig(**options))


def simulated(engine: Engine) -> SimulatedConfig:
    """The settings of an engine's scheduler, for a simulation."""
    config = engine.scheduler.config
    return SimulatedConfig(**{field.name: getattr(config, field.name) for field in fields(config)})


def random_tokens(*lens: int, seed: int = 0) -> list[list[int]]:
    """A list of tokens per length; 0 to 2, which mean something to a model, do not occur."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(3, small_models.VOCAB, (n,), generator=source).tolist() for n in lens]


def greedy(max_tokens: int = 16, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **changes})


def run_dry(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking the scheduler's invariants; outputs by request id."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
    return outputs


@torch.inference_mode()
def reference_logits(family: str, text: Sequence[int], num_last: int) -> torch.Tensor:
    """[num_last, vocab_size] that predict the text's last tokens: one forward pass of transformers without a cache."""
    logits: torch.Tensor = reference(family)(torch.tensor([text]), use_cache=False).logits[0, -1 - num_last : -1]
    return logits


def wrong_greedy_tokens(family: str, prompt: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    """Where `token_ids` are not transformers' choice after the same text, unless its two best are a rounding apart."""
    logits = reference_logits(family, [*prompt, *token_ids], len(token_ids))
    faults = []
    for i, (row, token) in enumerate(zip(logits, token_ids, strict=True)):
        best = int(row.argmax())
        if token != best and row[best] - row.topk(2).values[1] >= ROUNDING * row.abs().max():
            faults.append(f"token {i} after a prompt of {len(prompt)}: {token}, transformers has {best}")
    return faults


def faults(family: str, outputs: Iterable[RequestOutput], num_tokens: int) -> list[str]:
    """All that is wrong with greedy outputs that should have num_tokens tokens each."""
    problems = []
    for output in outputs:
        problems += wrong_greedy_tokens(family, output.prompt_token_ids, output.token_ids)
        if len(output.token_ids) != num_tokens:
            problems.append(f"{output.request_id}: {len(output.token_ids)} tokens")
    return problems


def poison(engine: Engine, token: int) -> None:
    """From now on this token's embedding is nan."""
    with torch.inference_mode():
        engine.runner.model.embedding.weight[token] = float("nan")
