"""Every formula behind a plan with its numbers put in, in reading order: --explain."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from kvplan.core.records import dataclass
from kvplan.core.units import GB, GIB, format_gib, format_size, plural
from kvplan.models.quant import scheme_name
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.base import terms_of
from kvplan.servers.plans import BUDGET_ROWS, Plan
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.pages import KVSpec, charged_blocks
from kvplan.servers.vllm.pool import KVGroup
from kvplan.sizing.layout import cell_bytes, local_kv_heads, state_bytes, token_bytes
from kvplan.sizing.weights import num_params, stage_layers

if TYPE_CHECKING:
    from kvplan.servers.sglang.pool import SglangPool

# The folk answer's terms: 0.90 was vLLM's default until 0.18, and the activation peak was measured on an H100, whose
# default is 1,024 sequences at 38.4 B per sequence and vocabulary entry (vLLM 0.11).
FOLK_UTILIZATION = 0.90
FOLK_SEQS = 1024
FOLK_RELEASE = (0, 11)
FOLK_SAMPLER_BYTES = 38.4
# The rule of thumb many notes carry: weights + 1.2 GB per user + 5 GB.
THUMB_USER = 12 * GB // 10
THUMB_FIXED = 5 * GB


@dataclass(frozen=True, slots=True)
class Section:
    """One step of the explanation: a title and lines of plain text."""

    title: str
    lines: tuple[str, ...]


def explain(plan: Plan) -> list[Section]:
    """The plan's arithmetic from bytes per token to users, then beside two estimates people make by hand."""
    sections = [
        Section("Bytes per token and rank", tuple(_per_token(plan))),
        Section("Blocks", tuple(_blocks(plan))),
        Section("Weights per rank", tuple(_weights(plan))),
        Section("From total to KV cache", tuple(_budget(plan))),
        Section("Users", tuple(_users(plan))),
    ]
    if folk := tuple(_folk(plan)):
        sections.append(Section("Why not the folk answer", folk))
    if notes := plan.request.spec.notes:
        sections.append(Section("What was read into the config", notes))
    if changes := tuple(plan.request.release.lacks()):
        lines = tuple(f"{_release(change.since)}: {change.what} [{change.evidence}]" for change in changes)
        sections.append(Section(f"What later releases than {plan.request.release.label} change", lines))
    if said := statements(plan):
        texts = tuple(f"{name}: {source}" for name, (_, source) in said.items())
        sections.append(Section("What the facts and rules rest on", texts))
    return [*sections, Section("Beside the rule of thumb (weights + 1.2 GB per user + 5 GB)", tuple(_thumb(plan)))]


def _release(number: tuple[int, ...]) -> str:
    return f"from {number[0]}.{number[1]} on"


def stage_of(plan: Plan) -> range:
    """The layers that the plan's rank holds; a draft model's join the only stage."""
    spec, pp = plan.request.spec, plan.request.args.pipeline_parallel_size
    if plan.request.draft is not None:
        return range(spec.num_layers + plan.request.draft.num_layers)
    return stage_layers(spec.num_layers, pp, rest_last=plan.pool.how.rest_last)[plan.stage]


# --- what the facts and rules rest on ---------------------------------------------------------------------------------

# How the catalog says that an entry's facts are not a copy of the published config.json.
DERIVED = ("sibling", "dims", "class default", "reconstructed")


def is_published(source: str) -> bool:
    """Whether a model's facts are its published config.json (or the user's own file), not a relative's or a table's."""
    return not source.startswith(DERIVED) and "not checked" not in source


def statements(plan: Plan) -> dict[str, tuple[str, str]]:
    """Assumptions about facts and rules, which have no bytes of their own: name -> (text, source)."""
    request, release = plan.request, plan.request.release
    found = {}
    for name, spec in (("model facts", request.spec), ("draft facts", request.draft)):
        if spec is not None and not is_published(spec.source):
            found[name] = spec.source.partition(";")[0], spec.source
    if release.is_compared:
        return found
    text, source = terms_of(release.engine).uncompared
    found["rules"] = text.format(label=release.label), source.format(label=release.label)
    return found


