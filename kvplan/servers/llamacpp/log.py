"""What llama-server logs of its buffers, in its own log and in Ollama's, compared with the plan, place by place.

Source: llama.cpp 0c1e57098 src/llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp, common/fit.cpp, and older logs.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.files import printable
from kvplan.core.units import MIB
from kvplan.models.gguf_mix import BASE
from kvplan.servers.llamacpp.command import NAMES, SHORTS, catalog_name, is_switch, name_model, parse
from kvplan.servers.logs.log import Case, Logs, ServerLog, Wording
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, not_in, reconcile
from kvplan.servers.words.command import ServeCommand

SOURCE: Final = "llama.cpp 0c1e57098 src/llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp"
SIZE: Final = r"buffer size\s{0,3}=\s{0,9}"


def _row(phrase: str, pattern: str) -> Wording:
    return Wording("llamacpp", phrase, pattern, "b1-0.5.0", SOURCE)


WORDINGS: Final = (
    _row("model buffer size", rf"<place>\s{{1,6}}model {SIZE}<weights_mib> MiB"),
    _row("llm_load_tensors: ", rf"llm_load_tensors:\s{{1,14}}<place>\s{{1,6}}{SIZE}<weights_mib> MiB"),
    _row("KV buffer size", rf"<place>\s{{1,6}}KV {SIZE}<cache_mib> MiB"),
    _row("RS buffer size", rf"<place>\s{{1,6}}RS {SIZE}<cache_mib> MiB"),
    _row("compute buffer size", rf"<place>\s{{1,6}}compute {SIZE}<compute_mib> MiB"),
    _row("layers to GPU", r"offloaded <layers_on_gpu>/<layers> layers"),
    _row("n_ctx  ", r"\bn_ctx\s{1,20}= <context>"),
    _row("n_batch  ", r"\bn_batch\s{1,20}= <max_batched_tokens>"),
    _row("n_ubatch  ", r"\bn_ubatch\s{1,20}= <micro_batch>"),
    _row("n_seq_max  ", r"\bn_seq_max\s{1,20}= <max_running>"),
    _row("n_outputs_max  ", r"\bn_outputs_max\s{1,20}= <outputs>"),
    _row("kv_unified  ", r"\bkv_unified\s{1,20}= <unified>"),
    _row("flash_attn  ", r"\bflash_attn\s{1,20}= <flash>"),
    _row(" cells,", r"\(\s{0,6}<kv_tokens> cells,.{1,60}K \(<k_type>\).{1,60}V \(<v_type>\)"),
    _row("using device ", r"using device <place> \(<gpu>\)(?: \([^)]{1,40}\))? - <free_mib> MiB free"),
    _row("Device 0: ", r"Device 0: <gpu>, compute capability"),
    _row("key-value pairs and", r"tensors from <model> \("),
    _row("general.name", r"general\.name\s{1,30}(?:str\s{1,20})?= <model_name>\s{0,4}$"),
    _row("file type  ", r"file type\s{1,6}= <file_type>\s{0,4}$"),
    _row("model ftype  ", r"model ftype\s{1,9}= <file_type>\s{0,4}$"),
    _row("build: ", r"build: <version> \("),
    _row("|   - ", r"\| {1,4}- <place> {1,60}(?:\([^|]{1,60})?\|\s{0,40}(?:<total_mib> = {1,6}<free_now_mib> \+ \()?\s{0,40}"
         r"[0-9]{1,7} = {1,6}<weights_now_mib> \+ {1,7}<cache_now_mib> \+ {1,7}<compute_now_mib>(?:\) \+ {1,9}"
         r"<outside_mib>)?\s{0,40}\|"),
)  # fmt: skip
BUFFERS: Final = {"weights_mib": "weights", "cache_mib": "caches", "compute_mib": "compute"}
NOW: Final = {"weights_now_mib": "weights", "cache_now_mib": "caches", "compute_now_mib": "compute"}
FLASH: Final = {"enabled": "on", "1": "on", "disabled": "off", "0": "off"}
CPUS: Final = ("CPU", "Host", "BLAS")


def place_of(device: str) -> str:
    """The plan's name of a buffer's place: "CUDA1" -> "GPU 1", "CUDA_Host" and "CPU_Mapped" -> "host"."""
    number = re.search(r"\d+$", device.partition("_")[0])
    if device.startswith(CPUS) or device.endswith("_Host"):
        return "host"
    return f"GPU {int(number[0]) if number else 0}"


def buffers(log: ServerLog) -> dict[str, Figure]:
    """Bytes of each place and kind: all weights and caches there, and the compute buffer that was reserved last; of a
    log without these lines, those of the last breakdown, which cuts fractions of a MiB.
    """
    places = {reading.line: place_of(reading.text) for reading in log.all("place")}
    sums: dict[str, Figure] = {}
    for reading in log.readings:
        kind, place = BUFFERS.get(reading.fact), places.get(reading.line)
        if kind is None or place is None:
            continue
        name = f"{place} {kind}"
        half, before = int(reading.half_digit * MIB) + 1, sums.get(name)
        size = round(reading.value * MIB)
        if before is not None and before.value is not None and (kind != "compute" or place == "host"):
            size, half = size + int(before.value), half + int(before.rounding)
        sums[name] = Figure(name, "bytes", size, half)
    for reading in log.readings if not sums else ():
        kind, place = NOW.get(reading.fact), places.get(reading.line)
        if kind is not None and place is not None and reading.value:
            middle = round((reading.value + 0.5) * MIB)
            sums[f"{place} {kind}"] = Figure(f"{place} {kind}", "bytes", middle, MIB // 2 + 1)
    return sums


def figures(log: ServerLog) -> Measurement:
    """Every buffer by place, what is outside the server's books, and the context."""
    rows = dict(sorted(buffers(log).items()))
    outside = next(iter(log.all("outside_mib")[::-1]), None)
    if outside is not None and outside.value >= 0:  # less while --fit looks, before anything is loaded
        rows["outside"] = Figure("outside", "bytes", round(outside.value * MIB), MIB // 2)
    context = log.first("context")
    tokens = None if context is None else context.count
    rows["tokens"] = Figure("tokens", "tokens", tokens, note="" if tokens else not_in(log.called))
    return Measurement(log.called, tuple(rows.values()))


def compared(case: Case) -> tuple[ComponentRow, ...]:
    """The figures compared with the plan's places; the outputs that a graph keeps are the log's, else every token's."""
    from kvplan.servers.llamacpp.size import in_use, started  # its graphs are only built for a plan

    plan, log = case.planned(case.request), case.log
    assert plan.slots is not None
    predictions = {"tokens": Prediction(plan.capacity.tokens, "exact")}
    outside = plan.estimates["non_torch"]
    predictions["outside"] = Prediction(outside.likely, "measured", "cuBLAS, kernels, growing pools", outside.low,
                                        outside.high)  # fmt: skip
    run = started(case.request, plan.estimates["context"].likely + in_use(case.request).likely)
    stated = log.first("outputs")
    outputs = run.measured.context.ubatch if stated is None else stated.count
    kept = run.server.allocate(replace(run.own, outputs=outputs), pipeline=run.measured.copies > 1)
    names = {None: "host"} | {number: f"GPU {number}" for number in kept.placement.devices}
    mixed = "" if run.model.mixed_by == "file" else "llama-quantize's mix of types; name the file for its own"
    split = "" if len(kept.placement.devices) < 2 else "; layers follow what each GPU has free"
    logits = "" if stated is not None else ", every token's logits kept, as by older builds"
    for place, memory in kept.places.items():
        predictions[f"{names[place]} weights"] = Prediction(memory.weights, "formula", mixed + split)
        predictions[f"{names[place]} caches"] = Prediction(memory.context, "exact")
        predictions[f"{names[place]} compute"] = Prediction(memory.compute, "formula", f"of llama.cpp 0.5.0 on CUDA{logits}")
    return reconcile(predictions, figures(log))


# --- what it was started with -----------------------------------------------------------------------------------------


def model(log: ServerLog) -> ServeCommand:
    """The model that the names in a log say, and its type: of the file or repository, else of the metadata."""
    for text in filter(None, (log.model, log.text("model_name"))):
        file = text.replace("\\", "/").rpartition("/")[2].strip()
        read = ServeCommand()
        if file.endswith(".gguf") or re.search(r"(?i)-GGUF(?::|$)", file):
            name_model(read, file if file.endswith(".gguf") else None, text)
        known = catalog_name((read.model or file).replace(" ", "-"))
        if known is not None:
            return ServeCommand(model=known, args=read.args)
    return ServeCommand()


def model_name(log: ServerLog) -> str | None:
    return model(log).model or log.model


def file_type(text: str) -> str | None:
    """llama-quantize's name of a type as a log has it: "Q4_K - Medium" -> "Q4_K_M"; None for another maker's."""
    words = re.sub(r"^(?:all|mostly) ", "", text.strip())
    head, _, size = words.partition(" - ")
    kind = f"{head}_{size[:1]}" if size in ("Small", "Medium", "Large") else head.partition(" ")[0]
    return kind if kind in BASE else {"MXFP4": "MXFP4_MOE"}.get(kind)


def flags(log: ServerLog) -> dict[str, str]:
    """Arguments as the server resolved them, which says what --fit chose, over those of its command."""
    stated = {name: text for name, text in log.flags.items() if name != "model"}
    resolved = dict(_resolved(log))
    kind = file_type(log.text("file_type") or "") or model(log).args.get("quantization")
    devices = {place_of(reading.text) for reading in log.all("place")} - {"host"}
    return {
        **stated, **resolved, "fit": "off", **({} if kind is None else {"quantization": kind}),
        "tensor_parallel_size": str(max(1, len(devices))),
    }  # fmt: skip


def _resolved(log: ServerLog) -> Iterator[tuple[str, str]]:
    facts = {"context": "max_model_len", "max_batched_tokens": "max_num_batched_tokens", "micro_batch":
             "micro_batch_size", "max_running": "max_num_seqs", "k_type": "cache_type_k", "v_type": "cache_type_v"}  # fmt: skip
    for fact, argument in facts.items():
        if (text := log.text(fact)) is not None:
            yield argument, text.replace(",", "")
    layers, total = log.first("layers_on_gpu"), log.first("layers")
    if layers is not None and total is not None and layers.count < total.count:
        yield "gpu_layers", str(layers.count)
    if log.first("max_running") is not None:  # logs without the line have one cache for all
        yield "kv_unified", "False" if log.text("unified") == "false" else "True"
    if (flash := FLASH.get(log.text("flash") or "")) is not None:
        yield "flash_attn", flash


def command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Arguments of the command that a log quotes, by kvplan's names."""
    read = parse([*words[1:]])
    model = next((word for flag, word in zip(words, words[1:], strict=False) if flag in ("-m", "--model", "-hf")), "")
    stated = {name: str(value) for name, value in read.args.items() if name != "quantization"}
    return stated | ({"model": model} if model else {}), [*read.refused, *read.unknown]


def label(log: ServerLog, request: object) -> str:
    version = log.text("version")
    return "llama.cpp" if version is None else f"llama.cpp build {printable(version, 40)}"


LOGS: Final = Logs(
    WORDINGS, figures, compared, first_words=("key-value pairs and",), list_names=tuple(NAMES.values()),
    commands=("llama-server ",), label=label, flags=flags, command=command, model=model_name,
    argument_of=lambda name: NAMES.get(SHORTS.get(name, name), name), takes_value=lambda name: not is_switch(name),
)  # fmt: skip
