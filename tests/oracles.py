"""Compare kvplan with data from elsewhere: `oracles.py capacity CASES DIR...`, `sglang CASES DIR...`,
`llamacpp ROWS DIR...`, `models DIR` or `traces FILE`.

A case's model is a folder of one of the DIRs, or a head of tests/facts/heads. Prints each difference and the counts
`equal / refused by name / different`; exits 1 when anything differs, 2 when there is nothing to compare. `traces`
replays a real scheduler's steps: `NAME: equal` or `NAME: differs at step N: how`.
"""

import json
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import cache
from itertools import count
from math import lcm
from pathlib import Path
from typing import Any
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.block_manager import FullGroup, Group, WindowGroup
from engine.draft_rules import NO_DRAFTS, DraftRules, by_batch_size, draft_rules
from engine.drafting import Drafting, DraftStep
from engine.extensions import AdapterSlots
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup, StateBlockManager, StateStep
from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import gpu, with_memory
from kvplan.models import catalog, hf_config
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.pool import Capacity
from kvplan.servers.plans.weights import draft_layout, embedded, weight_layout
from kvplan.servers.sglang import command as sglang_command
from kvplan.servers.sglang import drafts as sglang_drafts
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang import server as sglang_server
from kvplan.servers.sglang import supported as sglang_supported
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import server as vllm_server
from kvplan.servers.vllm.loaded import loaded
from kvplan.servers.words.arguments import EngineArgs, left_out
from kvplan.servers.words.command import Repeated
from kvplan.simulate.encoding import EncoderInput, EncoderRules, EncoderStep, Encoding, ImageSequence
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig, simulated_scheduler
from kvplan.sizing.weights import total_weights
from tests.support import llamacpp_rows, offload_trace
from tests.support.oracle_data import spec_named

EQUAL, REFUSED, DIFFERENT = "equal", "refused by name", "different"
NOT_ASKED = "not within the oracle's reach"
# What a row's failure says where the server could not be asked, rather than that it refused: parts that the oracles
# stub, model types that its transformers has no class for, and what cannot be had without a GPU. An error that a
# config's value leads to (KeyError, AssertionError, ZeroDivisionError, TypeError) is a refusal: the server stops.
OUT_OF_REACH = (
    "AttributeError", "ImportError", "ModuleNotFoundError", "stubbed kernel", "compiled op", "the child died",
    "does not recognize this architecture", "StrictDataclassClassValidationError", "huggingface.co",
    "cumem allocator is not supported",
)  # fmt: skip


def refuses(row: dict[str, Any]) -> bool:
    """True if the server does not start, or SGLang's loader refuses the class or its quantization.

    A class that the oracle could not import is one of Transformers' to it, which says nothing of the server.
    """
    loading = row.get("quant_error", "")
    return "failed" in row or (loading.startswith("ValueError") and "'TransformersForCausalLM'" not in loading)


def unanswered(row: dict[str, Any]) -> str | None:
    """Why a row says nothing of the server."""
    failure = row.get("failed", "")
    refuses = failure.startswith("AmbiguousGlobalPerLayer")  # transformers' own; no AttributeError in spite of its name
    return failure[:120] if not refuses and any(text in failure for text in OUT_OF_REACH) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def geometry_of(caches: tuple[LayerCache, ...]) -> tuple[Any, ...]:
    """(type, kv_heads, k_head_dim, v_head_dim, window) of a layer, in the words of kv_geometry.jsonl."""
    match caches:
        case (FullAttention(h, k, v),):
            return ("full", h, k, v, None)
        case (SlidingWindow(h, k, v, window),):
            return ("sliding", h, k, v, window)
        case (ChunkedAttention(h, k, v, chunk),):
            return ("chunked", h, k, v, chunk)
        case (CrossAttention(h, k, v),):
            return ("cross-attention (image tokens only)", h, k, v, None)
        case (LatentAttention(latent, rope, False),):
            return ("mla", 1, latent + rope, 0, None)
        case (LatentAttention(latent, rope, True),) | (LatentAttention(latent, rope, True), SparseIndexer()):
            return ("mla+dsa-indexer", 1, latent + rope, 0, None)
        case (FullAttention(h, k, v), KeyIndex()):
            return ("full+msa-indexer", h, k, v, None)
        case (RecurrentState(kind="mamba1"),):
            return ("mamba1", None, None, None, None)
        case (RecurrentState(kind="mamba2"),):
            return ("mamba2", None, None, None, None)
        case (RecurrentState(kind="short_conv"),):
            return ("shortconv", None, None, None, None)
        case (RecurrentState(),):
            return ("linear", None, None, None, None)
        case (FullAttention(h, k, v), RecurrentState(kind="mamba2")):
            return ("full+mamba2 (parallel)", h, k, v, None)
        case (WindowLatent(h, _, window),):
            return ("sliding", 1, h, h, window)
        case (WindowLatent(h, _, window), CompressedLatent(index_head_dim=index)):
            return ("dsv4-csa" if index else "dsv4-hca", 1, h, h, window)
    raise AssertionError(f"no word for {caches}")


def ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    out: list[list[int]] = []
    for i in layers:
        if out and out[-1][1] == i - 1:
            out[-1][1] = i
        else:
            out.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def geometry(spec: ModelSpec) -> set[tuple[Any, ...]]:
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for i, caches in enumerate(spec.layers):
        if not caches:  # the reference lists layers without a cache for some models only
            continue
        grouped.setdefault((*geometry_of(caches), tuple(sorted(index_dims(caches)))), []).append(i)
    return {(*key, len(layers), ranges(layers)) for key, layers in grouped.items()}


