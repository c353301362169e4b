"""The engine arguments: one table with a field of `EngineArgs` and a row for each.

Everything that names an argument reads this table: the commands' options and help panels, --engine-arg, pasted and
printed commands of every server, the arguments that logs list, policy keys and the schemas. To add an argument, add a
field and use it. Flags whose effect kvplan does not size are in servers/<name>/arguments.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import (
    AUTO,
    GIB,
    MIB,
    parse_context,
    parse_count,
    parse_fraction,
    parse_int_vllm,
    parse_ratio,
    parse_size,
    parse_tokens,
    parse_tokens_vllm,
)
from kvplan.servers.methods import METHODS

if TYPE_CHECKING:
    from kvplan.servers.releases import Version

Kind = Literal[
    "context", "tokens", "count", "bytes", "gib", "fraction", "ratio", "flag", "text", "choice", "limits", "json",
    "names",
]  # fmt: skip
COMMON: Final = "Model, GPU and server"
Panel = Literal["Model, GPU and server", "Parallelism", "Quantization", "Adapters and drafts"]
MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Flag:
    """A server's name and syntax for an argument.

    names    with underscores; the first is used in printed commands and in the server's log
    short    single-dash form
    on       the value that a switch sets; None: it has a --no-... counterpart, or takes a value
    values   the server's words for a value -> kvplan's
    since    the release change that introduced the first name; `earlier`: its name before that, "" for none
    beside   a switch without which it has no effect
    printed  whether it is a separate flag in a printed command
    off      the value that is equivalent to leaving it out
    """

    names: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    on: bool | str | None = None
    values: Mapping[str, str] | None = None
    since: str = ""
    earlier: str = ""
    beside: str = ""
    printed: bool = True
    off: str = ""


@dataclass(frozen=True, slots=True)
class Argument:
    """One engine argument: how it is parsed, shown in help, and what each server calls it.

    help, metavar  of its option
    options        option names besides the long one
    choices        its values, if there are few
    most           the largest sensible count; anything above is treated as a typo
    many           whether its option takes several values
    sglang, vllm   None: that server has no such argument; for vLLM, a Flag without names uses the argument's own name
    """

    kind: Kind
    help: str
    metavar: str | None = None
    options: tuple[str, ...] = ()
    panel: Panel = COMMON
    choices: tuple[str, ...] = ()
    most: int = 2**31 - 1
    many: bool = False
    vllm: Flag | None = Flag()
    sglang: Flag | None = None

    def flag(self, server: str) -> Flag | None:
        flag: Flag | None = getattr(self, server, None)
        return flag


def _sglang(
    kind: Kind,
    name: str,
    help: str,
    metavar: str | None = None,
    *,
    on: bool | None = None,
    since: str = "",
    earlier: str = "",
) -> Argument:
    """Define an argument that only SGLang has."""
    flag = Flag((name,), on=on, since=since, earlier=earlier)
    return Argument(kind, f"SGLang: {help}", metavar, vllm=None, sglang=flag)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Engine arguments as the user gave them; None means "not given": the server decides."""

    max_model_len: Annotated[
        int | Literal["auto"] | None,
        Argument(
            "context",
            "Context length, e.g. 32k; separate several with commas; auto (or -1): the longest that fits. Default: the "
            "model's maximum.",
            "TOKENS",
            ("--ctx",),
            many=True,
            sglang=Flag(("context_length",)),
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Argument(
            "count",
            "Number of GPUs each layer is split across.",
            "N",
            ("--tp", "-tp"),
            "Parallelism",
            most=MAX_RANKS,
            vllm=Flag(short=("tp",)),
            sglang=Flag(("tp_size", "tensor_parallel_size", "tp")),
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Argument(
            "count",
            "Number of pipeline stages.",
            "N",
            ("--pp", "-pp"),
            "Parallelism",
            most=MAX_RANKS,
            vllm=Flag(short=("pp",)),
            sglang=Flag(("pp_size", "pipeline_parallel_size", "pp")),
        ),
    ] = 1
    pp_layer_partition: Annotated[
        str | None,
        Argument(
            "text",
            "Layers of each pipeline stage, e.g. 20,22,19 (VLLM_PP_LAYER_PARTITION, SGLANG_PP_LAYER_PARTITION).",
            "N,N,...",
            panel="Parallelism",
            vllm=Flag(("pp_layer_partition",), printed=False),  # set by an environment variable in both servers
            sglang=Flag(("pp_layer_partition",), printed=False),
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        Argument(
            "count",
            "Number of data-parallel replicas.",
            "N",
            ("--dp", "-dp"),
            "Parallelism",
            most=MAX_RANKS,
            vllm=Flag(short=("dp",)),
            sglang=Flag(("dp_size", "data_parallel_size", "dp")),
        ),
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        Argument(
            "count",
            "Number of ranks each request's KV cache is split across.",
            "N",
            ("--dcp", "-dcp"),
            "Parallelism",
            most=MAX_RANKS,
            vllm=Flag(short=("dcp",)),
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        Argument(
            "count",
            "Number of ranks each prompt's computation is split across; each holds the weights and the KV cache.",
            "N",
            ("--pcp", "-pcp"),
            "Parallelism",
            most=MAX_RANKS,
            vllm=Flag(short=("pcp",)),
        ),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int | None,
        Argument(
            "count", "Consecutive tokens of a request on one rank of its split KV cache.", "N", panel="Parallelism"
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        Argument(
            "flag",
            "Distribute whole experts across ranks.",
            options=("--ep/--no-ep", "-ep"),
            panel="Parallelism",
            vllm=Flag(short=("ep",)),
            sglang=Flag(("ep_size", "expert_parallel_size", "ep")),  # a number of ranks: servers/sglang/command.py
        ),
    ] = False
    enable_eplb: Annotated[
        bool,
        Argument(
            "flag",
            "Balance experts across ranks while serving (EPLB).",
            panel="Parallelism",
            sglang=Flag(("enable_eplb",), on=True),
        ),
    ] = False
    num_redundant_experts: Annotated[
        int,
        Argument(
            "count",
            "Redundant experts per layer, over all ranks.",
            "N",
            panel="Parallelism",
            most=1023,  # vLLM's own limit
            vllm=Flag(("num_redundant_experts",), printed=False),  # part of --eplb-config; a flag until 0.11
            sglang=Flag(("ep_num_redundant_experts",), off="0"),
        ),
    ] = 0
    eplb_window_size: Annotated[
        int,
        Argument(
            "count",
            "vLLM: number of steps of expert loads that EPLB keeps.",
            "N",
            panel="Parallelism",
            most=10**6,
            vllm=Flag(("eplb_window_size",), printed=False),  # part of --eplb-config
        ),
    ] = 1000
    all2all_backend: Annotated[
        str | None,
        Argument(
            "text",
            "All-to-all backend for expert parallelism: vLLM deepep_low_latency, ...; SGLang deepep, ...",
            "NAME",
            panel="Parallelism",
            sglang=Flag(("moe_a2a_backend",)),
        ),
    ] = None
    enable_dp_attention: Annotated[
        bool | None,
        _sglang(
            "flag",
            "enable_dp_attention",
            "split attention over the --dp data-parallel ranks inside --tp.",
            on=True,
        ),
    ] = None
    enable_dp_lm_head: Annotated[
        bool | None,
        _sglang("flag", "enable_dp_lm_head", "split the output head as DP attention splits attention.", on=True),
    ] = None
    moe_dense_tp_size: Annotated[
        int | None,
        _sglang("count", "moe_dense_tp_size", "tensor-parallel size of the dense MLPs of an MoE model; only 1.", "N"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Argument("fraction", "Fraction of GPU memory the server may use, e.g. 0.92.", "SHARE")
    ] = None
    mem_fraction_static: Annotated[
        float | None,
        _sglang(
            "fraction", "mem_fraction_static", "fraction of free memory at startup for weights and KV cache.", "SHARE"
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Argument(
            "count", "Maximum number of concurrent requests.", "N", ("--batch",), sglang=Flag(("max_running_requests",))
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Argument("tokens", "Maximum number of tokens per step.", "TOKENS", sglang=Flag(("chunked_prefill_size",))),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        _sglang("tokens", "max_total_tokens", "maximum number of tokens in the KV cache.", "TOKENS"),
    ] = None
    dtype: Annotated[
        str,
        Argument(
            "text",
            "Model dtype: auto, bfloat16, float16 or float32.",
            "DTYPE",
            panel="Quantization",
            sglang=Flag(("dtype",)),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Argument(
            "text",
            "Quantize while loading (fp8), or state the checkpoint's method.",
            "METHOD",
            panel="Quantization",
            vllm=Flag(short=("q",)),
            sglang=Flag(("quantization",)),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Argument(
            "text",
            "KV cache dtype: auto, fp8, fp8_e4m3, fp8_e5m2, ...",
            "DTYPE",
            panel="Quantization",
            sglang=Flag(("kv_cache_dtype",), values={"bf16": "bfloat16"}),
        ),
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        str | None,
        Argument(
            "text",
            "Dtype of recurrent (Mamba) states.",
            "DTYPE",
            panel="Quantization",
            sglang=Flag(("mamba_ssm_dtype",)),
        ),
    ] = None
    block_size: Annotated[
        int | None, Argument("count", "Tokens per KV cache block.", "N", sglang=Flag(("page_size",)))
    ] = None
    attention_backend: Annotated[
        str | None,
        Argument(
            "text",
            "vLLM: FLASHINFER, TRITON_ATTN, FLASHMLA, ...",
            "NAME",
            vllm=Flag(since="attention_backend_flag"),
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, Argument("bytes", "Size of the KV cache on each GPU.", "SIZE")] = None
    num_gpu_blocks_override: Annotated[int | None, Argument("count", "Number of KV cache blocks.", "N")] = None
    performance_mode: Annotated[
        Literal["balanced", "interactivity", "throughput"],
        Argument(
            "choice",
            "What vLLM's defaults optimize for; throughput: larger batches.",
            choices=("balanced", "interactivity", "throughput"),
        ),
    ] = "balanced"
    kv_offloading_size: Annotated[
        int, Argument("gib", "Host memory for KV cache offloading, over all ranks.", "GIB")
    ] = 0
    cpu_offload_gb: Annotated[
        int | None,
        Argument(
            "gib", "Weights of each GPU to offload to host memory.", "GIB", sglang=Flag(("cpu_offload_gb",), off="0")
        ),
    ] = None
    offload_backend: Annotated[
        Literal["auto", "uva", "prefetch"] | None,
        Argument(
            "choice",
            "How weights in host memory are read: in place or fetched ahead.",
            choices=("auto", "uva", "prefetch"),
        ),
    ] = None
    offload_group_size: Annotated[
        int | None,
        Argument(
            "count",
            "Layers per group for weight offloading; the last --offload-num-in-group of each are offloaded.",
            "N",
            sglang=Flag(("offload_group_size",), off="-1"),
        ),
    ] = None
    offload_num_in_group: Annotated[
        int | None,
        Argument(
            "count",
            "Layers per group whose weights are offloaded to host memory.",
            "N",
            sglang=Flag(("offload_num_in_group",)),
        ),
    ] = None
    offload_prefetch_step: Annotated[
        int | None,
        Argument("count", "Layers to prefetch from host memory.", "N", sglang=Flag(("offload_prefetch_step",))),
    ] = None
    enable_sleep_mode: Annotated[
        bool | None,
        Argument("flag", "Allow the server to sleep: weights move to host memory and the KV cache is freed."),
    ] = None
    kv_offloading_backend: Annotated[
        Literal["native", "lmcache"] | None,
        Argument("choice", "KV offloading backend for --kv-offloading-size.", choices=("native", "lmcache")),
    ] = None
    kv_transfer_config: Annotated[
        str | None,
        Argument("json", 'KV connector, e.g. {"kv_connector": "NixlConnector", "kv_role": "kv_both"}.', "JSON"),
    ] = None
    lmcache_max_local_cpu_size: Annotated[
        int | None,
        Argument(
            "gib",
            "Host memory of LMCache in each rank, as LMCACHE_MAX_LOCAL_CPU_SIZE.",
            "GIB",
            vllm=Flag(("lmcache_max_local_cpu_size",), printed=False),  # set by an environment variable
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        Argument(
            "flag",
            "Reuse KV blocks of requests that share a prefix.",
            sglang=Flag(("disable_radix_cache",), on=False),
        ),
    ] = None
    enable_chunked_prefill: Annotated[bool, Argument("flag", "Split long prompts across several steps.")] = True
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        Argument(
            "flag",
            "Keep the whole context's KV in every layer.",
            sglang=Flag(("disable_hybrid_swa_memory",), on=True),
        ),
    ] = None
    async_scheduling: Annotated[
        bool,
        Argument(
            "flag", "Schedule the next step while this one runs.", sglang=Flag(("disable_overlap_schedule",), on=False)
        ),
    ] = True
    enforce_eager: Annotated[
        bool, Argument("flag", "Run without CUDA graphs.", sglang=Flag(("disable_cuda_graph",), on=True))
    ] = False
    max_cudagraph_capture_size: Annotated[
        int | None,
        Argument(
            "count",
            "vLLM: tokens of the largest CUDA graph. Default: twice --max-num-seqs, at most 512.",
            "TOKENS",
            vllm=Flag(since="graph_size_flag"),
        ),
    ] = None
    language_model_only: Annotated[bool, Argument("flag", "Serve text only: do not load the vision encoder.")] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Argument(
            "choice",
            "Whether the model generates text, or embeds, ranks or classifies (pooling).",
            choices=("auto", "generate", "pooling"),
            vllm=Flag(since="runner_flag"),  # before, --task: servers/vllm/launch.py
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Argument(
            "choice",
            "How to convert a generative model for pooling.",
            choices=("auto", "none", "embed", "classify"),
            vllm=Flag(since="runner_flag"),
        ),
    ] = "auto"
    limit_mm_per_prompt: Annotated[
        str | None,
        Argument(
            "limits",
            'Maximum items per prompt, e.g. image=0,video=0 or {"image": {"count": 2, "width": 512}}.',
            "LIMITS",
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        str | None,
        Argument("json", 'Settings of the image processor, e.g. {"max_pixels": 1003520}.', "JSON"),
    ] = None
    disable_chunked_mm_input: Annotated[bool, Argument("flag", "Compute every image, video or sound in one step.")] = (
        False
    )
    skip_mm_profiling: Annotated[
        bool, Argument("flag", "Skip the encoder in the profiling run: no memory is reserved for it.")
    ] = False
    mm_encoder_tp_mode: Annotated[
        Literal["weights", "data"],
        Argument(
            "choice",
            "Split the encoder's weights across ranks, or its inputs (data: every rank loads the whole encoder).",
            panel="Parallelism",
            choices=("weights", "data"),
            sglang=Flag(("mm_enable_dp_encoder",), on="data"),
        ),
    ] = "weights"
    max_loras: Annotated[
        int,
        Argument(
            "count",
            "Number of LoRA adapters on the GPU at once.",
            "N",
            panel="Adapters and drafts",
            most=10_000,
            vllm=Flag(beside="enable_lora"),
            sglang=Flag(("max_loras_per_batch",), beside="enable_lora"),
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Argument(
            "count", "Maximum LoRA rank.", "N", panel="Adapters and drafts", most=4096, sglang=Flag(("max_lora_rank",))
        ),
    ] = 16
    fully_sharded_loras: Annotated[
        bool, Argument("flag", "Shard both LoRA matrices across ranks.", panel="Adapters and drafts")
    ] = False
    lora_dtype: Annotated[
        str,
        Argument("text", "Dtype of adapters: auto, bfloat16 or float16.", "DTYPE", panel="Adapters and drafts"),
    ] = "auto"
    lora_target_modules: Annotated[
        str | None,
        Argument(
            "names",
            "Modules that adapters may change, e.g. q_proj,o_proj. Default: all.",
            "NAMES",
            panel="Adapters and drafts",
            sglang=Flag(("lora_target_modules",)),
        ),
    ] = None
    max_cpu_loras: Annotated[
        int | None,
        Argument(
            "count",
            "Number of adapters in host memory. Default: as many as on the GPU.",
            "N",
            panel="Adapters and drafts",
            most=1_000_000,
            sglang=Flag(("max_loaded_loras",)),
        ),
    ] = None
    enable_tower_connector_lora: Annotated[
        bool, Argument("flag", "Allow adapters to change the encoder.", panel="Adapters and drafts")
    ] = False
    enable_mixed_moe_lora_format: Annotated[
        bool, Argument("flag", "Accept adapters of experts in both formats.", panel="Adapters and drafts")
    ] = False
    enable_moe_shared_loras: Annotated[
        bool,
        Argument(
            "flag",
            "Adapters share their outer matrices over experts.",
            panel="Adapters and drafts",
            sglang=Flag(("experts_shared_outer_loras",), on=True),
        ),
    ] = False
    num_speculative_tokens: Annotated[
        int,
        Argument(
            "count",
            "Draft tokens per step.",
            "N",
            panel="Adapters and drafts",
            most=1000,
            vllm=Flag(printed=False),  # part of --speculative-config
            sglang=Flag(("speculative_num_steps",)),
        ),
    ] = 0
    speculative_method: Annotated[
        str | None,
        Argument(
            "choice",
            "Speculative decoding method. Default: from the draft model's config.",
            panel="Adapters and drafts",
            choices=METHODS,
            vllm=Flag(printed=False),  # part of --speculative-config
            sglang=Flag(("speculative_algorithm",), printed=False),  # its names: servers/sglang/drafts.py
        ),
    ] = None
    usage: Annotated[
        Literal["server", "offline"],
        Argument(
            "choice",
            "Use the defaults of `vllm serve` (server) or `LLM(...)` (offline).",
            choices=("server", "offline"),
            vllm=Flag(printed=False),  # which program it is
        ),
    ] = "server"
    swa_full_tokens_ratio: Annotated[
        float | None,
        _sglang(
            "ratio",
            "swa_full_tokens_ratio",
            "size of the sliding-window pool relative to the full-attention pool, in tokens.",
            "RATIO",
        ),
    ] = None
    mamba_full_memory_ratio: Annotated[
        float | None,
        _sglang(
            "ratio", "mamba_full_memory_ratio", "memory for recurrent states relative to KV cache memory.", "RATIO"
        ),
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None,
        _sglang(
            "count",
            "cuda_graph_max_bs_decode",
            "batch size of the largest CUDA graph.",
            "N",
            since="decode_graph_flag",
            earlier="cuda_graph_max_bs",
        ),
    ] = None
    cuda_graph_max_bs_prefill: Annotated[
        int | None,
        _sglang("count", "cuda_graph_max_bs_prefill", "tokens of the largest prefill CUDA graph.", "N"),
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        _sglang("text", "prefill_attention_backend", "fa3, flashinfer, trtllm_mha, ...", "NAME"),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        _sglang("text", "decode_attention_backend", "fa3, flashmla, trtllm_mla, ...", "NAME"),
    ] = None
    max_mamba_cache_size: Annotated[
        int | None,
        _sglang("count", "max_mamba_cache_size", "slots for recurrent states.", "N"),
    ] = None
    mamba_radix_cache_strategy: Annotated[
        str | None,
        _sglang(
            "text",
            "mamba_radix_cache_strategy",
            "auto, no_buffer, extra_buffer or extra_buffer_lazy.",
            "NAME",
            since="decode_graph_flag",
            earlier="mamba_scheduler_strategy",
        ),
    ] = None
    disable_prefill_cuda_graph: Annotated[
        bool | None,
        _sglang("flag", "disable_prefill_cuda_graph", "run prefills without CUDA graphs.", on=True),
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        _sglang("count", "speculative_eagle_topk", "branches per draft step.", "N"),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        _sglang("count", "speculative_num_draft_tokens", "draft tokens verified per step.", "N"),
    ] = None
    enable_hierarchical_cache: Annotated[
        bool | None,
        Argument(
            "flag",
            "SGLang: copy finished KV to host memory.",
            panel="SGLang",
            vllm=None,
            sglang=Flag(("enable_hierarchical_cache", "enable_hicache"), on=True),
        ),
    ] = None
    hicache_ratio: Annotated[
        float | None,
        _sglang("ratio", "hicache_ratio", "host pool of the hierarchical cache relative to the GPU's.", "RATIO"),
    ] = None
    hicache_size: Annotated[
        int | None,
        _sglang("count", "hicache_size", "host memory of the hierarchical cache in each rank, in GB.", "GB"),
    ] = None
    disaggregation_mode: Annotated[
        Literal["prefill", "decode"] | None,
        Argument(
            "choice",
            "SGLang: role in prefill/decode disaggregation.",
            panel="SGLang",
            choices=("prefill", "decode"),
            vllm=None,
            sglang=Flag(("disaggregation_mode",), off="null"),
        ),
    ] = None
    enable_multimodal: Annotated[
        bool | None,
        _sglang("flag", "enable_multimodal", "accept images with models that default to text only.", on=True),
    ] = None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all ranks: replicas have their own, and DP attention ranks are a subset of the
        tensor ranks.
        """
        return self.world_size * (1 if self.enable_dp_attention else self.data_parallel_size)

    @property
    def world_size(self) -> int:
        """Number of GPUs of one replica."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size * self.pipeline_parallel_size

    @property
    def attention_ranks(self) -> int:
        """Number of ranks that share attention."""
        return self.tensor_parallel_size // (self.data_parallel_size if self.enable_dp_attention else 1)

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each pipeline stage as given; empty for the server's default partition."""
        if self.pp_layer_partition is None or self.pipeline_parallel_size == 1:
            return ()
        numbers = self.pp_layer_partition.split(",")
        if not all(re.fullmatch(r" *[0-9]{1,5} *", number) for number in numbers):
            text = printable(self.pp_layer_partition, 60)
            raise UsageError("pp_layer_partition", f"is not a list of whole numbers ({text!r})", "write 20,22,19")
        return tuple(int(number) for number in numbers)


def _row(annotated: Any) -> Argument:
    row: Argument = annotated.__metadata__[0]
    return row


_FIELDS: Final = fields(EngineArgs)
ARGUMENTS: Final[Mapping[str, Argument]] = {field.name: _row(field.type) for field in _FIELDS}
DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in _FIELDS}
# vLLM's short flags -> the argument.
SHORT: Final[dict[str, str]] = {
    short: name for name, row in ARGUMENTS.items() if row.vllm is not None for short in row.vllm.short
}


def option_words() -> dict[str, str]:
    """The option of kvplan's commands for each argument, the short one if there is one: --tp, --ctx."""
    return {
        name: row.options[0].partition("/")[0] if row.options else "--" + name.replace("_", "-")
        for name, row in ARGUMENTS.items()
    }


def lacking(server: str) -> Iterator[str]:
    """Arguments that this server lacks and another server has."""
    return (name for name, row in ARGUMENTS.items() if row.flag(server) is None)


def spellings(server: str) -> dict[str, str]:
    """Map every current or former name of an argument on this server to the argument."""
    names: dict[str, str] = {}
    for argument, row in ARGUMENTS.items():
        flag = row.flag(server)
        if flag is not None:
            names |= dict.fromkeys(filter(None, (*(flag.names or (argument,)), flag.earlier)), argument)
    return names


def listed_names() -> Iterator[str]:
    """Names that servers use for their arguments when they print or log them."""
    for argument, row in ARGUMENTS.items():
        for flag in (row.vllm, row.sglang):
            if flag is not None and flag.printed:
                yield from filter(None, ((flag.names or (argument,))[0], flag.earlier, flag.beside))


# --- a printed command ------------------------------------------------------------------------------------------------


def flag_words(server: str, release: "Version", args: EngineArgs, stated: Mapping[str, Any]) -> list[str]:
    """Flags of a server's command that set these arguments, in table order.

    stated  values from the plan that replace an argument's; None: omit it. All others are included if not the default.
    """
    words: list[str] = []
    for name, row in ARGUMENTS.items():
        flag = row.flag(server)
        value = stated.get(name, getattr(args, name))
        if flag is None or not flag.printed or value is None or (name not in stated and value == DEFAULTS[name]):
            continue
        known = not flag.since or release.has(flag.since)
        spelling = ((flag.names or (name,))[0] if known else flag.earlier).replace("_", "-")
        if not spelling:
            continue
        if isinstance(value, bool) or flag.on is not None:
            if flag.on in (None, value):
                words.append(f"--{spelling}" if value or flag.on is False else f"--no-{spelling}")
            continue
        beside = [f"--{flag.beside.replace('_', '-')}"] if flag.beside else []
        words_after = (
            str(value).split(",")
            if row.kind == "names"
            else [f"{value / GIB:.9g}" if row.kind == "gib" else str(value)]
        )
        words += [*beside, f"--{spelling}", *words_after]
    return words


# --- one value --------------------------------------------------------------------------------------------------------


def read_argument(name: str, text: str, option: str, *, vllm: bool = False) -> Any:
    """Parse the value of an engine argument as EngineArgs stores it.

    option  its name in error messages
    vllm    parse numbers as vLLM does ("32k" is 32,000)
    """
    argument = ARGUMENTS[name]
    if name == "offload_group_size" and text.strip() == "0":  # off, as by default
        return None
    match argument.kind:
        case "context":
            context = parse_context(text, option, vllm=vllm)
            return "auto" if context is AUTO else context
        case "tokens":
            return parse_tokens_vllm(text, option) if vllm else parse_tokens(text, option)
        case "count":
            return parse_count(text, option, argument.most)
        case "bytes":
            return stated_bytes(
                parse_int_vllm(text, option) if vllm or is_vllm_size(text) else parse_size(text, option), option
            )
        case "gib":
            return gib(text, option)
        case "fraction":
            return parse_fraction(text, option)
        case "ratio":
            return parse_ratio(text, option)
        case "flag":
            return switch(text, option)
        case "choice":
            if text not in argument.choices:
                raise UsageError(option, f"{printable(text, 40)!r} is not one of {', '.join(argument.choices)}")
            return int(text) if text.isdigit() else text
        case "limits":
            return limits(text, option)
        case "json":
            return json_object(text, option)
        case "names":
            return names(text, option)
        case "text":
            if not text or len(text) > 100 or not text.isprintable():
                raise UsageError(option, f"is not a name ({printable(text, 40)!r})", "write a name that vLLM accepts")
            return text


def is_vllm_size(text: str) -> bool:
    """True if a size uses vLLM's own one-letter suffix: 10G (binary), 10g (decimal)."""
    return re.fullmatch(r"[0-9.]+[kmgtKMGT]", text) is not None


def stated_bytes(size: int, option: str) -> int:
    """Parse the size of weights or a KV pool; reject a bare "16", which more likely means 16 GB."""
    if size < MIB:
        raise UsageError(option, f"is implausibly small ({size:,} bytes)", "write the unit, for example 16GiB")
    return size


def vllm_size_note(option: str, text: str, size: int) -> str:
    other = text[:-1] + text[-1].swapcase()
    kinds = ("binary", "decimal") if text[-1].isupper() else ("decimal", "binary")
    return f"{option} {text} is {size:,} bytes ({kinds[0]}), as in vLLM; {other} would be {kinds[1]}"


def switch(text: str, option: str) -> bool:
    """Parse true or false."""
    value = {"true": True, "false": False}.get(text.lower())
    if value is None:
        raise UsageError(option, f"is neither true nor false ({printable(text, 40)!r})", "write one of them")
    return value


def gib(text: str, option: str) -> int:
    """Parse GiB as vLLM's --kv-offloading-size takes it and return bytes; a size with a unit is accepted too."""
    if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text):
        return int(float(text) * GIB)
    return parse_size(text, option)


MOST_JSON: Final = 20_000  # characters; no server takes a config this large


def json_object(text: str, option: str) -> str:
    """Parse a JSON object (also from a log) to one line, as json.dumps writes it; dotted flags are merged."""
    import json

    parsed = None
    for candidate in (text, pythonic(text)) if len(text) <= MOST_JSON else ():
        try:
            parsed = json.loads(candidate)
            break
        except (ValueError, RecursionError):
            continue
    if not isinstance(parsed, dict):
        raise UsageError(option, f"is not a JSON object ({printable(text, 60)!r})", "write {...}, quoted with '...'")
    return json.dumps(parsed)


def pythonic(text: str) -> str:
    """Return JSON for a value that a log shows in Python syntax."""
    words = {"True": "true", "False": "false", "None": "null"}
    return re.sub(r"\b(True|False|None)\b", lambda match: words[match[0]], text.replace("'", '"'))


def names(text: str, option: str) -> str:
    """Parse names separated by commas, spaces or as a JSON list; return them comma-separated, deduplicated, in
    order.
    """
    words = re.sub(r"[\[\]\"',\s]+", " ", text).split()
    if not words or not all(re.fullmatch(r"[\w.*-]{1,100}", word) for word in words):
        raise UsageError(option, f"is not a list of names ({printable(text, 60)!r})", "write q_proj,o_proj")
    return ",".join(sorted(dict.fromkeys(words)))


NO_LIMIT: Final = 999  # vLLM's count for a modality whose options set none


@dataclass(frozen=True, slots=True)
class Limit:
    """Most items of a modality in a prompt, and the largest item that the profiling run uses; None: unlimited.

    length  audio samples
    """

    count: int = NO_LIMIT
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    length: int | None = None

    @property
    def document(self) -> Any:
        """Return the count, or an object if sizes are given too."""
        sizes = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        return {"count": self.count, **sizes} if sizes else self.count


SIZES: Final = ("width", "height", "num_frames", "length")
SIZES_OF: Final = {"image": SIZES[:2], "video": SIZES[:3], "audio": SIZES[3:]}  # vLLM 0.33 config/multimodal.py


def limits(text: str, option: str) -> str | None:
    """Parse per-prompt item limits as "image=2,video=0" or, with sizes, as JSON; None if there are none.

    vLLM takes a JSON object whose values are counts or options with a count; its older releases took the first form,
    and its log shows Python syntax.
    """
    import json

    pairs = limit_pairs(text)
    read = {name: limit_of(name, value) for name, value in pairs.items()}
    if None in read.values():
        raise UsageError(
            option,
            f"is not a list of counts ({printable(text, 60)!r})",
            'write image=0,video=0, {"image": 0} or {"video": {"count": 1, "num_frames": 32}}',
        )
    documents = {name: limit.document for name, limit in read.items() if limit is not None}
    if any(isinstance(value, dict) for value in documents.values()):
        return json.dumps(documents, separators=(",", ":"))
    return ",".join(f"{name}={count}" for name, count in documents.items()) or None


def limit_pairs(text: str) -> dict[str, Any]:
    """Split limits into modality -> value; return an invalid pair if the text is not a list of limits."""
    import json

    if text.lstrip().startswith("{"):
        try:
            parsed = json.loads(text.replace("'", '"'))
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"": None}
    return {
        name.strip(): int(count) if re.fullmatch(r"\s*[0-9]{1,6}\s*", count) else None
        for name, _, count in (pair.partition("=") for pair in text.split(","))
    }


def limit_of(name: str, value: Any) -> Limit | None:
    """Parse one limit, or return None if vLLM would reject it."""
    options = value if isinstance(value, dict) else {"count": value}
    if not re.fullmatch(r"[a-z_]{1,30}", name) or not {*options} <= {"count", *SIZES_OF.get(name, ())}:
        return None
    numbers = {option: number for option, number in options.items() if number is not None}
    for option, number in numbers.items():
        least, beyond = (0, 10**6) if option == "count" else (1, 10**9)
        if type(number) is not int or not least <= number < beyond:
            return None
    return Limit(**numbers) if numbers or isinstance(value, dict) else None


def limits_of(text: str | None) -> dict[str, Limit]:
    """Parse the limits that EngineArgs stores."""
    read = {name: limit_of(name, value) for name, value in limit_pairs(text).items()} if text else {}
    return {name: limit for name, limit in read.items() if limit is not None}


def processor_kwargs(text: str | None) -> dict[str, Any]:
    """Parse the processor settings that EngineArgs stores."""
    import json

    parsed = json.loads(text) if text else {}
    return parsed if isinstance(parsed, dict) else {}
