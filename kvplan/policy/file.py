"""Reader of kvplan.policy.yaml: targets, rules, baseline, evidence, severities, waivers; errors name the line.

Engine keys stay text here and are parsed like the command line's options. A path in a policy is relative to the policy
file's folder.
"""

import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from kvplan.asked.form import LENGTH_KEYS, SWITCHES
from kvplan.asked.pasted import MAX_COMMAND_CHARS, too_long
from kvplan.core import strict_yaml
from kvplan.core.errors import Faults, InvalidInputError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.strict_yaml import Items, Mark, Node, Scalar, Table, located, wrong
from kvplan.core.units import parse_count, parse_duration, parse_fraction, parse_size, parse_tokens
from kvplan.policy.result import CHANGE_KINDS, OWN_RULES, RULES, ChangeKind, Key
from kvplan.servers.words.argument_values import read_argument, stated_bytes
from kvplan.servers.words.arguments import ARGUMENTS

Severity = Literal["warn", "fail"]
Limit = int | float | bool

MAX_TARGETS: Final = 500
MAX_VALUE_CHARS: Final = 1000  # of any value except commands: names, paths and numbers are far shorter
EVIDENCE_ID: Final = "measured"  # target of findings about the measurement itself

READING_SWITCHES: Final = ("assume_dense", "text_only")  # options for reading the model's config
# Keys that describe a target's server: the options of `kvplan estimate` by their long names.
ENGINE_KEYS: Final = (
    "model", "revision", "reader", *READING_SWITCHES, "gpu", "gpu_memory", "host_bandwidth", "memory_in_use", "engine",
    "engine_arg", "weights_bytes", "calibration", "draft_model", "speculative_config", "enable_lora", *ARGUMENTS,
    *LENGTH_KEYS,
)  # fmt: skip
TARGET_KEYS: Final = (
    "id", "command", "manifest", "container", "served_model_name", *ENGINE_KEYS, "workload", "rules", "severity",
)  # fmt: skip
DEFAULT_KEYS: Final = (*ENGINE_KEYS, "workload", "rules")
TOP_KEYS: Final = ("version", "defaults", "targets", "baseline", "measured", "severity", "waivers", "allow_changes")
WORKLOAD_KEYS: Final = ("profile", "trace", "rate", "tpot", "slo", *LENGTH_KEYS)
TARGET_RULES: Final = tuple(name for name in RULES if "." not in name and name not in ("max_age", "plausible"))
GROWTH: Final = ("weights", "kv_bytes_per_token", "lora")
DROP: Final = ("kv_cache", "kv_tokens", "users", "concurrency", "headroom")

# Keys that people write by mistake -> the right ones.
HINTS: Final[Mapping[str, str]] = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "ep": "enable_expert_parallel", "dcp": "decode_context_parallel_size", "ctx": "max_model_len",
    "context": "max_model_len", "batch": "max_num_seqs", "name": "id", "from_command": "command",
    "max_lora": "max_lora_bytes", "headroom": "min_headroom", "concurrency": "min_concurrency",
    "max_error": "max_prediction_error", "max_weight": "max_weights", "users": "min_users",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as written: its limit in its own unit, and the source text.

    is_share  True if the limit is a fraction of something, not a number in its unit
    key       the statistic that it limits, if a rule has several: "mean", "p99"
    """

    name: str
    limit: Limit
    text: str
    mark: Mark
    is_share: bool = False
    key: Key = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """The load on a target.

    profile, trace   source of the requests: at most one of them
    rate_per_s       requests per second; None: as in the profile or trace
    tpot_s           minimum seconds per simulated step; None: from the GPU's data
    slo              latency targets, which operating limits keep: "ttft=2s,tpot=50ms"
    """

    profile: str | None
    trace: Path | None
    rate_per_s: float | None
    tpot_s: float | None
    mark: Mark
    slo: str | None = None

    def facts(self) -> dict[str, str]:
        """Stated fields except the trace, as text by key."""
        stated = {"profile": self.profile, "rate": self.rate_per_s, "tpot": self.tpot_s, "slo": self.slo}
        return {key: str(value) for key, value in stated.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Target:
    """A server to check. `own` and `defaults` are its engine keys: its own and those shared by all targets.

    manifest, container  the file whose container starts it, and that container's name if the file has several
    served_model_name    the model's name for clients and in metrics; None: as the command says
    """

    id: str
    mark: Mark
    own: Mapping[str, Node]
    defaults: Mapping[str, Node]
    command: Scalar | None
    workload: Workload | None
    rules: tuple[Rule, ...]
    severity: Mapping[str, Severity]
    manifest: Scalar | None = None
    container: Scalar | None = None
    served_model_name: str | None = None

    def place(self, key: str) -> Mark:
        """Position of an engine key, else of the target."""
        node = self.own.get(key) or self.defaults.get(key)
        return node.mark if node is not None else self.mark


@dataclass(frozen=True, slots=True)
class Baseline:
    """The figures to compare with: a file written by an earlier check; `rules` are named "baseline.weights"."""

    path: Path
    text: str
    rules: tuple[Rule, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, or its reconciliation, whose error and age are judged; None: no limit."""

    path: Path
    text: str
    max_error: Rule | None
    max_age: Rule | None  # in days
    mark: Mark


