"""Failure messages of servers: the type of their rows, and the rows of torch, NCCL and the host.

A server's own rows are in its folder (vllm/failures.py, sglang/failures.py). Text is compared without whitespace,
quotes and backticks, because terminals, issue forms and Python tracebacks break lines and words arbitrarily.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
    "oom_kv_cache",
    "oom_compute_buffers",
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
    # those of obstacles.py
    "port_in_use",
    "disk_full",
    "model_access",
    "model_not_found",
    "hub_unreachable",
    "weight_files",
    "model_unknown",
    "remote_code",
    "chat_template",
    "gpu_not_visible",
    "driver_mismatch",
    "driver_too_old",
    "broken_install",
    "package_missing",
    "no_compiler",
    "unknown_argument",
    "argument_value",
    "lora_rank",
    "drafts_above_step",
    "drafts_and_graphs",
    "not_capturable",
    "own_request_refused",
    "kernel_crash",
    "segmentation_fault",
    "toolkit_too_old",
    "kernel_not_built",
    "fabric_manager",
    "checkpoint_shapes",
    "file_tensors",
    "tokenizer_unknown",
    "checkpoint_names",
    "adapter_unsupported",
    "request_slots",
    "host_memory_not_mapped",
    "probe_failed",
    "versions_differ",
    "library_missing",
    "not_memory",
]
# Causes that memory flags affect; all others are unrelated to memory.
MEMORY_CAUSES: Final[frozenset[Cause]] = frozenset(
    {
        "kv_too_small_for_max_len", "no_kv_memory", "free_memory_below_utilization", "oom_loading_weights",
        "oom_profile_run", "oom_cuda_graph_capture", "oom_sampler_warmup", "oom_runtime", "encoder_cache_too_small",
        "mamba_blocks_below_max_num_seqs", "host_memory_or_shm", "sglang_not_enough_memory", "sglang_oom_prefill",
        "sglang_oom_decode_retract", "sglang_cuda_graph_failed", "lora_memory", "oom_kv_cache", "oom_compute_buffers",
    }
)  # fmt: skip

Phase = Literal["arguments", "load", "profile", "pool", "capture", "warmup", "serving"]


@dataclass(frozen=True, slots=True)
class Size:
    """A size as logged, in bytes; low and high bound the value before rounding to two decimals."""

    text: str
    bytes: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Every number in the failing lines; sizes are per rank."""

    needed_bytes: Size | None = None  # KV cache of one request of `context` tokens
    available_bytes: Size | None = None  # KV cache memory available
    tried_bytes: Size | None = None  # of the failed allocation
    free_bytes: Size | None = None
    total_bytes: Size | None = None
    in_use_bytes: Size | None = None  # in use by this process
    other_process_bytes: Size | None = None
    budget_bytes: Size | None = None  # utilization x total
    allocated_bytes: Size | None = None  # by torch's tensors
    reserved_bytes: Size | None = None  # reserved by torch but unallocated
    private_pools_bytes: Size | None = None  # of CUDA graphs
    limit_bytes: Size | None = None  # of host memory, for a container
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
    preemptions: int | None = None
    running: int | None = None  # concurrent requests
    utilization: float | None = None
    mem_fraction: float | None = None
    least_share: float | None = None  # that the server itself asks for
    gpu: str | None = None
    capability: str | None = None
    required_capability: str | None = None
    quantization: str | None = None
    kv_dtype: str | None = None
    dtype: str | None = None


