"""Attention backends of vLLM: what each changes in memory, and what each refuses.

tests/facts/backends.jsonl: a backend, a model and a GPU, with the blocks, tokens and concurrency that vLLM 0.33's own
code answers, or its reasons not to take it.
"""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.releases import Version
from kvplan.servers.words import environment
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.core.test_facts import write_configs
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts" / "backends.jsonl"
ROWS = [json.loads(line) for line in FACTS.read_text().splitlines()]
# Reasons of a kernel's build that repeat one before them, or that no other reason says.
BUILD = (
    "FlashAttention MLA not supported on this device",
    "sink not supported on compute",
    "FP8 KV cache requires FA3",
)


def of(model: str, card: str, release: Version | None = None, **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(card), EngineArgs(**args), release=release or Version((0, 33))))


def test_pools_and_refusals_equal_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = write_configs(tmp_path / "configs", {row["inputs"]["model"] for row in ROWS})
    assert oracles.main(["capacity", str(FACTS), str(configs)]) == 0
    assert capsys.readouterr().out == f"{len(ROWS)} equal / 0 refused by name / 0 different\n"


# The reasons of one backend; where no backend reads fp8 at all, that is said first.
REASONS = [
    row
    for row in ROWS
    if row.get("failed", "").startswith("[")
    and not (row["inputs"]["gpu"] == "A100" and "kv_cache_dtype" in row["inputs"])
]


@pytest.mark.parametrize("row", REASONS, ids=lambda row: "-".join(map(str, row["inputs"].values()))[:60])
def test_a_backend_is_refused_in_the_servers_words(row: dict[str, Any]) -> None:
    inputs = row["inputs"]
    reasons = [text for text in ast.literal_eval(row["failed"].partition("]")[0] + "]") if not text.startswith(BUILD)]
    known = [text for text in reasons if not text.startswith(("FlashMLA Dense is only", "mm_prefix"))]
    args = inputs["engine_args"] | {key: inputs[key] for key in ("kv_cache_dtype", "block_size") if key in inputs}
    card = oracles.GPUS.get(inputs["gpu"], inputs["gpu"].lower())
    refusal = of(inputs["model"], card, tensor_parallel_size=inputs["tp"], **args).refusal
    assert refusal is not None
    assert refusal.by == "unsupported"
    for text in known:
        assert text in refusal.text


@pytest.mark.parametrize(
    ("model", "card", "backend", "note"),
    [
        ("llama-3.1-8b", "h100", "TRITON_ATTN", "no effect on memory"),
        ("llama-3.1-8b", "h100", "FLASHINFER", "no effect on memory; its workspace (394 MiB) is taken after"),
        ("deepseek-v2-lite", "h100", "FLASHMLA", "blocks of 64 tokens instead of 16"),
        ("deepseek-v2-lite", "b200", "CUTLASS_MLA", "blocks of 128 tokens instead of 32"),
        ("qwen3-next-80b-a3b", "b200", "FLASH_ATTN", "blocks of "),
        ("llama-3.1-8b", "h100", "TREE_ATTN", "its effect on memory is not modeled"),
        ("llama-3.1-8b", "h100", "CUSTOM", "its effect on memory is not modeled"),
    ],
)
def test_a_note_says_what_a_backend_changes(model: str, card: str, backend: str, note: str) -> None:
    release = Version((0, 18) if backend == "TREE_ATTN" else (0, 33))
    notes = of(model, card, release, attention_backend=backend, tensor_parallel_size=4).notes
    assert [text for text in notes if text.startswith(f"attention_backend {backend}: {note}")]


# MiMo-V2-Flash, whose keys have 192 elements and whose values 128, with an fp8 cache: what vLLM 0.33's own code
# answered on each GPU (refused: "FP8 KV cache is not supported by the Triton attention backend" on the A100,
# "FlashAttention does not support fp8 kv-cache on this device" on the B200).
UNEVEN_FP8 = {"l40s": True, "h100-80g": True, "h200": True, "rtx-5090": True, "a100-80g": False, "b200": False}


UNEVEN: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_hidden_layers": 2,
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "intermediate_size": 16384, "vocab_size": 152576, "max_position_embeddings": 262144, "sliding_window": 128,
    "sliding_window_size": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "attention_bias": False, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("card", "is_taken"), UNEVEN_FP8.items())
def test_heads_of_uneven_width_keep_fp8_where_a_kernel_reads_it(card: str, is_taken: bool) -> None:
    args = EngineArgs(kv_cache_dtype="fp8", tensor_parallel_size=4, max_model_len=4096)
    request = Request(read_config(UNEVEN, "config.json", "mimo"), gpu(card), args)
    if is_taken:
        assert plan(request).settings.kv_dtype.startswith("fp8")
    else:
        refusal = plan(request).refusal
        assert refusal is not None
        assert "no attention backend keeps a KV cache of fp8" in refusal.text


