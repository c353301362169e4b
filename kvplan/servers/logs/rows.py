"""Names and units of a server's figures."""

from typing import Final, Literal

from kvplan.servers.logs.log import Case, Reading, ServerLog
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, Source, not_in, reconcile

Unit = Literal["bytes", "blocks", "tokens", "requests"]
PARTS: Final = ("weights", "activations", "non_torch", "cuda_graphs", "kv_cache")
POOL: Final = ("blocks", "tokens", "concurrency")
RUNNING: Final = "max_running_requests"  # logged only by SGLang
ENCODER: Final = "encoder_tokens"  # only in vLLM, if it encodes images, videos or audio
UNITS: Final[dict[str, Unit]] = {
    "blocks": "blocks", "tokens": "tokens", "concurrency": "requests", RUNNING: "requests", ENCODER: "tokens"
}  # fmt: skip


def sized(component: str, logged: Reading | None, source: Source, note: str = "") -> Figure:
    """A logged size."""
    if logged is None:
        return Figure(component, "bytes", None, note=not_in(source))
    return Figure(component, "bytes", logged.size, logged.rounding, note)


def difference(component: str, whole: Reading, part: Reading, note: str) -> Figure:
    """The difference of two logged sizes."""
    return Figure(component, "bytes", whole.size - part.size, whole.rounding + part.rounding, note)


def counted(component: str, value: float | None, source: Source, rounding: float = 0.0) -> Figure:
    """A logged number of blocks, tokens or requests."""
    return Figure(component, UNITS[component], value, rounding, not_in(source) if value is None else "")


def missing(component: str, why: str) -> Figure:
    return Figure(component, UNITS.get(component, "bytes"), None, note=why)


def smallest_kv(log: ServerLog) -> Reading | None:
    """The pool's GiB on the rank with the least, which sets the number of blocks for all."""
    return log.least("available_kv") or log.least("kv_in_use")


def row_of(log: ServerLog, figure: Figure, prediction: Prediction) -> ComponentRow:
    """One component of one stage, or of the whole server."""
    (row,) = reconcile({figure.component: prediction}, Measurement(log.called, (figure,)))
    return row


def plain_figures(log: ServerLog) -> Measurement:
    """Logged weights, KV cache and tokens."""
    tokens = log.least("kv_tokens")
    return Measurement(
        log.called,
        (
            sized("weights", log.first("weights"), log.called),
            sized("kv_cache", smallest_kv(log), log.called),
            counted("tokens", None if tokens is None else tokens.count, log.called),
        ),
    )


def plain(case: Case) -> tuple[ComponentRow, ...]:
    """The plain figures compared with the plan."""
    made = case.planned(case.request)
    predictions = {
        "weights": Prediction(made.memory.weights, "formula"),
        "kv_cache": Prediction(made.memory.kv_cache, "formula"),
        "tokens": Prediction(made.capacity.tokens, "formula"),
    }
    if not case.gpu_known:
        why = "depends on the GPU; add --gpu"
        predictions |= {name: Prediction(None, why=why) for name in ("kv_cache", "tokens")}
    return reconcile(predictions, plain_figures(case.log))
