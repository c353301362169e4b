"""A vLLM server's logged figures, row by row, compared with its plan, and why they differ.

From the inputs alone: memory use and the remaining pool. And from the pool's bytes as logged: blocks, tokens and
concurrency, which must then match to the last logged digit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.units import GIB
from kvplan.servers.logs.log import Case, Given, Reading, ServerLog
from kvplan.servers.logs.measurement import WHERE, ComponentRow, Figure, Measurement, Prediction, reconcile
from kvplan.servers.logs.rows import ENCODER, POOL, counted, difference, missing, sized, smallest_kv
from kvplan.servers.plans.plan import Kind, Plan, Request
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.vllm import adapters, offload, overheads
from kvplan.servers.vllm.log_flags import is_drafting
from kvplan.servers.words.arguments import Settings

CONSUMED: Final = "logged as consumed memory, less the weights; holds the buffers allocated after loading"
IN_BUDGET: Final = ("weights", "activations", "non_torch")

# --- from the inputs alone --------------------------------------------------------------------------------------------


def rows(case: Case) -> tuple[ComponentRow, ...]:
    """Memory use and the remaining pool, from the inputs alone."""
    log, plan = case.log, case.planned(case.request)
    measured = measurement(log, plan)
    by_name = {row.component: row for row in reconcile(predictions(case, plan, measured), measured)}
    by_name["weights"] = replace(by_name["weights"], why=_weights_why(log, plan, by_name["weights"]))
    kv = by_name["kv_cache"]
    if kv.is_exact is False and case.request.args.kv_cache_memory_bytes is None:
        by_name["kv_cache"] = replace(kv, why=_budget_why(log, plan, list(by_name.values()), kv))
    for name in POOL:
        if by_name[name].is_exact is False and kv.error:
            by_name[name] = replace(by_name[name], why="follows kv_cache")
    return tuple(by_name.values())


def loaded_weights(request: Request, settings: Settings, stage: int) -> int:
    """Bytes in a server's "Model loading took": weights, the buffers that come with them, and adapter slots.

    Source for adapter slots: vLLM 0.8.5 worker/model_runner.py and v1/worker/gpu_model_runner.py, 0.28 and 0.33
    v1/worker/gpu/model_runner.py, whose load_model allocates the slots before it takes the difference; of weights on
    the host (0.32 model_executor/offloader/base.py and uva.py): layers are moved there as they
    are built, and buffers to fetch them into follow after the line (load_model, post_init).
    """
    weights = sum(rank_weights(request, stage).values())
    moved = offload.offloaded(request, stage)
    if moved is not None:
        weights -= moved.size
    slots = 0
    if request.release.has("v1"):
        slots = adapters.lora(request.spec, settings, request.args, stage).likely
    return weights + slots + overheads.loaded(request.spec, settings, request.args, own_layout(request, stage)).total


def activation_peak(plan: Plan) -> int:
    """Bytes that a log of the plan's release reports as the activation peak."""
    release, peak = plan.request.release, plan.estimates["activations"].likely
    if not release.has("consumed_memory"):
        own = overheads.loaded(
            plan.request.spec, plan.settings, plan.request.args, own_layout(plan.request, plan.stage)
        )
        return peak + plan.estimates["buffers"].likely - own.total
    return peak + (plan.estimates["cuda_graphs"].likely if plan.settings.graphs_in_budget else 0)


def measurement(log: ServerLog, plan: Plan | None = None) -> Measurement:
    """Logged memory use of a server, and the remaining pool."""
    parts = (_weights(log, plan), _activations(log, plan), _non_torch(log), _graphs(log))
    kv_cache = sized("kv_cache", smallest_kv(log), log.called)
    return Measurement(log.called, (*parts, *_encoder(log), kv_cache, *pool_figures(log)))


