"""A case's predictions beside what its server printed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isclose

from benchmarks.accuracy.cases import Case, Inputs, Models, NotAsked, NotStated, Unscorable, check_budget, inputs_of
from kvplan.core.errors import KvplanError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import GpuSpec, custom_gpu
from kvplan.models.spec import (
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.pool import Paging, Pool
from kvplan.servers.plans.weights import rank_weights, weight_layout
from kvplan.servers.releases import Version
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang.pool import SglangPool, max_requests, pages_in, request_table
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.changes import since
from kvplan.servers.vllm.log_rows import activation_peak, loaded_weights
from kvplan.servers.vllm.rules import OLDEST
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.allocator import weights_reserved
from kvplan.sizing.layout import bytes_per_token

# What a log calls a size. The first four and the pool's are predicted from the inputs alone; `given` from the KV bytes
# (or blocks, or tokens) that the same log prints.
BUDGET = ("weights", "activation", "non_torch", "graphs", "available_kv")
POOL = ("blocks", "tokens", "concurrency")
# SGLang's "avail mem", from the inputs alone, and what follows from it but for what nobody logs to the last digit.
FREE = ("free_after_load", "free_after_pool", "pool given free memory", "tokens given free memory")
PARTS = (*BUDGET, *POOL, *FREE)
GIVEN = ("blocks given KV", "tokens given KV", "concurrency given KV", "given blocks or tokens")


@dataclass(frozen=True, slots=True)
class Score:
    """One number predicted and logged, in GiB, blocks, tokens or requests.

    exact   for what is given the logged pool: the logged number lies within what the logs' rounding leaves open
    rule    what was not told and, taken for granted, makes it exact
    share   |error| as a share of the GPU's memory; for the budget's parts alone
    ends    the ends of the range that kvplan prints, where it prints one
    """

    part: str
    predicted: float
    logged: float
    exact: bool = False
    rule: str | None = None
    share: float | None = None
    ends: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        return self.predicted - self.logged

    @property
    def relative(self) -> float:
        return abs(self.error) / abs(self.logged) if self.logged else float(bool(self.error))


@dataclass(frozen=True, slots=True)
class Scored:
    """A case with its scores; `refused` names what could not be predicted and why."""

    case: Case
    inputs: Inputs
    scores: tuple[Score, ...]
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A case that kvplan refuses, or (`scorable` False) that says too little to be asked about, or (`in_scope` False)
    that ran a build of its own."""

    case: Case
    why: str
    scorable: bool
    in_scope: bool = True


AFTER_ABSORBED = since("plain_projections")  # the release after the one that kept MLA's projections multiplied out
UNNAMED = custom_gpu(80 * GIB)  # for what does not depend on the GPU


def logged_parts(case: Case) -> dict[str, float]:
    """What the log printed, by part."""
    m = case.measured
    parts = {
        "weights": m.get("sgl_weight_mem_gb", m.get("weights_gib")),
        "activation": m.get("activation_peak_gib"),
        "non_torch": m.get("non_torch_gib"),
        "graphs": m.get("cuda_graph_estimate_gib", m.get("cuda_graph_gib")),
        "available_kv": smallest_kv(case),
        "blocks": m.get("num_gpu_blocks"),
        "tokens": m.get("kv_cache_tokens"),
        "concurrency": m.get("max_concurrency"),
    }
    return {name: value for name, value in parts.items() if value is not None}


def settings_of(inputs: Inputs, gpu: GpuSpec) -> Settings:
    return vllm.resolve(inputs.spec, gpu, inputs.args, inputs.release)


def score_case(case: Case, models: Models) -> Scored | Refused:
    """Everything of a case that can be predicted, beside what was logged."""
    try:
        inputs = inputs_of(case, models)
    except Unscorable as reason:
        return Refused(case, str(reason), scorable=False)
    except NotAsked as reason:
        return Refused(case, str(reason), scorable=False, in_scope=False)
    except (KvplanError, NotStated) as reason:
        return Refused(case, str(reason), scorable=True)
    scores: list[Score] = []
    refused: list[tuple[str, str]] = []
    for name, part in SGLANG_PARTS if case.engine == "sglang" else VLLM_PARTS:
        try:
            scores += part(case, inputs)
        except NotStated as reason:
            refused.append((name, f"not asked: {reason}"))
        except KvplanError as error:
            refused.append((name, str(error)))
    return Scored(case, inputs, tuple(scores), tuple(refused))


