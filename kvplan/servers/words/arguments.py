"""The engine arguments: one table with a field of `EngineArgs` and a row for each.

Everything that names an argument reads this table: the commands' options and help panels, --engine-arg, pasted and
printed commands of every server, the arguments that logs list, policy keys and the schemas. What a server calls them is
in servers/<name>/flags.py; flags whose effect kvplan does not size are in its arguments.py. `Settings` is what a
server makes of them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeVar

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import GIB
from kvplan.servers.releases import Version

Kind = Literal[
    "context", "tokens", "count", "bytes", "gib", "fraction", "ratio", "flag", "text", "pattern", "choice", "limits",
    "json", "names",
]  # fmt: skip
COMMON: Final = "Model, GPU and server"
Panel = Literal["Model, GPU and server", "Parallelism", "Quantization", "Adapters and drafts"]
LARGEST: Final = 2**31 - 1  # of a count without a limit of its own


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


@lru_cache(maxsize=16)
def flags_of(server: str) -> Mapping[str, Flag]:
    """A server's flags, by argument, as `flags.py` in its folder has them; a Flag without names has the argument's own
    name, and an argument that is not listed is none of the server's.
    """
    path = f"kvplan.servers.{server}.flags"
    if find_spec(path.rpartition(".")[0]) is None or find_spec(path) is None:
        return {}
    flags: Mapping[str, Flag] = import_module(path).FLAGS
    return flags


@dataclass(frozen=True, slots=True)
class Argument:
    """One engine argument: how it is parsed and shown in help.

    help, metavar  of its option
    options        option names besides the long one
    choices        its values, if there are few
    largest        the largest sensible count; anything above is treated as a typo
    least          the smallest count
    many           whether its option takes several values
    usual          words for leaving it out
    """

    kind: Kind
    help: str
    metavar: str | None = None
    options: tuple[str, ...] = ()
    panel: Panel = COMMON
    choices: tuple[str, ...] = ()
    largest: int = LARGEST
    many: bool = False
    least: int = 1
    usual: tuple[str, ...] = ()


T = TypeVar("T")


def argument(
    default: T,
    kind: Kind,
    help: str,
    metavar: str | None = None,
    options: tuple[str, ...] = (),
    panel: Panel = COMMON,
    choices: tuple[str, ...] = (),
    *,
    largest: int = LARGEST,
    many: bool = False,
    least: int = 1,
    usual: tuple[str, ...] = (),
) -> T:
    """Define a field of `EngineArgs`: its default and its row."""
    row = Argument(kind, help, metavar, options, panel, choices, largest, many, least, usual)
    defined: T = field(default=default, metadata={"row": row})
    return defined


MAX_RANKS: Final = 1024

# The methods of speculative decoding, by vLLM's names. Source: vLLM 0.33 config/speculative.py.
NO_DRAFT: Final = ("ngram", "ngram_gpu", "suffix")  # use no GPU memory
NO_DRAFT_NAMES: Final = (*NO_DRAFT, "[ngram]")  # placeholders for a draft's name
HEADS: Final = ("eagle", "eagle3", "dflash", "dspark")
METHODS: Final = ("draft_model", "mtp", *HEADS, *NO_DRAFT)
TARGET_READERS: Final = ("mtp", *HEADS)  # read the target's hidden states
READS_NEXT: Final = ("mtp", "eagle", "eagle3")  # their KV at a position depends on the next token
LOOKING_AHEAD: Final = ("draft_model", "mtp", *HEADS)  # write to the cache beyond a step's tokens
MTP_TYPES: Final = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp",
    "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp",
    "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp",
    "glm5_next_mtp",
)  # fmt: skip
# Keys that change memory use in a way that is not sized.
REFUSED_KEYS: Final[Mapping[str, str]] = {
    "draft_lm_head_quantization": "keeps a second output head",
    "kv_cache_dtype": "gives the draft a cache of its own kind",
    "attention_backend": "may give the draft blocks of another size",
    "use_heterogeneous_vocab": "drafts with another vocabulary",
    "quantization": "may quantize the draft while loading",
}


def plain_method(method: str) -> str:
    """Return a method's current name."""
    return "mtp" if method in MTP_TYPES else {"[ngram]": "ngram"}.get(method, method)


