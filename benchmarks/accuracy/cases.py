"""Start-up logs as cases: what a server was told, what it printed, and what kvplan makes of the telling.

A file of cases is JSON Lines, or CSV with the same names (`measured.weights_gib`). A row that cannot be read is a
`Malformed`, never an exception: the rows are other people's.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import printable, read_text
from kvplan.core.units import GIB
from kvplan.hardware.gpu import GpuSpec, custom_gpu, gpu, gpu_names, with_memory
from kvplan.models import catalog, hf_config
from kvplan.models.families import mtp
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Request
from kvplan.servers.base import parse_engine
from kvplan.servers.plans import speculation
from kvplan.servers.plans.weights import ONLINE_METHODS
from kvplan.servers.releases import Version
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words import environment
from kvplan.servers.words.arguments import EngineArgs

KNOWN = Path(__file__).with_name("known.yaml")
SCORABLE = ("high", "medium")
ENGINES = ("vllm", "sglang")


class Unscorable(Exception):
    """A case that says too little, or says it too uncertainly, to be predicted at all."""


class NotAsked(Exception):
    """A case of somebody's own build: what its server holds is decided by neither a release nor what is stated."""


class NotStated(Exception):
    """A case with a model and a release that does not say, or says, something else without which no number is sure."""


@dataclass(frozen=True, slots=True)
class Malformed:
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Case:
    """One start-up. `line` is where it stands in its file; `stated` holds what the server was told, by flag; `flags`
    the rest of them in words; `measured` what it printed, in GiB, blocks and tokens; `fitted` says that the
    constants kvplan ships were fitted on it, or may have been."""

    line: int
    id: str
    thread: str
    source: str
    engine: str
    version: str | None
    model: str | None
    gpu: str | None
    confidence: str
    stated: Mapping[str, Any]
    flags: str
    notes: str
    measured: Mapping[str, float]
    fitted: bool = False