def index_dims(caches: tuple[LayerCache, ...]) -> Iterator[int]:
    for layer_cache in caches:
        if isinstance(layer_cache, SparseIndexer | KeyIndex):
            yield layer_cache.head_dim


def expected_geometry(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    keys = ("type", "kv_heads", "k_head_dim", "v_head_dim", "window")
    return {
        (*(g[k] for k in keys), (g["indexer_dim"],) if g.get("indexer_dim") else (), g["count"], g["layers"])
        for g in row["groups"]
        if not g["type"].startswith("none")
    }


def text_params(spec: ModelSpec) -> int:
    return sum(w.num_params for w in spec.weights if w.group != "vision_audio")


def total_params(spec: ModelSpec) -> int:
    return sum(w.num_params for w in spec.weights)


def compare_model(folder: Path, geo: dict[str, Any], params: dict[str, Any]) -> tuple[str, str, bool]:
    """(outcome, what differs, total with towers exact)."""
    try:
        spec = hf_config.load_spec(folder)
    except KvplanError as error:
        return REFUSED, str(error), False
    wrong = []
    if "groups" in geo and geometry(spec) != expected_geometry(geo):
        wrong.append(f"geometry {sorted(map(str, geometry(spec) ^ expected_geometry(geo)))}")
    expected = params.get("text_params")
    if expected is not None and text_params(spec) != expected:
        wrong.append(f"text_params {text_params(spec):,} for {expected:,} ({text_params(spec) - expected:+,})")
    total = params.get("total_params")
    if total is not None and total_params(spec) != total:
        towers = total_params(spec) - text_params(spec)
        wrong_towers = f"[towers {towers:,} for {total - (expected or 0):,}]"
        return (DIFFERENT if wrong else EQUAL), "; ".join([*wrong, wrong_towers]), False
    return (DIFFERENT if wrong else EQUAL), "; ".join(wrong), total is not None


def models(directory: Path) -> int:
    geo = {row["model"].replace("/", "__"): row for row in read_lines(directory / "kv_geometry.jsonl")}
    params = {row["model"].replace("/", "__"): row for row in read_lines(directory / "params.jsonl")}
    counts = {EQUAL: 0, REFUSED: 0, DIFFERENT: 0}
    totals = 0
    for folder in sorted(path.parent for path in directory.glob("*/config.json")):
        if folder.name not in geo and folder.name not in params:
            print(f"{folder.name}: no reference to compare with; not counted")
            continue
        outcome, why, total = compare_model(folder, geo.get(folder.name, {}), params.get(folder.name, {}))
        counts[outcome] += 1
        totals += total
        if why:
            print(f"{folder.name}: {outcome}: {why}")
    if not sum(counts.values()):
        raise ValueError("no model to compare")
    print(" / ".join(f"{n} {word}" for word, n in counts.items()), f"({totals} totals with towers exact)")
    return 1 if counts[DIFFERENT] else 0


# --- capacity: a real server's own answers -----------------------------------------------------------------------

GPUS = {"A10G": "a10g", "L40S": "l40s", "A100": "a100-80g", "H100": "h100-80g", "H200": "h200", "B200": "b200",
        "RTX4090": "rtx-4090", "RTX5090": "rtx-5090", "V100": "v100-32g"}  # fmt: skip
HEADS = Path(__file__).parent / "facts" / "heads"
DIRECT = ("max_model_len", "block_size", "kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs",
          "gpu_memory_utilization", "enable_prefix_caching", "disable_hybrid_kv_cache_manager")  # fmt: skip
USAGE = {"OPENAI_API_SERVER": "server", "LLM_CLASS": "offline"}


def serve_words(inputs: dict[str, Any]) -> list[str]:
    """A case as the command that a user would paste: what kvplan cannot read there it cannot size either."""
    values = {"tensor_parallel_size": inputs.get("tp", 1), "pipeline_parallel_size": inputs.get("pp", 1)}
    values |= {key: inputs[key] for key in DIRECT if key in inputs} | (inputs.get("engine_args") or {})
    words = ["vllm", "serve", inputs["model"]]
    for name, value in values.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                words.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                words += [f"--{flag}", json.dumps(value)]
            case list():
                words += [f"--{flag}", *map(str, value)]
            case _:
                words += [f"--{flag}", str(value)]
    return words


@cache
def spec_in(folder: Path) -> ModelSpec:
    return hf_config.load_spec(folder)


def folder_of(name: str, folders: tuple[Path, ...]) -> Path:
    """The first of the folders, and of the heads that are our own facts, with this model's config."""
    places = [folder / name for folder in (*folders, HEADS)]
    return next((place for place in places if (place / "config.json").is_file()), places[0])


def case_request(case: dict[str, Any], *folders: Path) -> Request:
    """A case as kvplan plans it; a flag that kvplan does not know is refused by name."""
    inputs = case["inputs"]
    command = read_command(shlex.join(serve_words(inputs)))
    if command.unknown:
        raise UsageError(f"engine argument {command.unknown[0]!r}: is not supported by kvplan")
    name, usage = inputs.get("gpu", "H100"), USAGE[inputs.get("usage_context", "OPENAI_API_SERVER")]
    return Request(
        spec_in(folder_of(inputs["model"], folders)),
        gpu(GPUS.get(name, name.lower())),
        EngineArgs(**left_out("vllm") | command.args | {"usage": usage}),
        draft=spec_in(folder_of(command.draft_model, folders)) if command.draft_model else None,
        repeated=Repeated("vllm", speculative=command.speculative),
    )


def stage_budgets(budget: int | list[int], stages: int) -> list[int]:
    """The least bytes of each stage's ranks; a list has one entry per stage or per rank, stage by stage."""
    if isinstance(budget, int):
        return [budget] * stages
    if not budget or len(budget) % stages:
        raise ValueError(f"a budget of {len(budget)} entries for {stages} stages")
    ranks = len(budget) // stages
    return [min(budget[i * ranks : (i + 1) * ranks]) for i in range(stages)]


def capacity_of(request: Request, budgets: list[int]) -> Capacity:
    """What the server's rules say of a KV budget per stage."""
    answer = plan(replace(request, args=replace(request.args, kv_cache_memory_bytes=budgets[0])))
    if len(set(budgets)) == 1:
        return replace(answer.capacity, fits=answer.capacity.fits and answer.capacity.num_blocks > 0)
    got = vllm_pages.capacity(answer.pool, answer.settings, request.args, budgets)
    return replace(got, fits=got.fits and got.num_blocks > 0)


def result_differences(request: Request, expected: dict[str, Any]) -> Iterator[str]:
    """What differs for one stated KV budget."""
    budget = expected["available_memory"]
    got = capacity_of(request, stage_budgets(budget, request.args.pipeline_parallel_size))
    label = f"{budget:,} B" if isinstance(budget, int) else f"{budget} B"
    if expected.get("error"):
        if got.fits:
            yield f"{label}: starts, expected the error {expected['error'][:60]!r}"
        return
    if not got.fits:
        yield f"{label}: refused to start, expected {expected['num_gpu_blocks']:,} blocks"
        return
    for name, mine, theirs in (
        ("num_gpu_blocks", got.num_blocks, expected["num_gpu_blocks"]),
        ("kv_cache_size_tokens", got.tokens, expected["kv_cache_size_tokens"]),
        ("max_concurrency", got.max_concurrency, expected["max_concurrency"]),
        ("max_model_len", got.max_model_len, expected.get("max_model_len", got.max_model_len)),
    ):
        if mine != theirs:
            yield f"{label}: {name} {mine} for {theirs}"


def weight_differences(request: Request, weights: dict[str, Any] | list[dict[str, Any]]) -> Iterator[str]:
    """What differs in the bytes of each stage's rank, as they are while loading."""
    request = embedded(vllm_server.drafter(loaded(request)[0])[0])
    for stage, expected in enumerate(weights if isinstance(weights, list) else [weights]):
        got = total_weights(request.spec, weight_layout(request, stage, online=False))
        if got != expected["param_bytes_per_rank"]:
            want = expected["param_bytes_per_rank"]
            yield f"weights of stage {stage}: {got:,} for {want:,} ({got - want:+,})"


def draft_differences(request: Request, expected: dict[str, Any] | None) -> Iterator[str]:
    if expected is None:
        return
    joined, _ = vllm_server.drafter(request)
    loading = replace(draft_layout(joined, joined=False), online=None) if joined.draft else None
    got = total_weights(joined.draft, loading) if joined.draft and loading else 0
    if got != expected["param_bytes_per_rank"]:
        want = expected["param_bytes_per_rank"]
        yield f"weights of the draft: {got:,} for {want:,} ({got - want:+,})"


def not_started(request: Request) -> str | None:
    """Why kvplan says that the server starts with no amount of memory, or None if it says no such thing."""
    refusal = plan(request).refusal
    return refusal.text if refusal is not None and refusal.by == "unsupported" else None


def compare_case(case: dict[str, Any], *folders: Path) -> tuple[str, list[str]]:
    """The outcome and why; a refusal of ours equals one of the server's own (`failed`)."""
    refused = case.get("failed")
    if reason := unanswered(case):
        return NOT_ASKED, [reason]
    try:
        request = case_request(case, *folders)
        if (reason := not_started(request)) is not None:
            return (EQUAL, []) if refused is not None else (REFUSED, [reason])
        if refused is not None:
            return DIFFERENT, [f"planned, and the server refuses: {refused[:200]!r}"]
        wrong = [text for expected in case.get("results", ()) for text in result_differences(request, expected)]
        if case.get("result") == "no kv cache" and plan(request).capacity.num_blocks:
            wrong.append("has blocks where the server has no KV cache")
        wrong += weight_differences(request, case["weights"])
        wrong += draft_differences(request, case.get("draft_weights"))
    except KvplanError as error:
        return (EQUAL, []) if refused is not None else (REFUSED, [str(error)])
    return (DIFFERENT if wrong else EQUAL), wrong


def compare_all(cases: Path, folders: list[Path], compare: Callable[..., tuple[str, list[str]]]) -> int:
    """Compare each case of a file, print why and count; 1 where one differs."""
    counts = {EQUAL: 0, REFUSED: 0, DIFFERENT: 0, NOT_ASKED: 0}
    for case in read_lines(cases):
        model = case["inputs"]["model"]
        if not (folder_of(model, tuple(folders)) / "config.json").is_file():
            raise ValueError(f"{model}/config.json is in none of the folders")
        if not (case.get("results") or case.get("result")) and "failed" not in case:
            raise ValueError("a case without results")
        outcome, why = compare(case, *folders)
        counts[outcome] += 1
        inputs = {key: value for key, value in case["inputs"].items() if key != "available_memory"}
        for text in why:
            print(f"{json.dumps(inputs)}: {outcome}: {text}")
    if not sum(counts.values()):
        raise ValueError("no case to compare")
    print(" / ".join(f"{n} {word}" for word, n in counts.items() if n or word != NOT_ASKED))
    return 1 if counts[DIFFERENT] else 0


# --- sglang: its own settings and pools ----------------------------------------------------------------------------

# What nvidia-smi says of the GPUs that the oracle plays, where no public listing is kvplan's.
SMI_MIB = {"B300": 275_040, "GB10": 124_607, "V100": 32_768}
KV_NAMES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_ds_mla": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def draft_in(name: str) -> ModelSpec:
    """A draft of a row of SGLang's: a head of our own facts, else a model of the catalog."""
    own = HEADS / name
    return spec_in(own) if own.is_dir() else catalog.load(name)


def sglang_request(inputs: dict[str, Any], spec: ModelSpec, load: Callable[[str], ModelSpec] | None = None) -> Request:
    """A row's inputs as a request; flags that are not modelled are refused by name. `load` reads a draft."""
    ranks = {"--tp-size": inputs.get("tp") or 1, "--pp-size": inputs.get("pp") or 1}
    sizes = [word for flag, size in ranks.items() for word in (flag, str(size))]
    command = sglang_command.parse([*sizes, *(inputs.get("argv") or [])])
    if odd := [*command.unknown, *command.refused]:
        raise UsageError(f"{odd[0]}: is not a flag of SGLang that kvplan models")
    if command.notes:  # spellings of older releases
        raise UsageError(command.notes[0].text)
    args = EngineArgs(**command.args)
    name = inputs.get("gpu", "H100")
    draft = (load or draft_in)(command.draft_model) if command.draft_model else None
    card = gpu(GPUS.get(name, name.lower()))
    card = with_memory(card, SMI_MIB[name] * 2**20) if name in SMI_MIB else card
    repeated = Repeated("sglang", tuple(command.repeated))
    request = Request(spec, card, args, parse_engine("sglang"), draft=draft, repeated=repeated)
    sglang_supported.deterministic(request)  # raises an error for what is not modeled
    return sglang_server.drafter(request)[0]


def sglang_settings(request: Request, pool: SglangPool) -> dict[str, Any]:
    """The settings in the words of a row's `resolved`."""
    spec, args, release = request.spec, request.args, request.release
    settings = sglang.resolve(spec, request.gpu, args, release)
    graphs = sglang_models.captures_prefill(spec, args) and sglang.prefill_graphs(
        spec, settings.max_num_batched_tokens, args
    )
    return {
        "context_len": settings.max_model_len,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "page_size": pool.block_size,
        "kv_cache_dtype": KV_NAMES.get(settings.kv_dtype, settings.kv_dtype),
        "decode_max_bs": sglang.decode_graphs(spec, request.gpu, args, release),
        "prefill_graphs": int(graphs),
        "mamba_ratio": pool.slots_each if pool.slot else None,
        "mamba_bytes_per_req": sum(pool.state) or None,
        "mm_reservation": sglang.image_reservation(spec, request.gpu, args, release),
    }


def resolved_settings(resolved: dict[str, Any]) -> dict[str, Any]:
    """The same of a row. Prefill graphs that a late rule takes back have been counted in the fraction all the same."""
    disabled = resolved["prefill_backend"] == "disabled"
    return {
        **resolved,
        "prefill_graphs": 0 if disabled else resolved["prefill_graphs"],
        "mm_reservation": int(resolved["mm_reservation_gb"] * 2**30),
    }


def sglang_differences(request: Request, row: dict[str, Any]) -> Iterator[str]:
    args, spec = request.args, request.spec
    settings = sglang.resolve(spec, request.gpu, args, request.release)
    sglang_drafts.check_context(request)
    pool = sglang_pool.pool(spec, settings, args, request.gpu.sm, request.draft)
    theirs = resolved_settings(row["resolved"])
    late = theirs["attention_backend"] == "trtllm_mla" and spec.architecture == "DeepseekV3ForCausalLM"
    late |= theirs["attention_backend"] in ("torch_native", "flex_attention") or args.disaggregation_mode == "decode"
    for name, mine in sglang_settings(request, pool).items():
        if mine != theirs[name] and not (name == "prefill_graphs" and (late or args.enforce_eager)):
            yield f"{name} {mine} for {theirs[name]}"
    images = sglang.image_reservation(spec, request.gpu, args, request.release)
    for expected in row["results"]:
        budget = expected["available_memory"]
        rooms = [budget - images] * args.pipeline_parallel_size
        pages, slots, _ = sglang_pool.pages_in(pool, args, rooms)
        runs = sglang_pool.starts(pool, settings, args, pages, slots)
        if ("error" in expected) == runs:
            how = "starts" if runs else "does not start"
            yield f"{budget:,} B: {how} for {expected.get('error', 'a server')!r:.90}"
        if "error" in expected or not runs:
            continue
        alone = pages * pool.block_size if expected.get("full") == 0 else None  # every layer has a window: one pool
        answers = {
            "max_total_num_tokens": pages * pool.block_size,
            "max_running_requests": sglang_pool.max_requests(pool, settings, args, pages, slots),
            "max_mamba_cache_size": slots if pool.slot else None,
            "swa": pool.tokens_of_windows(pages) if pool.window else alone,
        }
        for name, mine in answers.items():
            if mine != expected[name]:
                yield f"{budget:,} B: {name} {mine} for {expected[name]}"


def compare_sglang(
    row: dict[str, Any], load: Callable[[str], ModelSpec], load_draft: Callable[[str], ModelSpec] | None = None
) -> tuple[str, list[str]]:
    refused, is_refused = row.get("failed", "") or row.get("quant_error", ""), refuses(row)
    if reason := unanswered(row):
        return NOT_ASKED, [reason]
    try:
        request = sglang_request(row["inputs"], load(row["inputs"]["model"]), load_draft)
        wrong = [] if is_refused else list(sglang_differences(request, row))
        with nullcontext() if is_refused else suppress(KvplanError):  # pools are compared of more than can be planned
            if (reason := not_started(request)) is not None:
                return (EQUAL, []) if is_refused else (REFUSED, [reason])
    except KvplanError as error:
        return (EQUAL, []) if is_refused else (REFUSED, [str(error)])
    if is_refused:
        wrong = [f"is planned, where SGLang refuses: {refused[:120]}"]
    return (DIFFERENT if wrong else EQUAL), wrong


def compare_sglang_in(row: dict[str, Any], *folders: Path) -> tuple[str, list[str]]:
    def load(name: str) -> ModelSpec:
        return spec_in(folder_of(name, folders))

    return compare_sglang(row, load, load)


# --- traces: a real scheduler, step by step ----------------------------------------------------------------------

SAMPLED_TOKEN = 7  # every sampled token is the same one; prompts have others
STATS = -1  # in place of a step's number
KNOWN_ARGS = {"async_scheduling", "scheduling_policy", "long_prefill_token_threshold", "scheduler_reserve_full_isl",
              "watermark", "enable_lora", "max_loras", "enable_chunked_prefill", "prefill_schedule_interval",
              "long_prefill_token_threshold_adaptive", "prefix_match_unit", "disable_chunked_mm_input"}  # fmt: skip
# Engine arguments that say nothing to a scheduler, as these traces have them: vLLM 0.33 stops within a block where a
# shared prefix ends only if a drafter has groups of its own and drops blocks.
OF_THE_WORKER = {"max_lora_rank", "max_cpu_loras", "language_model_only", "enable_mamba_shared_prefix_checkpoint"}


def trace_group(group: dict[str, Any], checkpoint_alignment: int | None = None) -> Group:
    block_size = group["block_size"]
    match group["type"]:
        case "FullAttentionSpec" | "MLAAttentionSpec":
            return FullGroup(block_size)
        case "SlidingWindowSpec" | "SlidingWindowMLASpec":
            return WindowGroup(block_size, group["sliding_window"])
        case "ChunkedLocalAttentionSpec":
            chunk = group.get("attention_chunk_size")
            if chunk is None:
                raise UsageError("group type 'ChunkedLocalAttentionSpec': has no attention_chunk_size; add it")
            return ChunkedGroup(block_size, chunk)
        case "MambaSpec":
            return MambaGroup(block_size, group.get("num_speculative_blocks") or 0, checkpoint_alignment)
    raise UsageError(f"group type {group['type']!r}: is not one the engine knows")


def trace_config(trace: dict[str, Any]) -> SimulatedConfig:
    inputs = trace["inputs"]
    args = inputs.get("engine_args") or {}
    unknown = set(args) - KNOWN_ARGS - OF_THE_WORKER
    if unknown:
        raise UsageError(f"engine argument {sorted(unknown)[0]!r}: is not one the engine's scheduler knows")
    return SimulatedConfig(
        max_num_batched_tokens=inputs["max_num_batched_tokens"],
        max_num_seqs=inputs["max_num_seqs"],
        max_model_len=inputs["max_model_len"],
        policy=args.get("scheduling_policy", "fcfs"),
        enable_prefix_caching=inputs.get("enable_prefix_caching", True),
        long_prefill_token_threshold=args.get("long_prefill_token_threshold", 0),
        reserve_full_prompt=args.get("scheduler_reserve_full_isl", True),
        watermark=args.get("watermark", 0.0),
        batch_queue_depth=trace["batch_queue_depth"],
        max_loras=args.get("max_loras", 1) if args.get("enable_lora") else 0,
        drafts=trace_drafts(trace),
        enable_chunked_prefill=args.get("enable_chunked_prefill", True),
        adaptive_long_prefill_threshold=args.get("long_prefill_token_threshold_adaptive", False),
        prefill_schedule_interval=args.get("prefill_schedule_interval", 1),
        pipeline_stages=inputs.get("pp", 1),
        prefix_match_unit=args.get("prefix_match_unit"),
        encoder=trace_encoder(inputs.get("encoder"), chunks_inputs=not args.get("disable_chunked_mm_input", False)),
    )


# vLLM 0.33's kernels of these states store one on the way through a prompt, at multiples of so many tokens: Mamba 2 at
# any (mamba_mixer2.py), FlashInfer's gated delta net where blocks end (qwen_gdn_linear_attn.py), Mamba 1 nowhere.
def checkpoint_alignment(trace: dict[str, Any]) -> int | None:
    """Of a trace's model, on the H100 that all of them are played on."""
    states = [group["block_size"] for group in trace["groups"] if group["type"] == "MambaSpec"]
    if not states:
        return None
    spec = spec_named(trace["inputs"]["model"])
    kinds = {cache.kind for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)}
    if kinds == {"mamba2"}:
        return 1
    unit = (trace["inputs"].get("engine_args") or {}).get("prefix_match_unit")
    return (lcm(unit, 64) if unit else min(states)) if kinds == {"gated_delta_net"} else None


