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
FLAGS: Final = {
    "contextLength": "-c", "evalBatchSize": "-b", "llamaKCacheQuantizationType": "-ctk",
    "llamaVCacheQuantizationType": "-ctv",
}  # fmt: skip


def reading(text: str) -> list[str] | None:
    """llama-server's words for a pasted `lms load ...` or a JSON object of settings; None for another text."""
    if re.search(r"(?:^|\s)lms(?:\.exe)? load\s", text):
        return of_command(next(words for words in split(text) if "lms" in words[0] and "load" in words))
    if not text.lstrip().startswith("{") or not any(f'"{key}"' in text for key in (*FLAGS, "offloadKVCacheToGpu")):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return of_settings(values.get("load", values))


def of_command(words: list[str]) -> list[str]:
    """`lms load MODEL --gpu max --context-length 8192`; its other flags move no memory."""
    flags = words[words.index("load") + 1 :]
    pairs = dict(zip(flags, [*flags[1:], ""], strict=True))
    name, _, kind = flags[0].partition("@") if flags and not flags[0].startswith("-") else ("", "", "")
    named = ["--model", f"{name}-GGUF:{kind.upper()}" if kind else name] if name else []
    return [*named, *of_settings({"contextLength": pairs.get("--context-length"), "gpu": pairs.get("--gpu", "auto")})]


def of_settings(values: dict[str, Any]) -> list[str]:
    words = [word for key, flag in FLAGS.items() if values.get(key) for word in (flag, str(values[key]))]
    if (flash := values.get("flashAttention")) is not None:
        words += ["-fa", "on" if flash else "off"]
    words += ["-nkvo"] if values.get("offloadKVCacheToGpu") is False else []
    gpu = values.get("gpu")
    gpu = gpu if isinstance(gpu, dict) else {"ratio": gpu or "auto"}
    ratio, experts = str(gpu.get("ratio", "auto")), str(gpu.get("numCpuExpertLayersRatio", "off"))
    for name, value, usual in (("ratio", ratio, "auto"), ("numCpuExpertLayersRatio", experts, "off")):
        if value not in (*ALL, *NONE, usual):
            cure = "write --gpu-layers or --n-cpu-moe, as its log shows them"
            raise UsageError(f"gpu.{name} {value}", "LM Studio does not publish how a ratio becomes layers", cure)
    words += ["-ngl", "all" if ratio in ALL else "0"] if ratio != "auto" else []
    return [*words, *(["--cpu-moe"] if experts in ALL else [])]
