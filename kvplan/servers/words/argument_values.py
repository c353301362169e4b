"""Parse the value of an engine argument, however it was given, as `EngineArgs` stores it."""

import re
from typing import Any, Final

from kvplan.core import units
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.words.arguments import ARGUMENTS
from kvplan.servers.words.item_limits import limits


def read_argument(name: str, text: str, option: str, *, vllm: bool = False) -> Any:
    """Parse the value of an engine argument as EngineArgs stores it.

    option  its name in error messages
    vllm    parse numbers as vLLM does ("32k" is 32,000)
    """
    argument = ARGUMENTS[name]
    if name == "offload_group_size" and text.strip() == "0":  # off, as by default
        return None
    if text in argument.usual:
        return None
    match argument.kind:
        case "context":
            context = units.parse_context(text, option, vllm=vllm)
            return "auto" if context is units.AUTO else context
        case "tokens":
            return units.parse_tokens_vllm(text, option) if vllm else units.parse_tokens(text, option)
        case "count":
            return units.parse_count(text, option, argument.largest, least=argument.least)
        case "bytes":
            return stated_bytes(
                units.parse_int_vllm(text, option) if vllm or is_vllm_size(text) else units.parse_size(text, option),
                option,
            )
        case "gib":
            return gib(text, option)
        case "fraction":
            return units.parse_fraction(text, option)
        case "ratio":
            return units.parse_ratio(text, option)
        case "flag":
            return switch(text, option)
        case "choice":
            if text not in argument.choices:
                raise UsageError(option, f"{printable(text, 40)!r} is not one of {', '.join(argument.choices)}")
            return int(text) if text.isdigit() else text
        case "limits":
            return limits(text, option)
        case "json":
            return json_object(text, option)
        case "pattern":
            return pattern(text, option)
        case "names":
            return names(text, option)
        case "text":
            if not text or len(text) > 100 or not text.isprintable():
                raise UsageError(option, f"is not a name ('{printable(text, 40)}')", "write a name that vLLM accepts")
            return text


MOST_PATTERN: Final = 20_000  # characters of the rules for a model's tensors, layer by layer


def pattern(text: str, option: str) -> str:
    """Parse a text that its server reads: rules, numbers for each GPU."""
    if not text or len(text) > MOST_PATTERN or not text.isprintable():
        raise UsageError(option, f"is empty or not one line of text ('{printable(text, 40)}')", "write its value")
    return text


def is_vllm_size(text: str) -> bool:
    """True if a size uses vLLM's own one-letter suffix: 10G (binary), 10g (decimal)."""
    return re.fullmatch(r"[0-9.]+[kmgtKMGT]", text) is not None


def stated_bytes(size: int, option: str) -> int:
    """Parse the size of weights or a KV pool; reject a bare "16", which more likely means 16 GB."""
    if size < units.MIB:
        raise UsageError(
            option, f"is implausibly small ({units.plural(size, 'byte')})", "write the unit, for example 16GiB"
        )
    return size


def vllm_size_note(option: str, text: str, size: int) -> str:
    other = text[:-1] + text[-1].swapcase()
    kinds = ("binary", "decimal") if text[-1].isupper() else ("decimal", "binary")
    return f"{option} {text} is {size:,} bytes ({kinds[0]}), as in vLLM; {other} would be {kinds[1]}"


def switch(text: str, option: str) -> bool:
    """Parse true or false."""
    value = {"true": True, "false": False}.get(text.lower())
    if value is None:
        raise UsageError(option, f"is neither true nor false ({printable(text, 40)!r})", "write one of them")
    return value


def gib(text: str, option: str) -> int:
    """Parse GiB as vLLM's --kv-offloading-size takes it and return bytes; a size with a unit is accepted too."""
    if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text):
        return int(float(text) * units.GIB)
    return units.parse_size(text, option)


MOST_JSON: Final = 20_000  # characters; no server takes a config this large


def json_object(text: str, option: str) -> str:
    """Parse a JSON object (also from a log) to one line, as json.dumps writes it; dotted flags are merged."""
    import json

    parsed = None
    for candidate in (text, pythonic(text)) if len(text) <= MOST_JSON else ():
        try:
            parsed = json.loads(candidate)
            break
        except (ValueError, RecursionError):
            continue
    if not isinstance(parsed, dict):
        raise UsageError(option, f"is not a JSON object ({printable(text, 60)!r})", "write {...}, quoted with '...'")
    return json.dumps(parsed)


def pythonic(text: str) -> str:
    """Return JSON for a value that a log shows in Python syntax."""
    words = {"True": "true", "False": "false", "None": "null"}
    return re.sub(r"\b(True|False|None)\b", lambda match: words[match[0]], text.replace("'", '"'))


def names(text: str, option: str) -> str:
    """Parse names separated by commas, spaces or as a JSON list; return them comma-separated, deduplicated, in
    order.
    """
    words = re.sub(r"[\[\]\"',\s]+", " ", text).split()
    if not words or not all(re.fullmatch(r"[\w.*-]{1,100}", word) for word in words):
        raise UsageError(option, f"is not a list of names ({printable(text, 60)!r})", "write q_proj,o_proj")
    return ",".join(sorted(dict.fromkeys(words)))


def processor_kwargs(text: str | None) -> dict[str, Any]:
    """Parse the processor settings that EngineArgs stores."""
    import json

    parsed = json.loads(text) if text else {}
    return parsed if isinstance(parsed, dict) else {}
