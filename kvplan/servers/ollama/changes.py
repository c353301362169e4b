"""Releases of Ollama: from 0.30 on each runs a GGUF file in llama-server, so that its rules are llama.cpp's."""

from typing import Final

from kvplan.servers.releases import Releases

SOURCE: Final = "Ollama fb30760 (2026-08-21)"
RELEASES: Final = Releases(oldest=(0, 30), newest=(0, 34), compared=(), changes={})
