"""Quantities as users write them and as kvplan prints them: dtypes, token counts, sizes, fractions.

Sizes are integer bytes everywhere; GiB (2^30) exists in text only, GB in input means 10^9. Every parser takes `option`,
the flag (or file key) of the text, and raises a UsageError with the flag, the value and the accepted forms if it
cannot parse it. Nothing is coerced silently: `int()` would accept "1_000", " 7 " and full-width digits.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from kvplan.core.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
KB: Final = 10**3
MB: Final = 10**6
GB: Final = 10**9
TB: Final = 10**12

MAX_TOKENS: Final = 2**31 - 1  # token positions are int32 in the servers
MAX_BYTES: Final = 2**63 - 1
MEMORY_PAGE: Final = 4096  # bytes that an operating system allocates at once


class AutoFit(Enum):
    """A context to fit to the memory (`auto` or `-1`), as opposed to a number or no value."""

    AUTO = "auto"


AUTO: Final = AutoFit.AUTO

# --- dtypes -----------------------------------------------------------------------------------------------------------

# float8_e8m0 is the power-of-two block scale of the OCP microscaling formats.
DTYPES_BY_BITS: Final = {
    64: ("float64", "int64"), 32: ("float32", "int32"), 16: ("float16", "bfloat16", "int16"),
    8: ("float8_e4m3", "float8_e5m2", "float8_e8m0", "int8", "uint8", "bool"), 4: ("float4_e2m1", "int4", "uint4"),
}  # fmt: skip
DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {name: bits for bits, names in DTYPES_BY_BITS.items() for name in names}
)


# --- parsing ----------------------------------------------------------------------------------------------------------

# Plain strings, compiled on first use, because a command needs two or three of them. [0-9], not \d, which matches every
# script's digits; a count of 20 digits exceeds every bound here.
_COUNT = r"-?[0-9]{1,20}"
_TOKENS = r"(-?[0-9]{1,20}(?:\.[0-9]{1,9})?)([kKmM]i?)?"
_VLLM_INT = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)([kKmMgGtT])"
_VLLM_PLAIN = r"[0-9]{1,20}(?:_[0-9]{1,20})*"
_SIZE = r"([0-9]{1,20})(?:\.([0-9]{1,20}))? ?([A-Za-z]{0,3})"
_FRACTION = r"[0-9]{0,20}(?:\.[0-9]{0,20})?(?:[eE]-?[0-9]{1,2})?"
_GROUPED = r"(?<![^,\s])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![^,\s])"  # thousands separators, as kvplan prints them
_PERCENT = r"([0-9]{1,20})(?:\.([0-9]{1,20}))?%"

_TOKEN_UNITS: Final[Mapping[str, int]] = MappingProxyType({"": 1, "k": KIB, "ki": KIB, "m": MIB, "mi": MIB})
_VLLM_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {"k": KB, "m": MB, "g": GB, "t": TB, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
)
_SIZE_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": KB, "mb": MB, "gb": GB, "tb": TB}
)

_TOKEN_FORMS = "write a number such as 32768, 32k (32,768) or 1M (1,048,576)"
_VLLM_FORMS = "vLLM accepts 32768, 32k and 25.6k (decimal), 32K (binary, whole numbers only)"
_SIZE_FORMS = "write a size such as 24GiB, 512MiB, 80GB or 25769803776 (bytes)"


def _refuse(option: str, what: str, text: str, forms: str) -> UsageError:
    """One-line error for a value: flag, problem, value, accepted forms."""
    text_shown = text if len(text) <= 60 else f"{text[:57]}..."
    return UsageError(option, f"{what} ({text_shown!r})", f"{forms}")


def _bounded(value: int, most: int, option: str, text: str, forms: str, least: int = 1) -> int:
    if value < least:
        raise _refuse(option, f"must be at least {least}", text, forms)
    if value > most:
        raise _refuse(option, f"must be at most {most:,}", text, forms)
    return value


def parse_count(text: str, option: str, most: int = MAX_TOKENS, *, least: int = 1) -> int:
    """Parse a whole number of at least `least`, in plain ASCII digits: "8" -> 8."""
    above = f"from {least} to {most:,}" if most < MAX_TOKENS else f"of {least} or more"
    forms = f"write a whole number {above}"
    if not re.fullmatch(_COUNT, text):
        raise _refuse(option, "not a whole number", text, forms)
    return _bounded(int(text), most, option, text, forms, least)


def parse_tokens(text: str, option: str) -> int:
    """Parse a token count by kvplan's rules, where k and M are always binary: "32k", "32K" and "32Ki" -> 32768, "1M" ->
    1048576. A fraction of them is rounded down: "2.4k" -> 2457.
    """
    match = re.fullmatch(_TOKENS, text)
    if not match:
        raise _refuse(option, "not a token count", text, _TOKEN_FORMS)
    number, unit = match.groups(default="")
    size = _TOKEN_UNITS[unit.lower()]
    if "." in number and not unit:
        raise _refuse(option, "not a token count", text, _TOKEN_FORMS)
    tokens = int(float(number) * size) if "." in number else int(number) * size
    return _bounded(tokens, MAX_TOKENS, option, text, _TOKEN_FORMS)


def parse_int_vllm(text: str, option: str, most: int = MAX_BYTES) -> int:
    """Parse a number of a pasted command by vLLM's rules: k, m, g, t are decimal, K, M, G, T binary.

    "32k" -> 32000, "25.6k" -> 25600, "32K" -> 32768. Fractions are allowed with decimal suffixes only, and truncated.
    Source: vLLM docs, "vLLM CLI Guide", human-readable integer arguments; vllm-project/vllm, human_readable_int.
    """
    plain = text.strip()
    if re.fullmatch(_VLLM_PLAIN, plain):
        return _bounded(int(plain), most, option, text, _VLLM_FORMS)
    match = re.fullmatch(_VLLM_INT, plain)
    if not match:
        raise _refuse(option, "is not a number that vLLM accepts", text, _VLLM_FORMS)
    number, unit = match.groups()
    if unit.islower():
        return _bounded(int(float(number) * _VLLM_UNITS[unit]), most, option, text, _VLLM_FORMS)
    if "." in number:
        raise _refuse(option, f"a fraction cannot go with the binary suffix {unit}", text, _VLLM_FORMS)
    return _bounded(int(number) * _VLLM_UNITS[unit], most, option, text, _VLLM_FORMS)


def parse_tokens_vllm(text: str, option: str) -> int:
    """Parse a token count of a pasted command by vLLM's rules: "32k" -> 32000, "1.5k" -> 1500, "32K" -> 32768."""
    return parse_int_vllm(text, option, most=MAX_TOKENS)