def trace_groups(trace: dict[str, Any]) -> tuple[Group, ...]:
    alignment = checkpoint_alignment(trace)
    return tuple(trace_group(group, alignment) for group in trace["groups"])


def trace_scheduler(trace: dict[str, Any]) -> Scheduler:
    return simulated_scheduler(trace_config(trace), trace["num_blocks"], trace_groups(trace))


def trace_encoder(sizes: dict[str, int] | None, *, chunks_inputs: bool) -> EncoderRules | None:
    return None if sizes is None else EncoderRules(sizes["compute_budget"], sizes["cache_size"], chunks_inputs)


KNOWN_DRAFT_OPTIONS = {"num_speculative_tokens_per_batch_size", "disable_lookahead_block_hashes"}


def trace_drafts(trace: dict[str, Any]) -> DraftRules:
    """The rules of the trace's method, from its name and options; `num_mtp_modules` is the model's."""
    spec, inputs = trace["inputs"].get("spec"), trace["inputs"]
    if spec is None:
        return NO_DRAFTS
    options = spec.get("extra") or {}
    unknown = set(options) - KNOWN_DRAFT_OPTIONS
    if unknown:
        raise UsageError(f"speculative option {sorted(unknown)[0]!r}: is not one the engine's scheduler knows")
    count, ranges = spec["num_speculative_tokens"], options.get("num_speculative_tokens_per_batch_size")
    return draft_rules(
        spec["method"],
        count,
        enable_prefix_caching=trace["resolved"]["enable_prefix_caching"],
        num_modules=MTP_MODULES.get(inputs["model"], 1),
        num_by_batch_size=by_batch_size(ranges, count, inputs["max_num_seqs"]) if ranges else (),
        hashes_look_ahead=not options.get("disable_lookahead_block_hashes", False),
    )


