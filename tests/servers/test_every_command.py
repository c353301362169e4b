"""Whatever the table of arguments calls modeled is taken by every command, not by `estimate` alone, for the same plan.

Each argument is planted on a model where it counts, as a server's own flag and as kvplan's `--engine-arg`.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from kvplan.servers.base import SERVERS
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, DEFAULTS, flags_of
from tests.support.cli import Run
from tests.support.cli import run as run
from tests.support.readme_blocks import ROOT

Said = dict[str, str]  # engine argument -> its value

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
LMCACHE = NIXL.replace("NixlConnector", "LMCacheConnectorV1")
DENSE, EXPERTS, SIGHT, STATES = "llama-3.1-8b", "qwen3-30b-a3b", "qwen3-vl-8b", "qwen3-next-80b-a3b"
LATENT = "deepseek-v2-lite"
TABLES = str(ROOT / "tests" / "facts" / "heads" / "qwen4-exp" / "config.json")
CONTEXT = {"max_model_len": "8192"}
LORA = {"max_loras": "4"}
RANKED = {"max_lora_rank": "16", "lora_target_modules": "all"}
SPREAD = {"tensor_parallel_size": "2", "enable_expert_parallel": "true"}
BALANCED = {**SPREAD, "enable_eplb": "true"}
GROUPS = {"offload_group_size": "8"}
WIDE = {"tensor_parallel_size": "16", "decode_context_parallel_size": "2"}
NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": "4"}
NEXTN = {"speculative_method": "mtp", "tensor_parallel_size": "8"}
# Server -> argument -> (value, model, what stands beside it).
PLANTED: dict[str, dict[str, tuple[str, str, Said]]] = {
    "vllm": {
        "max_model_len": ("4096", DENSE, {}),
        "tensor_parallel_size": ("2", DENSE, CONTEXT),
        "pipeline_parallel_size": ("2", DENSE, CONTEXT),
        "pp_layer_partition": ("20,12", DENSE, {**CONTEXT, "pipeline_parallel_size": "2"}),
        "data_parallel_size": ("2", DENSE, CONTEXT),
        "decode_context_parallel_size": ("2", DENSE, {**CONTEXT, "tensor_parallel_size": "16"}),
        "prefill_context_parallel_size": ("2", LATENT, {**CONTEXT, "tensor_parallel_size": "2"}),
        "cp_kv_cache_interleave_size": ("16", DENSE, {**CONTEXT, **WIDE}),
        "enable_expert_parallel": ("true", EXPERTS, {**CONTEXT, "tensor_parallel_size": "2"}),
        "enable_eplb": ("true", EXPERTS, {**CONTEXT, **SPREAD}),
        "num_redundant_experts": ("8", EXPERTS, {**CONTEXT, **BALANCED}),
        "eplb_window_size": ("100", EXPERTS, {**CONTEXT, **BALANCED}),
        "all2all_backend": (
            "deepep_low_latency", EXPERTS, {**CONTEXT, "data_parallel_size": "2", "enable_expert_parallel": "true"}
        ),
        "gpu_memory_utilization": ("0.8", DENSE, CONTEXT),
        "max_num_seqs": ("64", DENSE, CONTEXT),
        "max_num_batched_tokens": ("4096", DENSE, CONTEXT),
        "dtype": ("float16", DENSE, CONTEXT),
        "quantization": ("fp8", DENSE, CONTEXT),
        "kv_cache_dtype": ("fp8", DENSE, CONTEXT),
        "mamba_ssm_cache_dtype": ("float32", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "mamba_cache_dtype": ("float32", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "mamba_block_size": ("128", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "block_size": ("32", DENSE, CONTEXT),
        "attention_backend": ("FLASHINFER", DENSE, CONTEXT),
        "kv_cache_memory_bytes": ("17179869184", DENSE, CONTEXT),
        "num_gpu_blocks_override": ("4096", DENSE, CONTEXT),
        "performance_mode": ("throughput", DENSE, CONTEXT),
        "kv_offloading_size": ("8", DENSE, CONTEXT),
        "kv_offloading_backend": ("lmcache", DENSE, {**CONTEXT, "kv_offloading_size": "8"}),
        "cpu_offload_gb": ("4", DENSE, CONTEXT),
        "offload_backend": ("prefetch", DENSE, {**CONTEXT, **GROUPS}),
        "offload_group_size": ("8", DENSE, CONTEXT),
        "offload_num_in_group": ("2", DENSE, {**CONTEXT, **GROUPS}),
        "offload_prefetch_step": ("2", DENSE, {**CONTEXT, **GROUPS}),
        "enable_sleep_mode": ("true", DENSE, CONTEXT),
        "kv_transfer_config": (NIXL, DENSE, CONTEXT),
        "engram_config": ('{"cpu_offload": false}', TABLES, {**CONTEXT, "tensor_parallel_size": "8"}),
        "lmcache_max_local_cpu_size": ("8", DENSE, {**CONTEXT, "kv_transfer_config": LMCACHE}),
        "enable_prefix_caching": ("false", DENSE, CONTEXT),
        "allow_deprecated_quantization": ("true", DENSE, CONTEXT),
        "enable_chunked_prefill": ("false", DENSE, CONTEXT),
        "disable_hybrid_kv_cache_manager": ("true", DENSE, CONTEXT),
        "disable_sliding_window": ("true", DENSE, CONTEXT),
        "async_scheduling": ("false", DENSE, CONTEXT),
        "enforce_eager": ("true", DENSE, CONTEXT),
        "max_cudagraph_capture_size": ("256", DENSE, CONTEXT),
        "hf_overrides": ('{"rope_theta": 1000000}', DENSE, CONTEXT),
        "moe_backend": ("flashinfer_b12x", EXPERTS, CONTEXT),
        "compilation_config": ('{"cudagraph_mode": "PIECEWISE"}', DENSE, CONTEXT),
        "language_model_only": ("true", SIGHT, CONTEXT),
        "runner": ("pooling", DENSE, CONTEXT),
        "convert": ("embed", DENSE, {**CONTEXT, "runner": "pooling"}),
        "limit_mm_per_prompt": ("image=1", SIGHT, CONTEXT),
        "mm_processor_kwargs": ('{"max_pixels": 1003520}', SIGHT, CONTEXT),
        "mm_processor_cache_gb": ("8", SIGHT, CONTEXT),
        "mm_processor_cache_type": ("shm", SIGHT, CONTEXT),
        "disable_chunked_mm_input": ("true", SIGHT, CONTEXT),
        "skip_mm_profiling": ("true", SIGHT, CONTEXT),
        "mm_encoder_tp_mode": ("data", SIGHT, {**CONTEXT, "tensor_parallel_size": "2"}),
        "max_loras": ("4", DENSE, CONTEXT),
        "max_lora_rank": ("32", DENSE, {**CONTEXT, **LORA}),
        "fully_sharded_loras": ("true", DENSE, {**CONTEXT, **LORA, "tensor_parallel_size": "2"}),
        "lora_dtype": ("float16", DENSE, {**CONTEXT, **LORA}),
        "lora_target_modules": ("o_proj,q_proj", DENSE, {**CONTEXT, **LORA}),
        "max_cpu_loras": ("16", DENSE, {**CONTEXT, **LORA}),
        "enable_tower_connector_lora": ("true", DENSE, {**CONTEXT, **LORA}),
        "enable_mixed_moe_lora_format": ("true", EXPERTS, {**CONTEXT, **LORA}),
        "enable_moe_shared_loras": ("true", EXPERTS, {**CONTEXT, **LORA}),
        "num_speculative_tokens": ("2", DENSE, {**CONTEXT, **NGRAM}),
        "speculative_method": ("suffix", DENSE, {**CONTEXT, **NGRAM}),
        "usage": ("offline", DENSE, CONTEXT),
    },
    "sglang": {
        "max_model_len": ("4096", DENSE, {}),
        "tensor_parallel_size": ("2", DENSE, CONTEXT),
        "pipeline_parallel_size": ("2", DENSE, CONTEXT),
        "pp_layer_partition": ("20,12", DENSE, {**CONTEXT, "pipeline_parallel_size": "2"}),
        "data_parallel_size": ("2", DENSE, CONTEXT),
        "enable_expert_parallel": ("true", EXPERTS, {**CONTEXT, "tensor_parallel_size": "2"}),
        "enable_eplb": ("true", EXPERTS, {**CONTEXT, **SPREAD}),
        "num_redundant_experts": ("8", EXPERTS, {**CONTEXT, **SPREAD}),
        "all2all_backend": ("deepep", EXPERTS, {**CONTEXT, **SPREAD}),
        "deepep_mode": ("normal", EXPERTS, {**CONTEXT, **SPREAD, "all2all_backend": "deepep"}),
        "enable_dp_attention": (
            "true", EXPERTS, {**CONTEXT, "tensor_parallel_size": "2", "data_parallel_size": "2"}
        ),
        "enable_dp_lm_head": (
            "true", EXPERTS,
            {**CONTEXT, "tensor_parallel_size": "2", "data_parallel_size": "2", "enable_dp_attention": "true"},
        ),
        "moe_dense_tp_size": ("1", EXPERTS, {**CONTEXT, "tensor_parallel_size": "2"}),
        "mem_fraction_static": ("0.7", DENSE, CONTEXT),
        "max_num_seqs": ("64", DENSE, CONTEXT),
        "max_num_batched_tokens": ("4096", DENSE, CONTEXT),
        "max_total_tokens": ("100000", DENSE, CONTEXT),
        "hf_overrides": ('{"rope_theta": 1000000}', DENSE, CONTEXT),
        "dtype": ("float16", DENSE, CONTEXT),
        "quantization": ("fp8", DENSE, CONTEXT),
        "kv_cache_dtype": ("fp8_e4m3", DENSE, CONTEXT),
        "mamba_ssm_cache_dtype": ("bfloat16", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "block_size": ("64", DENSE, CONTEXT),
        "enable_prefix_caching": ("false", DENSE, CONTEXT),
        "disable_hybrid_kv_cache_manager": ("true", DENSE, CONTEXT),
        "async_scheduling": ("false", DENSE, CONTEXT),
        "enforce_eager": ("true", DENSE, CONTEXT),
        "num_speculative_tokens": ("3", "deepseek-v3", NEXTN),
        "speculative_method": ("mtp", "deepseek-v3", {"tensor_parallel_size": "8"}),
        "speculative_eagle_topk": ("2", "deepseek-v3", {**NEXTN, "num_speculative_tokens": "3"}),
        "speculative_num_draft_tokens": (
            "8", "deepseek-v3", {**NEXTN, "num_speculative_tokens": "3", "speculative_eagle_topk": "2"}
        ),
        "max_loras": ("4", DENSE, {**CONTEXT, **RANKED}),
        "max_lora_rank": ("32", DENSE, {**CONTEXT, **LORA, **RANKED}),
        "lora_target_modules": ("o_proj,q_proj", DENSE, {**CONTEXT, **LORA, **RANKED}),
        "max_cpu_loras": ("16", DENSE, {**CONTEXT, **LORA, **RANKED}),
        "enable_moe_shared_loras": ("true", EXPERTS, {**CONTEXT, **LORA, **RANKED}),
        "cpu_offload_gb": ("4", DENSE, CONTEXT),
        "offload_group_size": ("8", "deepseek-v2-lite", CONTEXT),
        "offload_num_in_group": ("2", "deepseek-v2-lite", {**CONTEXT, **GROUPS}),
        "offload_prefetch_step": ("2", "deepseek-v2-lite", {**CONTEXT, **GROUPS}),
        "mm_encoder_tp_mode": ("data", SIGHT, {**CONTEXT, "tensor_parallel_size": "2"}),
        "swa_full_tokens_ratio": ("0.5", "gpt-oss-20b", CONTEXT),
        "mamba_full_memory_ratio": ("0.5", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "cuda_graph_max_bs": ("64", DENSE, CONTEXT),
        "cuda_graph_max_bs_prefill": ("512", DENSE, CONTEXT),
        "cuda_graph_backend_decode": ("disabled", DENSE, CONTEXT),
        "cuda_graph_backend_prefill": ("disabled", DENSE, CONTEXT),
        "prefill_attention_backend": ("fa3", DENSE, CONTEXT),
        "decode_attention_backend": ("fa3", DENSE, CONTEXT),
        "max_mamba_cache_size": ("64", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "mamba_radix_cache_strategy": ("extra_buffer", STATES, {**CONTEXT, "tensor_parallel_size": "4"}),
        "disable_prefill_cuda_graph": ("true", DENSE, CONTEXT),
        "enable_hierarchical_cache": ("true", DENSE, CONTEXT),
        "hicache_ratio": ("1.5", DENSE, {**CONTEXT, "enable_hierarchical_cache": "true"}),
        "hicache_size": ("32", DENSE, {**CONTEXT, "enable_hierarchical_cache": "true"}),
        "disaggregation_mode": ("decode", DENSE, CONTEXT),
        "enable_multimodal": ("true", SIGHT, CONTEXT),
    },
    "llamacpp": {
        "max_model_len": ("4096", DENSE, {}),
        "max_num_seqs": ("2", DENSE, CONTEXT),
        "max_num_batched_tokens": ("256", DENSE, CONTEXT),
        "micro_batch_size": ("256", DENSE, CONTEXT),
        "quantization": ("Q8_0", DENSE, CONTEXT),
        "gpu_layers": ("20", DENSE, CONTEXT),
        "n_cpu_moe": ("10", EXPERTS, CONTEXT),
        "cpu_moe": ("true", EXPERTS, CONTEXT),
        "override_tensor": (r"blk\.[0-3]\.ffn=CPU", DENSE, CONTEXT),
        "tensor_split": ("1", DENSE, CONTEXT),
        "split_mode": ("none", DENSE, CONTEXT),
        "main_gpu": ("0", DENSE, {**CONTEXT, "split_mode": "none"}),
        "kv_offload": ("false", DENSE, CONTEXT),
        "op_offload": ("false", DENSE, {**CONTEXT, "gpu_layers": "20"}),
        "cache_type_k": ("q8_0", DENSE, CONTEXT),
        "cache_type_v": ("q8_0", DENSE, CONTEXT),
        "kv_unified": ("true", DENSE, {**CONTEXT, "max_num_seqs": "2"}),
        "swa_full": ("true", "gpt-oss-20b", CONTEXT),
        "flash_attn": ("off", DENSE, CONTEXT),
        "fit": ("off", DENSE, CONTEXT),
        "fit_target": ("2048", DENSE, CONTEXT),
        "fit_ctx": ("2048", DENSE, {}),
        "mmproj_offload": ("false", DENSE, CONTEXT),
        "num_speculative_tokens": ("4", DENSE, CONTEXT),
        "speculative_method": ("mtp", "qwen3.6-27b", CONTEXT),
        "draft_gpu_layers": ("4", DENSE, CONTEXT),
        "draft_quant": ("Q8_0", DENSE, CONTEXT),
    },
    "ollama": {
        "max_model_len": ("4096", DENSE, {}),
        "max_num_seqs": ("2", DENSE, CONTEXT),
        "max_num_batched_tokens": ("256", DENSE, CONTEXT),
        "quantization": ("Q8_0", DENSE, CONTEXT),
        "gpu_layers": ("20", DENSE, CONTEXT),
        "main_gpu": ("0", DENSE, CONTEXT),
        "cache_type_k": ("q8_0", DENSE, CONTEXT),
        "flash_attn": ("off", DENSE, CONTEXT),
    },
}  # fmt: skip
OF_FILES = frozenset({"lora", "mmproj"})  # tests/cli/test_llamacpp.py makes the files
CASES = [(server, name) for server in SERVERS for name in PLANTED[server]]
FIGURES = ("memory", "kv", "concurrency", "host", "encoder", "fits")
LOG = Path(__file__).resolve().parents[2] / "examples" / "vllm-did-not-start.log"


def command(server: str, model: str, arguments: Said) -> str:
    """A server's own command that says these arguments."""
    front: list[str] = []
    parts: dict[str, dict[str, object]] = {"speculative_config": {}, "eplb_config": {}}
    words: list[str] = []
    start = {
        "vllm": ["vllm", "serve", model],
        "sglang": ["python", "-m", "sglang.launch_server", "--model", model],
        "llamacpp": ["llama-server", "--hf-repo", f"{model}:{arguments.get('quantization', '')}".removesuffix(":")],
        "ollama": ["ollama", "run", f"hf.co/{model}:{arguments.get('quantization', '')}".removesuffix(":")],
    }[server]
    for name, value in arguments.items():
        flag = flags_of(server).get(name)
        assert flag is not None
        spelling = "--" + (flag.names or (name,))[0].replace("_", "-")
        if name in ("pp_layer_partition", "lmcache_max_local_cpu_size"):
            prefix = "LMCACHE" if name.startswith("lmcache") else server.upper()
            front.append(f"{prefix}_{name.removeprefix('lmcache_').upper()}={value}")
        elif server in ("llamacpp", "ollama") and name in ("quantization", "draft_quant"):
            pass
        elif name == "usage":
            start = ["vllm", "bench", "throughput", "--model", model]
        elif server == "vllm" and name == "speculative_method":
            parts["speculative_config"]["method"] = value
        elif server == "vllm" and name == "num_speculative_tokens":
            parts["speculative_config"][name] = int(value)
        elif server == "vllm" and name in ("num_redundant_experts", "eplb_window_size"):
            parts["eplb_config"][name.removeprefix("eplb_")] = int(value)
        elif server == "sglang" and name == "mm_encoder_tp_mode":
            words.append("--mm-enable-dp-encoder")
        elif server == "sglang" and name == "speculative_method":
            words += ["--speculative-algorithm", "NEXTN"]
        elif server == "llamacpp" and name == "speculative_method":
            words += ["--spec-type", "draft-mtp"]
        elif server == "sglang" and name == "enable_expert_parallel":
            words += ["--ep-size", arguments["tensor_parallel_size"]]
        elif ARGUMENTS[name].kind == "flag":
            words.append(spelling if flag.on is not None or value == "true" else f"--no-{spelling[2:]}")
        else:
            words += [*([f"--{flag.beside.replace('_', '-')}"] if flag.beside else []), spelling, value]
    for name, part in parts.items():
        if part:
            words += [f"--{name.replace('_', '-')}", json.dumps(part)]
    return shlex.join([*front, *start, *words])