RANKS: Final = "draft_tensor_parallel_size"  # of a speculative config


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Engine arguments as the user gave them; None means "not given": the server decides."""

    max_model_len: int | Literal["auto"] | None = argument(
        None,
        "context",
        "Context length, e.g. 32k; separate several with commas; auto (or -1): the longest that fits. Default: the "
        "model's maximum.",
        "TOKENS",
        ("--ctx", "-c"),
        many=True,
    )
    tensor_parallel_size: int = argument(
        1, "count", "Number of GPUs each layer is split across.", "N", ("--tp", "-tp"), "Parallelism", largest=MAX_RANKS
    )
    pipeline_parallel_size: int = argument(
        1, "count", "Number of pipeline stages.", "N", ("--pp", "-pp"), "Parallelism", largest=MAX_RANKS
    )
    pp_layer_partition: str | None = argument(
        None,
        "text",
        "Layers of each pipeline stage, e.g. 20,22,19 (VLLM_PP_LAYER_PARTITION, SGLANG_PP_LAYER_PARTITION).",
        "N,N,...",
        panel="Parallelism",
    )
    data_parallel_size: int = argument(
        1,
        "count",
        "Number of data-parallel ranks, each with its own KV cache.",
        "N",
        ("--dp", "-dp"),
        "Parallelism",
        largest=MAX_RANKS,
    )
    decode_context_parallel_size: int = argument(
        1,
        "count",
        "Number of ranks each request's KV cache is split across.",
        "N",
        ("--dcp", "-dcp"),
        "Parallelism",
        largest=MAX_RANKS,
    )
    prefill_context_parallel_size: int = argument(
        1,
        "count",
        "Number of ranks each prompt's computation is split across; each holds the weights and the KV cache.",
        "N",
        ("--pcp", "-pcp"),
        "Parallelism",
        largest=MAX_RANKS,
    )
    cp_kv_cache_interleave_size: int | None = argument(
        None, "count", "Consecutive tokens of a request on one rank of its split KV cache.", "N", panel="Parallelism"
    )
    enable_expert_parallel: bool = argument(
        False, "flag", "Distribute whole experts across ranks.", options=("--ep/--no-ep", "-ep"), panel="Parallelism"
    )
    enable_eplb: bool = argument(
        False, "flag", "Balance experts across ranks while serving (EPLB).", panel="Parallelism"
    )
    num_redundant_experts: int = argument(
        0, "count", "Redundant experts per layer, over all ranks.", "N", panel="Parallelism", largest=1023
    )  # vLLM's own limit
    eplb_window_size: int = argument(
        1000,
        "count",
        "vLLM: number of recent steps whose expert loads EPLB balances.",
        "N",
        panel="Parallelism",
        largest=10**6,
    )
    all2all_backend: str | None = argument(
        None,
        "text",
        "All-to-all backend for expert parallelism: vLLM deepep_low_latency, ...; SGLang deepep, ...",
        "NAME",
        panel="Parallelism",
    )
    deepep_mode: Literal["auto", "normal", "low_latency"] | None = argument(
        None, "choice", "DeepEP buffers of SGLang's ranks: prefill (normal), decode (low_latency), or both.",
        choices=("auto", "normal", "low_latency"), panel="Parallelism",
    )  # fmt: skip
    enable_dp_attention: bool | None = argument(
        None, "flag", "Split attention over the --dp data-parallel ranks inside --tp."
    )
    enable_dp_lm_head: bool | None = argument(None, "flag", "Split the output head as DP attention splits attention.")
    moe_dense_tp_size: int | None = argument(
        None, "count", "Tensor-parallel size of the dense MLPs of an MoE model; only 1.", "N"
    )
    gpu_memory_utilization: float | None = argument(
        None, "fraction", "Fraction of GPU memory the server may use, e.g. 0.92.", "SHARE"
    )
    mem_fraction_static: float | None = argument(
        None, "fraction", "Fraction of free memory at startup for weights and KV cache.", "SHARE"
    )
    max_num_seqs: int | None = argument(
        None, "count", "Maximum number of concurrent requests.", "N", ("--batch", "-np")
    )
    max_num_batched_tokens: int | None = argument(
        None, "tokens", "Maximum number of tokens per step.", "TOKENS", ("-b",)
    )
    max_total_tokens: int | None = argument(None, "tokens", "Maximum number of tokens in the KV cache.", "TOKENS")
    dtype: str = argument(
        "auto", "text", "Model dtype: auto, bfloat16, float16 or float32.", "DTYPE", panel="Quantization"
    )
    quantization: str | None = argument(
        None,
        "text",
        "Quantize while loading (fp8), or state the checkpoint's method, or a GGUF file's type (Q4_K_M).",
        "METHOD",
        ("--quant",),
        "Quantization",
    )
    kv_cache_dtype: str = argument(
        "auto", "text", "KV cache dtype: auto, fp8, fp8_e4m3, fp8_e5m2, ...", "DTYPE", panel="Quantization"
    )
    mamba_cache_dtype: str | None = argument(
        None,
        "text",
        "vLLM: dtype of recurrent states, where --mamba-ssm-cache-dtype and the model give none.",
        "DTYPE",
        panel="Quantization",
    )
    mamba_ssm_cache_dtype: str | None = argument(
        None, "text", "Dtype of recurrent (Mamba) states.", "DTYPE", panel="Quantization"
    )
    block_size: int | None = argument(None, "count", "Tokens per KV cache block.", "N")
    mamba_block_size: int | None = argument(
        None, "count", "vLLM: tokens between cached states, which prefix caching overrules.", "N"
    )
    attention_backend: str | None = argument(None, "text", "vLLM: FLASHINFER, TRITON_ATTN, FLASHMLA, ...", "NAME")
    moe_backend: str | None = argument(
        None, "text", "Kernels that compute the experts (vLLM): marlin, triton, flashinfer_b12x, ...", "NAME"
    )
    kv_cache_memory_bytes: int | None = argument(None, "bytes", "Size of the KV cache on each GPU.", "SIZE")
    num_gpu_blocks_override: int | None = argument(None, "count", "Number of KV cache blocks.", "N")
    performance_mode: Literal["balanced", "interactivity", "throughput"] = argument(
        "balanced",
        "choice",
        "What vLLM's defaults optimize for; throughput: larger batches.",
        choices=("balanced", "interactivity", "throughput"),
    )
    kv_offloading_size: int = argument(0, "gib", "Host memory for KV cache offloading, over all ranks.", "GIB")
    cpu_offload_gb: int | None = argument(None, "gib", "Weights of each GPU to offload to host memory.", "GIB")
    offload_backend: Literal["auto", "uva", "prefetch"] | None = argument(
        None,
        "choice",
        "How weights in host memory are read: in place or fetched ahead.",
        choices=("auto", "uva", "prefetch"),
    )
    offload_group_size: int | None = argument(
        None,
        "count",
        "Layers per group for weight offloading; the last --offload-num-in-group of each are offloaded.",
        "N",
    )
    offload_num_in_group: int | None = argument(
        None, "count", "Layers per group whose weights are offloaded to host memory.", "N"
    )
    offload_prefetch_step: int | None = argument(None, "count", "Layers to prefetch from host memory.", "N")
    enable_sleep_mode: bool | None = argument(
        None, "flag", "Allow the server to sleep: weights move to host memory and the KV cache is freed."
    )
    kv_offloading_backend: Literal["native", "lmcache"] | None = argument(
        None, "choice", "KV offloading backend for --kv-offloading-size.", choices=("native", "lmcache")
    )
    kv_transfer_config: str | None = argument(
        None, "json", 'KV connector, e.g. {"kv_connector": "NixlConnector", "kv_role": "kv_both"}.', "JSON"
    )
    engram_config: str | None = argument(
        None, "json", 'Where tables of n-grams lie, e.g. {"cpu_offload": false}.', "JSON"
    )
    lmcache_max_local_cpu_size: int | None = argument(
        None, "gib", "Host memory of LMCache in each rank, as LMCACHE_MAX_LOCAL_CPU_SIZE.", "GIB"
    )
    enable_prefix_caching: bool | None = argument(None, "flag", "Reuse KV blocks of requests that share a prefix.")
    allow_deprecated_quantization: bool | None = argument(
        None,
        "flag",
        "Load a checkpoint of a deprecated quantization method (fbgemm_fp8). Default: if the model needs it.",
        panel="Quantization",
    )
    enable_chunked_prefill: bool = argument(True, "flag", "Split long prompts across several steps.")
    disable_hybrid_kv_cache_manager: bool | None = argument(None, "flag", "Keep the whole context's KV in every layer.")
    disable_sliding_window: bool | None = argument(
        None, "flag", "vLLM: end the context at the model's sliding window, and attend to all of it."
    )
    async_scheduling: bool | None = argument(None, "flag", "Schedule the next step while this one runs.")
    enforce_eager: bool = argument(False, "flag", "Run without CUDA graphs.")
    max_cudagraph_capture_size: int | None = argument(
        None, "count", "vLLM: tokens of the largest CUDA graph. Default: twice --max-num-seqs, at most 512.", "TOKENS"
    )
    compilation_config: str | None = argument(
        None, "json", 'What vLLM compiles and captures as CUDA graphs, e.g. {"cudagraph_mode": "PIECEWISE"}.', "JSON"
    )
    hf_overrides: str | None = argument(
        None, "json", 'Changes to the model\'s config.json, e.g. {"max_position_embeddings": 65536}.', "JSON"
    )
    language_model_only: bool = argument(False, "flag", "Serve text only: do not load the vision encoder.")
    runner: Literal["auto", "generate", "pooling"] = argument(
        "auto",
        "choice",
        "Whether the model generates text, or embeds, ranks or classifies (pooling).",
        choices=("auto", "generate", "pooling"),
    )
    convert: Literal["auto", "none", "embed", "classify"] = argument(
        "auto",
        "choice",
        "How to convert a generative model for pooling.",
        choices=("auto", "none", "embed", "classify"),
    )
    limit_mm_per_prompt: str | None = argument(
        None,
        "limits",
        'Maximum items per prompt, e.g. image=0,video=0 or {"image": {"count": 2, "width": 512}}.',
        "LIMITS",
    )
    mm_processor_kwargs: str | None = argument(
        None, "json", 'Settings of the image processor, e.g. {"max_pixels": 1003520}.', "JSON"
    )
    mm_processor_cache_gb: int | None = argument(
        None, "gib", "Host memory for processed images, videos and sounds. Default: 4; 0: none.", "GIB"
    )
    mm_processor_cache_type: Literal["lru", "shm"] | None = argument(
        None,
        "choice",
        "Where processed images, videos and sounds lie: in the processes or in /dev/shm.",
        choices=("lru", "shm"),
    )
    disable_chunked_mm_input: bool = argument(False, "flag", "Compute every image, video or sound in one step.")
    skip_mm_profiling: bool = argument(
        False, "flag", "Skip the encoder in the profiling run: no memory is reserved for it."
    )
    mm_encoder_tp_mode: Literal["weights", "data"] = argument(
        "weights",
        "choice",
        "Split the encoder's weights across ranks, or its inputs (data: every rank loads the whole encoder).",
        panel="Parallelism",
        choices=("weights", "data"),
    )
    max_loras: int = argument(
        0, "count", "Number of LoRA adapters on the GPU at once.", "N", panel="Adapters and drafts", largest=10_000
    )
    max_lora_rank: int = argument(16, "count", "Maximum LoRA rank.", "N", panel="Adapters and drafts", largest=4096)
    fully_sharded_loras: bool = argument(
        False, "flag", "Shard both LoRA matrices across ranks.", panel="Adapters and drafts"
    )
    lora_dtype: str = argument(
        "auto", "text", "Dtype of adapters: auto, bfloat16 or float16.", "DTYPE", panel="Adapters and drafts"
    )
    lora_target_modules: str | None = argument(
        None,
        "names",
        "Modules that adapters may change, e.g. q_proj,o_proj. Default: all.",
        "NAMES",
        panel="Adapters and drafts",
    )
    max_cpu_loras: int | None = argument(
        None,
        "count",
        "Number of adapters in host memory. Default: as many as on the GPU.",
        "N",
        panel="Adapters and drafts",
        largest=1_000_000,
    )
    enable_tower_connector_lora: bool = argument(
        False, "flag", "Allow adapters to change the encoder.", panel="Adapters and drafts"
    )
    enable_mixed_moe_lora_format: bool = argument(
        False, "flag", "Accept adapters of experts in both formats.", panel="Adapters and drafts"
    )
    enable_moe_shared_loras: bool = argument(
        False, "flag", "Adapters share their outer matrices over experts.", panel="Adapters and drafts"
    )
    num_speculative_tokens: int = argument(
        0, "count", "Draft tokens per step.", "N", panel="Adapters and drafts", largest=1000
    )
    speculative_method: str | None = argument(
        None,
        "choice",
        "Speculative decoding method. Default: from the draft model's config.",
        panel="Adapters and drafts",
        choices=METHODS,
    )
    usage: Literal["server", "offline"] = argument(
        "server",
        "choice",
        "Use the defaults of `vllm serve` (server) or `LLM(...)` (offline).",
        choices=("server", "offline"),
    )
    swa_full_tokens_ratio: float | None = argument(
        None, "ratio", "Size of the sliding-window pool relative to the full-attention pool, in tokens.", "RATIO"
    )
    mamba_full_memory_ratio: float | None = argument(
        None, "ratio", "Memory for recurrent states relative to KV cache memory.", "RATIO"
    )
    cuda_graph_max_bs: int | None = argument(None, "count", "Batch size of the largest CUDA graph.", "N")
    cuda_graph_max_bs_prefill: int | None = argument(None, "count", "Tokens of the largest prefill CUDA graph.", "N")
    cuda_graph_backend_decode: Literal["full", "breakable", "disabled"] | None = argument(
        None, "choice", "How decodes are captured as CUDA graphs, if at all.", choices=("full", "breakable", "disabled")
    )
    cuda_graph_backend_prefill: Literal["full", "breakable", "disabled"] | None = argument(
        None,
        "choice",
        "How prefills are captured as CUDA graphs, if at all.",
        choices=("full", "breakable", "disabled"),
    )
    prefill_attention_backend: str | None = argument(None, "text", "fa3, flashinfer, trtllm_mha, ...", "NAME")
    decode_attention_backend: str | None = argument(None, "text", "fa3, flashmla, trtllm_mla, ...", "NAME")
    max_mamba_cache_size: int | None = argument(None, "count", "Slots for recurrent states.", "N")
    mamba_radix_cache_strategy: str | None = argument(
        None, "text", "auto, no_buffer, extra_buffer or extra_buffer_lazy.", "NAME"
    )
    disable_prefill_cuda_graph: bool | None = argument(None, "flag", "Run prefills without CUDA graphs.")
    speculative_eagle_topk: int | None = argument(None, "count", "Branches per draft step.", "N")
    speculative_num_draft_tokens: int | None = argument(None, "count", "Draft tokens verified per step.", "N")
    enable_hierarchical_cache: bool | None = argument(None, "flag", "Copy finished KV to host memory.")
    hicache_ratio: float | None = argument(
        None, "ratio", "Host pool of the hierarchical cache relative to the GPU's.", "RATIO"
    )
    hicache_size: int | None = argument(
        None, "count", "Host memory of the hierarchical cache in each rank, in GB.", "GB"
    )
    disaggregation_mode: Literal["prefill", "decode"] | None = argument(
        None, "choice", "Role in prefill/decode disaggregation.", choices=("prefill", "decode")
    )
    enable_multimodal: bool | None = argument(None, "flag", "Accept images with models that default to text only.")
    micro_batch_size: int | None = argument(
        None, "tokens", "Tokens that are computed at once, of a batch.", "TOKENS", ("-ub",)
    )
    gpu_layers: int | None = argument(
        None,
        "count",
        "Layers on the GPUs, the output one of them; the others on the host.",
        "N",
        ("-ngl",),
        least=0,
        largest=10**6,
        usual=("all", "auto", "-1"),
    )
    n_cpu_moe: int | None = argument(
        None, "count", "First layers whose experts stay on the host.", "N", ("-ncmoe",), least=0, largest=10**6
    )
    cpu_moe: bool | None = argument(None, "flag", "Keep all experts on the host.")
    override_tensor: str | None = argument(
        None, "pattern", r"Where tensors lie, by their names, e.g. '\.ffn_.*_exps\.=CPU'.", "REGEX=PLACE,...", ("-ot",)
    )
    tensor_split: str | None = argument(
        None, "pattern", "Share of each GPU in the layers, e.g. 3,1.", "N,N,...", ("-ts",)
    )
    split_mode: Literal["layer", "none", "row", "tensor"] | None = argument(
        None, "choice", "How several GPUs share a model.", options=("-sm",), choices=("layer", "none", "row", "tensor")
    )
    main_gpu: int | None = argument(None, "count", "The GPU that is used alone.", "N", ("-mg",), least=0, largest=1023)
    kv_offload: bool | None = argument(None, "flag", "Keep the KV cache on the GPUs, with their layers.")
    op_offload: bool | None = argument(None, "flag", "Compute prompts on the GPU with weights of the host.")
    cache_type_k: str | None = argument(None, "text", "Type of the keys: f16, q8_0, q4_0, ...", "TYPE", ("-ctk",))
    cache_type_v: str | None = argument(None, "text", "Type of the values: f16, q8_0, q4_0, ...", "TYPE", ("-ctv",))
    kv_unified: bool | None = argument(None, "flag", "One cache that all requests share.")
    swa_full: bool | None = argument(None, "flag", "Keep every token in the layers with a window.")
    flash_attn: Literal["auto", "on", "off"] | None = argument(
        None, "choice", "Flash attention.", options=("-fa",), choices=("auto", "on", "off")
    )
    fit: Literal["on", "off"] | None = argument(
        None, "choice", "Fit the context and the layers to the memory that is free.", choices=("on", "off")
    )
    fit_target: str | None = argument(
        None, "pattern", "MiB that the fit leaves free on each GPU, e.g. 1024.", "MIB,..."
    )
    fit_ctx: int | None = argument(None, "tokens", "Smallest context that the fit may choose.", "TOKENS")
    lora: str | None = argument(None, "pattern", "Adapters that are loaded with the model.", "FILE,...")
    mmproj: str | None = argument(None, "pattern", "File of the model's tower.", "FILE", ("-mm",))
    mmproj_offload: bool | None = argument(None, "flag", "Keep the tower on the GPU.")
    draft_gpu_layers: int | None = argument(
        None, "count", "Layers of the draft on the GPUs.", "N", ("-ngld",), least=0, largest=10**6,
        usual=("all", "auto", "-1"),
    )  # fmt: skip
    draft_quant: str | None = argument(None, "text", "Type of the draft's file, if it is not named.", "TYPE")

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


_FIELDS: Final = fields(EngineArgs)
ARGUMENTS: Final[Mapping[str, Argument]] = {field.name: field.metadata["row"] for field in _FIELDS}
DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in _FIELDS}
LEFT_OUT: Final[Mapping[str, Any]] = {"allow_deprecated_quantization": False}  # what a command without it says


# What servers other than the default one call arguments that they share, as options with the same values. Their flags
# are loaded only if the server is asked for.
OWN_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "max_model_len": ("--context-length", "--ctx-size", "--num-ctx"),
    "tensor_parallel_size": ("--tp-size",),
    "pipeline_parallel_size": ("--pp-size",),
    "data_parallel_size": ("--dp-size",),
    "num_redundant_experts": ("--ep-num-redundant-experts",),
    "all2all_backend": ("--moe-a2a-backend",),
    "max_num_seqs": ("--max-running-requests", "--parallel", "--num-parallel"),
    "max_num_batched_tokens": ("--chunked-prefill-size", "--batch-size", "--num-batch"),
    "mamba_ssm_cache_dtype": ("--mamba-ssm-dtype",),
    "micro_batch_size": ("--ubatch-size",),
    "block_size": ("--page-size",),
    "enable_prefix_caching": (" /--disable-radix-cache",),
    "disable_hybrid_kv_cache_manager": ("--disable-hybrid-swa-memory",),
    "async_scheduling": (" /--disable-overlap-schedule",),
    "enforce_eager": ("--disable-cuda-graph",),
    "hf_overrides": ("--json-model-override-args",),
    "max_loras": ("--max-loras-per-batch",),
    "max_cpu_loras": ("--max-loaded-loras",),
    "enable_moe_shared_loras": ("--experts-shared-outer-loras",),
    "num_speculative_tokens": ("--speculative-num-steps", "--spec-draft-n-max"),
    "cuda_graph_max_bs": ("--cuda-graph-max-bs-decode",),
    "gpu_layers": ("--num-gpu",),
    "draft_gpu_layers": ("--spec-draft-ngl",),
    "cache_type_k": ("--kv-cache-type",),
    "flash_attn": ("--flash-attention",),
}


def short_flags(server: str) -> dict[str, str]:
    """A server's one-dash flags -> the argument."""
    return {short: name for name, flag in flags_of(server).items() for short in flag.short}


