"""What a server's log asks: its model, release, arguments, variables and GPU complete a form."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from typing import Any, Final

from kvplan.asked.form import COMMON_GPUS, FLAGS, Form, Origin, flag_of, gpus_of, read_form, stated_arguments
from kvplan.asked.question import Asked, taken_as
from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import GIB, MAX_TOKENS, format_gib
from kvplan.hardware.gpu import GIVEN, GpuSpec, custom_gpu, gpu, gpu_names, of_total, with_memory
from kvplan.models import catalog
from kvplan.models.lookup import in_path
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import logs_of, server_of
from kvplan.servers.logs.log import Reading, ServerLog
from kvplan.servers.releases import Version
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs
from kvplan.servers.words.command import Environment, ServeCommand
from kvplan.servers.words.environment import variables


class UnplannedLog(InvalidInputError):
    """What a log says that no plan can be made with: its figures are shown, and nothing is compared with them."""


ONLY_BYTES: Final = "custom"  # a GPU of which only the memory is known


@dataclass(frozen=True, slots=True)
class Logged:
    """A form completed from a log: what is given wins.

    flags    engine arguments that it says, as text; stated: those that were given
    derived  the context, if only a page's figures say it: the likeliest, the least and the most tokens
    """

    log: ServerLog
    form: Form
    command: ServeCommand | None
    flags: Mapping[str, str]
    stated: frozenset[str]
    derived: tuple[int, int, int] | None
    notes: tuple[str, ...]

    def query(self, gpus: Sequence[GpuSpec]) -> Asked:
        """The log's question on some GPUs. Raises UsageError for a value that cannot be read."""
        query = read_form(self.form.changed(gpu=None, gpu_memory=None), self.command)
        if len(query.contexts) > 1:
            raise UsageError("--ctx", "names several contexts", "a server has one")
        return replace(
            query,
            gpus=tuple((None, machine) for machine in gpus),
            environment=environment_of(self.log, query.release) | query.environment,
            context_of=None if self.derived is None else self.context,
            drafts_later=True,
            is_deployed=True,
        )

    def context(self, spec: ModelSpec) -> int:
        """The derived context: the model's own if the figures agree with it."""
        assert self.derived is not None
        tokens, low, high = self.derived
        return spec.max_model_len if low <= spec.max_model_len <= high else tokens


def completed(form: Form, log: ServerLog) -> Logged:
    """A form completed from a log; raises UnplannedLog if the log lacks what the form does not say."""
    command, notes = form.command(), list[str]()
    stated = stated_arguments(form, command) | ({"max_model_len"} & form.values.keys())
    values, origins, flags = dict[str, Any](), dict[str, Origin](), flags_of(log)
    if not form.names_model:
        name, note = model_of(log)
        if name is None:
            raise UnplannedLog(log.called, unknown_model(log), "add --model NAME or --config config.json")
        values["model"] = name
        notes += [] if note is None else [note]
    if "engine" not in form.values:
        engine = engine_of(log)
        if engine is None and command is None:
            cure = "add --engine with the release, such as vllm@0.11"
            raise InvalidInputError(log.called, "does not say its release", cure)
        if engine is not None:
            values["engine"] = engine
            version = f"{log.called}: version {printable(log.text('version') or '', 40)}"
            origins["engine"] = Origin(version, f"set it with --engine {server_of(log.engine).release(None, []).label}")
    for name, text in flags.items():
        if name not in stated:
            values[name] = value_of(log, name, text)
            flag = FLAGS.get(name, flag_of(name))
            origins[name] = Origin(f"{log.called}: {logged_as(log, name, text)}", f"set it with {flag}")
    has_context = "max_model_len" in stated or "max_model_len" in values
    filled = replace(form.changed(**values), origins=origins)
    return Logged(log, filled, command, flags, stated, None if has_context else derived_context(log), tuple(notes))


def value_of(log: ServerLog, name: str, text: str) -> Any:
    """A logged argument as a form has it."""
    if ARGUMENTS[name].kind == "flag":
        if text not in ("True", "False"):
            raise UnplannedLog(
                log.called, f"{logged_as(log, name, text)} is neither True nor False", f"add {flag_of(name)}"
            )
        return text == "True"
    return [text] if name == "max_model_len" else text


def unknown_model(log: ServerLog) -> str:
    if log.model is None:
        return "does not say which model it served"
    return f"its model {printable(log.model, 120)} is not one that `kvplan models` lists"