_SHARES: Final = frozenset({"utilization", "mem_fraction", "least_share"})
_TEXTS: Final = frozenset({"gpu", "capability", "required_capability", "quantization", "kv_dtype", "dtype"})
_SIZE: Final = r"-?[0-9]{1,18}(?:\.[0-9]{1,12})?(?:GiB?|MiB?|KiB|TiB|GB|MB|KB|bytes|B)?"
_COUNT: Final = r"-?[0-9](?:[0-9,_]{0,18}[0-9])?"
_SHARE: Final = r"[0-9]{1,4}(?:\.[0-9]{1,8})?"
_TEXT: Final = r"[A-Za-z0-9_.:+-]{1,60}?"
_DTYPE: Final = r"(?:[Bb]float16|[Ff]loat16|fp8)"
_UNITS: Final = {"TiB": TIB, "GiB": GIB, "Gi": GIB, "Mi": MIB, "GB": GIB, "MiB": MIB, "MB": MIB, "KiB": KIB, "KB": KIB}
NAMES: Final = frozenset(field.name for field in fields(Figures))


def figure(name: str, text: str) -> Size | int | float | str:
    """Parse a figure."""
    if name in _TEXTS:
        return text
    if name in _SHARES:
        return float(text)
    if not name.endswith("_bytes"):
        return int(text.replace(",", "").replace("_", ""))
    number = text.rstrip("TGMKiBbytes")
    unit = _UNITS.get(text[len(number) :], GIB if "." in number else 1)  # "(19.77/22.05 GiB)"; bytes have no point
    value = Fraction(number)
    if unit == 1:
        return Size(text, round(value), round(value), round(value))
    half = Fraction(1, 2 * 10 ** max(2, len(number.partition(".")[2])))  # servers round to two decimals, "24.0" too
    return Size(text, round(value * unit), ceil((value - half) * unit), floor((value + half) * unit))


def _written(name: str) -> str:
    if name == "dtype":
        return _DTYPE
    if name in _TEXTS:
        return _TEXT
    if name in _SHARES:
        return _SHARE
    return _SIZE if name.endswith("_bytes") else _COUNT


def dotted(capability: str) -> str:
    """A compute capability with its point: vLLM logs 8.6 as 86."""
    return f"{capability[:-1]}.{capability[-1]}" if capability.isdigit() and len(capability) > 1 else capability


REACH: Final = 600  # squeezed characters after a phrase within which its figures are searched
LEAD: Final = 160  # and before it


@dataclass(frozen=True, slots=True)
class Wording:
    """One message of a server, of torch or of the system that explains why it stopped.

    cause     what it proves; None if the start-up phase decides (torch's out of memory)
    phrase    literal text that must be present
    releases  in which it was seen
    source    file of the server, or an issue that quotes it
    figures   patterns around the phrase, with <name> for a figure; each is searched on its own
    needs     a pattern that must also match around the phrase; "" for none
    unless    a pattern around the phrase that rules it out; "" for none
    anywhere  a pattern that must match somewhere in the log; "" for none
    phase     the start-up phase that writes it
    strength  "decisive"; "general": the decisive line may follow; "hint": a symptom without an error
    fatal     whether the server exits; waits: whether it waits, perhaps for ever
    """

    cause: Cause | None
    phrase: str
    releases: str
    source: str
    figures: tuple[str, ...] = ()
    needs: str = ""
    unless: str = ""
    anywhere: str = ""
    phase: Phase | None = None
    strength: Literal["decisive", "general", "hint"] = "decisive"
    fatal: bool = True
    waits: bool = False


_DROPPED: Final = re.compile(r"[\s'\"`*\\\u200b\ufeff\xa0]+")


def squeezed(text: str) -> str:
    """Remove what copy and paste adds or loses: whitespace, quotes, backticks, asterisks, backslashes."""
    return _DROPPED.sub("", text)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a row's pattern for squeezed text."""
    plain = re.sub(r"[ '\"`]+", "", pattern)
    return re.compile(re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{_written(match[1])})", plain))


Part = tuple[Cause | None, Phase]


@dataclass(frozen=True, slots=True)
class Order:
    """A line that says that a server was told to stop.

    by  who told it, in words; empty if the line does not say
    """

    phrase: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Help:
    """A change that helps where memory is short, in a server that places layers: the argument, its flag as written,
    the direction, and what it does.
    """

    argument: str
    flag: str
    way: str
    text: str