def weights(case: Case, inputs: Inputs) -> Iterator[Score]:
    logged = logged_parts(case).get("weights")
    if logged is None:
        return
    if "mxfp4" in inputs.spec.scheme_kinds and inputs.gpu is None:
        raise NotStated("MXFP4 weights are padded by GPU, and " + inputs.why_no_gpu)
    gpu = inputs.gpu or UNNAMED
    if inputs.spec.is_mla and inputs.number < since("latent_cache"):
        inputs = replace(inputs, release=vllm.version(AFTER_ABSORBED))  # its cache is not modelled, its weights are
    request = Request(inputs.spec, gpu, inputs.args, inputs.release, draft=inputs.draft)
    yield Score("weights", loaded_weights(request, settings_of(inputs, gpu), 0) / GIB, logged)


def budget(case: Case, inputs: Inputs) -> Iterator[Score]:
    """From the inputs alone: what the budget goes to, and the pool that is left."""
    logged = logged_parts(case)
    names = [name for name in PARTS if name in logged and name != "weights"]
    if not names:
        return
    if inputs.gpu is None:
        raise NotStated(inputs.why_no_gpu)
    if inputs.number < OLDEST:
        raise NotStated(f"vLLM 0.{inputs.number[1]} is older than the releases kvplan models")
    check_budget(case, inputs.gpu)
    the_plan = plan(Request(inputs.spec, inputs.gpu, inputs.args, inputs.release, draft=inputs.draft))
    total = the_plan.request.gpu.total_memory
    predicted = {
        "activation": activation_peak(the_plan) / GIB,
        "non_torch": the_plan.estimates["non_torch"].likely / GIB,
        "graphs": the_plan.estimates["cuda_graphs"].likely / GIB,
        "available_kv": the_plan.available / GIB,
        "blocks": float(the_plan.capacity.num_blocks),
        "tokens": float(the_plan.capacity.tokens),
        "concurrency": the_plan.capacity.max_concurrency,
    }
    for name in names:
        share = abs(predicted[name] - logged[name]) * GIB / total if name in BUDGET else None
        ends = (the_plan.available_low / GIB, the_plan.available_high / GIB) if name == "available_kv" else None
        yield Score(name, predicted[name], logged[name], share=share, ends=ends)


# --- given the pool the log prints ------------------------------------------------------------------------------------

HALF_DIGIT = GIB // 200  # "18.14 GiB" may be 0.005 more or less


def given(case: Case, inputs: Inputs) -> Iterator[Score]:
    """Blocks, tokens and concurrency from the KV bytes of the same log; else from its blocks, else from its tokens."""
    if not any(name in logged_parts(case) for name in POOL):
        return
    gpu = inputs.gpu or UNNAMED
    if inputs.gpu is None and inputs.args.max_num_batched_tokens is None and sees_step(inputs):
        raise NotStated(
            "its windows are charged by the tokens of a step, which depend on the GPU; " + inputs.why_no_gpu
        )
    settings = settings_of(inputs, gpu)
    how = vllm_pages.paging(inputs.spec, settings, inputs.args, gpu.sm)
    scores = list(given_pool(case, inputs, settings, vllm_pages.pool(inputs.spec, how, inputs.draft)))
    if all(score.exact for score in scores):
        yield from scores
        return
    for rule, pool in other_pools(inputs, how):
        if all(score.exact for score in given_pool(case, inputs, settings, pool)):
            scores = [score if score.exact else replace(score, rule=rule) for score in scores]
            break
    yield from scores


STATES_CACHED = "prefix caching of states was turned on"
DRAFT_HEAD = "a draft head (MTP) has one more attention layer"


