"""The words of a server's command, parsed: flags, variables and their values.

Each server's names for arguments are in kvplan/servers/words/arguments.py, its other flags in servers/<name>/.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvplan.core.errors import Faults, UnsupportedModelError, UsageError, sentence
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import DEFAULT, Number, Version
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs, short_flags

if TYPE_CHECKING:
    from kvplan.servers.plans.plan import Colocated

MOST_UNKNOWN: Final = 200  # flags in no list; no real command has so many
EXPERT_RANKS: Final = "ep"  # number of ranks that share experts, kept here until the tensor ranks are known
VARIABLE: Final = r"\$[A-Za-z0-9_{(@*]|`|\{\{|<[A-Za-z][\w .-]*>|\{[A-Za-z_]\w*\}"
IN_FOLDER: Final = r"/?\$\{?\w+\}?(?:/[^$`{}<>]+)+"  # a known folder in an unknown one: $ROOT/Qwen2-VL-2B


Kind = Literal["on", "off", "size", "gib", "text"]  # 1 is True; 1 is False; a whole number; GiB in bytes; as it is
UNCHANGED: Final = ("", "0")
Concerns = Callable[[ModelSpec, EngineArgs], bool]


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that changes a server's memory.

    sets      the field of Version, else of EngineArgs, that it sets; "" if its effect is not modeled
    since     the first release that reads it this way; until: the first that no longer does
    concerns  for a variable without a field: the models and arguments it is rejected for, except for `usual` values
    """

    server: str
    sets: str
    kind: Kind
    effect: str
    source: str
    since: Number
    until: Number | None = None
    concerns: Concerns | None = None
    usual: tuple[str, ...] = UNCHANGED

    def is_read_by(self, release: Version) -> bool:
        return release.engine == self.server and release.is_within(self.since, self.until)


# Name -> value: None for a variable passed through, and for irrelevant ones: they may be secrets.
Environment = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Other:
    """A flag that is not in the table of arguments.

    reason      its subject, or why it is rejected and what to write instead
    is_refused  it changes GPU memory in a way that kvplan does not size
    is_switch   it takes no value
    usual       values of a rejected flag that change nothing
    order       why a simulation rejects it: it changes scheduling; "": it does not
    in_order    values that do not change scheduling; for a switch "true" or "false"
    is_kept     printed commands repeat it: the newest release takes it, and its value is no secret
    """

    reason: str
    is_refused: bool
    is_switch: bool
    usual: tuple[str, ...] = ()
    order: str = ""
    in_order: tuple[str, ...] = ()
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Note:
    """A note on a command; `flag`, with its value, if it is about one. The caller adds where the command came from."""

    text: str
    flag: str = ""

    def of(self, source: str) -> str:
        """The note prefixed with the command's origin: `--from-command`, a policy's key."""
        return sentence(f"{source} {self.flag}", self.text) if self.flag else f"{source}: {self.text}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """What printed commands of a server repeat from a pasted one, because it moves no memory.

    words        flags and their values: served names, ports, parsers
    speculative  keys of the speculative config
    """

    server: str
    words: tuple[str, ...] = ()
    speculative: Mapping[str, Any] = field(default_factory=dict)

    def value(self, flag: str) -> str | None:
        """The value of a flag, empty for a switch; None without it."""
        for word, following in zip(self.words, (*self.words[1:], ""), strict=False):
            name, has_value, value = word.partition("=")
            if name == flag:
                return value if has_value else "" if following.startswith("--") else following
        return None


@dataclass(frozen=True, slots=True)
class Resources:
    """What a manifest asks for, for one server: its GPU by a label of the node, and how many.

    num_gpus   GPUs of one pod; None: not stated
    num_pods   pods of one server; replicas: servers
    gpu_label  the label that names the GPU; "" if none does
    """

    gpu: str | None
    gpu_label: str
    num_gpus: int | None
    num_pods: int
    replicas: int


@dataclass(slots=True)
class ServeCommand:
    """A parsed server command.

    args       field of EngineArgs -> value, only those that were given
    engine     "vllm@0.33.0" if an image's tag implies it
    ignored    flags that do not affect GPU memory, by name: their values may be secrets
    repeated   those of them that printed commands repeat, with their values
    speculative  keys of the speculative config that printed commands repeat
    refused    flags that change GPU memory in a way that is not sized, each with the reason
    reordering flags that change scheduling in a way that is not simulated, each with the reason
    unknown    flags in no list: their effect on memory is not known
    readings   notes on numbers that kvplan's own flags would parse differently
    notes      other notes
    environment  variables set for the server's process, with the values of those that change its memory
    resources  what the manifest asks for, of whose container it is
    colocated  how a framework that trains shares its GPUs
    """

    model: str | None = None
    revision: str | None = None
    draft_model: str | None = None
    engine: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    speculative: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    reordering: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    readings: list[Note] = field(default_factory=list)
    environment: Environment = field(default_factory=dict)
    resources: "Resources | None" = None
    colocated: "Colocated | None" = None


@dataclass(frozen=True, slots=True)
class Started:
    """A server that a shell command starts.

    words   the words after the server's name
    engine  "vllm@0.11.2" if the image before it implies it
    args    arguments implied by the way it is started
    notes   what the image leaves open
    """

    words: list[str]
    engine: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def refuse(command: ServeCommand) -> None:
    """Raise UsageError for flags whose effect on memory is not sized."""
    faults = Faults()
    for flag, reason in command.refused.items():
        problem, _, remedy = reason.partition("; ")
        with faults.part():
            raise UsageError(f"--from-command {printable(flag, 60)}", problem, remedy)
    faults.refuse()


def is_value(word: str) -> bool:
    """True if a word after a flag is its value rather than another flag (-1 is a value)."""
    return not word.startswith("-") or re.fullmatch(r"-\d+", word) is not None or word == "-"


def flag_name(word: str, shorts: Mapping[str, str] | None = None) -> tuple[str, str | None]:
    """(name with underscores, value after =) of a flag; dotted parts of a JSON flag stay in the name."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    if not flag.startswith("--"):
        head, dot, key = name.partition(".")
        name = (short_flags(DEFAULT) if shorts is None else shorts).get(head, head) + dot + key
    return name, value if equals else None


