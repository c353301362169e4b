"""What Ollama prints: its log has llama-server's lines, after the command that it starts it with."""

from dataclasses import replace

from kvplan.servers.llamacpp import outputs as below

logs = replace(below.logs, wordings=(), commands=())
failures = replace(below.failures, wordings=(), marks=(), starts=(), files=("ollama serve",))
metrics = None
bench = None