def predictions(case: Case, plan: Plan, measured: Measurement) -> dict[str, Prediction]:
    """The plan's prediction for each component, counted in the same way as measured."""
    request, estimates = plan.request, plan.estimates
    weights = max(loaded_weights(request, plan.settings, i) for i in range(request.args.pipeline_parallel_size))
    non_torch = estimates["non_torch"].likely
    if measured["non_torch"].note == CONSUMED:
        own = overheads.loaded(request.spec, plan.settings, request.args, own_layout(request, plan.stage))
        non_torch += estimates["buffers"].likely - own.total
    kind: Kind = "exact" if request.args.kv_cache_memory_bytes is not None else "calibrated"
    return {
        "weights": Prediction(weights, "formula" if request.weights_bytes is not None else "exact"),
        "activations": Prediction(activation_peak(plan), estimates["activations"].kind),
        "non_torch": Prediction(non_torch, estimates["non_torch"].kind),
        "cuda_graphs": Prediction(estimates["cuda_graphs"].likely, estimates["cuda_graphs"].kind),
        **_encoder_prediction(case.log, plan),
        "kv_cache": Prediction(plan.available, kind),
        **pool_predictions(case, plan, measured, kind),
    }


def _weights(log: ServerLog, plan: Plan | None) -> Figure:
    by_rank = log.by_rank("weights")
    if not by_rank or plan is None or plan.request.args.pipeline_parallel_size == 1:
        return sized("weights", next(iter(by_rank.values()), None), log.called)
    return sized("weights", max(by_rank.values(), key=lambda reading: reading.value), log.called)


def _weights_why(log: ServerLog, plan: Plan, row: ComponentRow) -> str:
    if row.is_exact is not False:
        return row.why
    if row.error is not None and row.error < 0 and is_drafting(log) and plan.request.draft is None:
        return "the draft model that speculates is loaded too"
    device_lost = plan.request.gpu.vendor == "amd" and not plan.request.release.has("rocm_weights_allocated")
    if device_lost and row.error is not None and row.error < 0:
        return "on AMD GPUs this release logs what the device lost, modules and workspaces of libraries included"
    if plan.request.spec.multimodal and row.error is not None and row.error > 0:
        return "a server without image or audio inputs does not load their towers"
    return ""


def _deciding(log: ServerLog, fact: str) -> Reading | None:
    """The figure of the rank with the smallest pool, else the first."""
    kv = log.least("available_kv")
    by_rank = log.by_rank(fact)
    return by_rank.get(kv.rank) if kv is not None and kv.rank in by_rank else log.first(fact)


def _activations(log: ServerLog, plan: Plan | None) -> Figure:
    logged, peak, weights = (_deciding(log, fact) for fact in ("activations", "peak_torch", "weights"))
    if logged is None and peak is not None and weights is not None:
        return difference("activations", peak, weights, "logged as the peak of torch, less the weights")
    consumed = plan is not None and plan.request.release.has("consumed_memory")
    with_graphs = consumed and plan is not None and plan.settings.graphs_in_budget
    return sized("activations", logged, log.called, "includes the estimate of CUDA graphs" if with_graphs else "")


def _non_torch(log: ServerLog) -> Figure:
    logged, consumed, weights = (_deciding(log, fact) for fact in ("non_torch", "consumed", "weights"))
    if logged is None and consumed is not None and weights is not None:
        return difference("non_torch", consumed, weights, CONSUMED)
    return sized("non_torch", logged, log.called)


def _graphs(log: ServerLog) -> Figure:
    actual, estimated = log.first("cuda_graphs"), log.first("cuda_graphs_estimated")
    if actual is None:
        return sized("cuda_graphs", estimated, log.called, "logged as the server's own estimate")
    note = "" if estimated is None else f"the server itself estimated {estimated.text} GiB"
    if actual.value < 0:
        note = "free memory grew while graphs were captured: the figure does not cover them"
    return sized("cuda_graphs", actual, log.called, note)


def _encoder(log: ServerLog) -> tuple[Figure, ...]:
    """The encoder's budget, if one was logged."""
    tokens, items = log.first("encoder_tokens"), log.first("encoder_items")
    if tokens is None:
        return ()
    figure = counted(ENCODER, tokens.count, log.called)
    return (figure if items is None else replace(figure, note=f"profiled with {items.count:,} of the largest items"),)


