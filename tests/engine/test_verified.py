"""Functions of a backend that raise, or compute something else than plain torch, are replaced at the start."""

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import attention, cuda_graphs
from engine.attention import AttentionBackend
from engine.kernels import torch_backend
from engine.kernels.verified import Verified
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.real import start_log, start_of
from tests.support.small_engines import engine_for, greedy, random_tokens

FUNCTIONS = [
    name for name in vars(torch_backend) if callable(getattr(torch_backend, name)) and not name.startswith("_")
    and getattr(torch_backend, name).__module__ == torch_backend.__name__
]  # fmt: skip
PROMPTS = random_tokens(5, 30, 11)


def raises(*args: Any, **options: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device\nmore")


def not_a_number(*args: Any, **options: Any) -> Any:
    result = torch_backend.rms_norm(*args, **options)
    return tuple(part * math.nan for part in result) if isinstance(result, tuple) else result * math.nan


def off_by_a_tenth(*args: Any, **options: Any) -> Any:
    return torch_backend.gated_activation(*args, **options) * 1.1


def twice_as_much(*args: Any, **options: Any) -> Any:
    return torch_backend.paged_prefill(*args, **options).mul_(2)  # its `out`, too


def backend(**broken: Callable[..., Any]) -> ModuleType:
    """Plain torch under another name, with these functions in place of its own."""
    module = ModuleType("a_new_release")
    module.__dict__.update({name: getattr(torch_backend, name) for name in FUNCTIONS} | broken)
    module.__dict__.update({"__all__": FUNCTIONS, "IS_PLANNED": False, "LORA_WALKS_ON_HOST": True})
    return module


def with_backend(monkeypatch: pytest.MonkeyPatch, **broken: Callable[..., Any]) -> None:
    """Engines get this backend, which is compiled when first launched."""
    monkeypatch.setattr(attention, "load", lambda name, device: AttentionBackend(backend(**broken), compiles=True))


def tokens_of(engine: Any) -> list[list[int]]:
    return [output.token_ids for output in engine.generate([list(p) for p in PROMPTS], greedy(8))]


@pytest.mark.parametrize(
    ("name", "function", "why"),
    [
        ("rms_norm", raises, r"RuntimeError: no kernel image is available for execution on the device"),
        ("rms_norm", not_a_number, r"it differs from plain torch by nan of its norm"),
        ("gated_activation", off_by_a_tenth, r"it differs from plain torch by 0\.1 of its norm"),
        ("paged_prefill", twice_as_much, r"it differs from plain torch by 1 of its norm"),
    ],
)
def test_what_is_wrong_is_replaced_and_the_tokens_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any], why: str
) -> None:
    expected = tokens_of(engine_for("mistral"))
    with_backend(monkeypatch, **{name: function})
    engine = engine_for("mistral")
    fallbacks = engine.memory_report().fallbacks
    assert list(fallbacks) == [name]
    assert re.fullmatch(why, fallbacks[name])
    assert tokens_of(engine) == expected
    start = start_of(engine)
    page = ServerMetrics("m", 96, start.cache_config, fallbacks=start.fallbacks).page().decode()
    assert f'kvplan:fallback_info{{name="{name}",reason="{fallbacks[name]}"}} 1.0' in page.splitlines()
    (line,) = [line for line in start.log if name in line]
    assert line.endswith(f"plain torch stands for {name}: {fallbacks[name]}")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral"])
def test_a_backend_that_is_right_is_kept(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    with_backend(monkeypatch)
    engine = engine_for(family)
    assert engine.memory_report().fallbacks == {}
    assert isinstance(engine.runner.kernels, Verified)
    assert engine.runner.kernels.rms_norm is torch_backend.rms_norm


def widened(name: str) -> Callable[..., Any]:
    """A function of sampling that reads logits in the model's dtype, as a kernel does."""
    return lambda logits, *args, **options: getattr(torch_backend, name)(logits.float(), *args, **options)


@pytest.mark.parametrize("broken", [None, "draw", "nucleus_floors", "best_tokens"])
def test_sampling_is_compared_in_each_backends_own_dtype(monkeypatch: pytest.MonkeyPatch, broken: str | None) -> None:
    functions: dict[str, Any] = {name: widened(name) for name in ("best_tokens", "draw", "nucleus_floors")}
    functions["for_sampling"] = lambda logits: logits
    expected = tokens_of(engine_for("llama", dtype="bfloat16"))
    with_backend(monkeypatch, **functions | ({} if broken is None else {broken: raises}))
    engine = engine_for("llama", dtype="bfloat16")
    assert list(engine.memory_report().fallbacks) == ([] if broken is None else [broken])
    assert tokens_of(engine) == expected


def test_a_step_compares_the_functions_of_attention_with_a_cache_that_is_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode that reads one token less than there are is found, which an empty cache would not show."""

    def one_less(*args: Any, **options: Any) -> None:
        q, k_cache, v_cache, tables, lens, *more = args
        torch_backend.paged_decode(q, k_cache, v_cache, tables, (lens - 1).clamp_(min=1), *more, **options)

    with_backend(monkeypatch, paged_decode=one_less)
    assert list(engine_for("llama").memory_report().fallbacks) == ["paged_decode"]


def test_graphs_that_cannot_be_captured_leave_steps_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Callable[[], None], pool: object) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = engine_for("llama")
    monkeypatch.setattr(cuda_graphs, "capture", fails)
    assert engine.runner._graphs_or_none() is None
    assert engine.memory_report().fallbacks == {
        "CUDA graphs": "RuntimeError: operation not permitted when stream is capturing"
    }
    (line,) = [line for line in start_log(engine) if "CUDA graphs" in line]
    assert "decode steps run without CUDA graphs: RuntimeError: operation not permitted" in line


def test_a_lack_of_memory_while_capturing_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Callable[[], None], pool: object) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_for("llama")
    monkeypatch.setattr(cuda_graphs, "capture", fails)
    with pytest.raises(torch.OutOfMemoryError):
        engine.runner._graphs_or_none()
