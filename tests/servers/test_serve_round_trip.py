"""The printed Serve line, pasted back, is the plan above it: over random models of the catalog, GPUs and flags."""

import random
import shlex
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kvplan.asked.form import Form, engine_args
from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu, gpu_names
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs, flags_of

ENGINES = ("vllm", "vllm", "vllm", "vllm@0.25", "vllm@0.20", "vllm@0.12", "vllm@0.9")
BOTH: dict[str, tuple[Any, ...]] = {
    "max_model_len": ("auto", None, 2048, 8192, 32_768, 100_000),
    "tensor_parallel_size": (1, 2, 4, 8),
    "pipeline_parallel_size": (1, 1, 1, 2),
    "data_parallel_size": (1, 1, 2),
    "max_num_seqs": (None, None, 1, 64, 300),
    "max_num_batched_tokens": (None, None, 2048, 5000, 16_384),
    "kv_cache_dtype": ("auto", "auto", "fp8"),
    "dtype": ("auto", "auto", "auto", "float16", "bfloat16"),
    "enable_prefix_caching": (None, None, False, True),
    "enforce_eager": (False, False, True),
    "block_size": (None, None, None, 32, 64),
    "quantization": (None, None, None, "fp8"),
    "enable_expert_parallel": (False, False, True),
}
VLLM = BOTH | {
    "gpu_memory_utilization": (None, None, 0.5, 0.87, 0.95),
    "kv_cache_memory_bytes": (None, None, None, 8 * GIB),
    "num_gpu_blocks_override": (None, None, None, 3000),
    "enable_chunked_prefill": (True, True, False),
    "async_scheduling": (None, None, False),
    "disable_hybrid_kv_cache_manager": (False, False, True),
    "performance_mode": ("balanced", "balanced", "throughput", "interactivity"),
    "mamba_ssm_cache_dtype": (None, None, "float32"),
    "max_loras": (0, 0, 3),
    "kv_offloading_size": (0, 0, 16 * GIB),
    "decode_context_parallel_size": (1, 1, 1, 2),
    "attention_backend": (None, None, "TRITON_ATTN", "FLASHINFER"),
}
SGLANG = BOTH | {
    "mem_fraction_static": (None, None, 0.6, 0.873),
    "max_total_tokens": (None, None, 60_000),
    "swa_full_tokens_ratio": (None, None, 0.5),
    "mamba_full_memory_ratio": (None, None, 0.5),
    "cuda_graph_max_bs": (None, None, 24),
    "max_loras": (0, 0, 3),
    "max_lora_rank": (16, 16, 64),
    "lora_target_modules": (None, "all", "o_proj,q_proj"),
}


@cache
def spec(name: str) -> ModelSpec:
    return catalog.load(name)


def drawn(source: random.Random, engine: str) -> Request:
    """A random request; most of its flags are as they are by default."""
    names = VLLM if engine.startswith("vllm") else SGLANG
    usual = EngineArgs()
    chosen = source.sample(sorted(names), source.randint(1, 6))
    values = {name: source.choice(names[name]) for name in chosen}
    args = replace(usual, **{name: value for name, value in values.items() if value is not None})
    return Request(
        spec(source.choice(catalog.model_names())), gpu(source.choice(gpu_names())), args, parse_engine(engine),
        memory_in_use=source.choice((None, None, 3 * GIB)),
    )  # fmt: skip


def planned(request: Request) -> Plan | None:
    try:
        return plan(request)
    except KvplanError:
        return None


def fed_back(answer: Plan) -> Plan:
    """The plan of the command that the plan prints."""
    command = read_command(shlex.join(serve_command(answer)))
    assert not command.unknown
    values = dict(command.args)
    values.pop("enable_lora", None)
    return plan(replace(answer.request, args=replace(EngineArgs(), **values)))


