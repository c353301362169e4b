"""Rows of llama.cpp's own answers, and how kvplan's compare with them."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from kvplan.core.errors import KvplanError, UsageError
from kvplan.models.gguf_model import GGUFModel, gguf_of
from kvplan.models.spec import ModelSpec
from kvplan.servers.llamacpp.fit import fit
from kvplan.servers.llamacpp.measure import Server
from kvplan.servers.llamacpp.settings import MIB, Device, Override, Settings

# What the GPUs were played as: total and free MiB (as public logs show them), compute capability, integrated.
GPUS: Final = {
    "rtx-3060": (11911, 11348, 860, False), "rtx-3090": (24124, 23845, 860, False),
    "rtx-4060-ti-16g": (15947, 15630, 890, False), "rtx-4070-super": (12281, 11005, 890, False),
    "rtx-4090": (24077, 23600, 890, False), "rtx-5060-ti-16g": (15849, 15630, 1200, False),
    "rtx-5090": (32606, 30330, 1200, False), "rtx-pro-6000": (97249, 96644, 1200, False),
    "h100-80g": (81079, 80500, 900, False), "rtx-2080-ti": (11001, 10800, 750, False),
    "p40": (24438, 24290, 610, False), "dgx-spark": (124610, 117434, 1210, True),
}  # fmt: skip
NUMBERS: Final = {
    "-c": "ctx",
    "-b": "batch",
    "-ub": "ubatch",
    "-np": "slots",
    "-mg": "main_gpu",
    "--fit-ctx": "fit_ctx",
}
WORDS: Final = {"-fa": "flash", "-sm": "split_mode"}
SWITCHES: Final[dict[str, tuple[str, bool]]] = {
    "-kvu": ("unified", True), "-no-kvu": ("unified", False), "-nkvo": ("offload_cache", False),
    "--swa-full": ("full_windows", True), "--no-op-offload": ("offload_ops", False),
}  # fmt: skip
EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
PLACES: Final = ("model", "context", "compute")


def device(gpu: str | dict[str, Any]) -> Device:
    if isinstance(gpu, dict):
        return Device(gpu["total"], gpu["free"], gpu["capability"], bool(gpu.get("integrated")))
    total, free, capability, integrated = GPUS[gpu]
    return Device(total * MIB, free * MIB, capability, integrated)


def settings_of(flags: list[str]) -> Settings:
    """The flags of a row, as llama-server's reader of arguments understands them."""
    values: dict[str, Any] = {}
    overrides: list[Override] = []
    words = iter(flags)
    for flag in words:
        if flag in SWITCHES:
            name, value = SWITCHES[flag]
            values[name] = value
        elif flag == "-cmoe":
            overrides.append(Override(EXPERTS, None))
        else:
            read(flag, next(words), values, overrides)
    return Settings(**values, overrides=tuple(overrides))


def read(flag: str, word: str, values: dict[str, Any], overrides: list[Override]) -> None:
    match flag:
        case "-ngl":
            values["gpu_layers"] = None if word == "auto" else int(word)
        case "-ctk" | "-ctv":
            values[f"cache_{flag[-1]}"] = word.upper()
        case "--fit":
            values["fit"] = word == "on"
        case "--fit-target":
            values["fit_target"] = tuple(int(x) * MIB for x in word.split(","))
        case "-ts":
            values["split"] = tuple(map(float, word.split(",")))
        case "-ncmoe":
            overrides += [Override(rf"blk\.{layer}{EXPERTS}", None) for layer in range(int(word))]
        case "-ot":
            for pair in word.split(","):
                pattern, _, place = pair.rpartition("=")
                overrides.append(Override(pattern, None if place == "CPU" else int(place.removeprefix("CUDA"))))
        case _ if flag in NUMBERS:
            values[NUMBERS[flag]] = int(word)
        case _ if flag in WORDS:
            values[WORDS[flag]] = word
        case _:
            raise UsageError(f"{flag}: is not a flag of these rows")


def places_of(row: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Bytes of weights, context and compute of each device, and of all buffers of the host."""
    if "places" in row:
        return {name: tuple(sizes) for name, sizes in row["places"].items()}
    places: dict[str, tuple[int, ...]] = {}
    for buffer, sizes in row["buffers"].items():
        name = buffer if buffer.startswith("CUDA") and buffer != "CUDA_Host" else "host"
        before = places.get(name, (0, 0, 0))
        places[name] = tuple(a + sizes[key] for a, key in zip(before, PLACES, strict=True))
    return places


def label(device_number: int | None) -> str:
    return "host" if device_number is None else f"CUDA{device_number}"


def fit_differences(settings: Settings, problem: str | None, devices: int, expected: dict[str, Any]) -> Iterator[str]:
    """What differs in what `--fit` chose."""
    mine = {
        "status": int(problem is not None),
        "n_ctx": settings.ctx,
        "n_gpu_layers": -1 if settings.gpu_layers is None else settings.gpu_layers,
        "tensor_split": [int(share) for share in settings.split] or [0] * devices,
        "overrides": [f"{o.pattern}={'CPU' if o.device is None else label(o.device)}" for o in settings.overrides],
    }
    for name, value in mine.items():
        if value != expected[name]:
            yield f"fit: {name} {value} for {expected[name]}"


def differences(row: dict[str, Any], model: GGUFModel) -> Iterator[str]:
    """What differs from a row; raise an error for what kvplan refuses."""
    inputs = row["inputs"]
    settings = settings_of(inputs["flags"])
    server = Server(model, [device(gpu) for gpu in inputs["gpus"]])
    if settings.fit and "fit" in row:
        choice = fit(server, settings)
        settings = choice.settings
        used = len(server.measure(settings).placement.devices)
        yield from fit_differences(settings, choice.problem, used, row["fit"])
    allocated = inputs.get("environment", {}).get("ORACLE_REAL") == "1"  # else what it expects
    measured = server.allocate(settings) if allocated else server.measure(settings)
    for name, value in (("n_ctx", measured.context.total), ("n_ctx_seq", measured.context.cells)):
        if value != row[name]:
            yield f"{name} {value} for {row[name]}"
    expected = places_of(row)
    for number, memory in measured.places.items():
        theirs = expected.pop(label(number), (0, 0, 0))
        for name, ours, other in zip(PLACES, memory, theirs, strict=True):
            if ours != other:
                yield f"{label(number)}: {name} {ours:,} for {other:,} ({(ours - other) / max(1, other):+.2%})"
    yield from (f"{name}: nothing for {sizes}" for name, sizes in expected.items())


def compare(row: dict[str, Any], load: Callable[[str], ModelSpec]) -> tuple[str, list[str]]:
    """("equal" | "refused by name" | "different", why). A row that the server refuses equals a refusal of ours.

    The files of the rows have the types that llama-quantize gives without an importance matrix, also where a row says
    that one was played: the program that made them passed an empty one.
    """
    inputs = row["inputs"]
    try:
        wrong = list(differences(row | {"n_ctx": 0, "n_ctx_seq": 0, "buffers": {}} if "failed" in row else row,
                                 gguf_of(load(inputs["model"]), inputs["quant"])))  # fmt: skip
    except KvplanError as error:
        return ("equal", []) if "failed" in row else ("refused by name", [str(error)])
    if "failed" in row:
        return "different", [f"sized, and the server refuses: {row['failed'][-200:]!r}"]
    return ("different" if wrong else "equal"), wrong
