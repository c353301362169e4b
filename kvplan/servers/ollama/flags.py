"""Ollama's names for the arguments of kvplan's table: parameters of a Modelfile, and what OLLAMA_* variables say."""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.arguments import Flag

FLAGS: Final[Mapping[str, Flag]] = {
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