@dataclass(frozen=True, slots=True)
class Failures:
    """A server's failure messages, and the causes that only it has.

    wordings   its messages
    frames     functions in a traceback -> their start-up phase; the first row found in a trace decides
    marks      healthy lines -> the phase that follows; own_marks: whether no other server writes them
    ready      the line that says it is serving; starts: that it is starting
    files      strings that only its own paths and commands contain, in lowercase
    parts      start-up phase -> the cause if memory runs out there; a cause of None: only the phase is reported
    last_part  the same when only the last mark is known, if different
    of_size    phase implied by a size: (attempted size, whether graphs were captured, functions of the trace)
    sent_back  cause if a message says that requests were preempted
    causes     causes of its own -> the planner's name for their kind
    processes  patterns of its processes' line prefixes, and of how they refer to each other
    kinds      cause -> a pattern of messages that are in no table
    of_releases  patterns, besides the messages, that only some releases write; their first and last release
    raised_again  start-up phase -> functions below which it alone re-raises a caught error as another
    settings   patterns of lines that say that an argument was given -> the argument
    engines    the first line of an engine, which a server or a Python program starts
    alive      lines that only a working engine writes
    deaths     reports of a failed process besides WRAPPERS
    orders     lines that say that it was told to stop, besides ORDERS
    finished   the last lines of an offline run
    frontend   names, in a line's prefix, of the code that reads requests
    modules    parts of paths that only its own files have
    helps      cause -> the changes that help, in a server that places layers
    """

    wordings: tuple[Wording, ...]
    frames: tuple[tuple[str, frozenset[str]], ...]
    marks: tuple[tuple[str, Phase], ...]
    ready: tuple[str, ...]
    starts: tuple[str, ...]
    parts: Mapping[str, Part]
    files: tuple[str, ...] = ()
    own_marks: bool = False
    last_part: Mapping[str, str] = field(default_factory=dict)
    of_size: Callable[[Size | None, bool, frozenset[str]], str | None] | None = None
    sent_back: Cause | None = None
    causes: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    kinds: Mapping[Cause, str] = field(default_factory=dict)
    raised_again: Mapping[str, frozenset[str]] = field(default_factory=dict)
    of_releases: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    engines: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    deaths: tuple[str, ...] = ()
    orders: tuple[Order, ...] = ()
    finished: tuple[str, ...] = ()
    frontend: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    helps: Mapping[str, tuple[Help, ...]] = field(default_factory=dict)


# Phases that a frame table names as their cause.
TOLD_BY_FRAMES: Final[Mapping[str, Part]] = {
    "oom_sampler_warmup": ("oom_sampler_warmup", "warmup"),
    "lora_memory": ("lora_memory", "load"),
    "host_memory_or_shm": ("host_memory_or_shm", "load"),
}

# torch reports the GPU, the attempted size, the free memory and who holds the rest.
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