@dataclass(frozen=True, slots=True)
class Waiver:
    """A failure accepted through the day `expires`; `target` and `rule` may contain `*`."""

    target: str
    rule: str
    reason: str
    expires: datetime.date
    mark: Mark
    expires_mark: Mark


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy; every file that it names is inside `root`, also after following links."""

    path: str
    folder: Path
    root: Path
    targets: tuple[Target, ...]
    baseline: Baseline | None = None
    measured: Measured | None = None
    severity: Mapping[str, Severity] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()
    allow_changes: tuple[ChangeKind, ...] = ()


def read(path: Path, root: Path | None = None) -> Policy:
    """Parse the policy in a file. Raise InvalidInputError with file, line and column of an error.

    root  directory that must contain the files it names; None: the policy's repository, else its folder
    """
    root = root or root_of(path)
    if not is_within(root, path):
        raise InvalidInputError(
            path_text(path), f"is a link that points outside {path_text(root)}", "name the policy itself"
        )
    return policy_of(strict_yaml.read(path), path, root)


def root_of(path: Path) -> Path:
    """Top of the repository that contains a policy, or the policy's own folder if there is none."""
    try:
        folder = path.parent.resolve()
        top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        return top or path.resolve().parent
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a link cycle
        return path.parent


def is_within(root: Path, path: Path) -> bool:
    """True if a path, and each link on the way to it, resolves to a place below `root`, except git's own files."""
    return _leads_into(root, path) and all(_leads_into(root, link) for link in _links(path))


def _leads_into(root: Path, path: Path) -> bool:
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError):
        return True  # not a file name at all: its reader reports it
    return real.is_relative_to(root) and ".git" not in real.relative_to(root).parts


def refuse_outside(root: Path, path: Path, mark: Mark, what: str) -> None:
    """Reject a file outside the root: anyone who can change a policy can see what its messages contain."""
    if not is_within(root, path):
        raise wrong(
            mark, what, f"points outside {path_text(root)} ({path_text(path)})", "keep the file in the repository"
        )


def _links(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_symlink()]
    except (OSError, ValueError):
        return []


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a policy's files: relative to its folder, and inside the root; `faults` collects errors."""

    folder: Path
    root: Path
    faults: Faults = field(default_factory=Faults)

    def file(self, text: str, mark: Mark, what: str) -> Path:
        path = beside(self.folder, text)
        refuse_outside(self.root, path, mark, what)
        return path


def policy_of(top: Table, path: Path, root: Path | None = None) -> Policy:
    root, folder = root or root_of(path), path.parent
    _refuse_long(top)
    faults = Faults()
    place = Place(folder, root, faults)
    strict_yaml.table(top, "policy", TOP_KEYS, HINTS, faults)
    num_strange = len(faults.errors)  # perhaps misspelled, and so missing below
    with faults.part():
        _check_version(top)
    defaults = _Defaults()
    with faults.part():
        defaults = _Defaults.of(top.values.get("defaults"), place)
    targets: list[Target] = []
    with faults.part():
        for node in _targets(top):
            with faults.part():
                targets.append(_target(node, defaults, place))
        _refuse_twins(targets)
    policy = Policy(path_text(path), folder, root, tuple(targets))
    parts: dict[str, Callable[[Node], Any]] = {
        "baseline": lambda node: _baseline(node, place),
        "measured": lambda node: _measured(node, place),
        "severity": lambda node: _severity(node, faults),
        "waivers": lambda node: _waivers(node, faults),
        "allow_changes": _allowed,
    }
    for name, read_part in parts.items():
        if name in top.values:
            with faults.part():
                policy = replace(policy, **{name: read_part(top.values[name])})
    faults.errors[num_strange:] = sorted(faults.errors[num_strange:], key=lambda error: (error.mark or top.mark)[1:])
    faults.refuse()
    return policy