def differences(answer: Plan, other: Plan) -> dict[str, Any]:
    """What of the two plans is not the same."""
    parts: dict[str, tuple[Any, ...]] = {
        name: (getattr(answer, name), getattr(other, name))
        for name in ("memory", "capacity", "concurrency", "fits", "deficit", "blocks_low", "blocks_high", "available")
    }
    settings = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_dtype", "dtype", "in_flight_tokens")
    parts |= {name: (getattr(answer.settings, name), getattr(other.settings, name)) for name in settings}
    parts["kv_dtype"] = tuple("fp8" if name == "fp8_e4m3" else name for name in parts["kv_dtype"])  # two names of one
    if answer.settings.auto_fit:  # the fitted context is written out: the most that a request may have is then that
        parts["max_model_len"] = (answer.capacity.max_model_len, other.capacity.max_model_len)
    return {name: pair for name, pair in parts.items() if pair[0] != pair[1]}


def check(engines: tuple[str, ...], seed: int, num_commands: int) -> None:
    source, done = random.Random(seed), 0
    while done < num_commands:
        request = drawn(source, source.choice(engines))
        answer = planned(request)
        if answer is None or not answer.fits:
            continue
        done += 1
        assert not differences(answer, fed_back(answer)), serve_command(answer)


def test_the_command_of_a_vllm_plan_is_that_plan() -> None:
    check(ENGINES, 1, 60)


def test_a_stated_pool_keeps_the_utilization_that_was_asked_for() -> None:
    args = EngineArgs(max_model_len=2048, kv_cache_memory_bytes=8 * GIB, gpu_memory_utilization=0.5)
    answer = plan(Request(spec("opt-13b"), gpu("l40s"), args))
    assert not differences(answer, fed_back(answer))
    assert "--gpu-memory-utilization" in serve_command(answer)


def test_the_command_of_an_sglang_plan_is_that_plan() -> None:
    check(("sglang",), 2, 40)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_commands_are_their_plans(seed: int) -> None:
    check(ENGINES, 100 + seed, 100)
    check(("sglang",), 200 + seed, 100)


def printed_flags(server: str) -> list[str]:
    """Every flag that a server's command may have: its name in the table, or --no- before it."""
    flags = set()
    for name, row in ARGUMENTS.items():
        flag = flags_of(server).get(name)
        if flag is None or not flag.printed:
            continue
        names = [(flag.names or (name,))[0], *filter(None, (flag.earlier, flag.beside))]
        negated = [f"no_{name}"] if row.kind == "flag" and flag.on is None and not flag.names else []
        flags |= {"--" + name.replace("_", "-") for name in (*names, *negated)}
    return sorted(flags)


VLLM_FLAGS, SGLANG_FLAGS = printed_flags("vllm"), printed_flags("sglang")
# Values as the servers take them; every other flag with a value takes a whole number, and the rest are switches.
VALUES = {
    "--engram-config": '{"cpu_offload": false}', "--runner": "pooling", "--convert": "embed",
    "--gpu-memory-utilization": "0.5", "--mem-fraction-static": "0.5", "--swa-full-tokens-ratio": "0.5",
    "--mamba-full-memory-ratio": "0.5", "--kv-offloading-size": "1.5", "--kv-cache-memory-bytes": "8589934592",
    "--dtype": "float16", "--quantization": "fp8", "--mamba-ssm-cache-dtype": "float32", "--mamba-ssm-dtype": "float32",
    "--deepep-mode": "normal",
    "--performance-mode": "throughput", "--limit-mm-per-prompt": '{"image": 0}', "--mm-encoder-tp-mode": "data",
    "--mm-processor-kwargs": '{"max_pixels": 1003520}',
    "--compilation-config": '{"cudagraph_mode": "PIECEWISE"}',
    "--hf-overrides": '{"rope_theta": 1000000}', "--json-model-override-args": '{"rope_theta": 1000000}',
    "--kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    "--disaggregation-mode": "decode", "--lora-target-modules": "o_proj",
    "--kv-offloading-backend": "lmcache", "--offload-backend": "uva",
    "--mm-processor-cache-type": "shm",
    "--cuda-graph-backend-decode": "breakable", "--cuda-graph-backend-prefill": "disabled",
    "--prefill-attention-backend": "fa3", "--decode-attention-backend": "fa3",
    "--mamba-radix-cache-strategy": "extra_buffer", "--mamba-scheduler-strategy": "extra_buffer",
}  # fmt: skip
# Flags that mean nothing without another: that one, and the pair that says the same.
LORA, DRAFTS = (
    (["--enable-lora"], ["enable_lora=true"]),
    (["--speculative-algorithm", "NEXTN"], ["speculative_method=mtp"]),
)
STATED = (  # SGLang takes rank and modules from adapters where they are left out
    ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"],
    ["enable_lora=true", "max_lora_rank=16", "lora_target_modules=all"],
)
BESIDE: dict[str, tuple[list[str], list[str]]] = {
    "--max-loras": LORA, "--max-lora-rank": LORA, "--speculative-num-steps": DRAFTS, "--speculative-eagle-topk": DRAFTS,
    "--speculative-num-draft-tokens": DRAFTS, "--max-loras-per-batch": STATED,
    "--experts-shared-outer-loras": STATED,
}  # fmt: skip