def parse_context(text: str, option: str, *, vllm: bool = False) -> int | AutoFit:
    """Parse a context length, or return AUTO for `auto` and `-1`; `vllm` applies vLLM's rules for numbers."""
    if text in ("auto", "-1"):
        return AUTO
    try:
        return parse_tokens_vllm(text, option) if vllm else parse_tokens(text, option)
    except UsageError as error:
        raise error.changed(remedy=f"{error.remedy}, or auto (or -1) for the longest that fits") from None


def parse_contexts(text: str, option: str) -> tuple[int | AutoFit, ...]:
    """Parse comma-separated context lengths, in order: "4k,16k" -> (4096, 16384)."""
    return tuple(parse_context(part, option) for part in split_list(text, option))


def split_list(text: str, option: str, *, several: bool = True) -> list[str]:
    """Split at commas: "4k, 16k" -> ["4k", "16k"]. Raise UsageError for "8,192", which is one number to its reader.

    several  False if the command takes one value, which an error then does not offer to split
    """
    for grouped in re.findall(_GROUPED, text):
        number = grouped.replace(",", "")
        if int(number) <= MAX_TOKENS:  # more is several: 128,256,512,768
            is_list = several and ",0" not in grouped
            more = f"; for several, put a space after each comma: '{grouped.replace(',', ', ')}'" if is_list else ""
            raise UsageError(option, f"{grouped} may be one number", f"write {number}{more}")
    return [part.strip() for part in text.split(",")]


def parse_size(text: str, option: str, least: int = 1) -> int:
    """Parse a memory size to bytes: "24GiB" (2^30), "80GB" (10^9), "25769803776" (bytes), rounded down."""
    match = re.fullmatch(_SIZE, text)
    if not match:
        raise _refuse(option, "not a size", text, _SIZE_FORMS)
    whole, decimals, unit = match.groups(default="")
    if unit.lower() not in _SIZE_UNITS or (unit.endswith("b") and not unit.islower()):  # 8Gb would be gigabits
        raise _refuse(option, f"unknown unit {unit!r}", text, _SIZE_FORMS)
    if decimals and not unit:
        raise _refuse(option, "a fraction needs a unit", text, _SIZE_FORMS)
    scaled = int(whole + decimals) * _SIZE_UNITS[unit.lower()] // 10 ** len(decimals)
    return _bounded(scaled, MAX_BYTES, option, text, _SIZE_FORMS, least)


