"""Environment variables of llama-server that change its memory: each is a flag's value.

Source: llama.cpp 0c1e57098 common/arg.cpp (set_env).
"""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.command import Kind, Variable

ARGUMENTS: Final[Mapping[str, tuple[str, Kind]]] = {
    "LLAMA_ARG_CTX_SIZE": ("max_model_len", "size"),
    "LLAMA_ARG_N_PARALLEL": ("max_num_seqs", "size"),
    "LLAMA_ARG_BATCH": ("max_num_batched_tokens", "size"),
    "LLAMA_ARG_UBATCH": ("micro_batch_size", "size"),
    "LLAMA_ARG_N_GPU_LAYERS": ("gpu_layers", "size"),
    "LLAMA_ARG_N_CPU_MOE": ("n_cpu_moe", "size"),
    "LLAMA_ARG_CPU_MOE": ("cpu_moe", "on"),
    "LLAMA_ARG_OVERRIDE_TENSOR": ("override_tensor", "text"),
    "LLAMA_ARG_TENSOR_SPLIT": ("tensor_split", "text"),
    "LLAMA_ARG_SPLIT_MODE": ("split_mode", "text"),
    "LLAMA_ARG_MAIN_GPU": ("main_gpu", "size"),
    "LLAMA_ARG_CACHE_TYPE_K": ("cache_type_k", "text"),
    "LLAMA_ARG_CACHE_TYPE_V": ("cache_type_v", "text"),
    "LLAMA_ARG_KV_UNIFIED": ("kv_unified", "on"),
    "LLAMA_ARG_SWA_FULL": ("swa_full", "on"),
    "LLAMA_ARG_FLASH_ATTN": ("flash_attn", "text"),
    "LLAMA_ARG_FIT": ("fit", "text"),
    "LLAMA_ARG_FIT_TARGET": ("fit_target", "text"),
    "LLAMA_ARG_FIT_CTX": ("fit_ctx", "size"),
}
VARIABLES: Final[Mapping[str, Variable]] = {
    name: Variable(
        "llamacpp", argument, kind, f"as --{argument.replace('_', '-')}", "llama.cpp 0c1e57098 common/arg.cpp", (0, 0)
    )
    for name, (argument, kind) in ARGUMENTS.items()
}
