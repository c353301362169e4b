"""Topic of an exception's message whose wording is in no table.

Releases reword their errors and add new ones, but they describe what they reject in few ways. The first kind whose
words occur in a message decides; a message of no kind is an error of code, data or settings.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from kvplan.servers.logs.failures import Cause

LONGEST_MESSAGE: Final = 600  # characters of a message to inspect

_REFUSED: Final = (
    r"(?:not (?:yet )?support|unsupported|incompatible|n't support|only (?:currently )?supports?\b|requires?\b|"
    r"not implemented|must be\b|not available|not compatible|invalid|cannot (?:be|store)|expected)"
)
_KV_TYPE: Final = (
    r"(?:kv[-_ ]?cache[-_ ]?(?:d?type|quant)|(?:fp8|fp4|nvfp4|int8|int4|bfloat16|bf16|float16|quantized|e4m3|e5m2)"
    r"[-_ ]kv[-_ ]?cache|kv[-_ ]?cache[-_ ](?:fp8|nvfp4|bf16))"
)
_WANTS: Final = (
    r"(?:requires?|needs?|only (?:currently )?support(?:s|ed)|not (?:yet )?support(?:ed)?|unsupported|n't support|"
    r"minimum)"
)
_GPU_KIND: Final = (
    r"(?:sm[-_ ]?[0-9]{2,3}[af]?\b|sm[0-9]{1,2}x|compute capabilit|hopper|blackwell|ampere|"
    r"(?:current|device) capability|(?:this|your|current) (?:gpu|device|hardware|architecture))"
)
_SPLIT: Final = (
    r"(?:\btp\b|tp[-_ ]size|tensor[-_ ]parallel|ep[-_ ]size|expert[-_ ]parallel|world[-_ ]size|parallel size|number of "
    r"ranks|dcp[-_ ]size)"
)
_HOST: Final = r"(?<![-\w])(?:host|cpu|pinned|system)[- ](?:memory|ram)\b(?!-)"
_SHORT: Final = r"(?:insufficient|not enough|exceed\w{0,2}|exhausted|too small|null pointer|ran out)"

_KINDS: Final[dict[Cause, str]] = {
    "host_memory_or_shm": rf"{_HOST}.{{0,80}}{_SHORT}|{_SHORT}.{{0,40}}{_HOST}|shm[-_ ]size|shared[- ]memory creation",
    "kv_dtype_unsupported": rf"{_KV_TYPE}.{{0,160}}{_REFUSED}|{_REFUSED}.{{0,60}}{_KV_TYPE}",
    "quantization_mismatch": (
        r"quantized weight shape|quantization (?:method|config|argument)s?\b.{0,60}(?:match|unknown|not found|invalid|"
        r"differ)|divisible by.{0,30}(?:quantization|quant[-_ ]?block|group[-_ ]?size|min_thread)"
    ),
    "heads_not_divisible_by_tp": (
        rf"(?:divisible|divide|multiple).{{0,60}}{_SPLIT}|{_SPLIT}.{{0,80}}(?:divisible|divide|multiple)"
    ),
    "dtype_or_capability": rf"{_WANTS}.{{0,60}}{_GPU_KIND}",
    "too_few_gpus": (
        r"placement groups?\b.{0,120}(?:\bGPUs?\b|resources)|(?:not enough|insufficient|fewer)[^.]{0,40}(?:\bGPUs\b|"
        r"(?<!IB )devices\b|\bnodes and\b)|not enough resources to allocate|devices visible"
    ),
}


def cause_of(message: str, own: Mapping[Cause, str]) -> Cause | None:
    """Return the cause that a message indicates, by these kinds or a server's own, or None if it matches none."""
    text = re.sub(r"[`'\"]", "", message[:LONGEST_MESSAGE])
    return next((cause for cause, pattern in (_KINDS | dict(own)).items() if _pattern(pattern).search(text)), None)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)