def parse_fraction(text: str, option: str) -> float:
    """Parse a number greater than 0 and at most 1, as a fraction or a percentage: "0.92" and "92%" -> 0.92."""
    forms = "write a fraction or a percentage, such as 0.92 or 92%"
    if percent := re.fullmatch(_PERCENT, text):
        whole, decimals = percent.groups(default="")
        value = int(whole + decimals) / int("100" + "0" * len(decimals))  # rounded once, so that 92% is exactly 0.92
    elif any(digit in text for digit in "0123456789") and re.fullmatch(_FRACTION, text):
        try:
            value = float(text)
        except ValueError:  # "e5" and the like: digits only in the exponent
            raise _refuse(option, "not a number", text, forms) from None
    else:
        raise _refuse(option, "not a number", text, forms)
    if not 0 < value <= 1:
        raise _refuse(option, "must be greater than 0 and at most 1", text, forms)
    return value


_DURATION = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)?"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_ratio(text: str, option: str) -> float:
    """Parse a number above 0 and at most 1,000: 0.9, 2."""
    plain = re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,9})?", text.strip())
    value = float(plain.group()) if plain else 0.0
    if not 0 < value <= 1000:
        raise _refuse(option, "not a ratio above 0 and up to 1,000", text, "write 0.9 or 2")
    return value


def parse_duration(text: str, option: str, least: float = 0.001) -> float:
    """Parse a duration to seconds: "250ms", "1s", "2m", "1.5h", "10" (seconds)."""
    forms = "write a number with ms, s, m or h: 250ms, 1s, 2m"
    match = re.fullmatch(_DURATION, text)
    if not match:
        raise _refuse(option, "not a duration", text, forms)
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if seconds < least:
        raise _refuse(option, f"less than {least:g} s", text, forms)
    return seconds


# --- printing ---------------------------------------------------------------------------------------------------------

UNIT_GAP: Final = r"(?<=[0-9]) (?=(?:%|[KMGT]?i?B(?:/s)?|[mnµ]?s|min|h|W|[MG]Hz|TFLOPS)(?![\w/]))"  # no line ends here


def format_gib(num_bytes: int) -> str:
    """Format bytes as GiB with two decimals: "54.98 GiB"."""
    return f"{num_bytes / GIB:,.2f} GiB"


def format_size(num_bytes: int) -> str:
    """Format bytes in the largest binary unit with a value >= 1: "128 KiB", "512 MiB", "4 GiB", "1.50 GiB", "700 B"."""
    if abs(num_bytes) < KIB:
        return f"{num_bytes} B"
    names = {KIB: "KiB", MIB: "MiB", GIB: "GiB", TIB: "TiB"}
    unit = max(u for u in names if abs(num_bytes) >= u)
    if unit < TIB and round(abs(num_bytes) / unit, 2) >= 1024:  # 1024.00 KiB reads worse than 1.00 MiB
        unit <<= 10
    value = num_bytes / unit
    return f"{num_bytes // unit:,} {names[unit]}" if num_bytes % unit == 0 else f"{value:,.2f} {names[unit]}"


def format_bytes(num_bytes: int) -> str:
    """Format bytes as GiB with two decimals, or in a smaller unit if that would show 0: "512 KiB"."""
    return format_gib(num_bytes) if num_bytes == 0 or round(num_bytes / GIB, 2) else format_size(num_bytes)


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Format two different sizes so that they differ as text: in GiB, else in MiB, else in bytes."""
    forms: tuple[Callable[[int], str], ...] = (format_gib, lambda size: f"{size / MIB:,.2f} MiB", lambda s: f"{s:,} B")
    texts = [(form(first), form(second)) for form in forms]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def plural(count: int, noun: str) -> str:
    """ "1 user", "1,200 users"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_count(number: int) -> str:
    """Format a whole number with thousands separators: "32,768"."""
    return f"{number:,}"


def duration(seconds: float) -> str:
    """ "0.4 ms", "35 ms", "1.28 s", "6 min 2 s", "1 h 2 min"."""
    if seconds < 0.01:
        return f"{seconds * 1000:.2f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def rate_text(rate: float) -> str:
    """Format a rate with three or four digits and no exponent: "5.53", "1,000,000", "0.000001"."""
    if rate >= 1000:
        return f"{rate:,.0f}"
    return f"{rate:.4g}" if rate >= 1e-3 else f"{rate:.9f}".rstrip("0").rstrip(".")