def _targets(top: Table) -> tuple[Node, ...]:
    nodes = strict_yaml.items(_needed(top, "targets", "policy"), "targets")
    if not nodes:
        raise wrong(top.values["targets"].mark, "targets", "is empty", "add at least one, or run `kvplan check --init`")
    if len(nodes) > MAX_TARGETS:
        raise wrong(nodes[MAX_TARGETS].mark, "targets", f"has more than {MAX_TARGETS:,} entries", "split the file")
    return nodes


def _refuse_long(node: Node, key: str = "") -> None:
    """Reject a value too long to process; the reader limits nesting."""
    match node:
        case Table():
            for name, value in node.values.items():
                _refuse_long(value, name)
        case Items():
            for value in node.values:
                _refuse_long(value, key)
        case Scalar() if key != "command" and len(node.text) > MAX_VALUE_CHARS:
            problem = f"is {len(node.text):,} characters long; maximum {MAX_VALUE_CHARS:,}"
            raise wrong(node.mark, f"{printable(key, 60)}: {problem}")


def _check_version(top: Table) -> None:
    version = strict_yaml.scalar(_needed(top, "version", "policy"), "version")
    if version.text != "1":
        raise wrong(
            version.mark,
            "version",
            f"is {printable(version.text, 20)!r}, but kvplan supports only 1",
            "write version: 1",
        )


def _needed(table: Table, key: str, what: str) -> Node:
    if key not in table.values:
        raise wrong(table.mark, what, f"has no {key}", f"{EXAMPLES.get(key, f'write {key}: ...')}")
    return table.values[key]


EXAMPLES: Final[Mapping[str, str]] = {
    "version": "write version: 1",
    "targets": "add one, or run `kvplan check --init MODEL --gpu NAME`",
    "id": "write one, for example id: chat-prod",
    "file": "name one, for example file: .kvplan/baseline.json",
    "expires": "write its last day: expires: 2027-01-31",
    "reason": "say why, for whoever reads the report",
    "rule": "write TARGET/RULE, for example rule: chat-prod/min_headroom",
}


def _refuse_twins(targets: Sequence[Target]) -> None:
    seen: dict[str, Mark] = {}
    for target in targets:
        if target.id in seen:
            raise wrong(
                target.mark, f"target {target.id}", f"is already defined in line {seen[target.id].line}", "rename one"
            )
        seen[target.id] = target.mark


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Defaults:
    engine: Mapping[str, Node] = field(default_factory=dict)
    workload: Workload | None = None
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, node: Node | None, place: Place) -> "_Defaults":
        if node is None:
            return cls()
        table = strict_yaml.table(node, "defaults", DEFAULT_KEYS, HINTS, place.faults)
        engine, workload = _engine(table, "defaults", place)
        return cls(engine, workload, _rules(table.values.get("rules"), "defaults", place.faults))


def _target(node: Node, defaults: _Defaults, place: Place) -> Target:
    table = strict_yaml.table(node, "target", TARGET_KEYS, HINTS, place.faults)
    target_id = _target_id(_needed(table, "id", "target"))
    what = f"target {target_id}"
    engine, workload = _engine(table, what, place)
    own = _rules(table.values.get("rules"), what, place.faults)
    names = {rule.name for rule in own}
    return Target(
        id=target_id,
        mark=table.keys["id"],
        own=engine,
        defaults=defaults.engine,
        command=_command(table.values.get("command"), f"{what}: command"),
        manifest=_manifest(table, what, place),
        container=_optional(table, "container", what),
        served_model_name=None if (name := _optional(table, "served_model_name", what)) is None else name.text,
        workload=workload or defaults.workload,
        rules=(*own, *(rule for rule in defaults.rules if rule.name not in names)),
        severity=_severity(table.values.get("severity"), place.faults),
    )


def _command(node: Node | None, what: str) -> Scalar | None:
    if node is None:
        return None
    scalar = strict_yaml.scalar(node, what)
    if len(scalar.text) > MAX_COMMAND_CHARS:
        raise wrong(scalar.mark, what, *too_long(scalar.text))
    return scalar


def _manifest(table: Table, what: str, place: Place) -> Scalar | None:
    """The manifest that contains a target's server; a target has either this or a command."""
    manifest = _optional(table, "manifest", what)
    if manifest is None:
        if "container" in table.values:
            raise wrong(table.keys["container"], what, "names a container and no manifest", "add manifest: FILE")
        return None
    if "command" in table.values:
        raise wrong(table.keys["manifest"], what, "names a manifest and a command", "keep one of them")
    place.file(manifest.text, manifest.mark, f"{what}: manifest")
    return manifest