# --- bytes per token --------------------------------------------------------------------------------------------------


def _per_token(plan: Plan) -> Iterator[str]:
    spec, tp = plan.request.spec, plan.request.args.tensor_parallel_size
    dtype = plan.settings.kv_dtype
    counts = Counter(cache for caches in spec.layers for cache in caches)
    for cache, count in counts.items():
        yield _cache_line(plan, cache, count)
    if idle := sum(not caches for caches in spec.layers):
        yield f"{idle} layers keep no cache of their own"
    total = sum(count * token_bytes(cache, dtype, tp) for cache, count in counts.items())
    if plan.request.args.pipeline_parallel_size > 1:
        yield f"of these layers, the rank that decides holds {len(stage_of(plan))}"
    yield f"in all {total:,} B per token ({format_size(total)}), KV dtype {dtype}{_dtype_reason(plan)}"


def _dtype_reason(plan: Plan) -> str:
    if plan.request.args.kv_cache_dtype != "auto":
        return ""
    quantization = plan.request.spec.quantization
    if quantization is None:
        return " (auto: the model's dtype)"
    if quantization.kv_dtype:
        return " (auto: the checkpoint asks for it)"
    return f" (auto: the model's dtype; weights in {scheme_name(quantization)} do not change it)"


def _cache_line(plan: Plan, cache: LayerCache, count: int) -> str:
    args, dtype = plan.request.args, plan.settings.kv_dtype
    tp = args.tensor_parallel_size
    each = token_bytes(cache, dtype, tp)
    tail = f"= {each:,} B a layer, {count * each:,} B in all"
    match cache:
        case FullAttention(heads, k, v):
            return f"{count} x full attention: {_heads(heads, k, v, dtype, tp)} {tail}"
        case SlidingWindow(heads, k, v, window):
            return f"{count} x sliding window of {window:,} tokens: {_heads(heads, k, v, dtype, tp)} {tail}"
        case ChunkedAttention(heads, k, v, chunk):
            return f"{count} x chunks of {chunk:,} tokens: {_heads(heads, k, v, dtype, tp)} {tail}"
        case CrossAttention(heads, k, v):
            return f"{count} x cross attention (the encoder's tokens): {_heads(heads, k, v, dtype, tp)} {tail}"
        case LatentAttention(latent, rope):
            return f"{count} x latent (MLA), whole on every rank: {latent} latent + {rope} rope in {dtype} {tail}"
        case SparseIndexer(dim, pool):
            shared = f", one key per {pool} tokens" if pool > 1 else ""
            return f"{count} x sparse indexer: {dim} fp8 + one fp32 scale per 128{shared} {tail}"
        case WindowLatent(dim, rope, window):
            return f"{count} x latent of the last {window:,} tokens: {dim} wide, {rope} of it rope {tail}"
        case CompressedLatent(dim, rope, ratio, index):
            keys = f", {index} of index keys" if index else ""
            return f"{count} x latent of {dim} ({rope} of it rope{keys}) per {ratio} tokens {tail}"
        case KeyIndex(dim):
            return f"{count} x index keys: {dim} x 2 B {tail}"
        case RecurrentState():
            size = state_bytes(
                cache,
                plan.settings.dtype,
                tp,
                spec_tokens=args.num_speculative_tokens,
                ssm_dtype=args.mamba_ssm_cache_dtype,
            )
            return (
                f"{count} x {cache.kind.replace('_', ' ')} state: {size:,} B a layer and request, whatever its length "
                f"({count * size:,} B in all); nothing per token"
            )
        case _:
            assert_never(cache)


def _heads(heads: int, k: int, v: int, dtype: str, tp: int) -> str:
    local = local_kv_heads(heads, tp)
    if tp == 1:
        shared = f"{heads} KV heads"
    elif heads >= tp:
        shared = f"{heads} KV heads / {tp} ranks = {local}"
    else:
        shared = f"{local} KV head ({heads} repeated over {tp} ranks)"
    return f"{shared} x {_cell(dtype, k, v)}"