def is_switch(flag: str) -> bool:
    switches = ("allow", "enable", "disable", "no", "enforce", "language", "fully", "async", "skip", "experts")
    return flag == "--mm-enable-dp-encoder" or flag.startswith(tuple(f"--{switch}-" for switch in switches))


def test_the_table_has_the_flags_of_both_servers() -> None:
    assert len(VLLM_FLAGS) > 25
    assert len(SGLANG_FLAGS) > 25
    assert "--cuda-graph-max-bs-decode" in SGLANG_FLAGS


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", flag) for flag in VLLM_FLAGS] + [("sglang", flag) for flag in SGLANG_FLAGS]
)
def test_a_flag_that_is_printed_may_be_said_as_an_engine_argument(engine: str, flag: str) -> None:
    values = ["bf16", "fp8_e4m3"] if flag == "--kv-cache-dtype" and engine == "sglang" else [VALUES.get(flag, "8")]
    values = ["fp8"] if flag == "--kv-cache-dtype" and engine == "vllm" else values
    start = "vllm serve a/b" if engine == "vllm" else "python -m sglang.launch_server --model-path a/b --tp-size 8"
    for value in values:
        words = [flag] if is_switch(flag) else [flag, value]
        more, more_pairs = BESIDE.get(flag, ([], []))
        if engine == "sglang" and "lora" in flag:
            at_flag = next((index for index, word in enumerate(STATED[0]) if word == flag), None)
            name = flag.removeprefix("--").replace("-", "_")
            more = [
                word for index, word in enumerate(STATED[0]) if at_flag is None or not 0 <= index - at_flag < len(words)
            ]
            more_pairs = [pair for pair in STATED[1] if not pair.startswith(f"{name}=")]
        command = read_command(f"{start} {shlex.join([*words, *more])}")
        assert not command.unknown + command.ignored, flag
        pair = f"{flag.removeprefix('--').replace('-', '_')}={'true' if is_switch(flag) else value}"
        ranks = ["tp_size=8"] if engine == "sglang" else []
        args = engine_args(Form({"engine": engine, "engine_arg": [pair, *more_pairs, *ranks]}), None)
        assert normal(args) == normal(engine_args(Form({"engine": engine}), command)), flag


def normal(args: EngineArgs) -> EngineArgs:
    """In one spelling; a pasted command says of a switch that it leaves out that it is off, pairs say nothing."""
    kv_dtype = {"bf16": "bfloat16"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    return replace(
        args, kv_cache_dtype=kv_dtype, allow_deprecated_quantization=bool(args.allow_deprecated_quantization)
    )