def pairs(arguments: Said) -> list[str]:
    return [word for name, value in arguments.items() for word in ("--engine-arg", f"{name}={value}")]


@pytest.mark.parametrize("server", list(SERVERS))
def test_every_argument_of_the_table_is_planted(server: str) -> None:
    of_server = set(flags_of(server))
    assert {*PLANTED[server]} == of_server - OF_FILES


@pytest.mark.full
@pytest.mark.parametrize(("server", "name"), CASES)
def test_a_modeled_argument_is_taken_by_every_command(run: Run, tmp_path: Path, server: str, name: str) -> None:
    value, model, beside = PLANTED[server][name]
    model = str(shutil.copy(TABLES, str(tmp_path))) if model == TABLES else model  # beside the policy
    assert read_argument(name, value, name) != DEFAULTS[name]
    arguments = {**{other: text for other, text in beside.items() if other != name}, name: value}
    common = ["--gpu", "h100", "--engine", server]
    plain = run("estimate", model, *common, *pairs(beside), "--format", "json")
    planted = run("estimate", model, *common, *pairs(arguments), "--format", "json")
    assert planted.code == plain.code == 0, (planted.err, plain.err)
    pasted = run("estimate", "--from-command", command(server, model, arguments), "--gpu", "h100", "--format", "json")
    assert pasted.code == 0, pasted.err
    assert {key: pasted.json[key] for key in FIGURES} == {key: planted.json[key] for key in FIGURES}

    swept = run("sweep", model, *common, *pairs(arguments), "--format", "json")
    assert swept.code == 0, swept.err
    assert [row["tokens"] for row in swept.json["rows"]] == [planted.json["kv"]["tokens"]]

    policy = tmp_path / "kvplan.policy.yaml"
    stated = json.dumps([f"{other}={text}" for other, text in arguments.items()])
    policy.write_text(
        f"version: 1\ntargets:\n"
        f"- {{id: a, model: {model}, gpu: h100, engine: {server}, engine_arg: {stated}, rules: {{fits: true}}}}\n"
        f"- {{id: b, command: {json.dumps(command(server, model, arguments))}, gpu: h100, rules: {{fits: true}}}}\n",
        encoding="utf-8",
    )
    checked = run("check", policy, "--format", "json")
    assert checked.code == (0 if planted.json["fits"] else 1), checked.err
    kv = planted.json["kv"]["tokens"] if planted.json["fits"] else 0
    assert [target["figures"]["kv_tokens"] for target in checked.json["targets"]] == [kv, kv]

    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(plain.out, encoding="utf-8")
    new.write_text(planted.out, encoding="utf-8")
    for words in ([old, new], [model, model, *common, *pairs(arguments)]):
        compared = run("diff", *words, "--format", "json")
        assert compared.code == 0, compared.err
    explained = run("why", LOG, "--model", model, *common, *pairs(arguments), "--format", "json")
    assert explained.code == 0, explained.err
