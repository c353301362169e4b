"""What llama-server logs of its buffers, in its own log and in Ollama's, compared with the plan, place by place.

Source: llama.cpp 0c1e57098 src/llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp, common/fit.cpp, and older logs.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from kvplan.core.files import printable
from kvplan.core.units import MIB
from kvplan.models.gguf_mix import BASE
from kvplan.servers.llamacpp.command import NAMES, SHORTS, catalog_name, is_switch, name_model, parse
from kvplan.servers.logs.log import Case, Logs, ServerLog, Wording
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, not_in, reconcile
from kvplan.servers.words.command import ServeCommand

SOURCE: Final = "llama.cpp 0c1e57098 src/llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp, common/fit.cpp"
SIZE: Final = r"buffer size\s{0,3}=\s{0,9}"
PATTERNS: Final = {  # by a phrase of the line
    "model buffer size": rf"<place>\s{{1,6}}model {SIZE}<weights_mib> MiB",
    "llm_load_tensors: ": rf"llm_load_tensors:\s{{1,14}}<place>\s{{1,6}}{SIZE}<weights_mib> MiB",
    "KV buffer size": rf"<place>\s{{1,6}}KV {SIZE}<cache_mib> MiB",
    "RS buffer size": rf"<place>\s{{1,6}}RS {SIZE}<cache_mib> MiB",
    "compute buffer size": rf"<place>\s{{1,6}}compute {SIZE}<compute_mib> MiB",
    "layers to GPU": r"offloaded <layers_on_gpu>/<layers> layers",
    "n_ctx  ": r"\bn_ctx\s{1,20}= <context>",
    "n_batch  ": r"\bn_batch\s{1,20}= <max_batched_tokens>",
    "n_ubatch  ": r"\bn_ubatch\s{1,20}= <micro_batch>",
    "n_seq_max  ": r"\bn_seq_max\s{1,20}= <max_running>",
    "n_outputs_max  ": r"\bn_outputs_max\s{1,20}= <outputs>",
    "kv_unified  ": r"\bkv_unified\s{1,20}= <unified>",
    "flash_attn  ": r"\bflash_attn\s{1,20}= <flash>",
    " cells,": r"\(\s{0,6}<kv_tokens> cells,.{1,60}K \(<k_type>\).{1,60}V \(<v_type>\)",
    "using device ": r"using device <place> \(<gpu>\)(?: \([^)]{1,40}\))? - <free_mib> MiB free",
    "Device 0: ": r"Device 0: <gpu>, compute capability",
    "key-value pairs and": r"tensors from <model> \(",
    "general.name": r"general\.name\s{1,30}(?:str\s{1,20})?= <model_name>\s{0,4}$",
    "file type  ": r"file type\s{1,6}= <file_type>\s{0,4}$",
    "model ftype  ": r"model ftype\s{1,9}= <file_type>\s{0,4}$",
    "build: ": r"build: <version> \(",
    "|   - ": r"\| {1,4}- <place> {1,60}(?:\([^|]{1,60})?\|\s{0,40}(?:[0-9]{1,7} = {1,6}[0-9]{1,7} \+ \()?\s{0,40}"
    r"[0-9]{1,7} = {1,6}<weights_now_mib> \+ {1,7}<cache_now_mib> \+ {1,7}<compute_now_mib>"
    r"(?:\) \+ {1,9}<outside_mib>)?\s{0,40}\|",
}
BUFFERS: Final = {"weights_mib": "weights", "cache_mib": "caches", "compute_mib": "compute"}
NOW: Final = {"weights_now_mib": "weights", "cache_now_mib": "caches", "compute_now_mib": "compute"}
FLASH: Final = {"enabled": "on", "1": "on", "disabled": "off", "0": "off"}
# Figures that say how an argument was resolved.
RESOLVED: Final = {
    "context": "max_model_len", "max_batched_tokens": "max_num_batched_tokens", "micro_batch": "micro_batch_size",
    "max_running": "max_num_seqs", "k_type": "cache_type_k", "v_type": "cache_type_v",
}  # fmt: skip


def place_of(device: str) -> str:
    """The plan's name of a buffer's place: "CUDA1" -> "GPU 1", "CUDA_Host" and "CPU_Mapped" -> "host"."""
    number = re.search(r"\d+$", device.partition("_")[0])
    is_host = device.startswith(("CPU", "Host", "BLAS")) or device.endswith("_Host")
    return "host" if is_host else f"GPU {int(number[0]) if number else 0}"


def buffers(log: ServerLog) -> dict[str, Figure]:
    """Bytes of each place and kind: all weights and caches there, and the compute buffer that was reserved last; of a
    log without these lines, those of the last breakdown, which cuts fractions of a MiB.
    """
    places, sums = {reading.line: place_of(reading.text) for reading in log.all("place")}, dict[str, Figure]()
    is_whole = not any(reading.fact in BUFFERS for reading in log.readings)
    for reading in log.readings:
        kind, place = (NOW if is_whole else BUFFERS).get(reading.fact), places.get(reading.line)
        if kind is None or place is None or not reading.value:
            continue
        size, half, before = round(reading.value * MIB), int(reading.half_digit * MIB) + 1, sums.get(f"{place} {kind}")
        if is_whole:
            size += MIB // 2
        elif before is not None and (kind != "compute" or place == "host"):
            size, half = size + int(before.value or 0), half + int(before.rounding)
        sums[f"{place} {kind}"] = Figure(f"{place} {kind}", "bytes", size, half)
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

    plan, stated = case.planned(case.request), case.log.first("outputs")
    run = started(case.request, plan.estimates["context"].likely + in_use(case.request).likely)
    outputs = run.measured.context.ubatch if stated is None else stated.count
    loaded = run.server.allocate(replace(run.own, outputs=outputs), pipeline=run.measured.copies > 1)
    mixed = "" if run.model.mixed_by == "file" else "llama-quantize's mix of types; name the file for its own"
    split = "" if len(loaded.placement.devices) < 2 else "; layers follow what each GPU has free"
    logits = "" if stated is not None else ", every token's logits kept, as by older builds"
    outside, pools = plan.estimates["non_torch"], "cuBLAS, kernels, growing pools"
    predictions = {
        "tokens": Prediction(plan.capacity.tokens, "exact"),
        "outside": Prediction(outside.likely, "measured", pools, outside.low, outside.high),
    }
    for number, memory in loaded.places.items():
        place = "host" if number is None else f"GPU {number}"
        predictions[f"{place} weights"] = Prediction(memory.weights, "formula", mixed + split)
        predictions[f"{place} caches"] = Prediction(memory.context, "exact")
        predictions[f"{place} compute"] = Prediction(memory.compute, "formula", f"of llama.cpp 0.5.0 on CUDA{logits}")
    return reconcile(predictions, figures(case.log))


# --- what it was started with -----------------------------------------------------------------------------------------


def model(log: ServerLog) -> ServeCommand:
    """The model that the names in a log say, and its type: of the file or repository, else of the metadata."""
    for text in filter(None, (log.model, log.text("model_name"))):
        file, read = text.replace("\\", "/").rpartition("/")[2].strip(), ServeCommand()
        if file.endswith(".gguf") or re.search(r"(?i)-GGUF(?::|$)", file):
            name_model(read, file if file.endswith(".gguf") else None, text)
        known = catalog_name((read.model or file).replace(" ", "-"))
        if known is not None:
            return ServeCommand(model=known, args=read.args)
    return ServeCommand()


def file_type(text: str) -> str | None:
    """llama-quantize's name of a type as a log has it: "Q4_K - Medium" -> "Q4_K_M"; None for another maker's."""
    head, _, size = re.sub(r"^(?:all|mostly) ", "", text.strip()).partition(" - ")
    kind = f"{head}_{size[:1]}" if size in ("Small", "Medium", "Large") else head.partition(" ")[0]
    return kind if kind in BASE else {"MXFP4": "MXFP4_MOE"}.get(kind)


def flags(log: ServerLog) -> dict[str, str]:
    """Arguments as the server resolved them, which says what --fit chose, over those of its command."""
    values = {name: text for name, text in log.flags.items() if name != "model"}
    values |= {RESOLVED[row.fact]: row.text.replace(",", "") for row in log.readings[::-1] if row.fact in RESOLVED}
    layers, total = log.first("layers_on_gpu"), log.first("layers")
    if layers is not None and total is not None and layers.count < total.count:
        values["gpu_layers"] = str(layers.count)
    if log.first("max_running") is not None:  # logs without the line have one cache for all
        values["kv_unified"] = "False" if log.text("unified") == "false" else "True"
    if (flash := FLASH.get(log.text("flash") or "")) is not None:
        values["flash_attn"] = flash
    if kind := file_type(log.text("file_type") or "") or model(log).args.get("quantization"):
        values["quantization"] = kind
    devices = {place_of(reading.text) for reading in log.all("place")} - {"host"}
    return {**values, "fit": "off", "tensor_parallel_size": str(max(1, len(devices)))}


def command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Arguments of the command that a log quotes, by kvplan's names."""
    read = parse([*words[1:]])
    files = [word for flag, word in pairwise(words) if flag in ("-m", "--model", "-hf", "--hf-repo")]
    stated = {name: str(value) for name, value in read.args.items() if name != "quantization"}
    return {**stated, **({"model": files[0]} if files else {})}, [*read.refused, *read.unknown]


def label(log: ServerLog, request: object) -> str:
    version = log.text("version")
    return "llama.cpp" if version is None else f"llama.cpp build {printable(version, 40)}"


LOGS: Final = Logs(
    tuple(Wording("llamacpp", phrase, pattern, "b1-0.5.0", SOURCE) for phrase, pattern in PATTERNS.items()),
    figures, compared, first_words=("key-value pairs and",), list_names=tuple(NAMES.values()), label=label, flags=flags,
    commands=("llama-server ",), command=command, model=lambda log: model(log).model or log.model,
    argument_of=lambda name: NAMES.get(SHORTS.get(name, name), name), takes_value=lambda name: not is_switch(name),
)  # fmt: skip
