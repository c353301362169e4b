"""A server's start-up log -> what it says of itself: release, model, flags, memory per rank, and the KV pool.

The wordings are data: one table, each row with the releases it stands for and where it was seen. A log is untrusted:
it is read in bounded pieces, only the lines that hold a known phrase are looked at, every pattern is of bounded
repetitions, and nothing in it is opened or run. "GB" in these lines is 2^30 bytes in both servers.

Sources: `vllm#N` and `sglang#N` are issues of github.com/vllm-project/vllm and github.com/sgl-project/sglang that quote
the line; a file is the server's own, of the release named.
"""

import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

from kvplan.errors import InvalidInputError
from kvplan.files import open_regular, os_problem, printable, shown
from kvplan.units import GIB

Engine = Literal["vllm", "sglang"]

MAX_BYTES: Final = 64 << 20  # of text; of a longer file the first and the last half of this
MAX_LINE: Final = 16 << 10
# Of lines that hold a phrase: real logs have some hundreds, a hundred restarts some ten thousand.
MAX_LINES: Final = 40_000
MAX_LOOKED_AT: Final = 8 << 20
PIECE: Final = 1 << 20
_MOST_ON_A_LINE: Final = 4  # of one phrase: messages that were pasted onto one line

# --- the wordings -----------------------------------------------------------------------------------------------------

SIZE: Final = r"-?[0-9]{1,7}(?:\.[0-9]{1,8})?"
COUNT: Final = r"[0-9](?:[0-9,]{0,18}[0-9])?"
SHARE: Final = r"[0-9]{1,7}(?:\.[0-9]{1,8})?"
# Fact -> how its figure is written. Sizes are GiB of one rank.
FACTS: Final[dict[str, str]] = {
    "total_memory": SIZE,
    "free_at_start": SIZE,
    "budget": SIZE,
    "utilization": SHARE,
    "weights": SIZE,
    "consumed": SIZE,  # weights + what grew outside torch
    "activations": SIZE,
    "peak_torch": SIZE,  # weights + activations
    "non_torch": SIZE,
    "cuda_graphs": SIZE,
    "cuda_graphs_estimated": SIZE,
    "available_kv": SIZE,
    "kv_in_use": SIZE,
    "key_size": SIZE,
    "value_size": SIZE,
    "conv_state": SIZE,
    "ssm_state": SIZE,
    "free_before_load": SIZE,
    "free_after_load": SIZE,
    "free_after_pool": SIZE,
    "free_at_end": SIZE,
    "num_blocks": COUNT,
    "kv_tokens": COUNT,
    "kv_tokens_refused": COUNT,  # the pool of a server that did not start for it
    "pool_tokens": COUNT,  # of one pool; a hybrid model has several
    "max_concurrency": SHARE,
    "concurrency_context": COUNT,
    "context": COUNT,
    "max_batched_tokens": COUNT,
    "padding_layers": COUNT,
    "attention_block_size": COUNT,
    "context_parallel": COUNT,
    "max_running": COUNT,
    "repeated": COUNT,
    "version": r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,60}",
    "model": r"[^\s'\",]{1,300}",
    "gpu": r"[A-Za-z0-9][A-Za-z0-9_. -]{2,60}?",
}


@dataclass(frozen=True, slots=True)
class Wording:
    """One message of a server.

    phrase    what a line must hold for the pattern to be tried, from LEAD characters before it on
    pattern   <fact> stands for its figure (FACTS); the rest is a regular expression
    versions  the releases in which it was seen
    """

    engine: Engine
    phrase: str
    pattern: str
    versions: str
    source: str


LEAD: Final = 32
REACH: Final = 700  # characters of a message, at most
DEVICES: Final = ("GPU", "CUDA", "cuda", "rocm", "hpu", "xpu", "neuron")  # "# cuda blocks: 7054"; not "# CPU blocks"
_V0_PROFILE: Final = ("0.6.5-0.11 (V0)", "vllm#11899; vllm#20069")
_SUMMARY: Final = ("0.10.2-0.26", "vLLM 0.11 v1/worker/gpu_worker.py")