MTP_MODULES = {"tiny-dsv3-mtp3": 3}  # of the models of the traces; all others have 1 or none


class Player:
    """Plays the model of a trace: which drafts hold, and what is proposed next (FORMATS2.md, "spec.jsonl")."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.spec = trace["inputs"].get("spec")
        self.numbers = {request["id"]: i for i, request in enumerate(trace["inputs"]["requests"])}
        self.num_checks = dict.fromkeys(self.numbers, 0)
        self.num_proposals = dict.fromkeys(self.numbers, 0)

    def accepted(self, batch: Batch) -> dict[str, int]:
        """Drafts that hold, by request; to be asked for each batch in the order of their schedule."""
        num_accepted: dict[str, int] = {}
        step = batch.extra(DraftStep)
        for seq, drafts in step.drafts.items():
            name = seq.request_id
            if seq in step.padded:
                num_accepted[name] = 0
                continue
            pattern = self.spec["accept"]
            num_accepted[name] = min(len(drafts), pattern[(self.numbers[name] + self.num_checks[name]) % len(pattern)])
            self.num_checks[name] += 1
        return num_accepted

    def proposals(self, batch: Batch, alive: list[Sequence]) -> dict[Sequence, list[int]]:
        step = batch.extra(DraftStep)
        if step.is_last:
            return {}
        drafts: dict[Sequence, list[int]] = {}
        for seq in batch.samples:
            pattern, name = self.spec.get("propose"), seq.request_id
            num_drafts = step.num_next
            if pattern:
                num_drafts = min(num_drafts, pattern[(self.numbers[name] + self.num_proposals[name]) % len(pattern)])
            self.num_proposals[name] += 1
            if seq in alive:
                drafts[seq] = [SAMPLED_TOKEN] * num_drafts
        return drafts


def trace_sequence(request: dict[str, Any], number: int) -> Sequence:
    """The first `shared` tokens are those of the prefix_id, the rest are this request's own."""
    shared, own = request.get("prefix_id", 0), number
    tokens = [(1 + shared) * 10**8 + i for i in range(request.get("shared", 0))]
    tokens += [-(1 + own) * 10**8 - i for i in range(len(tokens), request["prompt_len"])]
    images = []
    for image in request.get("mm", ()):  # equal images are equal tokens
        ranges = tuple((first, last) for first, last in image.get("embeds") or ())
        images.append(EncoderInput(image["offset"], image["length"], image["hash"], ranges))
        span = slice(image["offset"], image["offset"] + image["length"])
        tokens[span] = [10**12 + crc32(f"{image['hash']} {i}".encode()) for i in range(image["length"])]
    adapter = None if request.get("lora") is None else str(request["lora"])
    keys = () if adapter is None else (adapter,)
    priority = request.get("priority") or 0
    return ImageSequence(
        request["id"], tokens, request["max_tokens"], priority, keys, adapter=adapter, encoder_inputs=tuple(images)
    )


