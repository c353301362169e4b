"""Every formula behind a plan with its numbers, in reading order, for --explain."""

from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from kvplan.core.records import dataclass
from kvplan.core.units import GB, format_gib, format_size, plural
from kvplan.models import spec as kinds
from kvplan.models.quant import scheme_name
from kvplan.planning.diff import LABELS
from kvplan.planning.plan import NOT_MODELED, host_rows, stage_of, statements
from kvplan.planning.users import request_blocks
from kvplan.servers.base import Explanation, abilities_of, server_of
from kvplan.servers.base import Section as Section
from kvplan.servers.plans.plan import MemoryBreakdown, Plan
from kvplan.servers.plans.pool import KVGroup, KVSpec, charged_blocks
from kvplan.sizing.layout import cell_bytes, local_kv_heads, state_bytes, token_bytes
from kvplan.sizing.weights import num_params

# A common rule of thumb: weights + 1.2 GB per user + 5 GB.
THUMB_USER = 12 * GB // 10
THUMB_FIXED = 5 * GB


def explain(plan: Plan) -> list[Section]:
    """Show the plan's arithmetic from bytes per token to users, compared with two common estimates."""
    own = server_of(plan.request.release.engine).explain(plan)
    if plan.slots is not None:
        return [*_slots(plan, own), *_sources(plan)]
    sections = [
        Section("Bytes per token and rank", tuple(_per_token(plan))),
        Section("Blocks", tuple(_blocks(plan, own))),
        Section("Weights per rank", tuple(_weights(plan))),
        Section("From total to KV cache", own.budget),
        Section("Users", own.users),
        *([Section("Memory of each stage", tuple(_places(plan)))] if len(plan.places) > 1 else []),
        *own.more,
        Section("Host memory (modeled; not the GPU's)", tuple(_host(plan))),
    ]
    if notes := plan.request.spec.notes:
        sections.append(Section("Values derived from config.json", notes))
    if changes := tuple(plan.request.release.lacks()):
        lines = tuple(f"{_release(change.since)}: {change.what} [{change.evidence}]" for change in changes)
        sections.append(Section(f"Changes in releases after {plan.request.release.label}", lines))
    sections += _sources(plan)
    if plan.request.spec.is_encoder:
        return sections
    title = "Compared with 'weights + 1.2 GB per user + 5 GB'"
    return [*sections, Section(title, tuple(_thumb(plan)))]


def _sources(plan: Plan) -> list[Section]:
    """Where facts and rules come from, if that is to be said."""
    assumptions = statements(plan)
    texts = tuple(f"{name}: {source}" for name, (_, source) in assumptions.items())
    return [Section("Sources of the data and rules", texts)] if texts else []


def _slots(plan: Plan, own: Explanation) -> list[Section]:
    """The arithmetic of a server that places layers and allocates its cache whole."""
    token = f"{plan.bytes_per_token:,} B in the layers that keep every token, as {plan.settings.kv_dtype}"
    states = [f"{plan.state_bytes:,} B of states in each slot"] if plan.state_bytes else []
    weights = tuple(f"{group}: {format_gib(size)}" for group, size in plan.weight_groups.items())
    return [
        Section("Bytes per token", (token, *states)),
        Section("Cache", (own.block_size, *own.pools)),
        Section("Weights of the fullest GPU", weights),
        Section("Places", own.budget),
        Section("Users", own.users),
        Section("Host memory (modeled; not the GPU's)", tuple(_host(plan))),
    ]


def _places(plan: Plan) -> Iterator[str]:
    for number, place in enumerate(plan.places):
        memory = place.memory
        rows = ", ".join(
            f"{LABELS[f'memory.{name}']} {format_gib(getattr(memory, name))}"
            for name in MemoryBreakdown.ROWS
            if getattr(memory, name) or name == "unused"
        )
        decides = " (decides)" if number == plan.stage else ""
        ranks = "1 GPU" if place.ranks == 1 else f"{place.ranks} GPUs"
        yield f"stage {number + 1} of {len(plan.places)}, {ranks}{decides}: {rows}"


def _host(plan: Plan) -> Iterator[str]:
    for row in host_rows(plan):
        compared = f"compared with {row.compared}" if row.compared else "not compared with anything"
        yield f"{row.name}: {format_gib(row.size)} per {row.per}: {row.formula} [{row.source}; {compared}]"
    yield f"not modeled: {NOT_MODELED}"


def _release(number: tuple[int, ...]) -> str:
    return f"from {number[0]}.{number[1]} on"


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


