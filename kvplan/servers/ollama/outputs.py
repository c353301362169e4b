"""What Ollama prints: its log has llama-server's lines, after the command that it starts it with."""

from dataclasses import replace
from typing import Final

from kvplan.servers.llamacpp import outputs as below
from kvplan.servers.logs.failures import Wording

# Names of a Modelfile's parameters and of its variables for llama-server's flags.
NAMES: Final = {
    "-ngl": "num_gpu", "-c": "num_ctx", "-ub": "num_batch", "-fa on": "OLLAMA_FLASH_ATTENTION=1",
    "-ctk q8_0 -ctv q8_0": "OLLAMA_KV_CACHE_TYPE=q8_0", "-ctk f16 -ctv f16": "OLLAMA_KV_CACHE_TYPE=f16",
    "a smaller file type": "a tag of a smaller file type",
}  # fmt: skip

logs = replace(below.logs, wordings=(), commands=())
failures = replace(
    below.failures,
    wordings=(
        Wording(
            "host_memory_or_shm", "model requires more system memory", "any", "ollama llm/server.go",
            (r"system memory \(<tried_bytes>\) than is available \(<free_bytes>\)",), phase="load",
        ),
    ),
    helps={
        cause: tuple(replace(help, flag=NAMES[help.flag]) for help in helps if help.flag in NAMES)
        for cause, helps in below.failures.helps.items()
    },
    marks=(), starts=(), files=("ollama serve",),
    processes=(r"level=(?:DEBUG|INFO|WARN|ERROR) source=\w{1,40}\.go:", r"\bollama\[[0-9]{1,9}\]: |/lib/ollama/"),
)  # fmt: skip
metrics = None
bench = None