def _optional(table: Table, key: str, what: str) -> Scalar | None:
    node = table.values.get(key)
    return None if node is None else strict_yaml.scalar(node, f"{what}: {key}")


def _target_id(node: Node) -> str:
    text = strict_yaml.text(node, "id")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", text):
        raise wrong(
            node.mark, "id", f"is not a name ({printable(text, 60)!r})", "use letters, digits, dot, dash, underscore"
        )
    if text == EVIDENCE_ID:
        raise wrong(node.mark, "id", f"{EVIDENCE_ID!r} is reserved for the measurement", "choose another id")
    return text


def _engine(table: Table, what: str, place: Place) -> tuple[dict[str, Node], Workload | None]:
    """(engine keys as written, workload); lengths of the workload count as the target's own."""
    keys = {key: node for key, node in table.values.items() if key in ENGINE_KEYS}
    workload = None
    if "workload" in table.values:
        inner = strict_yaml.table(table.values["workload"], f"{what}: workload", WORKLOAD_KEYS, HINTS, place.faults)
        for key in LENGTH_KEYS:
            if key in inner.values and key in keys:
                raise wrong(inner.keys[key], what, f"{key} is stated twice", "keep one of them")
            if key in inner.values:
                keys[key] = inner.values[key]
        workload = _workload(inner, what, place)
    for key, node in keys.items():
        with place.faults.part():
            check_engine_value(key, node, what)
    return keys, workload


def check_engine_value(key: str, node: Node, what: str) -> None:
    """Reject what the key's own parser rejects, with the position in the file."""
    name = f"{what}: {key}"
    if key == "engine_arg":
        for item in node.values if isinstance(node, Items) else (node,):
            strict_yaml.text(item, name)
        return
    if key in SWITCHES:
        strict_yaml.switch(node, name)
        return
    if isinstance(node, Items):
        raise wrong(node.mark, name, "is a list", "write one target for each value")
    text = strict_yaml.text(node, name)
    if key in ("gpu", "max_model_len") and "," in text:
        raise wrong(node.mark, name, f"has several values ({printable(text, 60)!r})", "write one target for each")
    if key in ARGUMENTS:
        with located(node.mark):
            read_argument(key, text, name)


def _workload(table: Table, what: str, place: Place) -> Workload:
    def value(key: str, reading: Callable[[str, str], Any]) -> Any:
        node = table.values.get(key)
        if node is None:
            return None
        with located(node.mark):
            return reading(strict_yaml.text(node, f"{what}: {key}"), f"{what}: {key}")

    if "profile" in table.values and "trace" in table.values:
        raise wrong(table.keys["trace"], f"{what}: workload", "names both a profile and a trace", "keep one of them")
    return Workload(
        profile=value("profile", lambda text, _: text),
        trace=value("trace", lambda text, _: place.file(text, table.values["trace"].mark, f"{what}: workload: trace")),
        rate_per_s=value("rate", _rate),
        tpot_s=value("tpot", parse_duration),
        mark=table.mark,
        slo=value("slo", _slo),
    )


def beside(folder: Path, text: str) -> Path:
    """Resolve a path relative to the policy's folder."""
    return Path(os.path.join(folder, text))  # noqa: PTH118 -- keeps the ./ that tells a path from a catalog name


