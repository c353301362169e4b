"""Memory of a GPU that llama.cpp's own books do not have once it serves: cuBLAS, the kernels' code and growing pools.

What the driver's context takes is already missing from the free memory that llama.cpp starts from.
"""

from typing import Final

from kvplan.servers.llamacpp.settings import MIB

# "unaccounted" in the memory breakdowns of public logs, in MiB: two idle RTX 3090; an RTX PRO 6000 right after its load
# and after use; an RTX 3090 with a draft; an RTX 4090 (llama.cpp, tools/fit-params/README.md). A GB10's 19,687 is
# the prompt cache of the host (--cache-ram) in the one memory that it has, and not among them.
UNACCOUNTED_MIB: Final = (24, 30, 133, 2_607, 1_908, 3_945)
AFTER_LOAD_MIB: Final = 133
SOURCE: Final = "unaccounted memory in six public logs of llama.cpp on CUDA devices"


def growth() -> tuple[int, int, int]:
    """Bytes outside the books on a CUDA device: the least, after the load, and the most that anybody logged."""
    return min(UNACCOUNTED_MIB) * MIB, AFTER_LOAD_MIB * MIB, max(UNACCOUNTED_MIB) * MIB