def other_pools(inputs: Inputs, how: Paging) -> Iterator[tuple[str, Pool]]:
    """Pools under what a log does not state, each with the rule that makes it: states cached, a draft head, both."""
    spec = inputs.spec
    cached = replace(how, prefix_caching=True, context=0)
    head = draft_head(spec) if how.spec_tokens and inputs.draft is None else None
    changes_states = spec.has_states and not how.prefix_caching
    if changes_states:
        yield STATES_CACHED, vllm_pages.pool(spec, cached, inputs.draft)
    if head is not None:
        yield DRAFT_HEAD, vllm_pages.pool(spec, how, head)
    if changes_states and head is not None:
        yield f"{STATES_CACHED}; {DRAFT_HEAD}", vllm_pages.pool(spec, cached, head)


def draft_head(spec: ModelSpec) -> ModelSpec | None:
    """A model of the last attention layer alone, which is what a multi-token prediction head keeps."""
    caches = [layer for layer in spec.layers if layer and not any(isinstance(cache, RecurrentState) for cache in layer)]
    return replace(spec, layers=(caches[-1],), layer_weights=spec.layer_weights[-1:]) if caches else None


def given_pool(case: Case, inputs: Inputs, settings: Settings, pool: Pool) -> Iterator[Score]:
    """What a pool of the logged size holds."""
    logged = logged_parts(case)
    kv = logged.get("available_kv")
    length = case.measured.get("max_concurrency_tokens")
    if kv is not None and kv > 0 and inputs.args.pipeline_parallel_size == 1:
        low, middle, high = (
            vllm_pages.capacity(pool, settings, inputs.args, [int(kv * GIB) + spread])
            for spread in (-HALF_DIGIT, 0, HALF_DIGIT)
        )
        for name, ends in (
            ("blocks", (low.num_blocks, middle.num_blocks, high.num_blocks)),
            ("tokens", (low.tokens, middle.tokens, high.tokens)),
            ("concurrency", (low.max_concurrency, middle.max_concurrency, high.max_concurrency)),
        ):
            if name in logged and (name != "concurrency" or length == settings.max_model_len):
                yield within(f"{name} given KV", ends, logged[name], 0.005 if name == "concurrency" else 0)
    possible = blocks_of(logged, pool, settings)
    if possible is not None and "concurrency" in logged and length == settings.max_model_len:
        charged = pool.charged(settings.max_model_len, settings)
        least, most = possible[0] / charged, possible[-1] / charged
        yield within("given blocks or tokens", (least, least, most), logged["concurrency"], 0.005)


def sees_step(inputs: Inputs) -> bool:
    """Whether a request's blocks depend on the tokens of a step, and so on the GPU's defaults."""
    return bool(inputs.spec.cache_kinds & {SlidingWindow, ChunkedAttention}) and inputs.release.has("hybrid_groups")


PER_RANK = re.compile(r"""available_kv_gib"?: \[([^\]]*)\]""")


def smallest_kv(case: Case) -> float | None:
    """The KV GiB of the rank that has least, where the log quotes several: all ranks take that rank's blocks."""
    quoted = case.measured.get("available_kv_gib")
    listed = PER_RANK.search(case.notes)
    ranks = [float(value) for value in re.findall(r"\d+\.\d+", listed[1])] if listed else []
    return min([*ranks, quoted]) if quoted is not None else None


def blocks_of(logged: dict[str, float], pool: Pool, settings: Settings) -> range | None:
    """The numbers of blocks that the logged blocks, else the logged tokens of one group, can stand for."""
    if "blocks" in logged:
        return range(int(logged["blocks"]), int(logged["blocks"]) + 1)
    if "tokens" in logged and not settings.version.has("tokens_by_concurrency"):
        groups = len(pool.groups)
        least = int(logged["tokens"]) // (pool.block_size * pool.dcp) * groups
        return range(least, least + groups)
    return None


def within(part: str, ends: tuple[float, float, float], logged: float, rounding: float) -> Score:
    low, middle, high = ends
    exact = low - rounding <= logged <= high + rounding or isclose(logged, middle, rel_tol=1e-9)
    return Score(part, logged if exact else middle, logged, exact=exact)