def _encoder_prediction(log: ServerLog, plan: Plan) -> dict[str, Prediction]:
    if log.first("encoder_tokens") is None:
        return {}
    budget = plan.encoder
    if budget is None:
        return {ENCODER: Prediction(None, why="the processor's settings are not known")}
    why = f"predicted with {budget.items_per_batch:,} {budget.profiled} items, by the published processor"
    return {ENCODER: Prediction(min(budget.compute_tokens, budget.cache_tokens), "exact", why=why)}


def _budget_why(log: ServerLog, plan: Plan, parts: Sequence[ComponentRow], row: ComponentRow) -> str:
    """Say which part of the budget causes the pool's error."""
    in_budget = [part for part in parts if part.component in IN_BUDGET and part.error is not None]
    reasons = []
    if in_budget:
        worst = max(in_budget, key=lambda part: abs(part.error or 0))
        assert row.error is not None
        if worst.error is not None and abs(worst.error) >= 0.4 * abs(row.error):
            reasons.append(f"mostly {worst.component} ({-worst.error / GIB:+.2f} GiB here)")
    estimated = log.first("cuda_graphs_estimated")
    if plan.settings.graphs_in_budget and estimated is not None:
        reasons.append(f"the server took its graph estimate of {estimated.text} GiB from the budget")
    activations = next((part for part in parts if part.component == "activations"), None)
    if (
        plan.request.spec.multimodal
        and activations is not None
        and activations.measured is None
        and (row.error or 0) > 0
    ):
        reasons.append("the towers' peak on images or video can be GiB above the plan's; the log does not give it")
    step = plan.request.gpu.total_memory / 200
    by_digits = "gpu_memory_utilization" not in log.flags and log.first("budget") is None
    if by_digits and log.first("utilization") is not None and not reasons:
        reasons.append(f"the logged utilization has two digits: {step / GIB:.2f} GiB either way")
    return "; ".join(reasons)


def pool_figures(log: ServerLog, left_out: str = "") -> tuple[Figure, ...]:
    """Logged blocks, tokens and concurrency."""
    blocks, tokens = log.least("num_blocks"), log.least("kv_tokens") or log.least("kv_tokens_refused")
    concurrency = log.least("max_concurrency")
    figures = {
        "blocks": (None if blocks is None else blocks.count, 0.0),
        "tokens": (None if tokens is None else tokens.count, 0.0),
        "concurrency": (None, 0.0) if concurrency is None else (concurrency.value, concurrency.half_digit),
    }
    return tuple(counted(name, value, log.called, half) for name, (value, half) in figures.items() if name != left_out)


def _pool(plan: Plan) -> dict[str, float]:
    capacity = plan.capacity
    return {"blocks": capacity.num_blocks, "tokens": capacity.tokens, "concurrency": capacity.max_concurrency}


def pool_predictions(case: Case, plan: Plan, measured: Measurement, kind: Kind) -> dict[str, Prediction]:
    """Blocks, tokens and concurrency of a plan; no concurrency if the log's is for other tokens per request."""
    predicted = {name: Prediction(figure, kind) for name, figure in _pool(plan).items()}
    why = _context_why(case, plan)
    if why and measured["concurrency"].value is not None:
        predicted["concurrency"] = Prediction(None, why=why)
    return predicted


def _context_why(case: Case, plan: Plan) -> str:
    logged, context = case.log.first("concurrency_context"), plan.capacity.max_model_len
    if logged is not None and logged.count != context:
        return f"logged for {logged.count:,} tokens per request, predicted for {context:,}"
    if logged is not None or case.context == "known":
        return ""
    if case.context == "derived":
        return "the context is derived from it; add --ctx"
    return "the context is not known; add --ctx"


# --- given the pool ---------------------------------------------------------------------------------------------------