def test_flashmla_keeps_packed_fp8_where_flashinfer_keeps_it_plain() -> None:
    """B200: 656 bytes a token of each layer for 576 (vLLM 0.33: fp8_ds_mla and fp8)."""
    sparse: dict[str, Any] = {"tensor_parallel_size": 8, "kv_cache_dtype": "fp8", "max_model_len": 16384}
    packed = of("deepseek-v3.2", "b200", attention_backend="FLASHMLA_SPARSE", **sparse)
    assert (packed.settings.kv_dtype, packed.capacity.bytes_per_block) == ("fp8_ds_mla", 3_076_352)
    assert of("deepseek-v3.2", "b200", **sparse).settings.kv_dtype == "fp8"
    assert "attention_backend FLASHMLA_SPARSE keeps fp8_ds_mla instead of fp8" in packed.notes
    assert not [text for text in packed.notes if "no effect on memory" in text]


def test_names_are_those_of_the_release() -> None:
    """vLLM 0.10.2 platforms/interface.py and 0.11 to 0.33 registry.py."""
    assert of("llama-3.1-8b", "h100", Version((0, 10)), attention_backend="TRITON_ATTN_VLLM_V1")
    for number, name, cure in (
        ((0, 10), "TRITON_ATTN", "TRITON_ATTN_VLLM_V1; write that"),
        ((0, 16), "TOKENSPEED_MLA", "knows no attention backend of that name; use one of "),
        ((0, 33), "XFORMERS", "knows no attention backend of that name; use one of "),
        ((0, 33), "TRITON_ATTN_VLLM_V1", "knows no attention backend"),
    ):
        with pytest.raises(UsageError, match=re.escape(cure)):
            of("llama-3.1-8b", "h100", Version(number), attention_backend=name)
    assert of("llama-3.1-8b", "h100", attention_backend="auto").settings.backend is None
    assert of("llama-3.1-8b", "h100", attention_backend="flash_attn").settings.backend == "FLASH_ATTN"


@pytest.mark.parametrize(("number", "blocks"), [((0, 17), 64), ((0, 18), 32)])
def test_flashinfer_mla_had_blocks_of_64_until_0_17(number: tuple[int, int], blocks: int) -> None:
    """vLLM 0.17 platforms/cuda.py forces 64; 0.18 takes the smallest that the backend has."""
    answer = of("deepseek-v2-lite", "b200", Version(number), attention_backend="FLASHINFER_MLA", max_model_len=8192)
    assert answer.pool.block_size == blocks


def test_the_variable_is_read_until_0_15_and_the_flag_from_0_14() -> None:
    spec, line = (
        catalog.load("deepseek-v2-lite"),
        "VLLM_ATTENTION_BACKEND=FLASHMLA vllm serve deepseek-ai/DeepSeek-V2-Lite",
    )
    command = read_command(line)
    for number, backend in (((0, 10), "FLASHMLA"), ((0, 14), "FLASHMLA"), ((0, 16), None)):
        _, args, note = environment.applied(command.environment, Version(number), EngineArgs(), spec)
        assert (args.attention_backend, note is None) == (backend, backend is not None)
    flagged = read_command("vllm serve a/b --attention-backend FLASHMLA")
    assert flagged.args == {"attention_backend": "FLASHMLA"}


@pytest.mark.parametrize("number", [(0, 10), (0, 14), (0, 33)])
def test_a_printed_command_has_the_backend_as_its_release_reads_it(number: tuple[int, int]) -> None:
    answer = of("deepseek-v2-lite", "h100", Version(number), attention_backend="FLASHMLA", max_model_len=8192)
    words = serve_command(answer)
    assert ("--attention-backend" in words) == (number >= (0, 14))
    again = read_command(shlex.join(words))
    _, args, _ = environment.applied(again.environment, Version(number), EngineArgs(**again.args), answer.request.spec)
    assert args.attention_backend == "FLASHMLA"


def test_sglang_says_which_flags_are_its_own(run: Run) -> None:
    words = ("estimate", "llama-3.1-8b", "--gpu", "h100", "--attention-backend", "FLASHINFER", "--engine", "sglang")
    assert "--prefill-attention-backend" in refused(run(*words, "--ctx", "8k"), 2)


def test_a_model_without_attention_takes_any_backend(run: Run) -> None:
    done = run("estimate", "mamba-2.8b", "--gpu", "h100-80g", "--ctx", "2k", "--attention-backend", "FLASHINFER")
    plain = run("estimate", "mamba-2.8b", "--gpu", "h100-80g", "--ctx", "2k")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == plain.out.splitlines()[0]


def test_backends_of_deepseek_v4_are_refused(run: Run) -> None:
    words = ("--gpu", "8xh200", "--ctx", "8k", "--attention-backend", "FLASHINFER")
    assert "are not modeled; remove it" in refused(run("estimate", "deepseek-v4-flash", *words))
