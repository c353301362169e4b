"""Adapters in the engine: logits and tokens of each request are those of the model that its adapter is merged into."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.config import SamplingParams
from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from tests.support import small_models
from tests.support.small_adapters import ATTENTION, MLP, merged_model, saved_adapter
from tests.support.small_engines import ROUNDING, engine_for, greedy, random_tokens, run_dry, saved_model


@cache
def reference(folder: Path) -> Any:
    return small_models.load_reference(folder)


@torch.inference_mode()
def wrong_tokens(folder: Path, prompt: list[int], token_ids: list[int]) -> list[str]:
    """Where tokens are not what transformers chooses with the weights in this folder, but for ties by rounding."""
    text = torch.tensor([[*prompt, *token_ids]])
    logits = reference(folder)(text, use_cache=False).logits[0, -1 - len(token_ids) : -1]
    wrong = []
    for row, token in zip(logits, token_ids, strict=True):
        best = int(row.argmax())
        if token != best and row[best] - row.topk(2).values[1] >= ROUNDING * row.abs().max():
            wrong.append(f"{token} for {best}")
    return wrong


def with_adapters(family: str, adapters: dict[str, Path], **changes: Any) -> Engine:
    engine = engine_for(family, **{"max_loras": len(adapters), "max_lora_rank": 8, **changes})
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


def test_each_request_of_a_batch_has_its_own_adapter() -> None:
    paths = {"x": saved_adapter("llama", seed=1), "y": saved_adapter("llama", ATTENTION[:2], rank=8, seed=2)}
    engine = with_adapters("llama", paths)
    names = [None, "x", "y", "x", None]
    prompts = random_tokens(5, 17, 30, 9, 21)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        engine.add_request(prompt, greedy(), request_id=str(i), adapter=name)
    outputs = run_dry(engine)
    tokens = [outputs[str(i)].token_ids for i in range(len(names))]
    for name, prompt, token_ids in zip(names, prompts, tokens, strict=True):
        folder = saved_model("llama") if name is None else merged_model("llama", paths[name])
        assert len(token_ids) == 16
        assert wrong_tokens(folder, prompt, token_ids) == []
    plain = engine.generate(prompts, greedy())
    assert [output.token_ids != other for output, other in zip(plain, tokens, strict=True)] == [
        name is not None for name in names
    ]