def _cache_line(plan: Plan, cache: kinds.LayerCache, count: int) -> str:
    args, dtype = plan.request.args, plan.settings.kv_dtype
    tp = args.tensor_parallel_size
    each = token_bytes(cache, dtype, tp)
    tail = f"= {each:,} B a layer, {count * each:,} B in all"
    match cache:
        case kinds.FullAttention(heads, k, v):
            return f"{count} x full attention: {_heads(heads, k, v, dtype, tp)} {tail}"
        case kinds.SlidingWindow(heads, k, v, window):
            return f"{count} x sliding window of {window:,} tokens: {_heads(heads, k, v, dtype, tp)} {tail}"
        case kinds.ChunkedAttention(heads, k, v, chunk):
            return f"{count} x chunks of {chunk:,} tokens: {_heads(heads, k, v, dtype, tp)} {tail}"
        case kinds.CrossAttention(heads, k, v):
            return f"{count} x cross attention (the encoder's tokens): {_heads(heads, k, v, dtype, tp)} {tail}"
        case kinds.LatentAttention(latent, rope):
            return f"{count} x latent (MLA), whole on every rank: {latent} latent + {rope} rope in {dtype} {tail}"
        case kinds.SparseIndexer(dim, pool, plain):
            shared = f", one key per {pool} tokens" if pool > 1 else ""
            stored = f"{dim} in bfloat16" if plain else f"{dim} fp8 + one fp32 scale per 128"
            return f"{count} x sparse indexer: {stored}{shared} {tail}"
        case kinds.WindowLatent(dim, rope, window):
            return f"{count} x latent of the last {window:,} tokens: {dim} wide, {rope} of it rope {tail}"
        case kinds.CompressedLatent(dim, rope, ratio, index):
            keys = f", {index} of index keys" if index else ""
            return f"{count} x latent of {dim} ({rope} of it rope{keys}) per {ratio} tokens {tail}"
        case kinds.KeyIndex(dim):
            return f"{count} x index keys: {dim} x 2 B {tail}"
        case kinds.RecurrentState():
            size = state_bytes(
                cache,
                plan.settings.dtype,
                tp,
                spec_tokens=args.num_speculative_tokens,
                ssm_dtype=args.mamba_ssm_cache_dtype,
                conv_dtype=args.mamba_cache_dtype,
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
    """Bytes of K and V of one head and token, spelled out if every element has the same size."""
    size = cell_bytes(dtype, k, v)
    each, rest = divmod(size, k + v)
    return f"({k} K + {v} V) x {each} B" if rest == 0 else f"{size} B ({k} K + {v} V in {dtype}, scales included)"


# --- blocks -----------------------------------------------------------------------------------------------------------


def _blocks(plan: Plan, own: Explanation) -> Iterator[str]:
    pool, capacity = plan.pool, plan.capacity
    yield own.block_size
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(pool.groups, 1):
        numbers.setdefault(_group_text(plan, group), []).append(number)
    for text, same in numbers.items():
        yield f"{_numbered(same)}: {text}"
    yield from own.pools
    yield (
        f"one request of {capacity.max_model_len:,} tokens: {capacity.blocks_per_request:,} blocks x "
        f"{capacity.bytes_per_block:,} B = {plan.bytes_per_request:,} B ({format_size(plan.bytes_per_request)})"
    )
    if (taken := request_blocks(plan)) is not None:
        yield (
            f"of these, whatever its length: {taken.fixed:,} of states, rings and an encoder's tokens and up to "
            f"{taken.windows:,} of windows and chunks before its first token; at most {taken.decoding:,} while decoding"
        )


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
    """Blocks that a request needs in a group, by the rule of its most demanding layer."""
    context, flight, dcp = plan.capacity.max_model_len, plan.settings.in_flight_tokens, plan.pool.dcp
    blocks = group.charged(context, plan.settings, dcp)
    spec = max(group.specs, key=lambda each: charged_blocks(each, context, plan.settings, dcp))
    match spec.kind:
        case "full" | "latent":
            share_of_context = f"{context:,} / {dcp} ranks" if dcp > 1 else f"{context:,}"
            rule = f"ceil({share_of_context} / {spec.block_size:,})"
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
    return f"a request takes {rule} = {blocks:,}"


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
        yield f"while loading {peak:,} B ({format_gib(peak)}): quantized once it is there"


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


# --- compared with estimates by hand ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thumb:
    """Answer of the rule of thumb, in its decimal GB. `users` is negative if no memory is left."""

    users: int
    needed: int


def rule_of_thumb(plan: Plan) -> Thumb:
    """Apply `weights + 1.2 GB per user + 5 GB` to one rank, and to kvplan's number of users."""
    memory, ours = plan.memory, int(plan.concurrency.max)
    left = memory.total - memory.weights - THUMB_FIXED
    return Thumb(max(0, left // THUMB_USER), memory.weights + THUMB_USER * ours + THUMB_FIXED)


def _thumb(plan: Plan) -> Iterator[str]:
    memory, ours = plan.memory, int(plan.concurrency.max)
    thumb = rule_of_thumb(plan)
    yield (
        f"that rule gives floor(({memory.total / GB:.2f} - {memory.weights / GB:.2f} - 5) / 1.2) = "
        f"{plural(thumb.users, 'user')}, kvplan gives {ours:,} at {plan.capacity.max_model_len:,} tokens: "
        f"{_off(thumb.users, ours)}"
    )
    if plan.fits:
        yield (
            f"a user needs {plan.bytes_per_request / GB:.2f} GB here, not 1.2; everything but weights and KV needs "
            f"{_overheads(plan) / GB:.2f} GB, not 5"
        )
        ours_needed = memory.weights + ours * plan.bytes_per_request + _overheads(plan)
        yield (
            f"for {ours:,} users that rule needs {thumb.needed / GB:.2f} GB, kvplan {ours_needed / GB:.2f} GB "
            f"({100 * (thumb.needed - ours_needed) / ours_needed:+.0f}%)"
        )


def _overheads(plan: Plan) -> int:
    keeps_share = abilities_of(plan.request.release.engine).keeps_share
    kept_back = max(0, plan.memory.outside_budget) if keeps_share else 0
    return sum(estimate.likely for estimate in plan.estimates.values()) + kept_back


def _off(theirs: int, ours: int) -> str:
    if not ours or not theirs:
        return "equal" if theirs == ours else "one of the two fits no user"
    if theirs == ours:
        return "equal"
    return f"{theirs / ours:.1f}x too many" if theirs > ours else f"{ours / theirs:.1f}x too few"