def _cell(dtype: str, k: int, v: int) -> str:
    """K and V of one head and token, spelled out where every element has the same size."""
    size = cell_bytes(dtype, k, v)
    each, rest = divmod(size, k + v)
    return f"({k} K + {v} V) x {each} B" if rest == 0 else f"{size} B ({k} K + {v} V in {dtype}, scales included)"


# --- blocks -----------------------------------------------------------------------------------------------------------


def _blocks(plan: Plan) -> Iterator[str]:
    pool, capacity = plan.pool, plan.capacity
    yield _block_reason(plan)
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(pool.groups, 1):
        numbers.setdefault(_group_text(plan, group), []).append(number)
    for text, same in numbers.items():
        yield f"{_numbered(same)}: {text}"
    if plan.request.release.engine == "sglang":
        from kvplan.servers.sglang.pool import SglangPool

        assert isinstance(pool, SglangPool)
        yield from _sglang_pools(plan, pool)
    elif len(pool.groups) > 1:
        yield (
            "groups share one set of block ids: a block costs the widest group's bytes, "
            f"{capacity.bytes_per_block:,} B, and a request is charged the sum, {capacity.blocks_per_request:,} blocks"
        )
    yield (
        f"one request of {capacity.max_model_len:,} tokens: {capacity.blocks_per_request:,} blocks x "
        f"{capacity.bytes_per_block:,} B = {plan.bytes_per_request:,} B ({format_size(plan.bytes_per_request)})"
    )


def _sglang_pools(plan: Plan, pool: "SglangPool") -> Iterator[str]:
    """How windows and recurrent states are kept beside the tokens."""
    if len(pool.groups) > 1:
        if pool.window_tokens is not None:
            yield (
                f"window layers have a pool of {pool.window_tokens:,} tokens, set aside before the tokens: "
                "--max-running-requests sizes it where the prefix cache is off"
            )
            return
        share = float(pool.swa_ratio)
        yield (
            f"window layers have a pool of {share:g} x as many tokens, which every page of the full pool pays for: "
            f"{pool.full[plan.stage]:,} B + {share:g} x {pool.windows[plan.stage]:,} B a token; a request is charged "
            f"the larger of its pages and its window pages / {share:g}"
        )
    if state := pool.state[plan.stage]:
        yield f"states have slots of {state:,} B, set aside before the tokens; a request may take {pool.slots_each}"


def _block_reason(plan: Plan) -> str:
    if plan.request.release.engine == "sglang":
        from kvplan.servers.sglang import models as sglang_models

        request = plan.request
        backend = sglang_models.backends(request.spec, request.gpu.sm, request.args, request.release)[1]
        page, asked = plan.pool.block_size, request.args.block_size
        why = "as asked" if asked == page else "the default" if page == 1 else f"what the backend {backend} takes"
        return f"page size {page}: {why}"
    spec, settings, size = plan.request.spec, plan.settings, plan.pool.block_size
    asked = plan.request.args.block_size
    if vllm.has_states(spec):
        return f"block size {size:,}: raised until a page of attention covers the page of a state"
    if asked is not None:
        return f"block size {size:,}: as asked"
    smallest = vllm.default_block_size(spec, settings.kv_dtype, plan.request.gpu.sm, ahead=plan.pool.how.ahead)
    if smallest != size:
        return f"block size {size:,}: {smallest}, raised so that the pages of all layers are equal"
    return f"block size {size:,}: the smallest that the attention backend takes on this GPU, at least 16"


def _numbered(same: list[int]) -> str:
    if len(same) == 1:
        return f"group {same[0]}"
    if same == list(range(same[0], same[-1] + 1)):
        return f"groups {same[0]} to {same[-1]}, each"
    return f"groups {', '.join(map(str, same))}, each"


