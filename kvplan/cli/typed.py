"""Errors in the words of the command line: the planner names an argument by its field, a user by an option.

Imported only for an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvplan.asked.form import FLAGS, flag_of
from kvplan.asked.words import argument_of, pasted_words
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import split_count
from kvplan.servers.words.arguments import ARGUMENTS

OWN_SETTINGS = {"num_blocks": "num_gpu_blocks_override"}  # the engine's name -> the option's
RANKS = "tensor_parallel_size"


def in_typed_words(error: KvplanError, line: Sequence[str], defaults: Mapping[str, str]) -> KvplanError:
    """Name every argument in an error and its others as on the command line; those in files keep the file's words.

    defaults  options of arguments that are not on the line
    """
    pasted, options = pasted_words(line), typed_options(line)
    usual = {**{name: FLAGS.get(name, flag_of(name)) for name in ARGUMENTS}, **defaults}
    names = {**usual, **pasted, **options}
    if RANKS not in {*pasted, *options}:
        names[RANKS] = "--tp"
    own = {usual[name]: option for name, option in options.items() if " " not in option}

    def named(wrong: KvplanError) -> KvplanError:
        first, _, after = wrong.subject.partition(" ")
        if wrong.mark is not None:
            return wrong
        if first.startswith("-"):
            return wrong.changed(subject=f"{own.get(first, first)} {after}".strip())
        argument = first.rstrip(":")
        place = "--from-command" if argument in pasted and argument not in options else ""
        if argument == RANKS and not place and argument not in options:
            place = counted_gpus(line)
        changed = wrong.in_words(names)
        return changed.changed(subject=f"{place} {changed.subject}") if place else changed

    return error.map_all(named)


def typed_options(line: Sequence[str]) -> dict[str, str]:
    """Arguments that have an option of their own on the line -> that option, or --engine-arg with the key."""
    options: dict[str, str] = {}
    for word, following in zip(line, [*line[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag == "--engine-arg":
            key = (value or following).partition("=")[0].strip()
            if (name := argument_of(key)) is not None:
                options.setdefault(name, f"{flag} {key}")
        elif " " not in flag and (name := option_argument(flag)) is not None:
            options[name] = flag
    return options


def option_argument(flag: str) -> str | None:
    """The argument that an option of the command line sets."""
    rows = ((name, (flag_of(name), *re.split("[/ ]", " ".join(row.options)))) for name, row in ARGUMENTS.items())
    return next((name for name, names in rows if flag in names), None)


def counted_gpus(line: Sequence[str]) -> str:
    """`--gpu 3xl40s:` or `--num-gpus 3:` if the number of GPUs on the line sets the tensor ranks."""
    for word, following in zip(line, [*line[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        text = value if equals else following
        is_counted = flag in ("--gpu", "--gpus") and any(split_count(name)[0] is not None for name in text.split(","))
        if is_counted or flag == "--num-gpus":
            return f"{flag} {text}:"
    return ""


# --- settings of Python objects ---------------------------------------------------------------------------------------


def option_words(options: type, line: Sequence[str] = ()) -> dict[str, str]:
    """The option behind each field of a command's options: the name typed on the line, else the first in its help.

    no_FIELD has the option that turns it off.
    """
    typed = {word.partition("=")[0] for word in line}
    words: dict[str, str] = {}
    for field in fields(options):
        if names := [name.partition("/") for name in field.metadata.get("names", ())]:
            first, _, off = names[0]
            words[field.name] = next((name for name, _, _ in names if name in typed), first)
            if off:
                words[f"no_{field.name}"] = off
    return words | {own: words[name] for own, name in OWN_SETTINGS.items() if name in words}


def in_options(error: KvplanError, words: Mapping[str, str]) -> KvplanError:
    """The error with the engine's own names of settings (`max_num_seqs`) replaced by options."""
    names = "|".join(sorted((name for name in words if "_" in name and not name.startswith("no_")), key=len))
    pattern = re.compile(rf"(?<![\w.-])(?:{names})(?![\w-])")
    subject, problem, remedy = (
        pattern.sub(lambda match: words[match[0]], text) for text in (error.subject, error.problem, error.remedy)
    )
    if error.subject in words:  # of one word: "device"
        subject = words[error.subject]
    return error.changed(subject=subject, problem=problem, remedy=remedy)