WORDINGS: Final[tuple[Wording, ...]] = (
    # which release, which model
    Wording("vllm", "vLLM API server version ", "vLLM API server version v?<version>", "0.4-0.14", "vllm#10702"),
    Wording(
        "vllm", "\u2588  version ", r"\u2588  version <version>\s{0,40}$", "0.15-0.33", "vLLM 0.19 entrypoints/utils.py"
    ),
    Wording(
        "vllm", "\u2588  model ", r"\u2588  model {1,4}<model>\s{0,40}$", "0.15-0.33", "vLLM 0.19 entrypoints/utils.py"
    ),
    Wording("vllm", "LLM engine (v", r"LLM engine \(v<version>\) with", "0.2-0.33", "vllm#10702; vllm#16692"),
    Wording("vllm", "Starting to load model ", r"Starting to load model <model>\.\.\.", "0.6-0.33", "vllm#16692"),
    Wording("vllm", "Using max model len ", "Using max model len <context>", "0.9-0.33", "vLLM 0.11 config/model.py"),
    Wording(
        "vllm", "enabled with max_num_batched_tokens=", "enabled with max_num_batched_tokens=<max_batched_tokens>",
        "0.5-0.33", "vllm#10702; vLLM 0.11 config/scheduler.py",
    ),
    Wording("vllm", "device_name=", r"device_name=<gpu>(?:,|\.json)", "0.4-0.33", "vllm#26612"),
    Wording(
        "vllm", " has a total capacity of ", "GPU [0-9]{1,2} has a total capacity of <total_memory> GiB", "any",
        "vllm#16712 (torch, out of memory)",
    ),
    Wording("vllm", "GPU 0: ", r"GPU 0: <gpu>(?: \(UUID|\s{0,40}$)", "any", "vLLM collect_env.py, pasted with a log"),
    # weights
    Wording(
        "vllm", "Loading model weights took ", "Loading model weights took <weights> GB", "0.3-0.7.3",
        "vllm#10116; vllm#15004",
    ),
    Wording("vllm", "Model loading took ", "Model loading took <weights> GB", "0.7.4-0.8.2", "vllm#14601; vllm#16378"),
    Wording("vllm", "Model loading took ", "Model loading took <weights> GiB", "0.8.3-0.33", "vllm#16301; vllm#16692"),
    # what V0's profile found
    Wording(
        "vllm", "Memory profiling results: ",
        rf"Memory profiling results: total_gpu_memory=<total_memory>GiB initial_memory_usage={SIZE}GiB "
        rf"peak_torch_memory=<peak_torch>GiB memory_usage_post_profile={SIZE}GiB non_torch_memory=<non_torch>GiB "
        "kv_cache_size=<available_kv>GiB gpu_memory_utilization=<utilization>",
        "0.6.4", "vllm#10702; vllm#10517",
    ),
    Wording(
        "vllm", "total_gpu_memory (",
        r"total_gpu_memory \(<total_memory>GiB\) x (?:gpu_memory_utilization )?\(?<utilization>\)?(?: = <budget>GiB)?",
        *_V0_PROFILE,
    ),
    Wording("vllm", "model weights take ", "model weights take <weights>GiB", *_V0_PROFILE),
    Wording("vllm", "non_torch_memory ", "non_torch_memory (?:takes )?<non_torch>GiB", *_V0_PROFILE),
    Wording("vllm", "activation peak memory takes ", "activation peak memory takes <activations>GiB", *_V0_PROFILE),
    Wording("vllm", "KV Cache is ", "KV Cache is (?:only )?<available_kv>GiB", *_V0_PROFILE),
    # the pool
    *(
        Wording("vllm", f"# {device} blocks: ", f"# {device} blocks: <num_blocks>", "0.2-0.11", "vllm#2310; vllm#20069")
        for device in DEVICES
    ),
    Wording(
        "vllm", "Available KV cache memory: ", "Available KV cache memory: <available_kv> GiB", "0.9.2-0.33",
        "vllm#27508",
    ),
    Wording(
        "vllm", "GiB memory for KV Cache as specified", "reserved <available_kv> GiB memory for KV Cache as specified",
        "0.11-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    Wording(
        "vllm", "GPU KV cache size", r"GPU KV cache size:? {0,20}\*{0,2}<kv_tokens> tokens", "0.7-0.33",
        "vllm#16301; vllm#19490",
    ),
    Wording(
        "vllm", "Maximum concurrency for ",
        "Maximum concurrency for <concurrency_context> tokens per request: <max_concurrency>x", "0.6.2-0.33",
        "vllm#10116; vllm#16301",
    ),
    Wording(
        "vllm", "that can be stored in KV cache (", r"that can be stored in KV cache \(<kv_tokens_refused>\)",
        "0.2-0.8", "vllm#4588; vllm#13061",
    ),
    # CUDA graphs
    Wording(
        "vllm", "Graph capturing finished in ", "Graph capturing finished in [0-9]{1,6} secs?, took <cuda_graphs> GiB",
        "0.6.4-0.33", "vllm#10702; vllm#16301",
    ),
    Wording(
        "vllm", "Estimated CUDA graph memory: ", "Estimated CUDA graph memory: <cuda_graphs_estimated> GiB",
        "0.19-0.33", "local-inference-lab/rtx6kpro models/glm5.1",
    ),
    Wording(
        "vllm", "CUDA graph pool memory: ",
        r"CUDA graph pool memory: <cuda_graphs> GiB \(actual\), <cuda_graphs_estimated> GiB \(estimated\)", "0.21-0.33",
        "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    # the summary after start-up
    Wording(
        "vllm", "Free memory on device (",
        r"Free memory on device \(<free_at_start>/<total_memory> GiB\) on startup\. Desired GPU memory utilization is "
        r"\(<utilization>, <budget> GiB\)", "0.10.2-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    Wording(
        "vllm", "Actual usage is ",
        "Actual usage is <weights> GiB for weight, <activations> GiB for peak activation, <non_torch> GiB for "
        "non-torch memory, and <cuda_graphs> GiB for CUDAGraph memory", *_SUMMARY,
    ),
    Wording(
        "vllm", "Actual usage is ",
        r"Actual usage is <consumed> GiB for consumed memory \(weights \+ non-torch\), <activations> GiB for peak "
        r"activation, and <cuda_graphs> GiB for CUDAGraph memory", "0.27-0.33", "vllm#57936",
    ),
    Wording(
        "vllm", "Current kv cache memory in use is ", "Current kv cache memory in use is <kv_in_use> GiB",
        "0.10.2-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    # what changes the meaning of the figures
    Wording(
        "vllm", "The current --gpu-memory-utilization=", "The current --gpu-memory-utilization=<utilization> is",
        "0.20-0.33", "noonghunna/club-3090#104",
    ),
    Wording(
        "vllm", " padding layers, may waste", "Add <padding_layers> padding layers", "0.8.5-0.33",
        "vLLM 0.10 v1/core/kv_cache_utils.py",
    ),
    Wording(
        "vllm", "Setting attention block size to ", "Setting attention block size to <attention_block_size> tokens",
        "0.10-0.33", "NVIDIA-NeMo/Nemotron usage-cookbook",
    ),
    Wording(
        "vllm", "by the dcp_world_size ", "by the dcp_world_size <context_parallel>", "0.11-0.20",
        "vllm-project/recipes moonshotai/Kimi-K2-Think.md",
    ),
    Wording("vllm", "[repeated ", r"\[repeated <repeated>x across cluster\]", "any", "vllm#13535 (Ray)"),
    # SGLang
    Wording(
        "sglang", "Load weight begin. avail mem=", "Load weight begin. avail mem=<free_before_load> GB", "0.1-0.5",
        "sglang 0.4 srt/model_executor/model_runner.py",
    ),
    Wording(
        "sglang", "Load weight end.",
        "Load weight end\\..{0,300}?avail mem=<free_after_load> GB(?:, mem usage=<weights> GB)?", "0.1-0.5",
        "sglang#565; sglang#5668",
    ),
    Wording(
        "sglang", "KV Cache is allocated.",
        r"KV Cache is allocated\.(?: dtype: [\w.]{1,40},)?(?: #tokens: <pool_tokens>,)? K size: <key_size> GB, "
        "V size: <value_size> GB", "0.4-0.5", "sglang#4351; sglang#5668",
    ),
    Wording(
        "sglang", "KV Cache is allocated.",
        r"KV Cache is allocated\.(?: dtype: [\w.]{1,40},)?(?: #tokens: <pool_tokens>,)? KV size: <key_size> GB",
        "0.4-0.5", "sglang 0.4 srt/mem_cache/memory_pool.py (latent attention)",
    ),
    Wording(
        "sglang", "Mamba Cache is allocated.",
        r"Mamba Cache is allocated\..{0,120}?conv_state size: <conv_state> ?GB,? ssm_state size: <ssm_state> ?GB",
        "0.5", "sglang 0.5 srt/mem_cache/memory_pool.py",
    ),
    Wording(
        "sglang", "Memory pool end. avail mem=", "Memory pool end. avail mem=<free_after_pool> GB", "0.1-0.5",
        "sglang#565",
    ),
    Wording(
        "sglang", "raph end. ", r"raph end\. .{0,80}?mem usage=<cuda_graphs> GB[.,]{1,2} avail mem=<free_at_end> GB",
        "0.4.4-0.5", "sglang#6753",
    ),
    Wording(
        "sglang", "raph end. ", r"raph end\. .{0,80}?avail mem=<free_at_end> GB[.,]{1,2} mem usage=<cuda_graphs> GB",
        "0.4.3", "sglang#4257",
    ),
    Wording(
        "sglang", "max_total_num_tokens=",
        "max_total_num_tokens=<kv_tokens>(?:, (?!max_running|context)[a-z_]{1,40}=[0-9]{1,12}){0,6}"
        "(?:, max_running_requests=<max_running>)?, context_len=<context>", "0.1-0.5", "sglang#565; sglang#4257",
    ),
)  # fmt: skip


@cache
def compiled(wording: Wording) -> re.Pattern[str]:
    return re.compile(re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{FACTS[match[1]]})", wording.pattern))


# What opens a list of arguments: the newest that a start has is read, each kind for itself.
ARGUMENT_LISTS: Final[tuple[tuple[Engine, str], ...]] = (
    ("vllm", "with config: "),  # resolved settings, so of most worth for what was not asked for
    ("vllm", "args: Namespace("),  # 0.2 to 0.9, defaults included
    ("vllm", "non-default args: {"),  # from 0.9 on
    ("sglang", "server_args=ServerArgs("),
)


# --- what a log says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure as a line gave it.

    rank  the process it came from, as the line's prefix names it; "" where no prefix does
    line  number of the line in what was read, from 1
    """

    fact: str
    text: str
    rank: str
    line: int

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def count(self) -> int:
        return int(self.text.replace(",", ""))

    @property
    def size(self) -> int:
        """Bytes, of a figure in GiB."""
        return round(self.value * GIB)

    @property
    def half_digit(self) -> float:
        """Half of one in the last place that was written, in the unit it was written in."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])

    @property
    def rounding(self) -> int:
        """Half of the last digit in bytes, rounded up."""
        return int(self.half_digit * GIB) + 1


@dataclass(frozen=True, slots=True)
class ServerLog:
    """The last start in a log.

    flags     arguments by name, as text; what was asked for wins over what the server resolved
    readings  every figure, in the order of the log
    starts    how many starts the log holds; first_line: where the last one begins
    """

    engine: Engine
    flags: dict[str, str]
    readings: tuple[Reading, ...]
    starts: int
    first_line: int
    notes: tuple[str, ...] = field(default=())

    def all(self, fact: str) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.fact == fact)

    def first(self, fact: str) -> Reading | None:
        return next((reading for reading in self.readings if reading.fact == fact), None)

    def by_rank(self, fact: str) -> dict[str, Reading]:
        """The first figure of each rank that gave one."""
        found: dict[str, Reading] = {}
        for reading in self.all(fact):
            found.setdefault(reading.rank, reading)
        return found

    def least(self, fact: str) -> Reading | None:
        """The smallest figure of any rank: the pool is as large as the rank with the least room lets it be."""
        return min(self.all(fact), key=lambda reading: reading.value, default=None)

    def text(self, fact: str) -> str | None:
        found = self.first(fact)
        return None if found is None else found.text

    @property
    def ranks(self) -> tuple[str, ...]:
        """The workers that gave figures, named as the log names them."""
        return tuple(dict.fromkeys(reading.rank for reading in self.readings if reading.fact in RANK_FACTS))

    @property
    def release(self) -> tuple[int, int] | None:
        """(major, minor) of the version, None for one that names no release (a build without tags says 0.1.dev)."""
        found = re.match(r"v?([0-9]{1,3})\.([0-9]{1,3})(?!\.?dev)", self.text("version") or "")
        return (int(found[1]), int(found[2])) if found else None

    @property
    def model(self) -> str | None:
        """The model as the server was told it: an id or a path of its own machine."""
        return next((self.flags[name] for name in MODEL_FLAGS if name in self.flags), None) or self.text("model")


MODEL_FLAGS: Final = ("model_tag", "model", "model_path")
RANK_FACTS: Final = frozenset(
    {
        "weights",
        "activations",
        "non_torch",
        "available_kv",
        "cuda_graphs",
        "free_after_load",
        "free_after_pool",
        "key_size",
    }
)
POOL_FACTS: Final = frozenset({"num_blocks", "kv_tokens", "max_concurrency"})
# What a process says once, before its pool is sized.
FIRST_WORDS: Final = frozenset(
    {
        "vLLM API server version ", "\u2588  version ", "LLM engine (v", "Loading model weights took ",
        "Model loading took ", "Load weight begin. avail mem=", "Load weight end.",
    }
)  # fmt: skip
# Of those, and of the lists of arguments, what a process says once.
SAID_ONCE: Final = frozenset(
    {"vLLM API server version ", "\u2588  version ", "LLM engine (v", "server_args=ServerArgs("}
)
# Flags that are kept: those an estimate takes, and those that explain a difference.
FLAGS: Final = frozenset(
    {
        *MODEL_FLAGS, "max_model_len", "max_seq_len", "context_length", "tensor_parallel_size", "tp_size",
        "pipeline_parallel_size", "pp_size", "data_parallel_size", "dp_size", "enable_expert_parallel", "ep_size",
        "decode_context_parallel_size", "dtype", "quantization", "kv_cache_dtype", "block_size", "page_size",
        "gpu_memory_utilization", "mem_fraction_static", "kv_cache_memory_bytes", "num_gpu_blocks_override",
        "max_num_batched_tokens", "max_num_seqs", "max_running_requests", "chunked_prefill_size",
        "enable_prefix_caching", "enable_chunked_prefill", "chunked_prefill_enabled", "disable_hybrid_kv_cache_manager",
        "async_scheduling", "enforce_eager", "disable_cuda_graph", "performance_mode", "mamba_ssm_cache_dtype",
        "enable_lora", "max_loras", "max_lora_rank", "fully_sharded_loras", "speculative_config", "speculative_model",
        "speculative_algorithm", "num_speculative_tokens", "cpu_offload_gb", "revision", "device",
    }
)  # fmt: skip

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]{0,40}[A-Za-z]|\[[0-9;]{1,8}m|\x1b")
# A worker by the prefix of its line: "(Worker_TP1_EP1 pid=5)", "(VllmWorker rank=1 pid=5)", "(VllmWorker TP0 pid=5)",
# "(RayWorkerWrapper pid=5, ip=10.0.0.1)"; "[2025-04-23 16:14:47 DP0 TP1]", "[gpu=7]", "[gpu_id=7]".
_WORKER: Final = re.compile(
    r"\((?:Vllm|Ray)?Worker(?:Process|Wrapper|Proc)?(?:_([A-Z][A-Z0-9_]{1,40}))? ([^()]{3,80})\)"
)
_CORE: Final = re.compile(r"\(EngineCore_(DP[0-9]{1,4}) ")
_BRACKET: Final = re.compile(
    r"\[(?:[0-9-]{10} [0-9:]{8} ([A-Z]{2,5}[0-9]{1,4}(?: [A-Z]{2,5}[0-9]{1,4}){0,4})|gpu(?:_id)?=([0-9]{1,4}))\]"
)


def rank_of(prefix: str) -> str:
    """Which process a line is of, by what stands before its message; the last one named counts."""
    for pattern in (_WORKER, _BRACKET, _CORE):
        found = list(pattern.finditer(prefix[-600:]))
        if found and pattern is _WORKER:
            named, rest = found[-1][1], found[-1][2]
            if named:
                return str(named)
            rank = re.search(r"\b(?:rank=([0-9]{1,4})|([A-Z]{2,4}[0-9]{1,4}))\b", rest)
            if rank:
                return f"rank {rank[1]}" if rank[1] else str(rank[2])
            return printable(", ".join(part.strip().replace("=", " ") for part in rest.split(",")), 60)
        if found and pattern is _BRACKET:
            return found[-1][1] or f"gpu {found[-1][2]}"
        if found:
            return str(found[-1][1])
    return ""


def read_log(source: str) -> ServerLog:
    """The last start in a log file, gzipped or not; `-` is standard input.

    Raises InvalidInputError for what is no text, no server's log, or longer than any; EnvironmentProblem where the
    file cannot be read.
    """
    reader = _Reader("standard input" if source == "-" else printable(source, 400))
    if source == "-":
        stream = getattr(sys.stdin, "buffer", None)
        if stream is None:
            raise InvalidInputError("--log -: standard input is closed; name a file")
        reader.take(lambda size: stream.read(size))
        return reader.result()
    path = Path(source)
    with open_regular(path) as file:
        try:
            if file.read(2) == b"\x1f\x8b":
                file.seek(0)
                with gzip.open(file) as unpacked:
                    reader.take(unpacked.read)
            else:
                size = os.fstat(file.fileno()).st_size
                file.seek(0)
                if size <= MAX_BYTES:
                    reader.take(file.read)
                else:
                    reader.take(file.read, MAX_BYTES // 2)
                    file.seek(size - MAX_BYTES // 2)
                    reader.skipped = f"{size:,} bytes: only the first and the last {MAX_BYTES // 2 >> 20} MiB are read"
                    reader.take(file.read)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidInputError(f"{shown(path)}: damaged gzip file ({error}); fetch it again") from error
        except OSError as error:
            raise os_problem(path, error) from error
    return reader.result()


def parse_log(text: str, where: str = "log") -> ServerLog:
    """The last start in a log's text."""
    data, at = text.encode("utf-8", "surrogatepass"), 0
    reader = _Reader(where)

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    reader.take(read)
    return reader.result()


class _Reader:
    """Takes a log piece by piece and keeps what its last start says."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.skipped: str | None = None
        self._starts = 1
        self._first_line = 1
        self._known: set[str] = set()
        self._said: set[tuple[str, str]] = set()
        self._readings: list[Reading] = []
        self._lists: dict[tuple[Engine, str], str] = {}
        self._engines: dict[Engine, int] = {"vllm": 0, "sglang": 0}
        self._line = 1
        self._num_looked_at = self._looked_at = 0
        self._is_first_piece = True

    # --- pieces and lines

    def take(self, read: Callable[[int], bytes], most: int | None = None) -> None:
        """Look through what `read` gives, at most so many bytes of it; None: MAX_BYTES."""
        left, rest = MAX_BYTES if most is None else most, b""
        while left > 0 and (piece := read(min(PIECE, left))):
            left -= len(piece)
            if self._is_first_piece:
                self._check_text(piece)
                self._is_first_piece = False
            piece = rest + piece.replace(b"\r", b"\n")  # progress bars draw over their line
            end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) > max(PIECE, MAX_LINE) else 0)
            rest = piece[end:]
            self._look_through(piece[:end])
        self._look_through(rest)
        if left <= 0 and most is None and read(1):
            self.skipped = f"more than {MAX_BYTES >> 20} MiB of text: the rest is not read"

    def _check_text(self, piece: bytes) -> None:
        if piece.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidInputError(f"{self.where}: UTF-16 text, not UTF-8; save it as UTF-8")
        if b"\0" in piece[: 4 << 10]:
            raise InvalidInputError(f"{self.where}: not text, it holds a NUL; name the server's log")

    def _look_through(self, piece: bytes) -> None:
        at = 0
        for start, end in sorted(_lines_of_worth(piece)):
            self._line += piece.count(b"\n", at, start)
            at = start
            self._num_looked_at += 1
            self._looked_at += end - start
            if self._num_looked_at > MAX_LINES or self._looked_at > MAX_LOOKED_AT:
                raise InvalidInputError(
                    f"{self.where}: more than {self._num_looked_at - 1:,} lines that could be a server's; "
                    "cut it to one start"
                )
            self._look_at(_ANSI.sub("", piece[start:end].decode("utf-8", "replace")))
        self._line += piece.count(b"\n", at)

    # --- one line

    def _look_at(self, text: str) -> None:
        found: list[tuple[int, Wording, dict[str, str]]] = []
        for wording in WORDINGS:
            at = text.find(wording.phrase)
            for _ in range(_MOST_ON_A_LINE):
                if at < 0:
                    break
                match = compiled(wording).search(text, max(0, at - LEAD), at + REACH)
                if match:
                    found.append((match.start(), wording, match.groupdict()))
                at = text.find(wording.phrase, at + len(wording.phrase))
        for at, wording, facts in sorted(found, key=lambda each: each[0]):
            self._keep(wording, facts, rank_of(text[:at]))
        for engine, opening in ARGUMENT_LISTS:
            at = text.find(opening)
            if at >= 0 and not text.endswith("non-default ", 0, at):
                self._begin_where_needed(opening, rank_of(text[:at]))
                self._lists[engine, opening] = text[at + len(opening) : at + MAX_LINE]

    def _keep(self, wording: Wording, facts: dict[str, str], rank: str) -> None:
        if wording.phrase in FIRST_WORDS:
            self._begin_where_needed(wording.phrase, rank)
        self._engines[wording.engine] += 1
        self._known |= facts.keys()
        self._readings += [Reading(fact, text, rank, self._line) for fact, text in facts.items() if text is not None]

    def _begin_where_needed(self, phrase: str, rank: str) -> None:
        """Begin a new start where a process says again what it says first.

        What a process says once, it says again only when it was started again, also after a start that failed. The rest
        (a draft's weights are loaded too) begins a start only where the pool of the last one was sized; of processes
        that have no name, another one may say it for the first time.
        """
        is_again = (phrase, rank) in self._said
        is_sized = bool(self._known & POOL_FACTS)
        if (is_again and phrase in SAID_ONCE) or (is_sized and (is_again or rank == "")):
            self._starts += 1
            self._first_line = self._line
            self._readings.clear()
            self._lists.clear()
            self._known.clear()
            self._said.clear()
            self._engines = {"vllm": 0, "sglang": 0}
        self._said.add((phrase, rank))

    # --- the end

    def result(self) -> ServerLog:
        if not self._readings and not self._lists:
            raise InvalidInputError(
                f"{self.where}: holds no line of a vLLM or SGLang server's start-up; name its log, from the first line"
            )
        for kind, _ in self._lists:
            self._engines[kind] += 1
        vllm, sglang = self._engines["vllm"], self._engines["sglang"]
        engine: Engine = "sglang" if sglang > vllm else "vllm"
        notes = [] if self.skipped is None else [f"{self.where}: {self.skipped}"]
        if self._starts > 1:
            notes.append(f"{self._starts} starts in the log; the last one, from line {self._first_line:,} on, is taken")
        flags: dict[str, str] = {}
        for opening in ARGUMENT_LISTS:
            if opening in self._lists and opening[0] == engine:
                flags |= {name: text for name, text in arguments(self._lists[opening]).items() if name in FLAGS}
        return ServerLog(engine, flags, tuple(self._readings), self._starts, self._first_line, tuple(notes))


@cache
def _phrases() -> tuple[bytes, ...]:
    openings = [opening for _, opening in ARGUMENT_LISTS]
    return tuple(dict.fromkeys(text.encode() for text in [*(one.phrase for one in WORDINGS), *openings]))


def _lines_of_worth(piece: bytes) -> set[tuple[int, int]]:
    """(start, end) of the lines that hold a phrase; a line beyond MAX_LINE is cut where it is that long."""
    found: set[tuple[int, int]] = set()
    for phrase in _phrases():
        at = piece.find(phrase)
        while at >= 0:
            start = piece.rfind(b"\n", max(0, at - MAX_LINE), at) + 1
            if start == 0 and at > MAX_LINE:
                start = at - at % MAX_LINE
            end = piece.find(b"\n", at, start + MAX_LINE)
            end = end if end >= 0 else min(len(piece), start + MAX_LINE)
            found.add((start, end))
            at = piece.find(phrase, max(end, at + 1))
    return found


# --- lists of arguments -----------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){},'"]|[^][(){},'"]+""")
_ITEM: Final = re.compile(r"""\s{0,4}(['"]?)([A-Za-z_]\w{0,60})\1\s{0,4}[=:]\s{0,4}(.*)""", re.DOTALL)


def arguments(text: str) -> dict[str, str]:
    """`name=value` or `'name': value` up to the bracket that closes, or the end; values as text, `None` left out.

    Text in quotes loses them; a nested list or object stays as it is written. Nothing is evaluated.
    """
    found: dict[str, str] = {}
    for item in _items(text):
        match = _ITEM.match(item)
        value = _plain(match[3]) if match else None
        if match and value is not None:
            found[match[2]] = value
    return found


def _items(text: str) -> Iterable[str]:
    """The parts between commas outside brackets."""
    depth, parts = 0, list[str]()
    for token in _TOKEN.finditer(text[:MAX_LINE]):
        word = token[0]
        if word in ("'", '"'):  # a text that is not closed: what follows cannot be told apart
            break
        if word in "([{":
            depth += 1
        elif word in ")]}":
            depth -= 1
            if depth < 0:
                break
        elif word == "," and depth == 0:
            yield "".join(parts)
            parts.clear()
            continue
        parts.append(word)
    yield "".join(parts)


def _plain(value: str) -> str | None:
    value = value.strip()
    if value[:1] in ("'", '"') and len(value) > 1 and value[-1] == value[0]:
        return value[1:-1].replace("\\\\", "\\")
    if value[:1] not in ("(", "[", "{") and "(" not in value:
        value = value.split(None, 1)[0] if value else ""
    return None if value in ("None", "null", "") else value