def _group_text(plan: Plan, group: KVGroup) -> str:
    here = stage_of(plan)
    local = [spec for index, spec in group.layers if index in here]
    pages = " + ".join(f"{count} x {_kind(spec)} x {spec.page:,} B a page" for spec, count in Counter(local).items())
    return f"{pages or 'no layer'} = {sum(spec.page for spec in local):,} B per block; {_charge(plan, group)}"


def _kind(spec: KVSpec) -> str:
    bound = f" {spec.bound:,}" if spec.bound is not None else ""
    return f"{spec.kind}{bound} ({spec.block_size:,} tokens)"


def _charge(plan: Plan, group: KVGroup) -> str:
    """How many blocks a request is charged for a group, by the rule of its most demanding layer."""
    context, flight, dcp = plan.capacity.max_model_len, plan.settings.in_flight_tokens, plan.pool.dcp
    blocks = group.charged(context, plan.settings, dcp)
    spec = max(group.specs, key=lambda each: charged_blocks(each, context, plan.settings, dcp))
    match spec.kind:
        case "full" | "latent":
            held = f"{context:,} / {dcp} ranks" if dcp > 1 else f"{context:,}"
            rule = f"ceil({held} / {spec.block_size:,})"
        case "sliding":
            assert spec.bound is not None
            rule = f"ceil(min({spec.bound:,} - 1 + {flight:,} in flight, {context:,}) / {spec.block_size:,}) + 1"
        case "chunked":
            assert spec.bound is not None
            rule = f"ceil(min({spec.bound:,} + {flight:,} in flight, {context:,}) / {spec.block_size:,})"
        case "state" if spec.blocks is None:
            drafts = f" + {spec.extra}" if spec.extra else ""
            rule = f"a state for every block of its context, ceil({context:,} / {spec.block_size:,}){drafts}"
        case "state":
            rule = "the state, drafts and checkpoints"
        case "ring":
            rule = "one ring of keys that are not pooled yet"
        case "cross":
            rule = f"ceil({plan.settings.max_num_batched_tokens:,} / {spec.block_size:,})"
        case _:
            assert_never(spec.kind)
    return f"a request is charged {rule} = {blocks:,}"


# --- weights and budget -----------------------------------------------------------------------------------------------


def _weights(plan: Plan) -> Iterator[str]:
    spec, args = plan.request.spec, plan.request.args
    stored = scheme_name(spec.quantization) if spec.quantization else args.quantization
    counts = num_params(spec)
    what = f"linear layers in {stored}, the rest in {plan.settings.dtype}" if stored else f"in {plan.settings.dtype}"
    yield f"{spec.name}: {sum(counts.values()):,} parameters, {what}{_spread(plan)}"
    for group, size in sorted(plan.weight_groups.items(), key=lambda item: -item[1]):
        yield f"{group.replace('_', ' ')}: {_share(counts, group)}{size:,} B"
    yield f"in all {plan.memory.weights:,} B ({format_gib(plan.memory.weights)})"
    if plan.memory.load_peak > plan.memory.weights:
        peak = plan.memory.load_peak
        yield f"while loading {peak:,} B ({format_gib(peak)}): quantised once it is there"


def _spread(plan: Plan) -> str:
    args = plan.request.args
    parts = []
    if args.tensor_parallel_size > 1:
        parts.append(f"over {args.tensor_parallel_size} tensor parallel ranks")
    if args.pipeline_parallel_size > 1:
        parts.append(f"stage {plan.stage + 1} of {args.pipeline_parallel_size}")
    if args.enable_expert_parallel:
        parts.append("experts whole, spread over the ranks")
    return "".join(f", {part}" for part in parts)


def _share(counts: Counter[str], group: str) -> str:
    return f"{counts[group]:,} parameters, " if group in counts else ""


