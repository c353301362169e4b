"""Contents of a run directory, as types: the manifest (kvplan/run@1), its samples and its events.

A run that ended early lacks what it did not reach, so no key is required; the manifest's values are checked when they
are read (kvplan.measure.run_manifest).
"""

from typing import Annotated, Any, Literal, TypedDict

from kvplan.core.records import or_null


class Model(TypedDict, total=False):
    name: str
    source: str
    config: dict[str, Any]  # as in a config.json


class Inputs(TypedDict, total=False):
    """Inputs as in kvplan.servers.bundled.rules.EngineInputs."""

    total: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    num_blocks: int | None
    max_blocks: int | None
    backend: Literal["torch", "triton"]
    batches_in_flight: int
    max_loras: int
    max_lora_rank: int
    fully_sharded_loras: bool


class Memory(TypedDict, total=False):
    """Memory measured by the engine: bytes, and blocks of the pool."""

    total: int
    budget: int
    weights: int
    buffers: int
    activations: int
    kv_cache: int
    cuda_graphs: int
    non_torch: int
    workspaces: int
    graph_tensors: int
    num_blocks: int
    block_bytes: int
    lora: int


class EngineFigures(TypedDict, total=False):
    """Counters of an engine: at the time of a sample; in results, at the end or at the fullest moment."""

    kv_cache_usage_perc: float
    num_used_blocks: int
    num_cached_blocks: int
    num_kv_tokens: int
    num_filled_slots: int
    num_requests_running: int
    num_requests_waiting: int
    num_preemptions: int
    num_cached_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    external_prefix_cache_queries: int
    external_prefix_cache_hits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    busy_s: float


class ServedFigures(TypedDict, total=False):
    """What an allocator served; a lower bound if `is_partial`."""

    is_partial: bool
    allocator: str
    seconds: float
    most_running: int
    densest: EngineFigures
    stats: EngineFigures
    output_tokens_per_s: float
    num_finished: int
    num_failed: int
    failures: list[str]


class Files(TypedDict, total=False):
    """KV in files: bytes that they may take, their number after the run, and their bytes on the disk."""

    disk_space: int
    num_files: int
    disk_files: int


class Offload(Files):
    """KV beyond the device: bytes of its memory, tokens looked up there and loaded, bytes copied each way."""

    memory: int
    looked_up_tokens: int
    loaded_tokens: int
    stored: int
    loaded: int
    saved: int
    fetched: int


class Results(ServedFigures, total=False):
    baseline: ServedFigures
    second_baseline: ServedFigures
    offload: Offload


class Environment(TypedDict, total=False):
    """Versions and hardware."""

    kvplan: str | None
    python: str
    platform: str
    packages: dict[str, str | None]
    cuda: str | None
    driver: str | None
    gpu: str | None
    cpu_cores: int | None
    torch_threads: int
    host_memory: int
    warnings: list[str]
    is_wsl: bool
    commit: str | None
    argv: list[str]


class Engine(TypedDict, total=False):
    """Settings of engine.config.EngineConfig."""

    device: str
    dtype: str
    block_size: int
    num_blocks: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    kv_scale: float
    enable_prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pp_layer_partition: str | None
    backend: str
    scheduling_policy: str
    long_prefill_token_threshold: int
    watermark: float
    reserve_full_prompt: bool
    async_scheduling: bool | None
    allocator: str
    load_format: str
    seed: int
    enforce_eager: bool
    memory_limit: int | None
    max_loras: int
    max_lora_rank: int
    fully_sharded_loras: bool
    kv_offloading_size: float | None
    kv_offloading_dir: str | None
    kv_offloading_disk_size: float | None
    speculative_config: dict[str, Any] | None


class Manifest(TypedDict, total=False):
    """Contents of run.json."""

    schema: Literal["kvplan/run@1"]
    status: Literal["running", "complete", "partial", "failed"]
    cause: str | None
    host: str
    pid: int
    pid_started: int | None
    started_utc: str
    finished_utc: str | None
    device: Literal["cpu", "cuda"]
    model: Model
    draft: Model
    inputs: Inputs
    engine: Engine
    workload: dict[str, Any]
    environment: Environment
    memory: Memory
    groups: int
    graph_bytes: dict[str, int]
    peaks: dict[str, dict[str, int]]
    seconds: float
    results: Annotated[Results, or_null]  # null if nothing was served: see `Run.results`


class Sample(EngineFigures, total=False):
    """A line of samples.jsonl: seconds since the run began, the stage, and bytes."""

    t: float
    stage: str
    rss: int
    torch_allocated: int
    torch_reserved: int
    torch_peak: int
    device_used: int
    device_reserved: int
    device_free: int
    device_is_host: bool
    device_total: int
    process_used: int
    process_is_estimated: bool
    is_foreign: bool
    gpu_utilization: float
    power_w: float
    sm_clock_mhz: float
    memory_clock_mhz: float


class Progress(Sample, total=False):
    """A sample as passed to the watcher of a profile."""

    num_finished: int
    num_requests: int | None
    eta_s: float | None


class Event(TypedDict, total=False):
    """A line of events.jsonl: a stage that begins, with its details and the previous stage's peaks, or a warning."""

    t: float
    event: str
    stage: str
    allocator: str
    peaks: dict[str, dict[str, int]]
    text: str