class Unfilled(UsageError):
    """A value of a command that its text does not say: a variable, or a placeholder.

    flag   the flag, or "" for the model in front of the flags; what: its value as written
    """

    flag: str
    what: str


def code(source: str) -> str:
    """A value that is code of another language, as a word: the text does not say it."""
    return f"$(={source})"


def unfilled(flag: str, what: str) -> Unfilled:
    """Error for a value that the text does not say."""
    what = what.removeprefix("$(=").removesuffix(")") if what.startswith("$(=") else what
    subject = "--from-command" if not flag else f"--from-command {printable(flag, 60)}"
    error = Unfilled(subject, f"has no value in the text ({printable(what, 60)!r})", "write its value")
    error.flag, error.what = flag, what
    return error


def literal(value: str, what: str) -> str:
    """The value of a flag (`what`, or "the model"), unless a variable is left in it."""
    is_model = what in ("the model", "--model", "--model-path")
    if re.search(VARIABLE, value) and not (is_model and re.fullmatch(IN_FOLDER, value)):
        raise unfilled("" if what == "the model" else what, value)
    return value


def flag_text(word: str) -> str:
    """Return a flag as it was written, without a value, which may be a secret."""
    return word.partition("=")[0]


def only_value(values: list[str], option: str) -> str:
    if len(values) != 1:
        raise UsageError(option, "needs one value", "write it after the flag")
    return values[0]


def take_other(command: ServeCommand, flag: str, other: Other, values: list[str], *, negated: bool = False) -> None:
    """Record a flag that is not in the table: rejected unless its value changes nothing; likewise for scheduling."""
    if other.is_refused and not negated and (not values or any(value not in other.usual for value in values)):
        command.refused.setdefault(flag, other.reason)
    else:
        command.ignored.append(flag)
        if other.is_kept and not any(re.search(VARIABLE, value) for value in values):
            command.repeated += [flag, *values]
    stated = values or ["false" if negated else "true"]
    if other.order and any(value not in other.in_order for value in stated):
        command.reordering.setdefault(flag, other.order)


def take_unknown(command: ServeCommand, flag: str) -> None:
    if len(command.unknown) > MOST_UNKNOWN:
        return  # that is an error already
    command.unknown.append(flag)
    if len(command.unknown) > MOST_UNKNOWN:
        raise UsageError(
            f"--from-command {printable(flag, 60)}",
            f"is one of more than {MOST_UNKNOWN} flags kvplan does not know",
            "is it the command of a server?",
        )


def near_flag(name: str, arguments: "frozenset[str]", others: Mapping[str, Other]) -> str | None:
    """The flag that a misspelled one may stand for, if taking it or not makes a difference."""
    import difflib

    near = difflib.get_close_matches(name, [*arguments, *others], n=1, cutoff=0.85)
    harmless = near and near[0] in others and not others[near[0]].is_refused
    return None if not near or harmless else "--" + near[0].replace("_", "-")


def over_experts(args: dict[str, Any], option: str) -> None:
    """Replace a number of expert ranks, which must equal the tensor ranks, with --enable-expert-parallel."""
    ranks = args.pop(EXPERT_RANKS, 1)
    if ranks > 1:
        if ranks != args.get("tensor_parallel_size", 1):
            raise UnsupportedModelError(option, "only experts over all tensor ranks are modeled")
        args["enable_expert_parallel"] = True


def pair_name(text: str) -> str:
    """Normalize the key of `--engine-arg k=v` to an argument's name."""
    name = text.partition("=")[0].strip().lstrip("-").replace("-", "_")
    return short_flags(DEFAULT).get(name, name)


def read_pair(text: str) -> tuple[str, Any]:
    """Parse `--engine-arg k=v` to (field, value); a key that is no engine argument is an error with suggestions.

    The flags that turn a switch off are accepted as well: no_async_scheduling=true.
    """
    from kvplan.servers.words.argument_values import read_argument, switch  # only for values that were typed or pasted

    key, equals, value = text.partition("=")
    name, option = pair_name(text), f"--engine-arg {printable(key, 60)}"
    if not equals:
        raise UsageError(option, "has no value", "write key=value, for example block_size=32")
    negated = name.removeprefix("no_")
    if name != negated and negated in ARGUMENTS and ARGUMENTS[negated].kind == "flag":
        return negated, not switch(value.strip(), option)
    if name == "speculative_config":
        raise UsageError(option, "may name another model", "write --speculative-config")
    if name not in ARGUMENTS:
        from kvplan.core.near import meant, near_names

        hint = meant(near_names(name, ARGUMENTS), "see the option names of `kvplan estimate --help`")
        raise UsageError(option, "is not an engine argument that kvplan models", hint)
    return name, read_argument(name, value.strip(), option)