def _sglang_budget(plan: Plan) -> Iterator[str]:
    memory, context, fraction = plan.memory, plan.estimates["context"], plan.settings.gpu_memory_utilization
    yield f"total {memory.total:,} B ({format_gib(memory.total)}): {plan.request.gpu.total_memory_source}"
    yield (
        f"- context {context.likely:,} B ({context.low / GIB:.2f}-{context.high / GIB:.2f} GiB) = {context.formula} "
        f"[{context.kind}: {context.source}]"
    )
    yield (
        f"free before loading x mem_fraction_static: ({memory.total:,} - {context.likely:,}) x {fraction} = "
        f"{memory.budget:,} B ({format_gib(memory.budget)})"
    )
    yield f"- weights {memory.weights:,} B"
    yield f"- buffers {memory.buffers:,} B = {plan.estimates['buffers'].formula}"
    if images := memory.budget - memory.weights - memory.buffers - plan.available:
        yield f"- set aside for images {images:,} B"
    yield f"= {plan.available:,} B for the KV cache ({format_gib(plan.available)})"
    kept = memory.total - context.likely - memory.budget
    yield f"kept back for activations and CUDA graphs, which SGLang does not measure: {kept:,} B ({format_gib(kept)})"


def _sglang_users(plan: Plan) -> Iterator[str]:
    from kvplan.servers.sglang import rules as sglang

    capacity, answer, args = plan.capacity, plan.concurrency, plan.request.args
    pages = capacity.num_blocks - 1
    given = " (or --engine-arg max_total_tokens, if less)" if args.max_total_tokens else ""
    yield f"tokens: {capacity.tokens:,} in {pages:,} pages of {plural(plan.pool.block_size, 'token')}{given}"
    yield f"full-context users: {pages:,} / {capacity.blocks_per_request:,} = {answer.max:.4f}"
    if args.max_num_seqs is not None:
        most = f"max_running_requests {plan.settings.max_num_seqs:,}"
        yield f"{most}: as asked, at most half the tokens and what states allow"
        return
    yield (
        f"max_running_requests {plan.settings.max_num_seqs:,}: {sglang.REQUESTS_PER_CONTEXT} per context held, from "
        f"{sglang.LEAST_REQUESTS:,} to {sglang.MOST_REQUESTS:,}, at most half the tokens and what states allow"
    )


def _budget(plan: Plan) -> Iterator[str]:
    if plan.request.release.engine == "sglang":
        yield from _sglang_budget(plan)
        return
    gpu, settings, memory = plan.request.gpu, plan.settings, plan.memory
    yield f"total {memory.total:,} B ({format_gib(memory.total)}, {gpu.total_memory_kind}): {gpu.total_memory_source}"
    given = plan.request.args.kv_cache_memory_bytes
    if given is not None:
        yield f"--kv-cache-memory-bytes {given:,} is the pool, whatever else there is"
    else:
        product = f"ceil({memory.total:,} x {settings.gpu_memory_utilization})"
        yield f"budget {product} = {memory.budget:,} B ({format_gib(memory.budget)})"
        yield f"- weights {memory.weights:,} B"
    for name in BUDGET_ROWS:
        estimate = plan.estimates[name]
        if estimate.likely or estimate.high:
            outside = given is not None or (name == "cuda_graphs" and not settings.graphs_in_budget)
            sign = "(not subtracted)" if outside else "-"
            spread = (
                "" if estimate.low == estimate.high else f" ({estimate.low / GIB:.2f}-{estimate.high / GIB:.2f} GiB)"
            )
            origin = f"[{estimate.kind}: {estimate.source}]"
            yield f"{sign} {name} {estimate.likely:,} B{spread} = {estimate.formula} {origin}"
    yield f"= {plan.available:,} B for the KV cache ({format_gib(plan.available)})"
    yield from filter(None, (overheads.runner_rule(settings), overheads.sampler_rule(settings)))
    if plan.estimates["cuda_graphs"].high:
        yield f"CUDA graphs: {overheads.graphs_rule(settings)}; {overheads.NARROWER}"
    context = plan.estimates["context"]
    yield f"outside the budget: {context.formula} {format_gib(context.likely)} [{context.kind}: {context.source}]"


