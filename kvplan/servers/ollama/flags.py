"""Ollama's names for the arguments of kvplan's table: parameters of a Modelfile, and what OLLAMA_* variables say."""

from typing import Final

from kvplan.servers.words.arguments import Flag
from kvplan.servers.words.command import Kind

FLAGS: Final = {
    "max_model_len": Flag(("num_ctx",)),
    "max_num_seqs": Flag(("num_parallel",)),
    "max_num_batched_tokens": Flag(("num_batch",)),
    "quantization": Flag(("quant",), printed=False),  # part of the model's tag
    "gpu_layers": Flag(("num_gpu",)),
    "main_gpu": Flag(),
    "cache_type_k": Flag(("kv_cache_type",)),
    "flash_attn": Flag(("flash_attention",), values={"1": "on", "true": "on", "0": "off", "false": "off"}),
}
PARAMETERS: Final = ("num_ctx", "num_batch", "num_gpu", "main_gpu")  # of a Modelfile; no variable sets the last three
VARIABLES: Final[dict[str, tuple[str, Kind]]] = {
    "OLLAMA_CONTEXT_LENGTH": ("max_model_len", "size"),
    "OLLAMA_NUM_PARALLEL": ("max_num_seqs", "size"),
    "OLLAMA_KV_CACHE_TYPE": ("cache_type_k", "text"),
    "OLLAMA_FLASH_ATTENTION": ("flash_attn", "text"),
}
