"""What vLLM starts with, by attention backend and KV dtype: the stored table against fresh answers, and what the plan
makes of it.

kvplan/servers/vllm/attention.json is asked by benchmarks/start_attention.py of vLLM 0.33's own classes; rows of its
whole planning code are in tests/facts/backends.jsonl.
"""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start_attention
from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.vllm import attention_table as table
from kvplan.servers.vllm.backends import BACKENDS, OTHERS
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

HOME = Path(os.environ.get("ORACLE_HOME") or "/nowhere")
EVERY = frozenset(BACKENDS) | frozenset(OTHERS)
RECENT = [sm for sm in start_attention.GPUS if sm >= 80]


@pytest.mark.skipif(not (HOME / "vllm-src").is_dir(), reason="vLLM's own classes are not at hand (ORACLE_HOME)")
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_the_table_is_what_the_backends_answer(sm: int) -> None:
    draw, names = random.Random(sm), sorted({name for name, answer in table._table().answers if answer == sm})
    cells = [drawn(draw) for _ in range(600)]
    questions = [{"backend": draw.choice(names), "cell": cell} for cell in cells]
    answers = start_attention.answers_of(HOME, start_attention.GPUS[sm], questions)
    for cell, question, fresh in zip(cells, questions, answers, strict=True):
        row = table.answers(str(question["backend"]), sm)
        assert row is not None
        flags = frozenset(flag for flag in table.FLAG_REASONS if cell.get(flag))
        layer = table.Layer(cell["kv"], cell["width"], cell["dtype"], cell["block"], row.latent, row.sparse, flags)
        assert bool(list(row.reasons(layer))) == bool(fresh), (question, fresh)


def drawn(draw: random.Random) -> dict[str, Any]:
    return {
        "kv": draw.choice(["auto", "fp8", "fp8_e5m2", "nvfp4", "turboquant_k8v4", "int8_per_token_head"]),
        "width": draw.choice(start_attention.WIDTHS), "dtype": draw.choice(start_attention.DTYPES),
        "block": draw.choice([None, 16, 64, 128, 256]),
        **{flag: draw.random() < 0.2 for flag in ("sinks", "ahead", "window", "dcp")},
    }  # fmt: skip


def test_a_plain_plan_needs_no_table() -> None:
    """From Ampere on a backend runs 16-bit caches of any head, with sinks, windows and images that look ahead."""
    flags = [frozenset(some) for n in range(4) for some in itertools.combinations(("sinks", "ahead", "window"), n)]
    for sm, dtype, some in itertools.product(RECENT, ("float16", "bfloat16"), flags):
        for width in (*range(32, 520, 8), 36, 52, 100):
            assert table.chosen(table.Layer("auto", width, dtype, flags=some), sm, EVERY), (sm, width, some)
    for sm, width in itertools.product(RECENT, (192, 256, 320, 512, 576)):
        assert table.chosen(table.Layer("auto", width, "bfloat16", latent=True), sm, EVERY), (sm, width)


def of(model: str, card: str, **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(card), EngineArgs(**args)))


# Model, GPUs and KV dtype that vLLM 0.33 does not start with, and its reason in the plan's words.
REFUSED = [
    ("qwen3-32b-fp8", "2xh100-80g", "fp8_e5m2", "fp8_e5m2 KV cache is not supported with fp8 checkpoints"),
    ("qwen3-8b", "a100-80g", "fp8_per_token_head", "no attention backend keeps a KV cache of fp8_per_token_head"),
    ("qwen3-8b", "b200", "turboquant_k8v4", "no layout of a KV cache of turboquant_k8v4 suits all its attention"),
    ("gpt-oss-120b", "2xh100-80g", "turboquant_k8v4", "no attention backend keeps a KV cache of turboquant_k8v4"),
    ("gemma-3-4b", "h100-80g", "turboquant_3bit_nc", "no attention backend keeps a KV cache of turboquant_3bit_nc"),
]


@pytest.mark.parametrize(("model", "card", "dtype", "reason"), REFUSED)
def test_a_cache_that_vllm_refuses_does_not_fit(model: str, card: str, dtype: str, reason: str, run: Run) -> None:
    words = ("estimate", model, "--gpu", card, "--ctx", "16k", "--kv-cache-dtype", dtype)
    answer = run(*words)
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert f" does not start: {reason}" in lines[0]
    serve = next(text for text in lines if text.startswith("Serve"))
    assert f"--kv-cache-dtype {dtype}" not in serve
    assert run(*words, "--exit-code").code == 1


# The same where vLLM 0.33 starts: rows of its planning code in tests/facts/backends.jsonl.
STARTED = [
    ("qwen3-8b", "a100-80g", "int8_per_token_head"), ("qwen3-8b", "a100-80g", "fp8_e5m2"),
    ("qwen3-8b", "h100-80g", "turboquant_k8v4"), ("qwen3.5-27b", "h100-80g", "fp8_e5m2"),
    ("gpt-oss-20b", "h100-80g", "fp8_per_token_head"), ("qwen3-8b-awq", "a100-80g", "fp8_e5m2"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "card", "dtype"), STARTED)
def test_a_cache_that_vllm_keeps_is_planned(model: str, card: str, dtype: str) -> None:
    assert of(model, card, kv_cache_dtype=dtype, max_model_len=8192).refusal is None


@pytest.mark.parametrize(("card", "starts"), [("a100-80g", False), ("h100-80g", True), ("l40s", True)])
def test_gemma_4_takes_triton_where_flash_attention_4_is_not(card: str, starts: bool) -> None:
    """vLLM 0.33 of text only on an A100: "FP8 KV cache is not supported by the Triton attention backend"."""
    args = {"kv_cache_dtype": "fp8", "max_model_len": 8192, "language_model_only": True, "tensor_parallel_size": 4}
    refusal = of("gemma-4-31b", card, **args).refusal
    assert (refusal is None) == starts
    assert starts or (refusal is not None and "no attention backend keeps a KV cache of fp8" in refusal.text)


def test_a_printed_command_is_never_one_that_the_server_refuses() -> None:
    draw = random.Random(29)
    models = ("qwen3-8b", "gpt-oss-20b", "gemma-3-12b", "qwen3-32b-fp8", "deepseek-v2-lite", "phi-3-mini-4k")
    cards = ("t4", "a100-80g", "l40s", "h100-80g", "b200", "rtx-5090")
    dtypes = ("auto", "fp8", "fp8_e5m2", "fp8_per_token_head", "turboquant_k8v4", "nvfp4", "float16")
    num_fits, refused = 0, 0
    for _ in range(60):
        args = {"kv_cache_dtype": draw.choice(dtypes), "max_model_len": 8192}
        if draw.random() < 0.4:
            args["attention_backend"] = draw.choice(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TRITON_MLA"))
        try:
            short = of(draw.choice(models), draw.choice(cards), **args)
        except KvplanError:  # cannot be sized at all
            continue
        num_fits, refused = (
            num_fits + short.fits,
            refused + (short.refusal is not None and short.refusal.by == "unsupported"),
        )
        doc = plan_document(short)
        for fix in doc["fixes"]:
            printed = EngineArgs(**read_command(fix["command"]).args)
            assert plan(Request(catalog.load(fix["model"]), gpu(fix["gpu"]), printed)).fits, fix["command"]
    assert num_fits >= 10
    assert refused > 10
