"""Further errors in a command line that has one: looked for only then, so that valid lines pay nothing."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from kvplan.asked.pasted import read_command
from kvplan.cli import inputs
from kvplan.cli.check_options import CheckOptions
from kvplan.cli.diff_options import DiffOptions
from kvplan.cli.load_options import LoadOptions
from kvplan.cli.options import PlanOptions, engine_pair, flag_of
from kvplan.cli.resolve import is_path
from kvplan.cli.serve_options import ServeOptions
from kvplan.cli.speculation import config_of
from kvplan.cli.sweep import SHORT_FLAGS
from kvplan.cli.sweep_options import SweepOptions
from kvplan.cli.typed import in_typed_words
from kvplan.cli.upgrade_options import UpgradeOptions, release_of
from kvplan.core.errors import KvplanError, UsageError, together
from kvplan.core.units import parse_count, parse_duration, parse_size
from kvplan.hardware.gpu import gpu, split_count
from kvplan.models import catalog
from kvplan.servers.base import SERVERS, abilities_of, parse_engine
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS
from kvplan.sizing.layout import check_dtype, check_kv_dtype

OTHER_SUBJECTS: Final = (CheckOptions, DiffOptions, UpgradeOptions, ServeOptions)  # `model` may be a file or a folder
WITH_COMMAS: Final = ("json", "names", "limits", "text")  # kinds of arguments whose value may contain commas


def whole_error(error: KvplanError, options: object, line: Sequence[str]) -> KvplanError:
    """The error with those of other values on the command line, all in its words."""
    if isinstance(options, UpgradeOptions) and options.from_command is None:
        error = error.map_all(lambda wrong: wrong.renamed("--from-command", "SERVER"))
    if isinstance(options, PlanOptions):
        error = together([*error.all, *other_errors(error, options)])
    return in_typed_words(error, line, SHORT_FLAGS if isinstance(options, SweepOptions) else {})


def other_errors(error: KvplanError, options: PlanOptions) -> tuple[KvplanError, ...]:
    """Errors of values that can be parsed independently, except environment problems."""
    known = {wrong.subject for wrong in error.all}
    others: dict[str, KvplanError] = {}
    for read in readers(options):
        try:
            read()
        except KvplanError as other:
            for wrong in other.all:
                if wrong.exit_code == UsageError.exit_code and wrong.subject not in known:
                    others[str(wrong)] = wrong.changed(others=())
    return tuple(others.values())


def readers(options: PlanOptions) -> Iterator[Callable[[], object]]:
    """Yield a parser for each value, in command-line order; none uses the network."""
    if not isinstance(options, OTHER_SUBJECTS):
        for name in models_of(options):
            if is_catalog_name(name):
                yield partial(catalog.load, name)
    for name in (*parts(options.gpu), *parts(getattr(options, "gpus", None))):
        yield partial(known_gpu, name)
    if options.gpu_memory is not None:
        yield partial(inputs.gpu_memory, options.gpu_memory)
    for name in parts(options.engine):
        yield partial(parse_engine, name)
    if options.from_command is not None:
        yield partial(read_command, options.from_command)
    if isinstance(options, UpgradeOptions):
        if options.model is not None and " " in options.model.strip():
            yield partial(read_command, options.model)
        for text, flag in ((options.old, "--from"), (options.new, "--to")):
            if text is not None:
                yield partial(release_of, text, flag)
    for name, row in ARGUMENTS.items():
        value = getattr(options, name)
        if isinstance(value, str) and row.kind not in WITH_COMMAS:
            flag = SHORT_FLAGS.get(name, flag_of(name)) if isinstance(options, SweepOptions) else flag_of(name)
            for text in parts(value):
                yield partial(read_argument, name, text, flag)
    for name in filter(str.isprintable, parts(options.dtype)):  # the others are refused above
        yield partial(check_dtype, name)
    servers = {re.split("[@+]", text)[0] for text in parts(options.engine)}
    if not any(abilities_of(name).own_kv_dtypes for name in servers & SERVERS.keys()):
        for name in parts(options.kv_cache_dtype):
            yield partial(check_kv_dtype, name)
    if not isinstance(options, ServeOptions):  # whose keys are those of what it starts
        yield partial(config_of, options)
    for text in options.engine_arg or ():
        if not text.strip().startswith("enable"):  # adapter slot switches are parsed with the server
            yield partial(engine_pair, text)
    yield partial(inputs.contexts_of, options, None)
    if options.weights_bytes is not None:
        yield partial(inputs.weights_of, options.weights_bytes)
    if options.memory_in_use is not None:
        yield partial(parse_size, options.memory_in_use, "--memory-in-use", least=0)
    if isinstance(options, LoadOptions):
        yield from load_readers(options)
    if (targets := getattr(options, "slo", None)) is not None:
        from kvplan.simulate.slo import parse_slo

        yield partial(parse_slo, targets)


def models_of(options: PlanOptions) -> list[str]:
    """Models that are named; only some commands take several."""
    models: list[str] | None = getattr(options, "models", None)
    return list(parts(models)) if options.model is None else [options.model]


def load_readers(options: LoadOptions) -> Iterator[Callable[[], object]]:
    """Return one for each value of a load."""
    from kvplan.cli import load  # of no account to commands without a load

    texts: dict[str, tuple[str | None, Callable[[str], object]]] = {
        "--prompt-tokens": (options.prompt_tokens, lambda text: load.lengths(text, "--prompt-tokens")),
        "--output-tokens": (options.output_tokens, lambda text: load.lengths(text, "--output-tokens")),
        "--shared-prefix": (options.shared_prefix, load.shared_prefix),
        "--num-requests": (options.num_requests, lambda text: parse_count(text, "--num-requests")),
        "--seed": (options.seed, load.parse_seed),
        "--rate": (options.rate, load.parse_stages),
        "--arrivals": (options.arrivals, load.parse_process),
        "--max-concurrency": (options.max_concurrency, lambda text: parse_count(text, "--max-concurrency")),
        "--users": (options.users, lambda text: parse_count(text, "--users")),
        "--think": (options.think, lambda text: parse_duration(text, "--think", least=0.0)),
        "--ramp": (options.ramp, lambda text: parse_duration(text, "--ramp", least=0.0)),
    }
    for text, read in texts.values():
        if text is not None:
            yield partial(read, text)


def parts(texts: str | Iterable[str] | None) -> Iterator[str]:
    """Yield the values of an option that may be repeated or contain several."""
    for text in [texts] if isinstance(texts, str) else texts or ():
        yield from filter(None, map(str.strip, text.split(",")))


def is_catalog_name(name: str) -> bool:
    """True if it can only be a catalog name, not a Hub id, file or folder."""
    return re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) is not None and not is_path(name)


def known_gpu(text: str) -> None:
    gpu(split_count(text)[1])
