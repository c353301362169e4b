"""How a failed server's words are written down: rows of one type, and those of torch, NCCL and the host.

A server's own rows are in its folder (vllm/failures.py, sglang/failures.py). Text is compared without white space,
quotes and backticks, since terminals, issue forms and Python's tracebacks break lines and words at will.
"""

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from math import ceil, floor
from typing import Final, Literal

from kvplan.core.units import GIB, KIB, MIB, TIB

Cause = Literal[
    "kv_too_small_for_max_len",
    "no_kv_memory",
    "free_memory_below_utilization",
    "oom_loading_weights",
    "oom_profile_run",
    "oom_cuda_graph_capture",
    "oom_sampler_warmup",
    "oom_runtime",
    "encoder_cache_too_small",
    "mamba_blocks_below_max_num_seqs",
    "max_len_above_model",
    "heads_not_divisible_by_tp",
    "dtype_or_capability",
    "kv_dtype_unsupported",
    "too_few_gpus",
    "host_memory_or_shm",
    "nccl_or_multiprocess",
    "sglang_not_enough_memory",
    "sglang_oom_prefill",
    "sglang_oom_decode_retract",
    "sglang_cuda_graph_failed",
    "lora_memory",
    "quantization_mismatch",
    "not_memory",
]
# Which memory flags change something about; what they do not change is no memory question.
MEMORY_CAUSES: Final[frozenset[Cause]] = frozenset(
    {
        "kv_too_small_for_max_len", "no_kv_memory", "free_memory_below_utilization", "oom_loading_weights",
        "oom_profile_run", "oom_cuda_graph_capture", "oom_sampler_warmup", "oom_runtime", "encoder_cache_too_small",
        "mamba_blocks_below_max_num_seqs", "host_memory_or_shm", "sglang_not_enough_memory", "sglang_oom_prefill",
        "sglang_oom_decode_retract", "sglang_cuda_graph_failed", "lora_memory",
    }
)  # fmt: skip

Phase = Literal["arguments", "load", "profile", "pool", "capture", "warmup", "serving"]


