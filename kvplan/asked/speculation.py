"""--speculative-config as the values that it stands for: the draft model, the method and the draft tokens."""

from dataclasses import replace
from typing import Final

from kvplan.asked.form import Form, flag_of
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.words.command import ServeCommand
from kvplan.servers.words.speculative_config import SpeculativeConfig, read_config

FLAG: Final = "--speculative-config"
# A key -> the config's key for it.
PARTS: Final = {
    "draft_model": "model", "speculative_method": "method", "num_speculative_tokens": "num_speculative_tokens",
}  # fmt: skip


def config_of(form: Form) -> SpeculativeConfig:
    """The parsed --speculative-config of a form that has one."""
    return read_config(form.values["speculative_config"], FLAG)


def in_parts(form: Form) -> Form:
    """The form with --speculative-config replaced by the values that it stands for; UsageError where they differ."""
    if "speculative_config" not in form.values:
        return form
    config = config_of(form)
    tokens = None if config.tokens is None else str(config.tokens)
    stated = zip(PARTS, (config.model, config.method, tokens), strict=True)
    parts = {key: stated_once(key, form.text(key), value) for key, value in stated}
    return form.changed(speculative_config=None, **parts)


def stated_once(key: str, typed: str | None, value: str | None) -> str | None:
    """The value, typed or from the config; UsageError where both are given and differ."""
    if None not in (typed, value) and typed != value:
        flag = f"{flag_of(key)} {printable(str(typed), 60)}"
        remedy = f"omit {PARTS[key]} from {FLAG}, or omit {flag_of(key)}"
        raise UsageError(flag, f"contradicts {FLAG} ({printable(str(value), 60)})", remedy)
    return value if typed is None else typed


def without_drafts(command: ServeCommand) -> ServeCommand:
    """The command less its own speculative decoding, which --speculative-config replaces."""
    others = {name: value for name, value in command.args.items() if name not in PARTS}
    return replace(command, args=others, draft_model=None)
