"""Log reader for vLLM: its messages, its argument lists, the command that they quote."""

import re
from collections.abc import Sequence
from typing import Final

from kvplan.core.errors import NoServerError
from kvplan.core.files import printable
from kvplan.servers.logs.log import Logs, ServerLog
from kvplan.servers.vllm import log_flags, log_rows, rules
from kvplan.servers.vllm.changes import CHANGES
from kvplan.servers.vllm.command import parse, start, takes_value
from kvplan.servers.vllm.log_lines import log_lines
from kvplan.servers.vllm.log_wordings import WORDINGS
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs
from kvplan.servers.words.command import flag_name, is_value

CONFIG: Final = "with config: "  # resolved settings, so the best source for what was not requested
NAMESPACE: Final = "args: Namespace("  # 0.2 to 0.9, including defaults
ARGS: Final = "non-default args: {"  # from 0.9 on
# Flags that a plan rejects, but that a log may have: they explain a difference.
EXPLAINING: Final = ("speculative_config", "cpu_offload_gb")
ONCE: Final = ("vLLM API server version ", "\u2588  version ", "LLM engine (v")


def engine(log: ServerLog) -> str | None:
    """Its release, with its patch where a later one changed a plan; of a build without a number, the last one that
    writes its messages; at most the newest known.
    """
    if log.called == "page" and log.release is None:
        return None
    major, minor = min(log.release or log.last_release or rules.NEWEST, rules.NEWEST)
    if tag := re.match(rf"v?({major}\.{minor}\.([0-9]{{1,3}}))(?![\w.])", log.text("version") or ""):
        later = (change.since for change in CHANGES.values() if change.since > (major, minor, int(tag[2])))
        if any(since[:2] == (major, minor) for since in later):
            return f"vllm@{tag[1]}"
    return f"vllm@{major}.{minor}"


def notes(log: ServerLog, args: EngineArgs, gpu_known: bool) -> list[str]:
    """Note the rules applied to a build without a release of its own, or a newer one: 0.19.1rc1.dev329 is 329 commits
    after the previous tag.
    """
    version, judged = log.text("version"), (engine(log) or "").partition("@")[2]
    label = f"version {printable(version or '', 60)}"
    if log.release is None:
        which = f"{label} names no release" if version else f"the {log.called} does not say its release"
        return [f"{which}: judged as {judged}, the last one that writes its messages; --engine says which it was"]
    if log.release > rules.NEWEST:
        return [f"{label} is newer than the releases that kvplan knows: judged as {judged}"]
    match = re.match(r"v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?\w*(?:\.post\d+)?\.dev\d", version or "")
    if match is None:
        return []
    major, minor, patch = (int(number or 0) for number in match.groups())
    later, other = ("after", minor + 1) if patch else ("before", minor - 1)
    neighbor = f"{major}.{other}"
    more = f"; --engine vllm@{neighbor} says so" if (major, other) <= rules.NEWEST and other >= 0 else ""
    return [
        f"{label} is a development build {later} {major}.{minor}.0, judged as "
        f"{major}.{minor}: it may {'already' if patch else 'still'} behave as {neighbor} does{more}"
    ]


def command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    explaining, others = _lifted(words)
    started = start(others)
    if started is None:
        raise NoServerError("--from-command", "contains no server command", "paste the whole command")
    asked_for = parse(started.words)
    values = {name: str(value) for name, value in {**started.args, **asked_for.args}.items() if name != "usage"}
    if "max_loras" in values:
        values["enable_lora"] = "True"
    if asked_for.draft_model is not None:
        values["speculative_model"] = asked_for.draft_model
    if asked_for.model is not None:
        values["model"] = asked_for.model
    return values | explaining, [*asked_for.refused, *asked_for.unknown]


def _lifted(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(explanatory flags, the other words)."""
    lifted: dict[str, str] = {}
    others: list[str] = []
    waiting: str | None = None
    for word in words:
        name, value = ("", None) if is_value(word) else flag_name(word)
        if waiting is not None and is_value(word):
            lifted[waiting] = word
            waiting = None
        elif name in EXPLAINING and value is not None:
            lifted[name] = value
        elif name in EXPLAINING:
            waiting = name
        else:
            waiting = None
            others.append(word)
    return lifted, others


def argument_of(name: str) -> str:
    return name.removeprefix("no_") if name not in ARGUMENTS else name


LOGS: Final = Logs(
    wordings=WORDINGS,
    lists=(CONFIG, NAMESPACE, ARGS),
    resolved=(CONFIG,),
    list_names=(
        "chunked_prefill_enabled", "cpu_offload_gb", "device", "max_seq_len", "num_speculative_tokens", "revision",
        "speculative_config", "speculative_model",
    ),
    commands=("vllm serve ", "-m vllm.entrypoints."),
    first_words=(*ONCE, "Loading model weights took ", "Model loading took "),
    once=ONCE,
    engine=engine,
    names=log_flags.RESOLVED_NAMES,
    flags=log_flags.flags,
    command=command,
    opening=ARGS,
    words=log_flags.words,
    argument_of=argument_of,
    takes_value=takes_value,
    draft=log_flags.draft,
    environment=log_flags.environment,
    notes=notes,
    figures=log_rows.measurement,
    rows=log_rows.rows,
    given=log_rows.given,
    lines=log_lines,
)  # fmt: skip