def _users(plan: Plan) -> Iterator[str]:
    if plan.request.release.engine == "sglang":
        yield from _sglang_users(plan)
        return
    capacity, answer = plan.capacity, plan.concurrency
    null_block = 1 if plan.settings.version.has("null_block") else 0
    need = (capacity.blocks_per_request + null_block) * capacity.bytes_per_block
    room, override = plan.available, plan.request.args.num_gpu_blocks_override
    if override is not None and plan.settings.version.has("override_before_fit"):
        room = override * capacity.bytes_per_block
    asked = f"({capacity.blocks_per_request:,} + 1 null block)" if null_block else f"{capacity.blocks_per_request:,}"
    yield (
        f"start-up check: {asked} x {capacity.bytes_per_block:,} B = {need:,} B {'<=' if plan.fits else '>'} "
        f"{room:,} B: {'starts' if plan.fits else f'refused, {plan.deficit:,} B short'}"
    )
    if plan.refusal is not None:
        yield f"does not start: {plan.refusal.text}"
    if not plan.fits:
        return
    if plan.request.args.num_gpu_blocks_override is None:
        yield f"blocks: floor({plan.available:,} / {capacity.bytes_per_block:,}) = {capacity.num_blocks:,}"
    else:
        yield f"blocks: --num-gpu-blocks-override {capacity.num_blocks:,}"
    yield f"concurrency: {capacity.num_blocks:,} / {capacity.blocks_per_request:,} = {answer.max:.4f}"
    if not plan.settings.version.has("tokens_by_concurrency"):
        shared = f"{capacity.num_blocks:,} // {len(plan.pool.groups)} groups"
        yield f"tokens: {shared} x {plan.pool.block_size:,} = {capacity.tokens:,}"
    else:
        yield f"tokens: floor({answer.max:.4f} x {capacity.max_model_len:,}) = {capacity.tokens:,}"
    load, pool = plan.request.load, answer.pool
    tokens = load.longest(capacity.max_model_len)
    in_flight = plan.pool.in_flight(tokens, capacity.max_model_len, plan.settings)
    usable = f"({capacity.num_blocks:,} - 1 null block - {plural(in_flight, 'block')} of a prompt in flight)"
    if load.lengths is not None:
        yield f"users of the lengths stated in {usable}{_shared_text(plan)}: {pool.users:,} [{pool.method}]"
    else:
        yield (
            f"users: {usable} / {plan.pool.held(tokens):,} blocks that a decoding request of {tokens:,} tokens holds"
            f"{_shared_text(plan)} = {pool.users:,}"
        )
    if answer.users < pool.users:
        yield f"users: at most --max-num-seqs {answer.max_num_seqs:,} of them run at once"


def _shared_text(plan: Plan) -> str:
    shared = plan.request.load.shared_prefix
    return f", {shared:,} tokens of prefix stored once" if shared else ""


# --- beside what people compute by hand -------------------------------------------------------------------------------


def folk_terms(plan: Plan) -> list[tuple[str, int]]:
    """From the folk KV budget to ours, step by step; the sum is `available`.

    Folk: 0.90 x the vendor's GB - parameters x 2 B - an activation peak measured with 1,024 sequences.
    """
    gpu, memory, estimates = plan.request.gpu, plan.memory, plan.estimates
    nominal = gpu.nominal_memory or memory.total
    folk_peak = int(FOLK_SAMPLER_BYTES * FOLK_SEQS * plan.request.spec.vocab_size)
    start = int(nominal * FOLK_UTILIZATION)
    seen = int(memory.total * FOLK_UTILIZATION)
    counted = [name for name in BUDGET_ROWS if name != "activations"]
    if not plan.settings.graphs_in_budget:
        counted.remove("cuda_graphs")
    return [
        ("folk", start - memory.weights - folk_peak),
        (f"the driver keeps some of the {format_gib(nominal)}: CUDA sees {format_gib(memory.total)}", seen - start),
        (f"utilisation {plan.settings.gpu_memory_utilization} in place of {FOLK_UTILIZATION}", memory.budget - seen),
        (_peak_step(plan), folk_peak - memory.activations),
        *(
            (f"{name.replace('_', ' ')}, left out", -estimates[name].likely)
            for name in counted
            if estimates[name].likely
        ),
    ]