@dataclass(frozen=True, slots=True)
class Size:
    """A size as a line states it, in bytes; low and high bound what it was before it was rounded to two decimals."""

    text: str
    bytes: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Every number that the failing lines state; sizes are of one rank."""

    needed_bytes: Size | None = None  # KV cache of one request of `context` tokens
    available_bytes: Size | None = None  # KV cache there is
    tried_bytes: Size | None = None  # by the allocation that failed
    free_bytes: Size | None = None
    total_bytes: Size | None = None
    in_use_bytes: Size | None = None  # by this process
    other_process_bytes: Size | None = None
    budget_bytes: Size | None = None  # utilization x total
    allocated_bytes: Size | None = None  # by torch's tensors
    reserved_bytes: Size | None = None  # by torch, in no tensor
    private_pools_bytes: Size | None = None  # of CUDA graphs
    initial_free_bytes: Size | None = None
    current_free_bytes: Size | None = None
    context: int | None = None
    estimated_max_len: int | None = None
    derived_max_len: int | None = None
    kv_tokens: int | None = None
    blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dummy_requests: int | None = None
    item_tokens: int | None = None
    encoder_cache_tokens: int | None = None
    heads: int | None = None
    tensor_parallel_size: int | None = None
    world_size: int | None = None
    gpus: int | None = None
    tried_tokens: int | None = None
    available_tokens: int | None = None
    retracted: int | None = None
    utilization: float | None = None
    mem_fraction: float | None = None
    gpu: str | None = None
    capability: str | None = None
    required_capability: str | None = None
    quantization: str | None = None
    kv_dtype: str | None = None


_SHARES: Final = frozenset({"utilization", "mem_fraction"})
_TEXTS: Final = frozenset({"gpu", "capability", "required_capability", "quantization", "kv_dtype"})
_SIZE: Final = r"-?[0-9]{1,18}(?:\.[0-9]{1,12})?(?:GiB|MiB|KiB|TiB|GB|MB|KB|bytes|B)?"
_COUNT: Final = r"-?[0-9](?:[0-9,_]{0,18}[0-9])?"
_SHARE: Final = r"[0-9]{1,4}(?:\.[0-9]{1,8})?"
_TEXT: Final = r"[A-Za-z0-9_.:+-]{1,60}?"
_UNITS: Final = {"TiB": TIB, "GiB": GIB, "GB": GIB, "MiB": MIB, "MB": MIB, "KiB": KIB, "KB": KIB}
NAMES: Final = frozenset(field.name for field in fields(Figures))


def figure(name: str, text: str) -> Size | int | float | str:
    """A figure from its text."""
    if name in _TEXTS:
        return text
    if name in _SHARES:
        return float(text)
    if not name.endswith("_bytes"):
        return int(text.replace(",", "").replace("_", ""))
    number = text.rstrip("TGMKiBbytes")
    unit = _UNITS.get(text[len(number) :], 1)
    value = Fraction(number)
    if unit == 1:
        return Size(text, round(value), round(value), round(value))
    half = Fraction(1, 2 * 10 ** max(2, len(number.partition(".")[2])))  # servers round to two decimals, "24.0" too
    return Size(text, round(value * unit), ceil((value - half) * unit), floor((value + half) * unit))


def _written(name: str) -> str:
    if name in _TEXTS:
        return _TEXT
    if name in _SHARES:
        return _SHARE
    return _SIZE if name.endswith("_bytes") else _COUNT


REACH: Final = 600  # squeezed characters after a phrase in which its figures are looked for
LEAD: Final = 160  # and before it


@dataclass(frozen=True, slots=True)
class Wording:
    """One message of a server, of torch or of the system that tells why it stopped.

    cause     what it proves; None where only the phase of start-up tells (torch's out of memory)
    phrase    the words that must be there, as the server writes them
    figures   patterns after the phrase, <name> standing for a figure; each is looked for on its own
    before    the same in front of the phrase
    needs     a pattern that must be there too, after the phrase; "" for none
    unless    a pattern after the phrase with which it is something else; "" for none
    phase     the part of start-up that writes it
    releases  in which it was seen
    source    file of the server, or an issue that quotes it
    """

    cause: Cause | None
    phrase: str
    releases: str
    source: str
    figures: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    needs: str = ""
    unless: str = ""
    phase: Phase | None = None


_DROPPED: Final = re.compile(r"[\s'\"`*\\\u200b\ufeff\xa0]+")


def squeezed(text: str) -> str:
    """Text without what pastes add or lose: white space, quotes, backticks, stars, backslashes."""
    return _DROPPED.sub("", text)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of a row, for squeezed text."""
    plain = re.sub(r"[ '\"`]+", "", pattern)
    return re.compile(re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{_written(match[1])})", plain))


# torch names the GPU, what it tried, what was free and whose memory the rest is.
TORCH_FIGURES: Final = (
    "Tried to allocate <tried_bytes>",
    r"total capacity of <total_bytes>",
    r"; <total_bytes> total capacity;",
    r"of which <free_bytes> is free",
    r"already allocated; <free_bytes> free",
    r"this process has <in_use_bytes> memory in use",
    r"Process [0-9]{1,9} has <other_process_bytes> memory in use",
    r"Of the allocated memory <allocated_bytes> is allocated by PyTorch",
    r"total capacity; <allocated_bytes> already allocated",
    r"with <private_pools_bytes> allocated in private pools",
    r"and <reserved_bytes> is reserved by PyTorch but unallocated",
)
OUT_OF_MEMORY: Final[tuple[Wording, ...]] = (
    Wording(None, "CUDA out of memory.", "any", "torch c10/cuda/CUDACachingAllocator.cpp", TORCH_FIGURES),
)
