"""What a user decides about the engine and about a request, by vLLM's names; plain Python, no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, TypeGuard

from engine.draft_rules import SpeculativeConfig
from kvplan.core.errors import SettingError, UsageError

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's
MOST_LOGPROBS = 1024
MOST_BIASES = 1024  # vLLM's
DEFAULT_NUM_SEQS = 256


def _check(owner: str, name: str, ok: bool, value: object, need: str) -> None:
    if not ok:
        text = repr(value).replace("{", "{{").replace("}", "}}")
        raise SettingError(owner, (name,), f"must be {need} ({text})")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    device                  "auto": a GPU if there is one
    num_blocks              blocks of the KV pool, the null block included; None: what gpu_memory_utilization leaves
    max_num_seqs            None: 256, or as many as a step has tokens (see num_seqs)
    memory_limit            bytes the engine may think the device has; None: what it has
    kv_cache_dtype          "auto": the model's; "fp8" is fp8_e4m3
    kv_scale                fp8 only: stored = value / kv_scale
    allocator               "contiguous": every request reserves max_model_len up front, as before paged attention;
                            "static": and a batch runs until its last request ends before others begin
    backend                 kernels: "auto" is triton on a GPU and torch elsewhere
    load_format             "auto": safetensors of the directory; "dummy": random from `seed`
    reserve_full_prompt     admit a request when its whole prompt fits; False: when the first step's part of it does
    max_loras               adapters in one batch, each with a slot on the device; 0: none
    max_lora_rank           of an adapter
    fully_sharded_loras     several ranks share both matrices of an adapter, not one of the two
    kv_offloading_size      GiB of host memory that prompts' blocks are kept in; None: none
    kv_offloading_dir       where files keep them too; kv_offloading_disk_size: GiB of those
    async_scheduling        schedule and launch a step while the one before runs; None: on a GPU, without speculation
                            and stages
    pipeline_parallel_size  stages of layers, each on tensor_parallel_size ranks; as many batches are in flight
    pp_layer_partition      layers of each stage, "20,22"; None: as even as vLLM has them
    speculative_config      guess tokens and check several at a time; None: not
    """

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    memory_limit: int | None = None
    kv_cache_dtype: str = "auto"
    kv_scale: float = 1.0
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: str | None = None
    allocator: Literal["paged", "contiguous", "static"] = "paged"
    backend: Literal["auto", "triton", "torch"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    async_scheduling: bool | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    fully_sharded_loras: bool = False
    kv_offloading_size: float | None = None
    kv_offloading_dir: str | None = None
    kv_offloading_disk_size: float | None = None
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, what: str) -> None:
            _check("EngineConfig", name, ok, getattr(self, name), what)

        for name in ("block_size", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size"):
            need(name, _is_count(getattr(self, name)), "a whole number of at least 1")
        for name in ("max_num_seqs", "num_blocks", "max_model_len", "memory_limit"):
            need(name, getattr(self, name) is None or _is_count(getattr(self, name)), "a whole number of at least 1")
        if self.max_num_batched_tokens < self.num_seqs:  # a running sequence could wait for ever
            raise SettingError(
                "EngineConfig",
                ("max_num_batched_tokens", "max_num_seqs"),
                f"({self.max_num_batched_tokens}) must be greater than or equal to {{1}} ({self.max_num_seqs})",
                "raise it, or lower {1}",
            )
        need("num_blocks", self.num_blocks is None or self.num_blocks >= 2, "at least 2: block 0 holds nothing")
        for name in ("gpu_memory_utilization", "kv_scale", "watermark"):
            need(name, _is_number(getattr(self, name)), "a finite number")
        need("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "above 0 and at most 1")
        need("kv_scale", self.kv_scale > 0, "above 0")
        need("watermark", 0 <= self.watermark < 1, "at least 0 and below 1")
        threshold = self.long_prefill_token_threshold
        need("long_prefill_token_threshold", threshold == 0 or _is_count(threshold), "a whole number of at least 0")
        need("seed", _is_whole(self.seed), "a whole number")
        need("max_loras", self.max_loras == 0 or _is_count(self.max_loras), "a whole number of at least 0")
        need("max_lora_rank", self.max_lora_rank in LORA_RANKS, f"one of {', '.join(map(str, LORA_RANKS))}")
        for name in ("enable_prefix_caching", "enforce_eager", "reserve_full_prompt", "fully_sharded_loras"):
            need(name, isinstance(getattr(self, name), bool), "True or False")
        need("async_scheduling", self.async_scheduling is None or isinstance(self.async_scheduling, bool),
             "True, False or None")  # fmt: skip
        self._check_offloading(need)
        self._check_stages(need)
        need("speculative_config", self.speculative_config is None or isinstance(self.speculative_config,
             SpeculativeConfig), "a SpeculativeConfig or None")  # fmt: skip
        if self.speculative_config is not None and self.async_scheduling:
            raise SettingError(
                "EngineConfig",
                ("async_scheduling", "speculative_config"),
                "cannot be combined: a step's drafts are made from the tokens of the one before",
                "use only one",
                both=True,
            )
        if self.speculative_config is not None and self.kv_offloading_size is not None:
            raise SettingError(
                "EngineConfig",
                ("kv_offloading_size", "speculative_config"),
                "cannot be combined: a draft's KV is not kept with the model's",
                "use only one",
                both=True,
            )
        if self.speculative_config is not None and self.allocator != "paged":
            names = ("speculative_config", "allocator")
            raise SettingError("EngineConfig", names, "needs the paged {1}", "use only one")
        for name, known in (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("allocator", ("paged", "contiguous", "static")),
            ("backend", ("auto", "triton", "torch")),
            ("load_format", ("auto", "dummy")),
            ("scheduling_policy", ("fcfs", "priority")),
        ):
            need(name, getattr(self, name) in known, f"one of {', '.join(known)}")

    def _check_stages(self, need: Callable[[str, bool, str], None]) -> None:
        """Refuse what stages are not combined with."""
        partition = self.pp_layer_partition
        is_list = isinstance(partition, str) and all(text.strip().isdecimal() for text in partition.split(","))
        need("pp_layer_partition", partition is None or is_list, 'numbers of layers, such as "20,22", or None')
        if self.pipeline_parallel_size == 1:
            if partition is not None:
                names = ("pp_layer_partition", "pipeline_parallel_size")
                raise SettingError("EngineConfig", names, "needs several stages", "set {1} too")
            return
        for name, is_set, remedy in (
            ("async_scheduling", self.async_scheduling is True, "set it to False"),
            ("speculative_config", self.speculative_config is not None, "remove it"),
            ("kv_offloading_size", self.kv_offloading_size is not None, "remove it"),
            ("max_loras", self.max_loras > 0, "run without adapters"),
        ):
            if is_set:
                problem = "cannot be combined with {1} above 1, which the engine does not run with it"
                raise SettingError("EngineConfig", (name, "pipeline_parallel_size"), problem, remedy)

    def _check_offloading(self, need: Callable[[str, bool, str], None]) -> None:
        """Refuse sizes that are none, and files without memory before them or without a size."""
        owner = "EngineConfig"
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            value = getattr(self, name)
            need(name, value is None or (_is_number(value) and value > 0), "a number of GiB above 0, or None")
        need("kv_offloading_dir", self.kv_offloading_dir is None or isinstance(self.kv_offloading_dir, str), "a path")
        if (self.kv_offloading_dir is None) != (self.kv_offloading_disk_size is None):
            names = ("kv_offloading_dir", "kv_offloading_disk_size")
            raise SettingError(owner, names, "go together", "set both", both=True)
        if self.kv_offloading_dir is not None and self.kv_offloading_size is None:
            names = ("kv_offloading_dir", "kv_offloading_size")
            raise SettingError(owner, names, "needs memory that its files are read into", "give {1} too")
        if self.kv_offloading_dir is not None and self.max_loras:
            problem = "keeps the base model's KV only: an adapter's could be another's of its name"
            raise SettingError(owner, ("kv_offloading_dir", "max_loras"), problem, "remove {1} or the directory")
        if self.kv_offloading_size is not None and self.tensor_parallel_size > 1:
            names = ("kv_offloading_size", "tensor_parallel_size")
            raise SettingError(owner, names, "works on one rank only", "set {1} 1")
        if self.kv_offloading_size is not None and self.allocator != "paged":
            names = ("kv_offloading_size", "allocator")
            raise SettingError(owner, names, f"needs {{1}} 'paged' ({self.allocator!r})")

    @property
    def num_seqs(self) -> int:
        """Sequences that run at once, at most: max_num_seqs, or what vLLM too makes of its default."""
        return self.max_num_seqs or min(DEFAULT_NUM_SEQS, self.max_num_batched_tokens)

    def batches_in_flight(self, device_type: str) -> int:
        """Steps scheduled and not yet taken in, at most: one per stage, so that all work.

        Beside them another one is for a GPU: a CPU, host and device in one, gains nothing by it.
        """
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        by_default = device_type == "cuda" and self.speculative_config is None
        is_async = by_default if self.async_scheduling is None else self.async_scheduling
        return 2 if is_async else 1

    @property
    def rows_per_seq(self) -> int:
        """Tokens of a sequence in a step whose logits are wanted, at most: its last one, and one for each draft."""
        return 1 if self.speculative_config is None else 1 + self.speculative_config.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output has to be.

    text  a JSON Schema, a regular expression, a JSON list of texts to choose from, or a grammar (Lark or GBNF)
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar")
        _check("Constraint", "kind", self.kind in kinds, self.kind, f"one of {', '.join(kinds)}")
        _check("Constraint", "text", isinstance(self.text, str), self.text, "a text")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    temperature         0: the most likely token
    top_k               0 or -1: all tokens
    top_p, min_p        of the probabilities after temperature
    seed                makes this request's draws its own, whatever runs beside it; None: the engine's
    stop, stop_token_ids  the text that ends it is cut off; the token that ends it, also a special one that `stop`
                        names, is kept
    include_stop_str_in_output  the text of `stop` that ends it is kept
    ignore_eos          the model's own end token does not end it
    logprobs            log-probabilities of this many most likely tokens (and of the chosen one) at every step
    prompt_logprobs     the same of each prompt token after the first; the prefix cache is not read for them
    repetition_penalty  1: none; presence_penalty, frequency_penalty: 0: none
    logit_bias          what is added to the logits of these tokens, from -100 to 100, before penalties
    min_tokens          so many tokens come before one that ends it, or a text of `stop` that counts
    bad_words           texts whose last token never follows their other ones
    allowed_token_ids   no other tokens come; None: all may
    detokenize          make text of the tokens; `stop` needs it
    skip_special_tokens  the text leaves special tokens out
    structured_outputs  what the output has to be; None: anything. The model's own end token ends it
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: Constraint | None = None

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, what: str) -> None:
            _check("SamplingParams", name, ok, getattr(self, name), what)

        for name, what, is_one in (
            ("stop", "texts that are not empty", _is_text),
            ("stop_token_ids", "token ids", _is_whole),
            ("bad_words", "texts that are not empty", _is_text),
            ("allowed_token_ids", "token ids", _is_whole),
        ):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
            if name == "allowed_token_ids" and self.allowed_token_ids is None:
                continue
            ids = () if getattr(self, name) is None else getattr(self, name)
            need(name, isinstance(ids, Iterable), what)
            object.__setattr__(self, name, tuple(ids))
            need(name, all(map(is_one, getattr(self, name))), what)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            need(name, _is_number(getattr(self, name)), "a finite number")
        for name in ("seed", "logprobs", "prompt_logprobs"):
            need(name, getattr(self, name) is None or _is_whole(getattr(self, name)), "a whole number")
        need("temperature", self.temperature >= 0, "at least 0")
        need("top_k", _is_whole(self.top_k) and self.top_k >= -1, "a whole number of at least -1")
        need("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        need("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        need("max_tokens", _is_count(self.max_tokens), "a whole number of at least 1")
        for name, num in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            need(name, num is None or 0 <= num <= MOST_LOGPROBS, f"from 0 to {MOST_LOGPROBS}")
        need("repetition_penalty", self.repetition_penalty > 0, "above 0")
        need("min_tokens", self.min_tokens == 0 or _is_count(self.min_tokens), "a whole number of at least 0")
        need("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens, {self.max_tokens}")
        need("allowed_token_ids", self.allowed_token_ids != (), "None, or at least one token id")
        for name in ("detokenize", "skip_special_tokens"):
            need(name, isinstance(getattr(self, name), bool), "True or False")
        need("detokenize", self.detokenize or not self.stop, "True for stop strings")
        need("structured_outputs", isinstance(self.structured_outputs, Constraint | None), "a Constraint or None")
        for name in ("presence_penalty", "frequency_penalty"):
            need(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        self._check_biases()

    def _check_biases(self) -> None:
        """Refuse what cannot be added to a logit, and keep a mapping of one's own."""
        biases: object = {} if self.logit_bias is None else self.logit_bias
        is_mapping = isinstance(biases, Mapping)
        _check("SamplingParams", "logit_bias", is_mapping, biases, "a mapping of token ids to numbers")
        assert isinstance(biases, Mapping)
        if len(biases) > MOST_BIASES:
            raise UsageError(
                f"SamplingParams: logit_bias has {len(biases)} tokens; at most {MOST_BIASES} in one request"
            )
        for token, bias in biases.items():
            _check("SamplingParams", "logit_bias", _is_whole(token), token, "a mapping of token ids to numbers")
            fits = _is_number(bias) and -100 <= bias <= 100
            _check("SamplingParams", f"logit_bias of token {token}", fits, bias, "from -100 to 100")
        object.__setattr__(self, "logit_bias", dict(biases))

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty moves logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may not come."""
        return bool(self.min_tokens or self.bad_words or self.allowed_token_ids or self.structured_outputs)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: object) -> bool:
    return _is_whole(value) and value >= 1


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and isfinite(value))
