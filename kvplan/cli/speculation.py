"""--speculative-config as the options that it stands for: --draft-model, --speculative-method and the draft tokens."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvplan.cli.options import PlanOptions, flag_of
from kvplan.core.errors import UsageError
from kvplan.core.files import printable

if TYPE_CHECKING:
    from kvplan.servers.words.command import ServeCommand
    from kvplan.servers.words.speculative_config import SpeculativeConfig

FLAG: Final = "--speculative-config"
# An option -> the key that it stands for.
PARTS: Final = {
    "draft_model": "model", "speculative_method": "method", "num_speculative_tokens": "num_speculative_tokens",
}  # fmt: skip
Options = TypeVar("Options", bound=PlanOptions)


def config_of(options: PlanOptions) -> "SpeculativeConfig | None":
    """The parsed --speculative-config, or None if it is not given."""
    if options.speculative_config is None:
        return None
    from kvplan.servers.words.speculative_config import read_config  # only needed for this option

    return read_config(options.speculative_config, FLAG)


def in_parts(options: Options) -> Options:
    """The options with --speculative-config replaced by those that it stands for; UsageError where they differ."""
    config = config_of(options)
    if config is None:
        return options
    tokens = None if config.tokens is None else str(config.tokens)
    stated = zip(PARTS, (config.model, config.method, tokens), strict=True)
    parts: dict[str, Any] = {name: stated_once(name, getattr(options, name), value) for name, value in stated}
    return replace(options, speculative_config=None, **parts)


def stated_once(name: str, typed: str | None, value: str | None) -> str | None:
    """The option's value, typed or from the config; UsageError where both are given and differ."""
    if None not in (typed, value) and typed != value:
        flag = f"{flag_of(name)} {printable(str(typed), 60)}"
        remedy = f"omit {PARTS[name]} from {FLAG}, or omit {flag_of(name)}"
        raise UsageError(flag, f"contradicts {FLAG} ({printable(str(value), 60)})", remedy)
    return value if typed is None else typed


def without_drafts(command: "ServeCommand") -> "ServeCommand":
    """The command less its own speculative decoding, which --speculative-config replaces."""
    others = {name: value for name, value in command.args.items() if name not in PARTS}
    return replace(command, args=others, draft_model=None)
