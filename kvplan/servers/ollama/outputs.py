"""What Ollama prints: its log has llama-server's lines, after the command that it starts it with."""

from dataclasses import replace

from kvplan.servers.llamacpp import outputs as below
from kvplan.servers.logs.failures import Wording

logs = replace(below.logs, wordings=(), commands=())
failures = replace(
    below.failures,
    wordings=(
        Wording(
            "host_memory_or_shm", "model requires more system memory", "any", "ollama llm/server.go",
            (r"system memory \(<tried_bytes>\) than is available \(<free_bytes>\)",), phase="load",
        ),
    ),
    marks=(), starts=(), files=("ollama serve",),
)  # fmt: skip
metrics = None
bench = None
