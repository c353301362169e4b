"""Makers of GPUs: what texts call them, and what serves on theirs."""

from typing import Final

# Metal: llama.cpp's and MLX's backends. Intel: llama.cpp's SYCL and Vulkan, Intel's own builds of other servers.
SERVED_BY: Final = {
    "apple": "llama.cpp, Ollama and MLX serve on them",
    "intel": "llama.cpp serves on them, and servers' builds for Intel, of whose memory no rule is known",
    "amd": "servers' builds for ROCm serve on them",
    "nvidia": "name another --engine",
}
TITLES: Final = {"nvidia": "NVIDIA", "amd": "AMD"}


def title(vendor: str) -> str:
    return TITLES.get(vendor, vendor.title())


def served_by(vendor: str) -> str:
    return SERVED_BY[vendor]
