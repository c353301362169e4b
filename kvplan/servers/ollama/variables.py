"""Environment variables of `ollama serve` that change the memory of a model. Source: Ollama fb30760 envconfig."""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.ollama.changes import RELEASES, SOURCE
from kvplan.servers.words.command import Kind, Variable

ARGUMENTS: Final[Mapping[str, tuple[str, Kind]]] = {
    "OLLAMA_CONTEXT_LENGTH": ("max_model_len", "size"),
    "OLLAMA_NUM_PARALLEL": ("max_num_seqs", "size"),
    "OLLAMA_KV_CACHE_TYPE": ("cache_type_k", "text"),
    "OLLAMA_FLASH_ATTENTION": ("flash_attn", "text"),
}
VARIABLES: Final[Mapping[str, Variable]] = {
    **{
        name: Variable("ollama", argument, kind, f"as --{argument.replace('_', '-')}", SOURCE, RELEASES.oldest)
        for name, (argument, kind) in ARGUMENTS.items()
    },
    "OLLAMA_GPU_OVERHEAD": Variable(
        "ollama", "", "size", "keeps memory of each GPU free", SOURCE, RELEASES.oldest, concerns=lambda spec, args: True
    ),
}
