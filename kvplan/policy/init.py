"""Write a policy for plans as they are today: commented YAML whose rules leave a stated slack below today's figures."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvplan.asked.form import LENGTH_KEYS
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import exists, printable
from kvplan.core.strict_yaml import ODD
from kvplan.core.units import GIB, format_gib, format_size, plural
from kvplan.planning.plan import Plan, lack_text
from kvplan.policy.gauges import kv_tokens, served
from kvplan.policy.judge import title
from kvplan.servers.base import abilities_of, program_words
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.environment import variables

KEPT: Final = 90  # percent of today's figure that a lower limit requires
GROWTH: Final = 2  # percent above today's figure that an upper limit allows


@dataclass(frozen=True, slots=True)
class Stated:
    """User input that a plan does not carry as text: keys of a target -> values, as written in a policy."""

    values: Mapping[str, str]


def policy_text(plans: Sequence[tuple[Plan, Stated]], origin: str) -> str:
    """Write the policy for plans that fit. `origin`: what wrote it, for its first line."""
    for plan, _ in plans:
        if not plan.fits:
            raise UsageError(f"--init: {title(plan)}", lack_text(plan), "see what would fit with kvplan estimate")
    parts = [HEAD.format(origin=printable(origin, 400), kept=KEPT, growth=GROWTH)]
    parts += [
        "\n".join(target_lines(plan, stated, name)) for (plan, stated), name in zip(plans, ids(plans), strict=True)
    ]
    return "\n\n".join([*parts, TAIL])


HEAD: Final = """\
# What these deployments promise; `kvplan check` holds them to it. Written by: {origin}
# A floor (min_...) is {kept}% of today's figure, a ceiling (max_...) {growth}% above it: set them to what you need.
version: 1

targets:"""

TAIL: Final = """\
# Uncomment what you need.
#
# baseline: # figures that `kvplan check --update-baseline` writes, and how far from them a change may go
#   file: .kvplan/baseline.json
#   max_growth: {weights: 1%, kv_bytes_per_token: 0%}
#   max_drop: {kv_tokens: 5%}
# measured: # a run of `kvplan profile`, or what `kvplan reconcile --format json` says of it
#   file: runs/latest
#   max_error: 5%
#   max_age: 30d
# severity: {min_headroom: warn} # warn instead of fail
# waivers: # a failure that is accepted, through the day it expires
#   - {rule: TARGET/min_headroom, reason: "why, and who removes it", expires: 2027-01-31}
# allow_changes: [baseline] # what the next change may weaken, where `kvplan check --base` compares it with this file
"""


def ids(plans: Sequence[tuple[Plan, Stated]]) -> list[str]:
    """A name for each target: the model's, with GPU and context if needed to tell them apart."""
    short = [slug(plan.request.spec.name) for plan, _ in plans]
    if len(plans) == 1:
        return short
    return [
        slug(f"{name}-{plan.request.gpu.name}-{plan.capacity.max_model_len}")
        for name, (plan, _) in zip(short, plans, strict=True)
    ]


def slug(name: str) -> str:
    path = Path(name)
    base = path.parent.name if path.name == "config.json" else path.name
    cleaned = re.sub(r"[^a-z0-9.-]+", "-", base.lower()).strip("-.")[:80]
    return "server" if not cleaned or cleaned == "measured" else cleaned


def target_lines(plan: Plan, stated: Stated, name: str) -> Iterator[str]:
    yield f"  - id: {quoted(name)} # {title(plan)}"
    for key, value in {**stated.values, **engine_values(plan)}.items():
        yield f"    {key}: {value}"
    yield "    rules:"
    for text, comment in rules(plan):
        yield f"      {text:<38} # {comment}"


def engine_values(plan: Plan) -> dict[str, str]:
    """The stated engine arguments, as plain integers; always with the context, because the model's own may change."""
    args, values = plan.request.args, {"engine": plan.request.release.label}
    context = args.max_model_len or plan.capacity.max_model_len
    values["max_model_len"] = str(context if plan.slots is not None else plan.capacity.max_model_len)
    if args.max_model_len == "auto":
        values["max_model_len"] = "auto"
    usual = EngineArgs()
    for field in fields(EngineArgs):
        value = getattr(args, field.name)
        if value != getattr(usual, field.name) and field.name not in values:
            values[field.name] = value_text(field.name, value)
    return values


def value_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "kv_offloading_size":
        assert isinstance(value, int)
        return f"{value // GIB}GiB" if value % GIB == 0 else f"{value}B"
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")
    return quoted(str(value))