def step_state(scheduler: Scheduler) -> dict[str, Any]:
    return {
        "running": [seq.request_id for seq in scheduler.running],
        "num_waiting": len(scheduler.waiting),
        "free_blocks": scheduler.blocks.num_free_blocks,
    }


def adapters_state(scheduler: Scheduler) -> dict[str, Any]:
    """Whose adapters run, and who waits, in order."""
    return {
        "loras_running": sorted({int(seq.adapter) for seq in scheduler.running if seq.adapter is not None}),
        "waiting": [seq.request_id for seq in scheduler.waiting],
    }


def step_row(scheduler: Scheduler, batch: Batch, accepted: dict[str, int] | None = None) -> dict[str, Any]:
    """One step in the words of the trace."""
    row = {
        "scheduled": {seq.request_id: n for seq, n in batch.num_tokens.items()},
        "admitted": sorted(seq.request_id for seq in (*batch.new, *batch.resumed)),
        "new_computed_tokens": {seq.request_id: n for seq, n in batch.hits.items()},
        "preempted": sorted(seq.request_id for seq in batch.preempted),
        "blocks_held": {seq.request_id: scheduler.blocks.num_held(seq) for seq in batch.num_tokens},
        "start": {seq.request_id: seq.num_computed_tokens - n for seq, n in batch.num_tokens.items()},
        "distinct_held": scheduler.num_used_blocks,
    } | step_state(scheduler)
    if scheduler.extension(AdapterSlots) is not None:
        row |= adapters_state(scheduler)
    if isinstance(scheduler.blocks, StateBlockManager):
        admitted = (*batch.new, *batch.resumed)
        row |= {
            "junction": {seq.request_id: seq.full_attention_hit_len for seq in admitted if seq.full_attention_hit_len},
            "block_copies": len(batch.extra(StateStep).copies),
        }
    if (encoding := scheduler.extension(Encoding)) is not None:
        cache, images = encoding.cache, batch.extra(EncoderStep)
        cache.check_invariants()
        row |= {
            "encoder_inputs": {seq.request_id: numbers for seq, numbers in images.inputs.items()},
            "encoder_freed": images.evicted,
            "encoder_cache": {
                "free": cache.num_free,
                "freeable": cache.num_freeable,
                "entries": sorted(cache.users),
                "unreferenced": list(cache.unused),
            },
        }
    if scheduler.extension(Drafting) is not None:
        step = batch.extra(DraftStep)
        row |= {
            "draft_tokens": {seq.request_id: len(drafts) for seq, drafts in step.drafts.items()},
            "padded": [seq.request_id for seq in step.padded],
            "accepted": accepted or {},
            "skip_drafts": step.is_last,
            "next_num_drafts": step.num_next,
        }
    return row