def machines_of(form: Form, log: ServerLog) -> tuple[list[GpuSpec], list[str], list[str]]:
    """(the given GPU with the logged total, else the GPUs that the log may mean; warnings; notes)."""
    if not form.names_gpu:
        gpus, note = logged_gpus(log)
        if not gpus:
            note = f"the {log.called} does not name the GPU, so rows that depend on it are not compared; add --gpu NAME"
        return gpus, [], [] if note is None else [note]
    named = gpus_of(form)
    if len(named) > 1:
        raise UsageError("--gpu", "names several GPUs", "a server ran on one kind")
    memory = form.text("gpu_memory")
    flag = f"--gpu {named[0].name}" if memory is None else f"--gpu-memory {printable(memory, 40)}"
    warnings = check_gpu(log, named[0], flag)
    logged = log.first("total_memory")
    if memory is None and logged is not None and logged.size > 0:
        return [with_memory(named[0], logged.size)], warnings, []
    return named, warnings, []


# --- what a log says --------------------------------------------------------------------------------------------------


def flags_of(log: ServerLog) -> dict[str, str]:
    """Engine arguments by kvplan's names, as text: as requested, else as the server resolved them."""
    return logs_of(log.engine).flags(log)


def logged_as(log: ServerLog, name: str, text: str) -> str:
    """An argument of flags_of as in the log: `tp_size=2` if the server calls it so."""
    names = [theirs for theirs, ours in logs_of(log.engine).names.items() if ours == name]
    theirs = next((own for own in [name, *names] if own in log.flags), name)
    return f"{printable(theirs, 60)}={printable(text, 60)}"


def agrees(log: ServerLog, name: str, text: str, value: Any) -> bool:
    """True if a value of EngineArgs agrees with the log's text to its digits, or leaves the choice to the server."""
    share = log.first("utilization")
    if name == "gpu_memory_utilization" and share is not None and abs(value - share.value) <= share.half_digit:
        return True
    try:
        return bool(value == "auto" or value == read_argument(name, text, name))
    except KvplanError:
        return False


# Common context lengths: the first of these with a multiple in the range is chosen.
ROUND: Final = (65536, 32768, 16384, 8192, 4096, 2048, 1024, 1000, 512, 500, 256, 128, 100, 64, 50, 32, 16, 10, 1)