def left_out(server: str) -> dict[str, Any]:
    """Arguments that a server's command states by leaving them out."""
    return {name: value for name, value in LEFT_OUT.items() if name in flags_of(server)}


def option_words() -> dict[str, str]:
    """The option of kvplan's commands for each argument, a shorter name if there is one: --tp, --ctx."""
    return {
        name: next(
            (option.partition("/")[0] for option in row.options if option.startswith("--")),
            "--" + name.replace("_", "-"),
        )
        for name, row in ARGUMENTS.items()
    }


def lacking(server: str) -> Iterator[str]:
    """Arguments that this server lacks and another server has."""
    return (name for name in ARGUMENTS if name not in flags_of(server))


def spellings(server: str) -> dict[str, str]:
    """Map every current or former name of an argument on this server to the argument."""
    names: dict[str, str] = {}
    flags = flags_of(server)
    for name in ARGUMENTS:
        if (flag := flags.get(name)) is not None:
            names |= dict.fromkeys(filter(None, (*(flag.names or (name,)), flag.earlier)), name)
    return names


def flag_words(server: str, release: Version, args: EngineArgs, stated: Mapping[str, Any]) -> list[str]:
    """Flags of a server's command that set these arguments, in table order.

    stated  values from the plan that replace an argument's; None: omit it. All others are included if not the default.
    """
    words: list[str] = []
    flags = flags_of(server)
    for name, row in ARGUMENTS.items():
        flag = flags.get(name)
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


def listed_names(server: str) -> Iterator[str]:
    """Names that a server uses for its arguments when it prints or logs them."""
    for name, flag in flags_of(server).items():
        if flag.printed:
            yield from filter(None, ((flag.names or (name,))[0], flag.earlier, flag.beside))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a server runs with: the user's, or its defaults.

    batches           batches scheduled at once; windows are charged for in_flight_tokens
    first_engine      vLLM's V0 engine runs
    runner_v2         model runner V2 runs
    backend           the requested attention backend, without its suffix; None: the server's choice
    graphs_in_budget  a CUDA graph estimate is subtracted before the KV pool is sized
    prefix_caching    finished blocks are kept for requests with the same prefix
    """

    version: Version
    max_model_len: int
    auto_fit: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    in_flight_tokens: int
    gpu_memory_utilization: float
    kv_dtype: str
    dtype: str
    backend: str | None = None
    batches: int = 1
    first_engine: bool = False
    runner_v2: bool = False
    graphs_in_budget: bool = False
    prefix_caching: bool = True