def given(case: Case) -> Given:
    kv, blocks = smallest_kv(case.log), case.log.least("num_blocks")
    rows_of_pool = _given_rows(case)
    if kv is not None:
        return Given(rows_of_pool, f"{kv.text} GiB")
    return Given(rows_of_pool, "" if blocks is None else f"{blocks.count:,} blocks")


def _given_rows(case: Case) -> tuple[ComponentRow, ...]:
    """Blocks, tokens and concurrency predicted from the logged pool bytes; else, from the logged blocks, the
    last two.
    """
    log, request = case.log, case.request
    kv, blocks = smallest_kv(log), log.least("num_blocks")
    if kv is not None and kv.size > 0:
        sizes = [kv.size + spread for spread in (-kv.rounding, 0, kv.rounding)]
        args = [
            replace(request.args, kv_cache_memory_bytes=max(1, size), num_gpu_blocks_override=None) for size in sizes
        ]
        left_out = ""
    elif blocks is not None and blocks.count > 0:
        args = [replace(request.args, num_gpu_blocks_override=blocks.count)] * 3
        left_out = "blocks"
    else:
        nothing = f"neither the pool's bytes nor its blocks are {WHERE[log.called]}"
        why = "the pool has no room" if kv is not None else nothing
        return reconcile({}, Measurement(log.called, tuple(missing(name, why) for name in POOL)))
    low, middle, high = (case.planned(replace(request, args=each)) for each in args)
    measured = Measurement(log.called, pool_figures(log, left_out))
    kind: Kind = "exact" if request.release.is_compared else "formula"
    predicted = pool_predictions(case, middle, measured, kind)
    for figure in measured.figures:
        prediction = predicted[figure.component]
        if figure.value is not None and prediction.value is not None:
            least, most = (_pool(end)[figure.component] for end in (low, high))
            predicted[figure.component] = replace(prediction, low=least, high=most)
    return tuple(
        replace(row, why=_pool_why(log, middle, row)) if row.is_exact is False else row
        for row in reconcile(predicted, measured)
    )


def _pool_why(log: ServerLog, plan: Plan, row: ComponentRow) -> str:
    """The known reason that fully explains a pool's difference, or an empty string."""
    for factor, why in _known_factors(log, plan):
        if _fits(row, factor):
            return why
    block, own = log.first("attention_block_size"), plan.pool.block_size
    if block is not None and block.count != own:
        return (
            f"the server's attention block is {block.count:,} tokens, here {own:,}: keys and values, or states, have "
            "another dtype there; add --kv-cache-dtype or --mamba-ssm-cache-dtype"
        )
    args = plan.request.args
    is_little_more = row.relative is not None and 0 < row.relative < 0.05
    if args.tensor_parallel_size > 1 and is_little_more and len(log.by_rank("available_kv")) < 2:
        return "the smallest rank decides; the log quotes the bytes of one rank"
    return ""


def _known_factors(log: ServerLog, plan: Plan) -> Iterable[tuple[float, str]]:
    """(logged / predicted, reason) for known differences in bytes per token."""
    layers = plan.request.spec.num_layers
    padding = log.first("padding_layers")
    if padding is not None and 0 < padding.count < 1000:
        yield layers / (layers + padding.count), f"the server adds {padding.count} padding layers to {layers}"
    if is_drafting(log) and plan.request.draft is None:
        yield layers / (layers + 1), f"the draft (MTP) layer keeps KV too: {layers + 1} layers, not {layers}"
    parallel = log.first("context_parallel")
    if parallel is not None and plan.request.args.decode_context_parallel_size == 1:
        yield float(parallel.count), f"multiplied by the {parallel.count} ranks of decode context parallelism"


def _fits(row: ComponentRow, factor: float) -> bool:
    """True if the factor explains the difference up to one block of either."""
    assert row.low is not None
    assert row.high is not None
    assert row.measured is not None
    return row.low * factor * 0.998 - row.rounding <= row.measured <= row.high * factor * 1.002 + row.rounding
