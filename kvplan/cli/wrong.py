"""Further errors in a command line that has one: looked for only then, so that valid lines pay nothing."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from kvplan.asked import errors
from kvplan.asked.errors import Reader, parts
from kvplan.asked.pasted import read_command
from kvplan.cli.check_options import CheckOptions
from kvplan.cli.diff_options import DiffOptions
from kvplan.cli.load_options import LoadOptions
from kvplan.cli.options import PlanOptions, form_of
from kvplan.cli.serve_options import ServeOptions
from kvplan.cli.sweep_options import SweepOptions
from kvplan.cli.typed import in_typed_words
from kvplan.cli.upgrade_options import UpgradeOptions, release_of
from kvplan.core.errors import KvplanError, together
from kvplan.core.units import parse_count, parse_duration
from kvplan.planning.grid import SHORT_FLAGS

OTHER_SUBJECTS: Final = (CheckOptions, DiffOptions, UpgradeOptions, ServeOptions)  # `model` may be a file or a folder


def whole_error(error: KvplanError, options: object, line: Sequence[str]) -> KvplanError:
    """The error with those of other values on the command line, all in its words."""
    if isinstance(options, UpgradeOptions) and options.from_command is None:
        error = error.map_all(lambda wrong: wrong.renamed("--from-command", "SERVER"))
    if isinstance(options, PlanOptions):
        error = together([*error.all, *errors.other_errors(error, readers(options))])
    return in_typed_words(error, line, SHORT_FLAGS if isinstance(options, SweepOptions) else {})


def readers(options: PlanOptions) -> Iterator[Reader]:
    """Yield a reader for each value; none uses the network."""
    form = form_of(options)
    if isinstance(options, OTHER_SUBJECTS):
        form = form.changed(model=None)
    if isinstance(options, ServeOptions):  # the config's keys are those of what it starts
        form = form.changed(speculative_config=None)
    models, gpus = (getattr(options, name, None) for name in ("models", "gpus"))  # only some commands take several
    yield from errors.readers(
        form, parts(models), parts(gpus), SHORT_FLAGS if isinstance(options, SweepOptions) else {}
    )
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
