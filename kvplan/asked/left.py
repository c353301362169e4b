"""Values that a pasted text leaves open, and which options state them instead."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from kvplan.asked.words import argument_of
from kvplan.core.errors import Faults, KvplanError, UsageError, together
from kvplan.core.files import printable
from kvplan.servers.words.arguments import ARGUMENTS, option_words
from kvplan.servers.words.command import VARIABLE, Note, ServeCommand, Unfilled, is_value, unfilled

if TYPE_CHECKING:
    from kvplan.servers.words.shell import Word

# Words that stand for any number of arguments: $@, ${ARGS[@]}, and by their name $EXTRA_ARGS.
_MANY: Final = r"\$[@*]|\$\{\w+\[[@*]\]\}|\$\{?\w*(?:ARGS|FLAGS|OPTS|OPTIONS|PARAMS|EXTRA)\w*(?::?-)?\}?"
_OTHERS: Final = {
    "model": "MODEL", "model_path": "MODEL", "model_tag": "MODEL", "revision": "--revision",
    "speculative_draft_model_path": "--draft-model", "speculative_config": "--speculative-config",
}  # fmt: skip
_KEYS: Final = {"MODEL": "model"}


def parsed(parse: Callable[[list[str]], ServeCommand], words: Sequence[str], options: Collection[str]) -> ServeCommand:
    """Parse a server's words without the values that options state. Raises one error that names all that is left.

    options  keys that are stated outside the text: model, tensor_parallel_size, ...
    """
    many = [word for word in words if re.fullmatch(_MANY, word, re.IGNORECASE)]
    plain = [word for word in words if word not in many]
    notes, faults = list[Note](), Faults()
    if any(re.search(VARIABLE, word) for word in plain):
        plain = without_stated(plain, options, notes)
        for word in [word for word in plain if is_open_switch(word)]:  # parsers take no value for a switch
            plain.remove(word)
            with faults.part():
                raise unfilled(*word.split("=", 1))
    command = ServeCommand()
    with faults.part():
        command = parse(plain)
    try:
        faults.refuse()
    except KvplanError as error:
        raise gathered(error) from error
    if command.model is None and many and "model" not in options:
        problem = f"the model may be in {printable(many[0], 40)}, which has no value in the text"
        raise UsageError("--from-command", problem, "name the model, or paste the lines that assign it")
    command.unknown += many
    command.notes += [*notes, *values_note(plain)]
    return command


def without_stated(words: list[str], options: Collection[str], notes: list[Note]) -> list[str]:
    """The words without flags whose values are open and stated by an option, and without an open revision."""
    stated_here: list[str] = []
    for word in words:
        flag, _, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if not re.search(VARIABLE, value):
            stated_here.append(word)
            continue
        in_front = not flag and stated_here and not is_value(stated_here[-1]) and "=" not in stated_here[-1]
        flag = stated_here[-1] if in_front else flag
        option = key_of(flag)
        if option not in options and option != "revision":
            stated_here.append(word)
            continue
        if in_front:
            stated_here.pop()
        if option == "revision" and option not in options:
            notes.append(Note(f"{printable(value, 60)} has no value in the text; the main branch is read", flag))
    return stated_here


def is_open_switch(word: str) -> bool:
    flag, _, value = word.partition("=")
    row = ARGUMENTS.get(argument_of(flag) or "") if flag.startswith("--") and re.search(VARIABLE, value) else None
    return row is not None and row.kind == "flag"


def key_of(flag: str) -> str:
    """The key of a form that states a flag's value."""
    name = flag.lstrip("-").replace("-", "_") or "model"
    other = _OTHERS.get(name.partition(".")[0])
    if other is not None:
        return _KEYS.get(other, other.lstrip("-").replace("-", "_"))
    return argument_of(flag) or name


def gathered(error: KvplanError) -> KvplanError:
    """The error with all values that are left open in one line, which names the option for fault."""
    left = [fault for fault in error.all if isinstance(fault, Unfilled)]
    if not left:
        return error
    options = option_words() | {option.lstrip("-").replace("-", "_"): option for option in _OTHERS.values()}
    options["model"] = options.pop("MODEL")
    parts, keys = [], []
    for fault in sorted(left, key=lambda fault: key_of(fault.flag) != "model"):
        key = key_of(fault.flag)
        parts.append(f"{printable(fault.what, 60)} ({options.get(key, f'write {fault.flag}')})")
        keys.append(key)
    names = ", ".join(dict.fromkeys(parts))
    remedy = "state what stands in parentheses as an option, or paste the lines that assign it"
    merged = UsageError("--from-command", f"no value in the text for {names}", remedy, keys=tuple(keys))
    return together([merged, *(fault.changed(others=()) for fault in error.all if fault not in left)])


def values_note(words: Sequence["str | Word"]) -> list[Note]:
    """A note of the variables of the text that were replaced in flags that kvplan reads: others may be secrets."""
    values: dict[str, str] = {}
    for word, before in zip(words, ["", *words], strict=False):
        replaced = getattr(word, "values", None)
        flag = word.partition("=")[0] if word.startswith("-") else before if before.startswith("-") else ""
        if replaced and (not flag or argument_of(flag) or key_of(flag) == "model"):
            values |= replaced
    if not values:
        return []
    return [Note("by assignments of the text, " + ", ".join(f"{k} is {printable(v, 80)}" for k, v in values.items()))]
