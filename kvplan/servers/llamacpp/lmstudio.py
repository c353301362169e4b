"""LM Studio's settings as the flags of the llama.cpp in it, as far as they are public: `lms load`, and its SDK's names.

Source: lmstudio-js LLMLoadModelConfig and `lms load --help` (2026). How a ratio becomes layers is not published.
"""

import json
import re
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.servers.words.shell import split

ALL: Final = ("max", "1", "1.0")
NONE: Final = ("off", "0", "0.0")
CACHE: Final = {"llamaKCacheQuantizationType": "-ctk", "llamaVCacheQuantizationType": "-ctv"}
MARKS: Final = ("contextLength", "evalBatchSize", "offloadKVCacheToGpu", *CACHE)
CURE: Final = "write --gpu-layers or --n-cpu-moe, as its log shows them"


def reading(text: str) -> list[str] | None:
    """llama-server's words for a pasted `lms load ...` or a JSON object of settings; None for another text."""
    if re.search(r"(?:^|\s)lms(?:\.exe)? load\s", text):
        return of_command(next(words for words in split(text) if "lms" in words[0] and "load" in words))
    if not text.lstrip().startswith("{") or not any(f'"{mark}"' in text for mark in MARKS):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return of_settings(values.get("load", values)) if isinstance(values, dict) else None


def of_command(words: list[str]) -> list[str]:
    """`lms load MODEL --gpu max --context-length 8192`; its other flags move no memory."""
    rest = words[words.index("load") + 1 :]
    model = next((word for word in rest[:1] if not word.startswith("-")), None)
    pairs = dict(zip(rest, [*rest[1:], ""], strict=True))
    stated = {"contextLength": pairs.get("--context-length"), "gpu": {"ratio": pairs.get("--gpu", "auto")}}
    name, _, kind = (model or "").partition("@")
    named = ["--model", f"{name}-GGUF:{kind.upper()}" if kind else name] if model else []
    return [*named, *of_settings(stated)]


def of_settings(values: dict[str, Any]) -> list[str]:
    words, gpu = list[str](), values.get("gpu") or {}
    for key, flag in {"contextLength": "-c", "evalBatchSize": "-b", **CACHE}.items():
        if values.get(key):
            words += [flag, str(values[key])]
    if (flash := values.get("flashAttention")) is not None:
        words += ["-fa", "on" if flash else "off"]
    words += ["-nkvo"] if values.get("offloadKVCacheToGpu") is False else []
    gpu = gpu if isinstance(gpu, dict) else {"ratio": gpu}
    ratio, experts = str(gpu.get("ratio", "auto")), str(gpu.get("numCpuExpertLayersRatio", "off"))
    words += ["-ngl", "all" if ratio in ALL else "0"] if ratio in (*ALL, *NONE) else []
    words += ["--cpu-moe"] if experts in ALL else []
    for name, value, usual in (("ratio", ratio, "auto"), ("numCpuExpertLayersRatio", experts, "off")):
        if value not in (*ALL, *NONE, usual):
            raise UsageError(f"gpu.{name} {value}", "LM Studio does not publish how a ratio becomes layers", CURE)
    return words