def state_after(trace: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """The scheduler between batches; what the trace counts of tokens in flight is ours where it schedules ahead."""
    begun = [seq for seq in scheduler.unfinished if seq.num_computed_tokens > 0]
    is_async, encoding = trace_config(trace).is_async, scheduler.extension(Encoding)
    cache = None if encoding is None else encoding.cache
    sizes = {} if cache is None else {"encoder_cache": {"free": cache.num_free, "freeable": cache.num_freeable}}
    return (
        step_state(scheduler)
        | sizes
        | {
            "distinct_held": scheduler.num_used_blocks,
            "proposed": {seq.request_id: len(seq.draft_ids) for seq in scheduler.unfinished if seq.draft_ids},
            "computed": {seq.request_id: seq.num_computed_tokens for seq in begun},
            "tokens": {seq.request_id: seq.num_tokens for seq in begun},
            "in_flight": {
                seq.request_id: seq.num_in_flight_tokens for seq in scheduler.unfinished if seq.num_in_flight_tokens
            },
            "placeholders": {
                seq.request_id: seq.num_placeholders for seq in begun if is_async and seq.num_placeholders
            },
        }
    )


def replay(trace: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, row) of each step, its `after_update` filled in when the batch is applied."""
    scheduler, player, depth = trace_scheduler(trace), Player(trace), trace["batch_queue_depth"]
    pending = deque((r["arrive_step"], trace_sequence(r, i)) for i, r in enumerate(trace["inputs"]["requests"]))
    arrived: list[Sequence] = []
    in_flight: deque[tuple[int, dict[str, Any], Batch]] = deque()
    for step in count():
        if step == trace.get("unfinished_engine_steps"):  # the recording was cut with work left
            break
        for arrival in [entry for entry in pending if entry[0] == step]:
            pending.remove(arrival)
            arrived.append(arrival[1])
            scheduler.add(arrival[1])
        for name, when in (trace["inputs"].get("aborts") or {}).items():
            if when == step:
                scheduler.abort(name)
        batch = scheduler.schedule()
        scheduler.check_invariants()
        in_flight.append((step, step_row(scheduler, batch, player.accepted(batch)), batch))
        is_waited_for = batch.num_tokens or scheduler.has_unfinished
        if len(in_flight) == depth or not is_waited_for:
            done, row, oldest = in_flight.popleft()
            apply(scheduler, player, oldest, row)
            yield done, row | {"after_update": state_after(trace, scheduler)}
        if not pending and not scheduler.has_unfinished and not any(entry[2].num_tokens for entry in in_flight):
            break
    for done, row, _ in in_flight if trace.get("unfinished_engine_steps") is not None else ():
        yield done, row
    stats = scheduler.prefix_cache_stats
    row = {field.name: getattr(stats, field.name) for field in fields(stats)}
    if (drafting := scheduler.extension(Drafting)) is not None:
        counts = drafting.stats
        row["spec_stats"] = {
            "drafts": counts.num_drafts,
            "draft_tokens": counts.num_draft_tokens,
            "accepted": counts.num_accepted_tokens,
        }
    row["finished"] = {seq.request_id: outcome(seq) for seq in arrived}
    yield STATS, row


STATUSES = {"length": "FINISHED_LENGTH_CAPPED", "abort": "FINISHED_ABORTED", "stop": "FINISHED_STOPPED"}


def outcome(seq: Sequence) -> dict[str, Any]:
    """What became of a request, in the words of the trace."""
    status = STATUSES.get(seq.finish_reason or "", str(seq.finish_reason)) if seq.is_finished else seq.status.upper()
    return {"output": seq.num_output_tokens, "preemptions": seq.num_preemptions, "status": status}


def apply(scheduler: Scheduler, player: Player, batch: Batch, row: dict[str, Any]) -> None:
    """Give a batch its tokens, and the scheduler what is guessed after it."""
    accepted: dict[str, int] = row.get("accepted", {})
    sampled = {seq.request_id: [SAMPLED_TOKEN] * (1 + accepted.get(seq.request_id, 0)) for seq in batch.samples}
    scheduler.update(batch, sampled)
    scheduler.check_invariants()
    drafting = scheduler.extension(Drafting)
    if drafting is not None and not drafting.is_async:
        drafting.propose(player.proposals(batch, scheduler.running))


def trace_difference(trace: dict[str, Any], *, timed: bool = False) -> str | None:
    """The first difference between a real scheduler's steps and ours, as `step N: how`.

    timed  with the tiers of a simulation in place of the engine's
    """
    if trace["inputs"].get("offload"):
        scheduler_of = offload_trace.timed_scheduler_of if timed else offload_trace.scheduler_of
        scheduler = scheduler_of(trace, trace_config(trace), trace_groups(trace))
        sequences = [trace_sequence(request, i) for i, request in enumerate(trace["inputs"]["requests"])]
        return offload_trace.difference(trace, scheduler, sequences)
    expected = {
        step["step"]: step | {"admitted": sorted(step["new"] + step["resumed"]), "preempted": sorted(step["preempted"])}
        for step in trace["steps"]
    }
    stats = (trace.get("prefix_cache_stats") or {}) | {
        key: trace[key] for key in ("spec_stats", "finished") if trace.get(key) is not None
    }
    last = max(expected)
    for number, row in replay(trace):
        if number == STATS:
            how = row_difference(row, stats)
            return missing_step(expected) or (how and f"step {last}: in the end {how}")
        if number not in expected and row["scheduled"]:
            return f"step {number}: scheduled {row['scheduled']}, expected no step"
        how = row_difference(row, expected.pop(number, {}))
        if how:
            return f"step {number}: {how}"
    raise AssertionError("a replay ends with its statistics")


def row_difference(row: dict[str, Any], expected: dict[str, Any]) -> str | None:
    for key in row:
        if key == "after_update" and key in expected:
            how = row_difference(row[key], expected[key])
            if how:
                return f"after_update {how}"
        elif key in expected and row[key] != expected[key]:
            return f"{key} {row[key]}, expected {expected[key]}"
    return None


def missing_step(expected: dict[int, dict[str, Any]]) -> str | None:
    """The first step that the real scheduler went on to run; idle ones do not count."""
    for number, step in expected.items():
        if step["scheduled"]:
            return f"step {number}: no step, expected {step['scheduled']}"
    return None


def traces(path: Path) -> int:
    different = 0
    for trace in read_lines(path):
        try:
            how = trace_difference(trace)
        except KvplanError as error:
            how = f"step 0: refused: {error}"
        different += how is not None
        print(f"{trace['name']}: " + ("equal" if how is None else f"differs at {how}"))
    return 1 if different else 0


# --- llama.cpp: bytes of every place, and what its --fit chooses ---------------------------------------------------


def llamacpp(rows: Path, folders: list[Path]) -> int:
    """Compare each row; a model that no folder has is the catalog's."""
    counts = {EQUAL: 0, REFUSED: 0, DIFFERENT: 0}

    def load(name: str) -> ModelSpec:
        folder = folder_of(name, tuple(folders))
        if (folder / "config.json").is_file():
            return spec_in(folder)
        name = name.replace("__", "/")
        return catalog.load(catalog.find(name) or name)

    for row in read_lines(rows):
        outcome, why = llamacpp_rows.compare(row, load)
        counts[outcome] += 1
        for text in why:
            print(f"{json.dumps(row['inputs'])}: {outcome}: {text}")
    if not sum(counts.values()):
        raise ValueError("no row to compare")
    print(" / ".join(f"{n} {word}" for word, n in counts.items()))
    return 1 if counts[DIFFERENT] else 0


def main(argv: list[str]) -> int:
    match argv:
        case ["traces", path]:
            return traces(Path(path))
        case ["capacity" | "sglang" as server, cases, *folders] if folders:
            compare = compare_case if server == "capacity" else compare_sglang_in
            return compare_all(Path(cases), [Path(folder) for folder in folders], compare)
        case ["llamacpp", rows, *folders] if folders:
            return llamacpp(Path(rows), [Path(folder) for folder in folders])
        case ["models", directory]:
            return models(Path(directory))
        case _:
            print(__doc__)
            return 2


def run(argv: list[str]) -> int:
    """`main`, with 2 for files that are missing, malformed or hold nothing to compare."""
    try:
        return main(argv)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{argv[1] if len(argv) > 1 else ''}: malformed: {type(error).__name__}: {error}"
    print(problem, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