def exists(path: Path) -> bool:
    """True if the file exists; also for an invalid path, so that its reader reports why."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return True


def _slo(text: str, option: str) -> str:
    from kvplan.simulate.slo import parse_slo  # only where a workload has targets

    parse_slo(text)
    return text


def _rate(text: str, option: str) -> float:
    from kvplan.workloads.profiles import RATE

    match = re.fullmatch(rf"({RATE})(?:/(s|min|h))?", text)
    rate = 0.0 if match is None else float(match[1]) / {"s": 1, "min": 60, "h": 3600}[match[2] or "s"]
    if not rate:
        raise UsageError(option, f"is not a request rate ({printable(text, 40)!r})", "write 5.5/s, 90/min or 2000/h")
    return rate


# --- rules ------------------------------------------------------------------------------------------------------------


def _rules(node: Node | None, what: str, faults: Faults) -> tuple[Rule, ...]:
    if node is None:
        return ()
    table = strict_yaml.table(node, f"{what}: rules", TARGET_RULES, HINTS, faults)
    rules: list[Rule] = []
    for name in table.values:
        with faults.part():
            rules += _rule(name, table, what)
    return tuple(rules)


USER_KEYS: Final[dict[str, Key]] = {"mean": "mean", "p99": "p99"}


def _rule(name: str, table: Table, what: str) -> list[Rule]:
    node, mark = table.values[name], table.keys[name]
    option = f"{what}: {name}"
    if name == "min_users" and isinstance(node, Table):
        inner = strict_yaml.table(node, option, tuple(USER_KEYS))
        if not inner.values:
            raise wrong(node.mark, option, "is empty", "write {mean: 200, p99: 20}, or one number")
        return [
            _limited(name, value, inner.keys[key], f"{option}.{key}", USER_KEYS[key])
            for key, value in inner.values.items()
        ]
    return [_limited(name, node, mark, option, "mean" if name == "min_users" else "")]


def _limited(name: str, node: Node, mark: Mark, option: str, key: Key = "") -> Rule:
    value = strict_yaml.scalar(node, option)
    with located(value.mark):
        limit = LIMITS[name](value.text, option)
    is_share = isinstance(limit, Share)
    return Rule(name, limit.value if isinstance(limit, Share) else limit, value.text, mark, is_share, key)


@dataclass(frozen=True, slots=True)
class Share:
    value: float


def _true(text: str, option: str) -> bool:
    if text != "true":
        raise UsageError(option, f"is {printable(text, 40)!r}", "write true, or remove the rule")
    return True


def _number(text: str, option: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text) or not float(text):
        raise UsageError(option, f"is not a number above 0 ({printable(text, 40)!r})", "write 12 or 12.5")
    return float(text)


def share(text: str, option: str) -> Share:
    """Parse a percentage >= 0, or a fraction from 0 to 1, rounded once: "5%" is exactly 0.05."""
    percent = re.fullmatch(r"([0-9]{1,6})(?:\.([0-9]{1,6}))?%", text)
    if percent:
        whole, decimals = percent.groups(default="")
        return Share(int(whole + decimals) / int("100" + "0" * len(decimals)))
    if re.fullmatch(r"0|0\.0{1,6}", text):
        return Share(0.0)
    if not re.fullmatch(r"[01]|[01]\.[0-9]{1,6}", text):
        raise UsageError(option, f"is not a share ({printable(text, 40)!r})", "write a percentage such as 5%")
    return Share(parse_fraction(text, option))


def _at_most_whole(text: str, option: str) -> Share:
    limit = share(text, option)
    if limit.value > 1:
        raise UsageError(option, f"is over 100% ({printable(text, 40)})", "write 100% or less")
    return limit


def _stated(text: str, option: str) -> int:
    return stated_bytes(parse_size(text, option), option)


def _headroom(text: str, option: str) -> int | Share:
    if text.endswith("%"):
        return _at_most_whole(text, option)
    return _stated(text, option)


def _days(text: str, option: str) -> int:
    match = re.fullmatch(r"([0-9]{1,5})(d|w)", text)
    if match is None:
        raise UsageError(option, f"is not an age ({printable(text, 40)!r})", "write days or weeks: 30d, 2w")
    return int(match[1]) * (7 if match[2] == "w" else 1)


LIMITS: Final[Mapping[str, Callable[[str, str], Limit | Share]]] = {
    "fits": _true,
    "min_headroom": _headroom,
    "min_concurrency": _number,
    "min_logged_concurrency": _number,
    "min_users": parse_count,
    "min_kv_tokens": parse_tokens,
    "max_weights": _stated,
    "max_kv_bytes_per_token": parse_size,
    "max_lora_bytes": _stated,
    "max_preemption_rate": _at_most_whole,
    "max_prediction_error": share,
    "max_age": _days,
    **{f"baseline.{figure}": share for figure in GROWTH},
    **{f"baseline.{figure}": _at_most_whole for figure in DROP},
}


# --- baseline, evidence, severities, waivers --------------------------------------------------------------------------


def _baseline(node: Node, place: Place) -> Baseline:
    table = strict_yaml.table(node, "baseline", ("file", "max_growth", "max_drop"))
    text = strict_yaml.text(_needed(table, "file", "baseline"), "baseline: file")
    rules: list[Rule] = []
    for key, figures in (("max_growth", GROWTH), ("max_drop", DROP)):
        if key not in table.values:
            continue
        inner = strict_yaml.table(table.values[key], f"baseline: {key}")
        for figure in inner.values:
            if figure not in figures:
                other = "max_drop" if key == "max_growth" else "max_growth"
                moved = f"it goes under {other}" if figure in (*GROWTH, *DROP) else _near(figure, figures)
                shown_figure = printable(figure, 60)
                raise wrong(inner.keys[figure], f"baseline: {key}", f"has no figure {shown_figure!r}", f"{moved}")
            option = f"baseline: {key}: {figure}"
            rules.append(_limited(f"baseline.{figure}", inner.values[figure], inner.keys[figure], option))
    path = place.file(_path(text, table), table.values["file"].mark, "baseline: file")
    return Baseline(path, text, tuple(rules), table.keys["file"])


def _near(name: str, known: tuple[str, ...]) -> str:
    return strict_yaml.nearest(name, known, HINTS)


def _path(text: str, table: Table) -> str:
    if not text or "\0" in text:
        raise wrong(table.values["file"].mark, "file", "is empty", "write a path")
    return text


def _measured(node: Node, place: Place) -> Measured:
    table = strict_yaml.table(node, "measured", ("file", "max_error", "max_age"))
    text = strict_yaml.text(_needed(table, "file", "measured"), "measured: file")

    def rule(key: str, name: str) -> Rule | None:
        if key not in table.values:
            return None
        return _limited(name, table.values[key], table.keys[key], f"measured: {key}")

    path = place.file(_path(text, table), table.values["file"].mark, "measured: file")
    for name in ("run.json", "samples.jsonl", "events.jsonl"):  # the run's files may be in the same folder
        refuse_outside(place.root, path.parent / name, table.values["file"].mark, "measured: file")
    return Measured(
        path, text, rule("max_error", "max_prediction_error"), rule("max_age", "max_age"), table.keys["file"]
    )


def _severity(node: Node | None, faults: Faults) -> dict[str, Severity]:
    if node is None:
        return {}
    table = strict_yaml.table(node, "severity", OWN_RULES, HINTS, faults)
    severities: dict[str, Severity] = {}
    for name, inner in table.values.items():
        with faults.part():
            if name == "plausible":
                raise wrong(inner.mark, "severity", "plausible has none", "waive the rule with the reason")
            match strict_yaml.text(inner, f"severity: {name}"):
                case "warn":
                    severities[name] = "warn"
                case "fail":
                    severities[name] = "fail"
                case other:
                    what = f"severity: {name} is {printable(other, 40)!r}; write warn or fail"
                    raise wrong(inner.mark, what)
    return severities


def _waivers(node: Node, faults: Faults) -> tuple[Waiver, ...]:
    waivers: list[Waiver] = []
    for item in strict_yaml.items(node, "waivers"):
        with faults.part():
            waivers.append(_waiver(item))
    return tuple(waivers)


def _waiver(node: Node) -> Waiver:
    table = strict_yaml.table(node, "waiver", ("rule", "reason", "expires"))
    pattern = strict_yaml.scalar(_needed(table, "rule", "waiver"), "waiver: rule")
    target, slash, rule = pattern.text.partition("/")
    if not slash or not target or not rule:
        raise wrong(pattern.mark, "waiver", f"rule is {printable(pattern.text, 60)!r}", "write TARGET/RULE")
    if "*" not in rule and rule not in OWN_RULES:
        raise wrong(pattern.mark, "waiver", f"there is no rule {printable(rule, 60)!r}", f"{_near(rule, OWN_RULES)}")
    reason = strict_yaml.text(_needed(table, "reason", "waiver"), "waiver: reason")
    if not reason.strip():
        raise wrong(table.values["reason"].mark, "waiver", "reason is empty", "say why the rule is waived")
    expires = strict_yaml.date(_needed(table, "expires", "waiver"), "waiver: expires")
    return Waiver(target, rule, " ".join(reason.split()), expires, pattern.mark, table.values["expires"].mark)


# --- what the base revision allows changes to weaken ------------------------------------------------------------------


def _allowed(node: Node) -> tuple[ChangeKind, ...]:
    known: dict[str, ChangeKind] = {kind: kind for kind in CHANGE_KINDS}
    allowed: list[ChangeKind] = []
    for item in strict_yaml.items(node, "allow_changes"):
        kind = strict_yaml.text(item, "allow_changes")
        if kind not in known:
            raise wrong(
                item.mark, "allow_changes", f"has no kind {printable(kind, 60)!r}", f"{_near(kind, CHANGE_KINDS)}"
            )
        allowed.append(known[kind])
    return tuple(allowed)