NUMBERS = ("n_gpus", "tp", "pp", "dp", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs")
WORDS = ("dtype", "quantization", "kv_cache_dtype")
MEASURED = (
    "total_gpu_mem_gib", "weights_gib", "activation_peak_gib", "non_torch_gib", "cuda_graph_gib",
    "cuda_graph_estimate_gib", "consumed_weights_plus_nontorch_gib", "available_kv_gib", "num_gpu_blocks",
    "kv_cache_tokens", "max_concurrency", "max_concurrency_tokens", "peak_torch_gib", "sgl_weight_mem_gb",
    "sgl_avail_after_load_gb", "sgl_avail_after_pool_gb", "sgl_k_gb", "sgl_v_gb", "sgl_graph_gb", "sgl_avail_final_gb",
)  # fmt: skip
LARGEST = 1e12  # of anything a log prints
MOST_GPUS = 4096


def number(value: object, name: str) -> float | None:
    """A finite number of a sensible size, or None where it is not stated."""
    if value in (None, ""):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise InvalidInputError(f"{name} is not a number ({printable(value, 30)})") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise InvalidInputError(f"{name} is not a number ({printable(repr(value), 30)})")
    return float(value)


def text(value: object, name: str) -> str | None:
    if value in (None, ""):
        return None
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InvalidInputError(f"{name} is not text ({printable(repr(value), 30)})")
    return str(value)


def flag(value: object, name: str) -> bool | None:
    match value:
        case None | "":
            return None
        case bool():
            return value
        case int() | float():
            return value > 1
        case str() if value.strip().lower() in ("true", "false", "0", "1"):
            return value.strip().lower() == "true"
        case str() if value.strip().isdigit():
            return int(value) > 1
    raise InvalidInputError(f"{name} is neither true nor false ({printable(repr(value), 30)})")


def told_of(row: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for name in NUMBERS:
        value = number(row.get(name), name)
        if value is not None:
            if value < 1 or value != int(value):
                raise InvalidInputError(f"{name} is not a positive whole number ({value:g})")
            if name in ("n_gpus", "tp", "pp", "dp") and value > MOST_GPUS:
                raise InvalidInputError(f"{name} is more than {MOST_GPUS:,} ({value:g})")
            stated[name] = int(value)
    for name in WORDS:
        stated[name] = text(row.get(name), name)
    for name in ("ep", "enforce_eager"):
        stated[name] = flag(row.get(name), name)
    stated["gpu_memory_utilization"] = number(row.get("gpu_memory_utilization"), "gpu_memory_utilization")
    return {name: value for name, value in stated.items() if value is not None}


def case_of(line: int, row: object) -> Case | Malformed:
    """One row, checked."""
    try:
        if not isinstance(row, dict):
            raise InvalidInputError("is not an object")
        measured = row.get("measured")
        if measured is None:  # a CSV row
            measured = {name.removeprefix("measured."): row[name] for name in row if str(name).startswith("measured.")}
        if not isinstance(measured, dict):
            raise InvalidInputError("measured is not an object")
        numbers = {name: number(measured.get(name), name) for name in MEASURED}
        return Case(
            line=line,
            id=text(row.get("id"), "id") or f"line {line}",
            thread=text(row.get("thread"), "thread") or f"line {line}",
            source=text(row.get("source"), "source") or "",
            engine=(text(row.get("engine"), "engine") or "").lower(),
            version=text(row.get("engine_version"), "engine_version"),
            model=text(row.get("model"), "model"),
            gpu=text(row.get("gpu"), "gpu"),
            confidence=(text(row.get("confidence"), "confidence") or "").lower(),
            stated=told_of(row),
            flags=text(row.get("other_flags"), "other_flags") or "",
            notes=text(row.get("notes"), "notes") or "",
            measured={name: value for name, value in numbers.items() if value is not None},
            fitted=flag(row.get("fitted"), "fitted") or False,
        )
    except InvalidInputError as error:
        return Malformed(line, str(error))


LARGEST_FILE = 256 * 2**20


def read_cases(path: Path) -> Iterator[Case | Malformed]:
    """Every row of a file of cases, in order."""
    content = read_text(path, LARGEST_FILE)
    if path.suffix == ".csv":
        for line, row in enumerate(csv.DictReader(io.StringIO(content)), 2):
            yield case_of(line, row)
        return
    for line, written in enumerate(content.splitlines(), 1):
        if written.strip():
            yield parsed(line, written)


def parsed(line: int, written: str) -> Case | Malformed:
    try:
        return case_of(line, json.loads(written))
    except (ValueError, RecursionError) as error:
        return Malformed(line, f"is not JSON ({printable(str(error), 60)})")


# --- what the words stand for ---------------------------------------------------------------------------------------


@cache
def known() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    return tables


# "0.8.3", "v0.11.1 (...)", "~0.10.2"; of a range, "0.20-0.21", the newer.
RELEASE = re.compile(r"^(?:vllm/vllm-openai:)?[v~ ]*(?:0\.\d{1,2}(?:\.\d+)?[-/])?0\.(\d{1,2})(?![\d]|\.dev)")
DATE = re.compile(r"(20\d\d)-?(\d\d)(?:-?\d\d)?(?!\d)")
IN_WORDS = re.compile(r"v?LLM[ @]?v?0\.(\d{1,2})|image v0\.(\d{1,2})", re.IGNORECASE)


SGLANG_SHARE = re.compile(r"mem[-_]fraction[-_]static[ =]")


def release_of(case: Case) -> tuple[int, int]:
    """The release of vLLM a case ran on: its number, else the one of its thread, its date, or its notes. SGLang's
    are told apart where its pool is sized, and matter to its default share alone."""
    if case.engine == "sglang" and (case.version is not None or SGLANG_SHARE.search(case.flags)):
        return vllm.NEWEST
    by_thread = {source: value for source, value in known()["threads"].items() if case.source.startswith(source)}
    if case.version is not None and (match := RELEASE.match(case.version)) and int(match[1]) > 1:
        return 0, int(match[1])
    if by_thread:
        return numbered(next(iter(by_thread.values())))
    if case.version is not None and (dated := DATE.search(case.version)):
        month = f"{dated[1]}-{dated[2]}"
        if month in known()["releases"]:
            return numbered(known()["releases"][month])
    if in_words := IN_WORDS.search(case.notes):
        return 0, int(in_words[1] or in_words[2])
    raise Unscorable("no release is named" if case.version is None else "its version names no release")


def numbered(label: str) -> tuple[int, int]:
    major, minor = label.split(".")
    return int(major), int(minor)


PATCHED = re.compile(r"0\.\d{1,2}\.\d{1,2}")


def patched(case: Case, number: tuple[int, int]) -> Version:
    """The rules of a case's release, and of its patch where it names one and is no other build."""
    if case.engine == "vllm" and number >= vllm.OLDEST and PATCHED.fullmatch(case.version or ""):
        return parse_engine(f"vllm@{case.version}")
    return vllm.version(max(number, vllm.OLDEST))


TOTAL = re.compile(r"(\d+\.\d+) ?Gi?B(?: total|\)| usable| capacity)|max memory (\d+\.\d+) GB")
MIG = re.compile(r"a100.*mig.*\dg\.(\d+)gb")


def gpu_of(case: Case) -> GpuSpec:
    """The GPU by its name, with the total memory its name states; a total alone where nobody named it."""
    name = (case.gpu or "").lower()
    bare = TOTAL.sub("", name).strip(" (")
    entry = bare if bare in gpu_names() else None
    entry = entry or next((named for pattern, named in known()["gpus"] if re.search(pattern, name)), None)
    stated = TOTAL.search(case.gpu or "")
    total = float(stated[1] or stated[2]) if stated else case.measured.get("total_gpu_mem_gib")
    if slice_of := MIG.search(name):  # "1g.5gb": a slice of 4.75 GiB
        return with_memory(gpu("a100-40g" if slice_of[1] == "5" else "a100-80g"), int(int(slice_of[1]) * 0.95 * GIB))
    if entry is None:
        if total is None:
            raise NotStated("no GPU is named" if not name else "its GPU is not in gpus.yaml")
        return custom_gpu(int(total * GIB))
    spec = gpu(entry)
    if stated and total and 0.75 < total * GIB / spec.total_memory < 1.1:
        return with_memory(spec, int(total * GIB))
    return spec


@dataclass(frozen=True, slots=True)
class Models:
    """Where configs are looked up: a checkpoint's own in `directory` (folders `org__name`), then the catalog."""

    directory: Path | None = None

    @property
    def folders(self) -> Mapping[str, Path]:
        return {} if self.directory is None else folders_of(self.directory)

    def spec(self, name: str) -> ModelSpec:
        key = name.strip().lower()
        if folder := self.folders.get(key.replace("/", "__")):  # the checkpoint's own config
            return hf_config.load_spec(folder, name=key)
        listed = known()["models"].get(key)
        if listed is not None:
            return derived(listed["entry"], listed.get("scheme"), listed.get("config", {}), name)
        own = self.own(key)
        if own is not None:
            return own
        for suffix, scheme in known()["suffixes"].items():
            if key.endswith(suffix):
                base = called(key.removesuffix(suffix)) or called(key.removesuffix(suffix).rpartition("/")[2])
                if base is not None:
                    usual = known()["publishers"].get(key.partition("/")[0], {})
                    return derived(base, usual.get(suffix, scheme), {}, name)
        raise Unscorable("its model is neither in the catalog nor among the configs given")

    def own(self, name: str) -> ModelSpec | None:
        """The model by its name, in the catalog or among the configs; last by its name without the organisation."""
        last = name.rpartition("/")[2]
        if entry := catalog.find(name):
            return catalog.load(entry)
        if folder := self.folders.get(last):
            return hf_config.load_spec(folder, name=name)
        return catalog.load(entry) if (entry := called(last)) else None


def called(name: str) -> str | None:
    """A catalog entry by its name, or by that of a model with the same facts, whoever published it."""
    return catalog.find(name) or names_alone().get(name.lower())


@cache
def names_alone() -> dict[str, str]:
    """Lower-case name without organisation -> catalog entry."""
    names: dict[str, str] = {}
    for entry in catalog.model_names():
        facts = catalog.facts(entry)
        for full in (facts["id"], *facts.get("aliases", ())):
            names.setdefault(str(full).rpartition("/")[2].lower(), entry)
    return names


@cache
def folders_of(directory: Path) -> dict[str, Path]:
    """Lower-case folder name, and the part after the organisation -> folder."""
    folders = {path.name.lower(): path for path in sorted(directory.iterdir()) if path.is_dir()}
    return {name.partition("__")[2]: path for name, path in folders.items() if "__" in name} | folders


def derived(entry: str, scheme: str | None, changes: Mapping[str, Any], name: str) -> ModelSpec:
    """A catalog entry's config with another way of storing it."""
    config = {**catalog.expand(catalog.facts(entry)["config"]), **changes}
    if scheme == "none":
        config.pop("quantization_config", None)
    elif scheme is not None:
        config["quantization_config"] = known()["schemes"][scheme]
    return hf_config.read_config(config, where=f"models.yaml: {entry}", name=name, source=f"derived from {entry}")


# --- flags in words ---------------------------------------------------------------------------------------------------

OPTIONS = {
    "max_model_len": r"max[-_]model[-_]len",
    "tp": r"tensor[-_]parallel[-_]size",
    "pp": r"pipeline[-_]parallel[-_]size",
    "dp": r"data[-_]parallel[-_]size",
    "gpu_memory_utilization": r"gpu[-_]memory[-_]utilization",
    "max_num_seqs": r"max[-_]num[-_]seqs",
    "max_num_batched_tokens": r"max[-_]num[-_]batched[-_]tokens",
    "block_size": r"--block[-_]size|'block_size",
    "decode_context_parallel_size": r"decode[-_]context[-_]parallel[-_]size|DCP",
    "num_speculative_tokens": r"MTP|MTP k|num[-_]speculative[-_]tokens",
    "max_loras": r"max[-_]loras",
    "max_lora_rank": r"max[-_]lora[-_]rank",
}
VALUE = r"(?:'?[=: ]+|=)(\d+(?:\.\d+)?)\b"


def option(name: str, words: str) -> float | None:
    match = re.search(rf"(?:{OPTIONS[name]}){VALUE}", words)
    return float(match[1]) if match else None


def switched(name: str, words: str) -> bool:
    """Whether a flag without a value is on: --enable-lora, 'enable_lora': True; not enable_lora=False."""
    match = re.search(rf"(?<!no[-_]){name.replace('_', '[-_]')}(?:'?[=: ]+(\w+))?", words)
    return match is not None and (match[1] or "").lower() not in ("false", "none", "0")


DRAFT_TOKENS = re.compile(r"MTP (\d+) token|(\d+) draft tokens")
OWN_HEAD = re.compile(r"(?<!no )\bMTP\b(?!=0| off| head available)|num[-_]speculative[-_]tokens")
SPARK_HEAD = re.compile(r"DSpark")
FIXED_POOL = re.compile(r"kv cache fixed (\d+(?:\.\d+)?) GiB|kv[-_]cache[-_]memory[-_]bytes[=: ]+(\d+)")
KV_NAMES = {"fp8 (doc)": "fp8"}
OFFLOAD = re.compile(r"cpu[-_]offload[-_]gb[=: ]+(\d+)")
DRAFT = re.compile(r"EAGLE|DFlash|draft model", re.IGNORECASE)


def check_stated(case: Case) -> None:
    """Raise NotStated for what changes the numbers and is not stated in a way that could be planned."""
    words = f"{case.flags} {case.notes}"
    if match := OFFLOAD.search(words):
        raise NotStated(f"{match[1]} GiB of its weights lie in the CPU's memory")
    if DRAFT.search(f"{case.flags} {case.model}"):
        raise NotStated("its draft model is not named")


# A label that is no commit, date or CUDA version, or somebody's own image: "0.20.2+glmrebase", "someone/vllm:stack",
# "2026-09 (somebody's image)".
FORK = re.compile(
    r"\+(?!g[0-9a-f]{6,}|d20|cu\d|rocm|cpu|precompiled)[a-z]|^(?!vllm/)[\w.-]+/[\w.-]+:|"
    r"\((?!vllm|official)[\w.'-]+ image\)",
    re.IGNORECASE,
)


OWN_BUILD = re.compile(  # also a build that has a date and no release
    r"\bfork(?:'s|ed)? (?:build|image)|\b(?:custom|own|patched) (?:build|image)\b|^\d{4}-\d\d-\d\d build\b",
    re.IGNORECASE,
)


def check_build(case: Case) -> None:
    """Raise NotAsked for a fork's build and for somebody's own image, which may hold anything."""
    if case.version is not None and FORK.search(case.version):
        raise NotAsked("its build is a fork's or somebody's own image, no release")
    if OWN_BUILD.search(f"{case.version} {case.notes}"):
        raise NotAsked("its build is a fork's or somebody's own image, no release")


def method_of(case: Case, spec: ModelSpec) -> str | None:
    """The method of drafts that the words state. Raises NotStated where they name no draft and the model has no head.

    Gemma 4's assistants read its caches, so that a pool is sized without them.
    """
    words = f"{case.flags} {case.model}"
    if SPARK_HEAD.search(words):
        return "dspark"
    if not OWN_HEAD.search(words) or spec.model_type == "gemma4_text":
        return None
    if not mtp.num_layers(spec):
        raise NotStated("its draft model is not named")
    return "mtp"


def check_budget(case: Case, gpu: GpuSpec) -> None:
    """Raise NotStated where what the budget goes to is decided by something that is neither stated nor a release's.

    Unsloth sets max_num_seqs and the utilization itself, by rules of its own. Two starts of one container on one Jetson
    had 5.0 and 12.3 GiB besides weights and pool: other processes and files take what host and GPU share.
    """
    if gpu.unified and not RELEASE.match(case.version or ""):
        raise NotStated("what the host takes of the memory that it shares with the GPU is not stated")
    if "unsloth" in f"{case.notes} {case.flags} {case.version}".lower() and "max_num_seqs" not in case.stated:
        raise NotStated("Unsloth launched it with a max_num_seqs of its own, which is not stated")


IMPLIED = re.compile(r"says util 0\.\d+; [-+=.\d ]*implies (0\.\d+)")  # a collector's note on rows that do not add up


def utilization_of(case: Case) -> float | None:
    if match := IMPLIED.search(case.notes):
        return float(match[1])
    stated = case.stated.get("gpu_memory_utilization")
    return stated if stated is not None else option("gpu_memory_utilization", case.flags)


def context_of(case: Case) -> int | None:
    stated = case.stated.get("max_model_len") or option("max_model_len", case.flags)
    length = stated or case.measured.get("max_concurrency_tokens")
    return int(length) if length else None


def args_of(case: Case, spec: ModelSpec, release: Version) -> EngineArgs:
    """What the server was told, as the planner's arguments."""
    stated, words = case.stated, case.flags

    def whole(name: str, default: int | None = None) -> int | None:
        value = stated.get(name) or option(name, words)
        return int(value) if value else default

    tp = whole("tp") or (1 if stated.get("n_gpus") == 1 else None)
    if tp is None:
        raise NotStated("how its GPUs share the model is not stated")
    drafts = option("num_speculative_tokens", words)
    if drafts is None and (match := DRAFT_TOKENS.search(words)):
        drafts = float(match[1] or match[2])
    fixed = FIXED_POOL.search(words)
    kv_dtype = stated.get("kv_cache_dtype") or "auto"
    return EngineArgs(
        max_model_len=context_of(case),
        tensor_parallel_size=tp,
        pipeline_parallel_size=whole("pp", 1) or 1,
        data_parallel_size=whole("dp", 1) or 1,
        enable_expert_parallel=bool(stated.get("ep")) or "enable-expert-parallel" in words,
        decode_context_parallel_size=int(option("decode_context_parallel_size", words) or 1),
        dtype=stated.get("dtype") or "auto",
        quantization=online_quantization(case, spec),
        kv_cache_dtype=KV_NAMES.get(kv_dtype, kv_dtype),
        block_size=None if spec.has_states else whole("block_size"),
        gpu_memory_utilization=utilization_of(case),
        kv_cache_memory_bytes=None if not fixed else int(float(fixed[1]) * GIB if fixed[1] else float(fixed[2])),
        max_num_batched_tokens=whole("max_num_batched_tokens"),
        max_num_seqs=whole("max_num_seqs"),
        enable_prefix_caching=prefix_caching_of(words),
        enable_chunked_prefill="enable-chunked-prefill=False" not in words,
        disable_hybrid_kv_cache_manager=re.search(r"(?<!no-)disable-hybrid-kv-cache-manager", words) is not None,
        enforce_eager=bool(stated.get("enforce_eager")) or "cudagraph_mode NONE" in words or "enforce-eager" in words,
        num_speculative_tokens=int(drafts or 0),
        speculative_method=method_of(case, spec),
        language_model_only=switched("language_model_only", words),
        runner="pooling" if "--runner pooling" in words else "auto",
        **adapters(words),
        usage="offline" if "LLM()" in words or "LLM(" in words else "server",
    )


def adapters(words: str) -> dict[str, Any]:
    """The arguments of LoRA slots, which count only where adapters are enabled."""
    if not switched("enable_lora", words):
        return {}
    arguments: dict[str, Any] = {"max_loras": int(option("max_loras", words) or 1)}
    if rank := option("max_lora_rank", words):
        arguments["max_lora_rank"] = int(rank)
    return arguments | {"fully_sharded_loras": switched("fully_sharded_loras", words)}


PREFIX_CACHING = re.compile(r"(no-)?enable[-_]prefix[-_]caching(?:['\"]?[=: ]+(\w+))?", re.IGNORECASE)


def prefix_caching_of(words: str) -> bool | None:
    """What the flags say of prefix caching; None: nothing."""
    match = PREFIX_CACHING.search(words)
    if match is None:
        return None
    return not match[1] and (match[2] or "").lower() != "false"


def online_quantization(case: Case, spec: ModelSpec) -> str | None:
    """The method of a plain checkpoint that is quantised while loading."""
    method = (case.stated.get("quantization") or "").split(" ")[0]
    return method if method in ONLINE_METHODS and spec.quantization is None else None


STRETCHED = re.compile(r"YaRN|hf[-_]overrides|rope[-_]scaling", re.IGNORECASE)


def stretched(spec: ModelSpec, case: Case) -> ModelSpec:
    """The model with the context that its server was told to stretch it to."""
    context = context_of(case)
    if context is None or context <= spec.context_limit or not STRETCHED.search(case.flags):
        return spec
    return replace(spec, context_limit=context)


STORED = {"awq": "awq", "gptq": "gptq", "bitsandbytes": "bitsandbytes"}  # what a flag says of a checkpoint


def spec_of(case: Case, models: Models) -> ModelSpec:
    """The model, stored as the flags say where its config does not."""
    if case.model is None:
        raise Unscorable("no model is named")
    spec = stretched(models.spec(case.model), case)
    method = (case.stated.get("quantization") or "").lower()
    if not method or spec.quantization is not None or method.split(" ")[0] in ONLINE_METHODS:
        return spec
    scheme = next((scheme for word, scheme in STORED.items() if word in method), "unstated")
    config = {**(spec.config or {}), "quantization_config": known()["schemes"][scheme]}
    return hf_config.read_config(config, where=f"case {case.id}", name=spec.name)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a case comes to as a planner's question; `gpu` is None where only the memory is unknown."""

    spec: ModelSpec
    args: EngineArgs
    release: Version
    number: tuple[int, int]
    gpu: GpuSpec | None
    why_no_gpu: str = ""
    draft: ModelSpec | None = None


def drafting(inputs: Inputs) -> Inputs:
    """With the draft that its server loads, on whichever GPU."""
    if inputs.args.speculative_method is None:
        return inputs
    request = Request(inputs.spec, inputs.gpu or custom_gpu(80 * GIB), inputs.args, inputs.release)
    drafted, _ = speculation.drafter(request, "vLLM")
    return replace(inputs, args=drafted.args, draft=drafted.draft)


def inputs_of(case: Case, models: Models) -> Inputs:
    """Raises Unscorable where the case has no model or release; NotStated where it lacks something else; KvplanError
    where kvplan refuses what it says."""
    if case.engine not in ENGINES:
        raise Unscorable(f"engine {printable(case.engine or 'unnamed', 20)} is not one that is scored")
    if case.confidence not in SCORABLE:
        raise Unscorable("its confidence is low")
    check_build(case)
    spec = spec_of(case, models)
    number = release_of(case)
    check_stated(case)
    release = patched(case, number)
    args = args_of(case, spec, release)
    if case.engine == "vllm":
        release, args, _ = environment.applied(environment_of(case), release, args, spec)
    device, why = None, ""
    try:
        device = gpu_of(case)
    except NotStated as reason:
        why = str(reason)
    return drafting(Inputs(spec, args, release, number, device, why))


ASSIGNED = re.compile(rf"({'|'.join(environment.variables())})=(\w+)")
FIRST_ENGINE = re.compile(r"\bV0\b")  # "0.8.5 V0": its log has the first engine's wordings


def environment_of(case: Case) -> environment.Environment:
    """The variables that change memory, as stated, or as the engine says that the log's wording proves."""
    words = f"{case.flags} {case.notes}"
    variables: environment.Environment = {"VLLM_USE_V1": "0"} if FIRST_ENGINE.search(f"{case.version} {words}") else {}
    return variables | dict(ASSIGNED.findall(words))