# --- SGLang: what does not depend on its budget -----------------------------------------------------------------------


def sglang_weights(case: Case, inputs: Inputs) -> Iterator[Score]:
    """From the memory that the device has less of after loading, which is whole segments of torch's allocator."""
    logged = logged_parts(case).get("weights")
    if logged is None:
        return
    yield Score("weights", loaded_gib(inputs), logged)


def loaded_gib(inputs: Inputs) -> float:
    request = Request(inputs.spec, inputs.gpu or UNNAMED, inputs.args, inputs.release)
    if inputs.spec.quantization is not None:
        rank_weights(request, 0)  # refuses what kvplan cannot size
    return weights_reserved(inputs.spec, weight_layout(request, 0)) / GIB


def sglang_tokens(case: Case, inputs: Inputs) -> Iterator[Score]:
    """Tokens from the K and V sizes of the same log: a cell per token and layer, and one page more than are counted.

    Source: SGLang 0.5 mem_cache/memory_pool.py. Windows and states have pools of their own.
    """
    m = case.measured
    if inputs.args.pipeline_parallel_size > 1:
        raise NotStated("its pool is that of one pipeline stage")
    if not {"sgl_k_gb", "sgl_v_gb", "kv_cache_tokens"} <= set(m):
        return
    if inputs.spec.cache_kinds - {FullAttention, LatentAttention}:
        raise NotStated("its K and V sizes are of one of several pools, and the log does not say of which")
    settings = settings_of(inputs, inputs.gpu or UNNAMED)
    cell = bytes_per_token(inputs.spec, settings.kv_dtype, inputs.args.tensor_parallel_size)
    if not cell:
        raise NotStated(f"{inputs.spec.name} keeps no keys and values, so the log is of another model")
    middle = (m["sgl_k_gb"] + m["sgl_v_gb"]) * GIB
    low, likely, high = ((middle + spread) / cell - 1 for spread in (-2 * HALF_DIGIT, 0, 2 * HALF_DIGIT))
    yield within("tokens given KV", (low, likely, high), m["kv_cache_tokens"], 1)


def sglang_plan(case: Case, inputs: Inputs) -> Plan:
    """The plan of an SGLang server. Raises NotStated where it hangs on what the case does not say."""
    if inputs.gpu is None:
        raise NotStated(inputs.why_no_gpu)
    args = sglang_args(case, inputs)
    release = sglang_release(case)
    if args.mem_fraction_static is None and release is None:
        raise NotStated("its default share of the memory is that of a release which is not modelled")
    return plan(Request(inputs.spec, inputs.gpu, args, release or sglang.version(sglang.NEWEST)))


def sglang_budget(case: Case, inputs: Inputs) -> Iterator[Score]:
    """From the inputs alone: the pool of a server that was told its share, or whose release has a known default, and
    what "avail mem" says was free before and after it was allocated."""
    m = case.measured
    kv, tokens = m.get("available_kv_gib"), m.get("kv_cache_tokens")
    free = {"free_after_load": "sgl_avail_after_load_gb", "free_after_pool": "sgl_avail_after_pool_gb"}
    if kv is None and tokens is None and not set(free.values()) & set(m):
        return
    the_plan = sglang_plan(case, inputs)
    total = the_plan.request.gpu.total_memory
    if kv is not None:
        available = the_plan.capacity.num_blocks * the_plan.capacity.bytes_per_block / GIB
        yield Score("available_kv", available, kv, share=abs(available - kv) * GIB / total)
    if tokens is not None:
        yield Score("tokens", float(the_plan.capacity.tokens), tokens)
    taken = the_plan.estimates["context"].likely + the_plan.estimates["in_use"].likely
    left = (total - taken) / GIB - loaded_gib(inputs)
    for part, name in free.items():
        if part == "free_after_pool":
            left -= (pool_bytes(the_plan) + request_table(the_plan.settings, the_plan.settings.max_num_seqs)) / GIB
        if name in m:
            yield Score(part, left, m[name], share=abs(left - m[name]) * GIB / total)