def quoted(text: str) -> str:
    """A value as YAML reads it back: unquoted if it cannot be misread."""
    bare = re.fullmatch(r"[A-Za-z0-9./][A-Za-z0-9._/@=+,-]*(?::[A-Za-z0-9._/@=+,-]+)*", text)
    odd = any(pattern.fullmatch(text) for pattern, _, _ in ODD) or re.fullmatch(r"[0-9]{4}-.*|[-+.0-9].*:.*", text)
    return text if bare and not odd else json.dumps(text, ensure_ascii=True)


def rules(plan: Plan) -> Iterator[tuple[str, str]]:
    """(rule, comment with today's figure) for everything that applies to any plan."""
    memory = plan.memory
    yield "fits: true", f"{format_gib(memory.unused)} of GPU memory left"
    keeps_share = abilities_of(plan.request.release.engine).keeps_share  # then unused memory is not modeled
    if not keeps_share and memory.unused * 1000 * KEPT // 100 // memory.total > 0:
        share = 1000 * memory.unused * KEPT // 100 // memory.total  # in thousandths, rounded down
        yield f"min_headroom: {share / 10:g}%", f"today {100 * memory.unused / memory.total:.1f}%"
    load, context = plan.request.load, plan.capacity.max_model_len
    if requests := served(plan, context, load.shared_prefix):
        text = f"today {plural(requests, 'concurrent request')} of {context:,} tokens"
        yield f"min_concurrency: {max(1, requests * KEPT // 100)}", text
    if load.mean_tokens is not None and (users := plan.concurrency.users):
        yield (
            f"min_users: {max(1, users * KEPT // 100)}",
            f"today {plural(users, 'concurrent user')} at the mean length",
        )
    yield f"min_kv_tokens: {max(1, kv_tokens(plan) * KEPT // 100)}", f"today {kv_tokens(plan):,}"
    yield f"max_weights: {ceiling(memory.weights)}", f"today {format_gib(memory.weights)} on each GPU"
    if plan.bytes_per_token:
        token = plan.bytes_per_token
        yield f"max_kv_bytes_per_token: {token}", f"{format_size(token)}, exact: changes only with the model or flags"
    if memory.lora:
        yield f"max_lora_bytes: {ceiling(memory.lora)}", f"today {format_gib(memory.lora)} on each GPU"


def ceiling(num_bytes: int) -> str:
    """A size plus slack, in whole MiB, rounded up."""
    allowed = num_bytes * (100 + GROWTH)
    return f"{-(-allowed // (100 << 20))}MiB"


# --- user input -------------------------------------------------------------------------------------------------------


def lengths_stated(values: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The lengths as typed; file names become relative to the policy's folder."""
    stated = {}
    for key in LENGTH_KEYS:
        value = values.get(key)
        if value is not None:
            stated[key] = quoted(from_folder(value, folder) if key == "lengths" else value)
    return stated


def from_folder(text: str, folder: Path) -> str:
    """A path as the policy must contain it, relative to its folder; text that is not a file is unchanged."""
    if not exists(text) or Path(text).is_absolute():
        return text
    relative = os.path.relpath(text, folder)
    return relative if relative.startswith(".") else f"./{relative}"


LISTED: Final = f"`pgrep -fa '{'|'.join(program_words())}'` lists the servers that run"


def command_of(pid: str, proc: Path = Path("/proc")) -> list[str]:
    """Words that started a process, preceded by its environment variables that change memory.

    Source: proc(5), /proc/PID/cmdline and /proc/PID/environ.
    """
    if not re.fullmatch(r"[0-9]{1,10}", pid):
        raise UsageError("--from-pid", f"is not a process id ('{printable(pid, 40)}')", f"write a number; {LISTED}")
    if not proc.is_dir():
        raise EnvironmentProblem("--from-pid", "this system has no /proc", "paste the command with --from-command")
    try:
        raw = (proc / pid / "cmdline").read_bytes()
    except FileNotFoundError:
        raise EnvironmentProblem(f"--from-pid {pid}", "no such process", LISTED) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"--from-pid {pid}", f"cannot be read ({error.strerror})", "run as the server's user"
        ) from None
    words = [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")]
    while words and not words[-1]:
        words.pop()
    if not words:
        raise EnvironmentProblem(f"--from-pid {pid}", "has no command line (a kernel thread, or it has ended)")
    return [*_assignments(proc / pid / "environ"), *words]


def _assignments(environ: Path) -> list[str]:
    """`NAME=value` of each variable that changes a server's memory; others, which may be secrets, are ignored."""
    try:
        raw = environ.read_bytes()
    except OSError:  # another user's process
        return []
    pairs = [pair.decode("utf-8", "surrogateescape") for pair in raw.split(b"\0")]
    return [pair for pair in pairs if pair.partition("=")[0] in variables()]