_TORCH: Final = "torch c10/cuda/CUDACachingAllocator.cpp"
# Messages of torch, the driver and its libraries when an allocation fails; the start-up phase decides the cause.
OUT_OF_MEMORY: Final[tuple[Wording, ...]] = (
    Wording(None, "CUDA out of", "any", _TORCH, TORCH_FIGURES),
    Wording(None, "HIP out of memory.", "any", _TORCH, TORCH_FIGURES),
    Wording(None, "XPU out of memory.", "any", "torch c10/xpu/XPUCachingAllocator.cpp", TORCH_FIGURES),
    Wording(None, "NPU out of memory.", "any", "torch_npu", TORCH_FIGURES),
    Wording(None, "OutOfMemoryError: ", "any", _TORCH, TORCH_FIGURES, unless="^OutOfMemoryError: Task was killed"),
    Wording(None, "OutOfMemoryError(", "any", _TORCH, TORCH_FIGURES),
    Wording(None, "torch.OutOfMemoryError", "any", _TORCH, TORCH_FIGURES),
    Wording(None, "torch.cuda.OutOfMemoryError", "any", _TORCH, TORCH_FIGURES),
    Wording(None, "CUDA error: out of memory", "any", "cudaErrorMemoryAllocation"),
    Wording(None, "HIP error: out of memory", "any", "hipErrorOutOfMemory"),
    Wording(None, "CUDA_ERROR_OUT_OF_MEMORY", "any", "CUresult"),
    Wording(None, "Triton Error [CUDA]: out of memory", "any", "triton"),
    Wording(None, "CUBLAS_STATUS_ALLOC_FAILED", "any", "cublasStatus_t"),
    Wording(None, "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "any", "oneAPI"),
)


LIMIT: Final = (r"(?:Limits:|limits:).{0,80}?memory: <limit_bytes>(?:[^0-9A-Za-z]|$|[a-z]{2})",)  # kubectl describe


def _host(phrase: str, source: str, needs: str = "", unless: str = "") -> Wording:
    return Wording("host_memory_or_shm", phrase, "any", source, LIMIT, needs=needs, unless=unless)


def _killed(phrase: str, source: str) -> Wording:
    """A process killed by SIGKILL: by the system when out of memory, though SGLang kills its own processes after
    any error.
    """
    return Wording("host_memory_or_shm", phrase, "any", source, LIMIT, strength="hint")


def _nccl(phrase: str, source: str, needs: str = "", unless: str = "") -> Wording:
    return Wording("nccl_or_multiprocess", phrase, "any", source, needs=needs, unless=unless, strength="general")


def _capability(phrase: str, source: str, needs: str = "", unless: str = "") -> Wording:
    return Wording("dtype_or_capability", phrase, "any", source, needs=needs, unless=unless)


# A checkpoint's tensors have other shapes than its config, or its quantization as loaded.
SHAPES: Final = (
    ("assert param_data.shape == loaded_weight.shape", "vLLM and SGLang layers/linear.py"),
    ("assert param.size() == loaded_weight.size()", "vLLM and SGLang model_loader/weight_utils.py"),
    ("Tried to load weights of size", "vLLM model_executor/parameter.py"),
    ("Attempted to load weight (torch.Size", "vLLM and SGLang model_loader/weight_utils.py"),
)

# Messages of the host, the driver and the libraries below both servers.
SYSTEM: Final[tuple[Wording, ...]] = (
    # host memory and shared memory
    _host("OOMKilled", "Kubernetes, Docker: reason of a container's end"),
    _host("Out of memory: Killed process", "Linux mm/oom_kill.c"),
    _host("Memory cgroup out of memory", "Linux mm/oom_kill.c"),
    _host("oom-kill:constraint=", "Linux mm/oom_kill.c"),
    _host("invoked oom-killer", "Linux mm/oom_kill.c"),
    _killed("exit code 137", "128 + SIGKILL"),
    _killed("exited with code 137", "128 + SIGKILL"),
    _killed("Exit Code: 137", "kubectl describe"),
    _killed("died with exit code -9", "multiprocessing: SIGKILL"),
    _killed("(exit code: -9)", "vLLM v1/executor/multiproc_executor.py"),
    _killed("exitcode=-9", "multiprocessing: SIGKILL"),
    _killed("exit code: -9", "SGLang srt/entrypoints/engine.py"),
    _killed("exitcode: -9", "torch.distributed.elastic"),
    _killed("terminated with -9", "SGLang srt/entrypoints/engine.py"),
    _killed("terminated by signal SIGKILL", "shells, multiprocessing"),
    _host("killed due to the node running low on memory", "ray"),
    _host("DefaultCPUAllocator: can't allocate memory", "torch c10/core/impl/alloc_cpu.cpp"),
    _host("DefaultCPUAllocator: not enough memory", "torch c10/core/impl/alloc_cpu.cpp"),
    _host("Cannot allocate memory", "errno ENOMEM"),
    _host("NV_ERR_NO_MEMORY", "NVIDIA's kernel driver"),
    _host("unable to open shared memory object", "torch MapAllocator.cpp"),
    _host("unable to write to file </torch_", "torch MapAllocator.cpp"),
    _host("unable to allocate shared memory(shm)", "torch"),
    _host("It is possible that dataloader's workers are out of shared memory", "torch"),
    _host("insufficient shared memory (shm)", "torch"),
    _host("is killed by signal: Killed", "torch utils/data/_utils/signal_handling.py"),
    _host("Bus error", "SIGBUS of a full /dev/shm", unless="PCI ?e Bus error"),
    _host("No space left on device", "errno ENOSPC", needs=r"/dev/shm|shared ?memory|nccl-|psm_"),
    _host("Error while creating shared memory segment", "NCCL misc/shmutils.cc"),
    _host("Error while attaching to shared memory segment", "NCCL misc/shmutils.cc"),
    _host("Insufficient space in /dev/shm", "vLLM distributed/device_communicators/shm_broadcast.py"),
    _host("failed to extend /dev/shm", "NCCL misc/shmutils.cc"),
    _host("Not enough host memory", "SGLang srt/mem_cache/pool_host"),
    _host("Pinned host memory allocation of", "SGLang srt/mem_cache/pool_host/common.py"),
    _host("killed by Kubernetes", "a poster's words for OOMKilled", needs="(?i)memory"),
    _host("killed due to high memory usage", "a poster's words"),
    _host("ray-oom-prevention", "ray: the page its message ends with"),
    _killed("SIGKILL (exit 137)", "128 + SIGKILL"),
    _host("Too large swap space.", "vLLM 0.2-0.10 config.py"),
    _host("lack of CPU swap space", "vLLM 0.6-0.10 core/scheduler.py"),
    _host("on startup is less than desired CPU memory utilization", "vLLM v1/worker/cpu_worker.py"),
    _host("on kv cache allocation is less than requested memory for kv", "vLLM v1/worker/cpu_worker.py"),
    # how processes connect and communicate
    _nccl("NCCL error", "vLLM distributed/device_communicators/pynccl_wrapper.py", unless="out of memory"),
    _nccl("DistBackendError", "torch", unless="out of memory"),
    _nccl("ncclUnhandledCudaError", "torch", unless="out of memory"),
    _nccl("ncclSystemError", "torch"),
    _nccl("ncclInternalError", "torch"),
    _nccl("ncclInvalidUsage", "torch"),
    _nccl("ncclRemoteError", "torch"),
    _nccl("DistNetworkError", "torch"),
    _nccl("DistStoreError", "torch"),
    _nccl("Watchdog caught collective operation timeout", "torch ProcessGroupNCCL.cpp"),
    _nccl("Gloo connectFullMesh failed", "torch"),
    _nccl("gloo/transport/", "torch, gloo"),
    _nccl("client socket has timed out after", "torch TCPStore"),
    _nccl("Timed out waiting for clients", "torch TCPStore"),
    _nccl("wait timeout after", "torch TCPStore", needs="store|key"),
    _nccl("Duplicate GPU detected", "NCCL init.cc"),
    _nccl("Cannot re-initialize CUDA in forked subprocess", "torch/cuda/__init__.py"),
    _nccl("before the current process has finished its bootstrapping phase", "multiprocessing/spawn.py"),
    _nccl("daemonic processes are not allowed to have children", "multiprocessing/process.py"),
    _nccl("peer access is not supported between these two devices", "CUDA"),
    _nccl("RayChannelTimeoutError", "ray"),
    _nccl("TimeoutError: RPC call to", "vLLM v1/executor/multiproc_executor.py"),
    _nccl("Did not receive response from front-end process within", "vLLM v1/engine/core.py"),
    _nccl("Timed out waiting for engine core", "vLLM v1/engine"),
    _nccl("can't start new thread", "Python"),
    Wording(  # logged every minute by a process that waits for another, in start-up or between requests
        "nccl_or_multiprocess", "No available shared memory broadcast block found", "any",
        "vLLM distributed/device_communicators/shm_broadcast.py", strength="hint", waits=True,
    ),
    # not supported by the GPU
    _capability("no kernel image is available for execution on the device", "CUDA"),
    _capability("is not compatible with the current PyTorch installation", "torch/cuda/__init__.py", needs="sm_"),
    _capability("FlashAttention only supports Ampere GPUs or newer", "flash-attn"),
    Wording(
        "kv_dtype_unsupported", "fp8e4nv not supported in this architecture", "any", "triton",
        anywhere=r"(?i)kv[-_]?cache[-_]?dtype[=:,]?fp8|kv-?cachequant|reshape_and_cache|fp8kv-?cache|kv-?cachefp8",
    ),
    _capability("fp8e4nv not supported in this architecture", "triton"),
    _capability("requires device with capability", "torch, xformers"),
    _capability("ptxas fatal", "CUDA", needs="sm_|gpu-name"),
    _capability("--gpu-name=sm_", "triton/backends/nvidia/compiler.py", needs="(?:exit status|exited with) ?255|ptxas"),
    _capability("out of resource: shared memory", "triton: memory of one block on the chip"),
    _capability("device kernel image is invalid", "CUDA"),
    Wording("heads_not_divisible_by_tp", "is not divisible by", "any", "vLLM, SGLang distributed/utils.py",
            needs="AssertionError: [0-9]{1,9} is not divisible by [0-9]{1,9}"),
    Wording("too_few_gpus", "Insufficient nvidia.com/gpu", "any", "Kubernetes: event FailedScheduling"),
    Wording("too_few_gpus", "Insufficient amd.com/gpu", "any", "Kubernetes: event FailedScheduling"),
    Wording("too_few_gpus", "invalid device ordinal", "any", "CUDA"),
    Wording("too_few_gpus", "No CUDA GPUs are available", "any", "torch/cuda/__init__.py"),
    Wording(
        "quantization_mismatch", "Quantization method specified in the model config", "any",
        "vLLM config/model.py, SGLang srt/configs/model_config.py",
        (r"in the model config \(<quantization>\)",), phase="arguments",
    ),
    *(
        Wording(
            "quantization_mismatch", phrase, "any", source, phase="load",
            anywhere=r"(?i)bnb|bitsandbytes|[^0-9a-z][48]-?bit|awq|gptq|nvfp4|compressed.?tensors",
        )
        for phrase, source in SHAPES
    ),
    Wording(
        "quantization_mismatch", "is not divisible by weight quantization block", "any",
        "vLLM and SGLang layers/quantization/fp8.py", phase="load",
    ),
    Wording("not_memory", "memory space vmem", "any", "Pallas: on the chip"),
)  # fmt: skip

# Messages of the parents of a failed worker: never the cause, and the last line of most pastes.
WRAPPERS: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine process failed to start",
    "Worker failed with error",
    "EngineCore encountered an issue",
    "Background loop has errored already",
    "Engine loop is not running",
    "Engine loop has died",
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "WorkerProc hit an exception",
    "WorkerProc failed to start",
    "Scheduler hit an exception",
    "Rank 0 scheduler is dead",
    "Engine background task failed",
)

# Lines of those who stop a server: a user, a supervisor, a batch system, uvicorn. Only the first without an error
# above it counts: servers stop their own processes after any error.
ORDERS: Final = (
    Order("KeyboardInterrupt: terminated", "SIGTERM"),
    Order("KeyboardInterrupt", "Ctrl-C"),
    Order("received signal=SIGINT", "Ctrl-C"),
    Order("Received SIGINT", "Ctrl-C"),
    Order("received signal=SIGTERM", "SIGTERM"),
    Order("Received SIGTERM", "SIGTERM"),
    Order("SIGTERM received", "SIGTERM"),
    Order("DUE TO TIME LIMIT ***", "the time limit of its job"),
    Order("slurmstepd: error: *** ", "its batch system"),
    Order("INFO: Shutting down"),  # uvicorn
    Order("Waiting for application shutdown"),  # uvicorn
)