def derived_context(log: ServerLog) -> tuple[int, int, int] | None:
    """Return (likeliest, least, most) tokens per request consistent with the logged capacity and concurrency.

    The concurrency is the tokens over the context, rounded as logged.
    """
    tokens, concurrency = log.first("kv_tokens"), log.first("max_concurrency")
    if tokens is None or concurrency is None or tokens.count == 0:
        return None
    low = ceil(tokens.count / (concurrency.value + concurrency.half_digit))
    high = floor(tokens.count / (concurrency.value - concurrency.half_digit))
    if low > high or high > MAX_TOKENS:
        return None
    unit = next(step for step in ROUND if high // step * step >= low)
    likeliest = round(tokens.count / concurrency.value / unit) * unit
    return (likeliest if low <= likeliest <= high else high // unit * unit), low, high


def environment_of(log: ServerLog, release: Version) -> Environment:
    """Variables of the command that the log quotes, and those inferred from its lines.

    A log line wins: it shows what the server did.
    """
    known = variables()
    stated: Environment = {name: text for name, text in log.flags.items() if name in known}
    return stated | logs_of(log.engine).environment(log, release)


def engine_of(log: ServerLog) -> str | None:
    """Engine as --engine accepts it (`vllm@0.11`), or None if the log names no release and the releases differ."""
    return logs_of(log.engine).engine(log)


def model_of(log: ServerLog) -> tuple[str | None, str | None]:
    """Return (catalog name of the logged model, a note)."""
    return catalog_name(logs_of(log.engine).model(log), log.called, log.model)


def catalog_name(named: str | None, called: str, own: str | None = None) -> tuple[str | None, str | None]:
    """Return (catalog name of a model by its name or path in a log, a note); paths are never opened."""
    if named is None:
        return None, None
    if catalog.find(named) is not None:
        return named, None
    try:
        known = in_path(named)
    except UsageError:  # two models of that name
        known = None
    if known is None:
        return None, None
    return known, f"the {called}'s model {printable(own or named, 100)} is {taken_as(known).removeprefix('it is ')}"


def logged_gpus(log: ServerLog) -> tuple[list[GpuSpec], str | None]:
    """Return (candidate GPUs, a note): by name, else all that report the logged total, else none."""
    logged = log.first("total_memory")
    named = _gpu_named(log)
    if named is not None:
        return [named if logged is None else with_memory(named, logged.size)], None
    if logged is None or logged.size <= 0:
        return [], None
    near = of_total(lambda candidate: _reports(candidate, logged))
    if not near:
        text = f"no GPU that kvplan knows reports {logged.text} GiB: only its bytes are known; --gpu NAME says more"
        return [custom_gpu(logged.size)], text
    names = ", ".join(candidate.name for candidate in near)
    note = f"{logged.text} GiB is what {names} report{'s' if len(near) == 1 else ''}"
    return [with_memory(candidate, logged.size) for candidate in near], note + (
        "" if len(near) == 1 else "; --gpu says which it was"
    )


def _gpu_named(log: ServerLog) -> GpuSpec | None:
    """The GPU that a log names, of several of one name that of the logged total; None: it names none, or several."""
    if log.first("gpu") is None:
        return None
    named, total = [spec for spec in map(gpu, gpu_names()) if _is_named(log, spec)], log.first("total_memory")
    if len(named) < 2 or total is None:
        return named[0] if len(named) == 1 else None
    return min(named, key=lambda spec: abs(spec.total_memory - total.size))


def _is_named(log: ServerLog, spec: GpuSpec) -> bool:
    return spec.device_name.lower() in [reading.text.replace("_", " ").strip().lower() for reading in log.all("gpu")]


def sample_gpus() -> list[GpuSpec]:
    """GPUs to use if the log does not name one: only what is the same on all of these can be compared."""
    return [gpu(name) for name in COMMON_GPUS]


def held_by(log: ServerLog) -> Iterable[tuple[int, int, str]]:
    """Yield (bytes, rounding, description) of everything that must have fit on a GPU of the log."""
    total = log.first("total_memory")
    if total is not None:
        yield total.size, total.rounding, f"a GPU of {total.text} GiB"
    for fact in ("free_at_start", "free_before_load"):
        for reading in log.all(fact):
            yield reading.size, reading.rounding, f"{reading.text} GiB free"
    weights, pools = log.by_rank("weights"), log.by_rank("available_kv")
    for readings_by_rank, what in ((weights, "weights"), (pools, "KV cache")):
        for reading in readings_by_rank.values():
            yield reading.size, reading.rounding, f"{reading.text} GiB of {what}"
    for rank in weights.keys() & pools.keys():
        weight, other = weights[rank], pools[rank]
        text = f"{weight.text} GiB of weights and {other.text} GiB of KV cache"
        yield weight.size + other.size, weight.rounding + other.rounding, text
    for rank, key in log.by_rank("key_size").items():
        value = log.by_rank("value_size").get(rank)
        if value is not None:
            yield key.size + value.size, key.rounding + value.rounding, f"{key.text} + {value.text} GiB of KV cache"


def check_gpu(log: ServerLog, spec: GpuSpec, flag: str) -> list[str]:
    """Reject a GPU that cannot have written the log; return warnings for one that differs from it."""
    highest = max(spec.total_memory, spec.total_memory_high)
    if spec.total_memory_kind != GIVEN:  # no board reports more than its vendor's nominal size
        highest = max(highest, spec.nominal_memory or 0)
    worst = max(held_by(log), default=None)
    if worst is not None and worst[0] - worst[1] > highest:
        raise UsageError(
            flag,
            f"has {format_gib(highest)} at most, but the {log.called} says {worst[2]}",
            f"name the GPU that it ran on, or remove {flag.partition(' ')[0]}",
        )
    notes, total, named = [], log.first("total_memory"), _gpu_named(log)
    if named is not None and not _is_named(log, spec) and spec.name != ONLY_BYTES:
        notes.append(f"{flag} is taken, but the {log.called} names an {named.device_name} ({named.name})")
    if total is not None and not _reports(spec, total):
        size = f"{spec.total_memory_low / GIB:.2f}"
        if spec.total_memory_low != spec.total_memory_high:
            size += f" to {spec.total_memory_high / GIB:.2f}"
        notes.append(f"{flag}: a GPU of {size} GiB, but the {log.called} says {total.text} GiB")
    return notes


def _reports(spec: GpuSpec, total: Reading) -> bool:
    return spec.total_memory_low - total.rounding <= total.size <= spec.total_memory_high + total.rounding


def check_log(log: ServerLog, args: EngineArgs) -> None:
    """Reject a log whose ranks do not match the arguments."""
    workers = [rank for rank in log.ranks if rank != ""]
    ranks = args.world_size * args.data_parallel_size
    if len(workers) > 1 and ranks == 1:
        ranks_text = ", ".join(printable(rank, 30) for rank in workers[:4])
        flag = "--dp" if all(re.fullmatch("DP[0-9]+", rank) for rank in workers) else "--tp"
        raise UnplannedLog(
            log.called, f"figures of several ranks ({ranks_text}), but not how the model is split", f"add {flag}"
        )


def check_model(log: ServerLog, spec: ModelSpec) -> None:
    """Reject a model whose weight format contradicts the log."""
    quantization = log.flags.get("quantization")
    if quantization not in (None, "fp8", "auto") and spec.quantization is None:
        raise UnplannedLog(
            log.called,
            f"quantization={printable(quantization or '', 40)}, but {spec.name} is not quantized",
            "say with --model which checkpoint was served",
        )
