"""Further errors in a command line that has one: looked for only then, so that valid lines pay nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from kvplan.asked.form import counted_gpus_of, flag_of, is_catalog_name, read_form
from kvplan.asked.pasted import read_command
from kvplan.cli.check_options import CheckOptions
from kvplan.cli.diff_options import DiffOptions
from kvplan.cli.explore_options import ExploreOptions
from kvplan.cli.load_options import LoadOptions
from kvplan.cli.options import PlanOptions, whole_form
from kvplan.cli.serve_options import ServeOptions
from kvplan.cli.sweep_options import RecommendOptions, SweepOptions
from kvplan.cli.typed import in_typed_words
from kvplan.cli.upgrade_options import UpgradeOptions, release_of
from kvplan.core.errors import KvplanError, UsageError, together
from kvplan.core.units import parse_count, parse_duration
from kvplan.models import catalog
from kvplan.planning.grid import LISTS, SHORT_FLAGS, arguments_of
from kvplan.planning.offers import compares
from kvplan.servers.base import parse_engine

Reader = Callable[[], object]
OTHER_SUBJECTS: Final = (CheckOptions, DiffOptions, UpgradeOptions, ServeOptions)  # `model` may be a file or a folder


def whole_error(error: KvplanError, options: object, line: Sequence[str]) -> KvplanError:
    """The error with those of other values on the command line, all in its words."""
    if isinstance(options, UpgradeOptions) and options.from_command is None:
        error = error.map_all(lambda wrong: wrong.renamed("--from-command", "SERVER"))
    if isinstance(options, PlanOptions):
        error = together([*error.all, *other_errors(error, readers(options))])
    return in_typed_words(error, line, SHORT_FLAGS if isinstance(options, SweepOptions) else {})


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


def readers(options: PlanOptions) -> Iterator[Reader]:
    """Yield a reader for each value; none uses the network."""
    form = whole_form(options)
    if isinstance(options, OTHER_SUBJECTS):
        form = form.changed(model=None)
    if isinstance(options, ServeOptions):  # the config's keys are those of what it starts
        form = form.changed(speculative_config=None)
    if isinstance(options, SweepOptions | ExploreOptions):
        for name in filter(is_catalog_name, options.models or ()):
            yield partial(catalog.load, name)
        for name in filter(None, (options.engine or "").split(",")):
            yield partial(parse_engine, name.strip())
        yield partial(arguments_of, form)
        form = form.changed(engine=None, **dict.fromkeys(LISTS))
    if isinstance(options, RecommendOptions) and compares(form):
        form = form.changed(engine=None)
    yield partial(read_form, form)
    if isinstance(options, RecommendOptions):
        names = filter(str.strip, ",".join(options.gpus or ()).split(","))
        yield partial(counted_gpus_of, form.changed(gpu=[*names] or None))
    if isinstance(options, UpgradeOptions):
        if options.model is not None and " " in options.model.strip():
            yield partial(read_command, options.model)
        for text, flag in ((options.old, "--from"), (options.new, "--to")):
            if text is not None:
                yield partial(release_of, text, flag)
    if isinstance(options, LoadOptions):
        yield from load_readers(options)
    if (targets := getattr(options, "slo", None)) is not None:
        from kvplan.simulate.slo import parse_slo

        yield partial(parse_slo, targets)


def load_readers(options: LoadOptions) -> Iterator[Reader]:
    """Return one for each value of a load."""
    from kvplan.simulate import load  # of no account to commands without a load

    parsers: dict[str, Callable[[str], object]] = {
        "prompt_tokens": lambda text: load.lengths(text, "--prompt-tokens"),
        "output_tokens": lambda text: load.lengths(text, "--output-tokens"),
        "shared_prefix": load.shared_prefix, "seed": load.parse_seed, "rate": load.parse_stages,
        "arrivals": load.parse_process,
    }  # fmt: skip
    for name in ("num_requests", "max_concurrency", "users"):
        parsers[name] = partial(parse_count, option=flag_of(name))
    for name in ("think", "ramp"):
        parsers[name] = partial(parse_duration, option=flag_of(name), least=0.0)
    for name, parse in parsers.items():
        if (text := getattr(options, name)) is not None:
            yield partial(parse, text)