def pool_bytes(the_plan: Plan) -> int:
    """What the pools of a plan take on its first rank."""
    layout, args = the_plan.pool, the_plan.request.args
    assert isinstance(layout, SglangPool)
    pages, slots, _ = pages_in(layout, args, [the_plan.available] * args.pipeline_parallel_size)
    return layout.num_bytes(pages, slots, 0)


def sglang_given_free(case: Case, inputs: Inputs) -> Iterator[Score]:
    """The pool that SGLang makes of the memory it found free: what is free after loading, less the share of what was
    free before that it keeps back. Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py."""
    m = case.measured
    after, tokens, left = (
        m.get(name) for name in ("sgl_avail_after_load_gb", "kv_cache_tokens", "sgl_avail_after_pool_gb")
    )
    if after is None or (tokens is None and left is None):
        return
    if inputs.gpu is None and sglang_args(case, inputs).mem_fraction_static is None:
        raise NotStated(inputs.why_no_gpu)
    if inputs.args.pipeline_parallel_size > 1:
        raise NotStated("its free memory is that of one pipeline stage")
    the_plan = sglang_plan(case, replace(inputs, gpu=inputs.gpu or UNNAMED))
    room = after - free_before(case, inputs, the_plan) * (1 - the_plan.settings.gpu_memory_utilization)
    layout, args = the_plan.pool, the_plan.request.args
    assert isinstance(layout, SglangPool)
    request = the_plan.request
    images = sglang.image_reservation(request.spec, request.gpu, args, request.release)
    pages, slots, stage = pages_in(layout, args, [int(room * GIB) - images])
    pools = layout.num_bytes(pages, slots, stage)
    if "available_kv_gib" in m:
        yield Score("pool given free memory", pools / GIB, m["available_kv_gib"])
    elif left is not None:  # what the device has less of includes the table of requests
        table = request_table(the_plan.settings, max_requests(layout, the_plan.settings, args, pages, slots))
        yield Score("pool given free memory", (pools + table) / GIB, after - left)
    if tokens is not None:
        yield Score("tokens given free memory", float(pages * layout.block_size), tokens)


def free_before(case: Case, inputs: Inputs, the_plan: Plan) -> float:
    """GiB free before loading: from what loading took, else the GPU's memory, else what loading should take."""
    after, took = case.measured["sgl_avail_after_load_gb"], case.measured.get("sgl_weight_mem_gb")
    if took is not None:
        return after + took
    if inputs.gpu is not None:
        return (inputs.gpu.total_memory - the_plan.estimates["context"].likely) / GIB
    return after + loaded_gib(inputs)


SGLANG_FLAGS = ("mem_fraction_static", "max_total_tokens", "chunked_prefill_size", "max_running_requests")


def sglang_args(case: Case, inputs: Inputs) -> EngineArgs:
    """The arguments that only SGLang has, from the flags in words."""
    stated = re.findall(r"\b([a-z]+(?:[-_][a-z]+)+)[ =]([0-9.]+)", case.flags)
    flags = {name.replace("-", "_"): text for name, text in stated}
    share, most, chunk, requests = (flags.get(name) for name in SGLANG_FLAGS)
    return replace(
        inputs.args,
        mem_fraction_static=float(share) if share else None,
        max_total_tokens=int(most) if most else None,
        max_num_batched_tokens=int(chunk) if chunk else None,
        max_num_seqs=int(requests) if requests else inputs.args.max_num_seqs,
        enable_prefix_caching="disable-radix-cache" not in case.flags and inputs.args.enable_prefix_caching,
    )


def sglang_release(case: Case) -> Version | None:
    try:
        return parse_engine(f"sglang@{case.version}") if case.version else None
    except KvplanError:
        return None


Part = Callable[[Case, Inputs], Iterator[Score]]
VLLM_PARTS: tuple[tuple[str, Part], ...] = (("weights", weights), ("pool given", given), ("budget", budget))
SGLANG_PARTS: tuple[tuple[str, Part], ...] = (
    ("weights", sglang_weights), ("pool given", sglang_tokens), ("pool given free memory", sglang_given_free),
    ("budget", sglang_budget),
)  # fmt: skip