def _peak_step(plan: Plan) -> str:
    """What sets our activation peak apart from the folk one, measured with FOLK_SEQS sequences in FOLK_RELEASE."""
    settings, release = plan.settings, plan.request.release
    if release.number == FOLK_RELEASE and settings.max_num_seqs == FOLK_SEQS:
        return f"activation peak as estimated here: {plan.estimates['activations'].formula}"
    return (
        f"activation peak of {settings.max_num_seqs:,} sequences and {settings.max_num_batched_tokens:,} batched "
        f"tokens in {release.label}, not of {FOLK_SEQS:,} sequences on an H100 in vllm@0.11"
    )


def _folk(plan: Plan) -> Iterator[str]:
    args = plan.request.args
    if args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None or not plan.fits:
        return
    if plan.request.release.engine != "vllm":  # the folk answer is about vLLM's budget
        return
    each = plan.bytes_per_request
    nominal = plan.request.gpu.nominal_memory or plan.memory.total
    running = 0
    for what, step in folk_terms(plan):
        running += step
        users = running / each
        if what == "folk":
            peak = FOLK_SAMPLER_BYTES * FOLK_SEQS * plan.request.spec.vocab_size / GIB
            yield (
                f"folk: {nominal / GIB:.0f} x {FOLK_UTILIZATION} - weights {plan.memory.weights / GIB:.2f} - "
                f"activations {peak:.2f} (an H100's) = {format_gib(running)}, / {format_gib(each)} = {users:.2f} users"
            )
        elif round(step / GIB, 2):
            yield f"{step / GIB:+.2f} GiB {what}: {format_gib(running)}, {users:.2f} users"


@dataclass(frozen=True, slots=True)
class Thumb:
    """The rule of thumb's answer: bytes are its own decimal GB. `users` may be negative, when nothing is left."""

    users: int
    needed: int


def rule_of_thumb(plan: Plan) -> Thumb:
    """What `weights + 1.2 GB per user + 5 GB` says of one rank, and what it asks for our number of users."""
    memory, ours = plan.memory, int(plan.concurrency.max)
    left = memory.total - memory.weights - THUMB_FIXED
    return Thumb(max(0, left // THUMB_USER), memory.weights + THUMB_USER * ours + THUMB_FIXED)


def _thumb(plan: Plan) -> Iterator[str]:
    memory, ours = plan.memory, int(plan.concurrency.max)
    thumb = rule_of_thumb(plan)
    yield (
        f"it says floor(({memory.total / GB:.2f} - {memory.weights / GB:.2f} - 5) / 1.2) = "
        f"{plural(thumb.users, 'user')}, we say {ours:,} at {plan.capacity.max_model_len:,} tokens: "
        f"{_off(thumb.users, ours)}"
    )
    if plan.fits:
        yield (
            f"a user takes {plan.bytes_per_request / GB:.2f} GB here, not 1.2; what is neither weights nor KV takes "
            f"{_overheads(plan) / GB:.2f} GB, not 5"
        )
        ours_needed = memory.weights + ours * plan.bytes_per_request + _overheads(plan)
        yield (
            f"for {ours:,} users it asks for {thumb.needed / GB:.2f} GB, we for {ours_needed / GB:.2f} GB "
            f"({100 * (thumb.needed - ours_needed) / ours_needed:+.0f} %)"
        )


def _overheads(plan: Plan) -> int:
    keeps_share = terms_of(plan.request.release.engine).keeps_share
    kept_back = max(0, plan.memory.outside_budget) if keeps_share else 0
    return sum(estimate.likely for estimate in plan.estimates.values()) + kept_back


def _off(theirs: int, ours: int) -> str:
    if not ours or not theirs:
        return "equal" if theirs == ours else "one of the two says that nobody fits"
    if theirs == ours:
        return "equal"
    return f"{theirs / ours:.1f}x too many" if theirs > ours else f"{ours / theirs:.1f}x too few"
