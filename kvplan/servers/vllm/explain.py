"""vLLM's part of --explain: its blocks, its budget, its start-up check, and the usual estimate by hand."""

from collections.abc import Iterator

from kvplan.core.units import GIB, format_gib, plural
from kvplan.hardware.gpu import GpuSpec
from kvplan.servers.base import Explanation, Section
from kvplan.servers.plans.plan import BUDGET_ROWS, Plan
from kvplan.servers.releases import number_text
from kvplan.servers.vllm import encoder, items, overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import Settings

# Terms of the usual estimate: 0.90 was vLLM's default until 0.18, and the activation peak was measured on an H100,
# whose default is 1,024 sequences at 38.4 B per sequence and vocabulary entry (vLLM 0.11).
FOLK_UTILIZATION = 0.90
FOLK_SEQS = 1024
FOLK_SAMPLER_BYTES = 38.4


def explain(plan: Plan) -> Explanation:
    if plan.request.spec.is_encoder:
        step, context = plan.settings.max_num_batched_tokens, plan.capacity.max_model_len
        tokens = "no blocks: nothing is kept of a request after its step"
        users = f"requests of {context:,} tokens in a step of {step:,}: {plan.concurrency.users:,}"
        return Explanation(tokens, (), tuple(_budget(plan)), (users,))
    folk = tuple(_folk(plan))
    more = (
        (Section("Why this differs from the rule of thumb (memory x 0.9 - weights - activations)", folk),)
        if folk
        else ()
    )
    return Explanation(_block_size(plan), tuple(_pools(plan)), tuple(_budget(plan)), tuple(_users(plan)), more)


def _block_size(plan: Plan) -> str:
    spec, settings, size = plan.request.spec, plan.settings, plan.pool.block_size
    stated = plan.request.args.block_size
    if spec.has_states:
        return f"block size {size:,}: raised until a page of attention covers the page of a state"
    if stated is not None:
        return f"block size {size:,}: as set"
    smallest = vllm.default_block_size(spec, settings.kv_dtype, plan.request.gpu.sm, ahead=plan.pool.how.ahead)
    if smallest != size:
        return f"block size {size:,}: {smallest}, raised so that the pages of all layers are equal"
    return f"block size {size:,}: the smallest that the attention backend takes on this GPU, at least 16"


def _pools(plan: Plan) -> Iterator[str]:
    if len(plan.pool.groups) > 1:
        yield (
            "groups share one set of block ids: a block costs the widest group's bytes, "
            f"{plan.capacity.bytes_per_block:,} B, and a request takes the sum, "
            f"{plan.capacity.blocks_per_request:,} blocks"
        )


def _budget(plan: Plan) -> Iterator[str]:
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
    yield from _encoder(plan)
    yield from filter(None, (runner_rule(settings), sampler_rule(settings, plan.request.gpu)))
    if plan.estimates["cuda_graphs"].high:
        yield f"CUDA graphs: {graphs_rule(settings)}; {overheads.NARROWER}"
    context = plan.estimates["context"]
    yield f"outside the budget: {context.formula} {format_gib(context.likely)} [{context.kind}: {context.source}]"


def _encoder(plan: Plan) -> Iterator[str]:
    request, tokens = plan.request, plan.settings.max_num_batched_tokens
    budget = encoder.budget_of(request.spec, plan.settings, request.args, request.release)
    if budget is None:
        return
    largest, batch, seqs = budget.item.tokens, budget.batch, plan.settings.max_num_seqs
    yield (
        f"encoder budget max({tokens:,} tokens a step, {largest:,} of the largest {budget.profiled}) = "
        f"{budget.tokens:,} tokens; profiled with min({budget.tokens:,} / {largest:,}, {seqs:,} sequences x "
        f"{budget.per_prompt[budget.profiled]:,} a prompt) = {batch:,} [exact: {items.SOURCE}]"
    )


