"""Errors of a form: further ones in its other values, and what a pasted command calls an argument.

Imported only for an error, so that valid forms pay nothing.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from kvplan.asked.form import Form, contexts_of, engine_pair, flag_of, gpu_memory, weights_of
from kvplan.asked.pasted import read_command
from kvplan.asked.question import is_path
from kvplan.asked.speculation import config_of
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.units import parse_size
from kvplan.hardware.gpu import gpu, split_count
from kvplan.models import catalog
from kvplan.servers.base import SERVERS, abilities_of, parse_engine
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, SHORT, spellings
from kvplan.sizing.layout import check_dtype, check_kv_dtype

WITH_COMMAS: Final = ("json", "names", "limits", "text")  # kinds of arguments whose value may contain commas
Reader = Callable[[], object]


def other_errors(error: KvplanError, readers: Iterable[Reader]) -> tuple[KvplanError, ...]:
    """Errors of values that can be read independently, except environment problems."""
    known = {wrong.subject for wrong in error.all}
    others: dict[str, KvplanError] = {}
    for read in readers:
        try:
            read()
        except KvplanError as other:
            for wrong in other.all:
                if wrong.exit_code == UsageError.exit_code and wrong.subject not in known:
                    others[str(wrong)] = wrong.changed(others=())
    return tuple(others.values())


def readers(
    form: Form, models: Iterable[str] = (), gpus: Iterable[str] = (), flags: Mapping[str, str] | None = None
) -> Iterator[Reader]:
    """Yield a reader for each value, in the order of a command line; none uses the network.

    models, gpus  those named elsewhere
    flags         what some arguments are called
    """
    model = form.text("model")
    for name in filter(is_catalog_name, models if model is None else [model]):
        yield partial(catalog.load, name)
    for name in (*parts(form.texts("gpu")), *gpus):
        yield partial(known_gpu, name)
    for key, read in {"gpu_memory": gpu_memory, "from_command": read_command, "weights_bytes": weights_of}.items():
        if (text := form.text(key)) is not None:
            yield partial(read, text)
    for name in parts(form.text("engine")):
        yield partial(parse_engine, name)
    yield from argument_readers(form, flags or {})
    yield partial(config_of, form)
    for text in form.texts("engine_arg") or ():
        if not text.strip().startswith("enable"):  # adapter slot switches are parsed with the server
            yield partial(engine_pair, text)
    yield partial(contexts_of, form)
    if (in_use := form.text("memory_in_use")) is not None:
        yield partial(parse_size, in_use, "--memory-in-use", least=0)


def argument_readers(form: Form, flags: Mapping[str, str]) -> Iterator[Reader]:
    for name, row in ARGUMENTS.items():
        value = form.values.get(name)
        if isinstance(value, str) and row.kind not in WITH_COMMAS:
            for text in parts(value):
                yield partial(read_argument, name, text, flags.get(name, flag_of(name)))
    for name in filter(str.isprintable, parts(form.text("dtype"))):  # the others are refused above
        yield partial(check_dtype, name)
    servers = {re.split("[@+]", text)[0] for text in parts(form.text("engine"))}
    if not any(abilities_of(name).own_kv_dtypes for name in servers & SERVERS.keys()):
        for name in parts(form.text("kv_cache_dtype")):
            yield partial(check_kv_dtype, name)


def parts(texts: str | Iterable[str] | None) -> Iterator[str]:
    """Yield the values of a key that may be repeated or contain several."""
    for text in [texts] if isinstance(texts, str) else texts or ():
        yield from filter(None, map(str.strip, text.split(",")))


def is_catalog_name(name: str) -> bool:
    """True if it can only be a catalog name, not a Hub id, file or folder."""
    return re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) is not None and not is_path(name)


def known_gpu(text: str) -> None:
    gpu(split_count(text)[1])


# --- words of a command -----------------------------------------------------------------------------------------------


def pasted_words(line: Sequence[str]) -> dict[str, str]:
    """Arguments set in commands, manifests or code on the line -> their flag or name there."""
    words: dict[str, str] = {}
    for text in line:
        if not re.search(r"\s", text.strip()):
            continue
        for flag in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text):
            if (name := argument_of(flag)) is not None:
                words[name] = flag
        for key in re.findall(r"(?<![\w-])([a-z]\w*)\s*=", text):
            if key in ARGUMENTS:
                words.setdefault(key, key)
    return words


def argument_of(flag: str) -> str | None:
    """The argument that a flag or a key of any server sets."""
    name = flag.lstrip("-").replace("-", "_")
    servers = (spellings(server).get(name) for server in SERVERS)
    return name if name in ARGUMENTS else SHORT.get(name) or next(filter(None, servers), None)