def _users(plan: Plan) -> Iterator[str]:
    capacity, answer = plan.capacity, plan.concurrency
    null_block = 1 if plan.settings.version.has("null_block") else 0
    need = (capacity.blocks_per_request + null_block) * capacity.bytes_per_block
    room, override = plan.available, plan.request.args.num_gpu_blocks_override
    if override is not None and plan.settings.version.has("override_before_fit"):
        room = override * capacity.bytes_per_block
    needed_blocks = (
        f"({capacity.blocks_per_request:,} + 1 null block)" if null_block else f"{capacity.blocks_per_request:,}"
    )
    yield (
        f"start-up check: {needed_blocks} x {capacity.bytes_per_block:,} B = {need:,} B {'<=' if plan.fits else '>'} "
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
    usable = f"({capacity.num_blocks:,} - 1 null block - {plural(in_flight, 'block')} for one prefill in flight)"
    if load.lengths is not None:
        yield f"users of the lengths stated in {usable}{_shared_text(plan)}: {pool.users:,} [{pool.method}]"
    else:
        yield (
            f"users: {usable} / {plan.pool.allocated_blocks(tokens):,} blocks that a decoding request of {tokens:,} "
            f"tokens holds{_shared_text(plan)} = {pool.users:,}"
        )
    if answer.users < pool.users:
        yield f"users: at most --max-num-seqs {answer.max_num_seqs:,} of them run at once"


def _shared_text(plan: Plan) -> str:
    shared = plan.request.load.shared_prefix
    return f", {shared:,} tokens of prefix stored once" if shared else ""


def folk_terms(plan: Plan) -> list[tuple[str, int]]:
    """Steps from the usual estimate of the KV budget to ours; they add up to `available`.

    Usual estimate: 0.90 x the vendor's GB - parameters x 2 B - an activation peak measured with 1,024 sequences.
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
        (f"utilization {plan.settings.gpu_memory_utilization} instead of {FOLK_UTILIZATION}", memory.budget - seen),
        (_peak_step(plan), folk_peak - memory.activations),
        *(
            (f"{name.replace('_', ' ')}, left out", -estimates[name].likely)
            for name in counted
            if estimates[name].likely
        ),
    ]


def _peak_step(plan: Plan) -> str:
    """Explain why our activation peak differs from the usual one, measured with FOLK_SEQS sequences in vLLM 0.11."""
    settings, release = plan.settings, plan.request.release
    is_same = release.has("v1_only") and not release.has("sampler_on_request")
    if is_same and settings.max_num_seqs == FOLK_SEQS:
        return f"activation peak as estimated here: {plan.estimates['activations'].formula}"
    return (
        f"activation peak of {settings.max_num_seqs:,} sequences and {settings.max_num_batched_tokens:,} batched "
        f"tokens in {release.label}, not of {FOLK_SEQS:,} sequences on an H100 in vllm@0.11"
    )


def _folk(plan: Plan) -> Iterator[str]:
    args = plan.request.args
    if args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None or not plan.fits:
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
                f"rule of thumb: {nominal / GIB:.0f} x {FOLK_UTILIZATION} - weights {plan.memory.weights / GIB:.2f} - "
                f"activations {peak:.2f} (an H100's) = {format_gib(running)}, / {format_gib(each)} = {users:.2f} users"
            )
        elif round(step / GIB, 2):
            yield f"{step / GIB:+.2f} GiB {what}: {format_gib(running)}, {users:.2f} users"


def graphs_rule(settings: Settings) -> str:
    """Say how the planned server determines its bytes for CUDA graphs.

    Source: vLLM 0.20 to 0.33 v1/worker/gpu_model_runner.py and v1/worker/gpu/cudagraph_utils.py.
    """
    if not settings.graphs_in_budget:
        return "the server does not reserve memory for graphs: they use what is above --gpu-memory-utilization"
    if settings.runner_v2:
        return (
            "model runner V2 captures all piecewise graphs and the two largest full ones, and takes the second's "
            "bytes, at least 1 MiB, for each of the other full ones"
        )
    return (
        "model runner V1 captures the two largest graphs of each kind, and takes the second's bytes, at least 1 MiB, "
        "for each of the others"
    )


def sampler_rule(settings: Settings, gpu: GpuSpec) -> str | None:
    """Say which sampler a plan uses and how to choose another, or None if a release has only one."""
    release = settings.version
    if settings.runner_v2 and release.has("sampler_warm_up"):
        if overheads.samples_with_flashinfer(release, gpu):
            other = f"--engine vllm@{number_text(release.number)}+no-flashinfer"
            return (
                f"sampling with FlashInfer, as the server chooses on this GPU; VLLM_USE_FLASHINFER_SAMPLER=0: {other}"
            )
        return "sampling with Triton's top-k, as set, or on a GPU that FlashInfer does not sample on"
    if settings.runner_v2 or settings.first_engine or not release.has("v1") or release.has("lean_sampler"):
        return None
    name = f"vllm@{number_text(release.number)}"
    match release.flashinfer:
        case True:
            return f"sampling with FlashInfer, as set; without: --engine {name}+no-flashinfer"
        case False:
            return f"sampling sorts, as set; with FlashInfer: --engine {name}+flashinfer"
        case None:
            return (
                "sampling sorts, as after `pip install vllm`, which does not install FlashInfer; container images "
                f'of 0.8 to 0.11 have it (the log says "Using FlashInfer for top-p & top-k sampling"): '
                f"--engine {name}+flashinfer"
            )


def runner_rule(settings: Settings) -> str | None:
    """Say which model runner a plan uses and how to choose another, or None if a release has only one."""
    release = settings.version
    if not release.has("runner_v2_by_name"):
        return None
    this, other = ("V2", "v1") if settings.runner_v2 else ("V1", "v2")
    why = "as this release chooses for the model" if release.runner_v2 is None else "as set"
    name = f"vllm@{number_text(release.number)}"
    return f"model runner {this}, {why}; the other (VLLM_USE_V2_MODEL_RUNNER): --engine {name}+runner-{other}"
