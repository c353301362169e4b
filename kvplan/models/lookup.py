"""What a name that is not the catalog's stands for: a path's folder, a copy by another owner, a model nobody serves.

Nothing is opened: only the name is read. A name that may be one of two models is refused.
"""

import re
from functools import cache
from typing import Final

from kvplan.core import entries
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.models import catalog

# How a repository's name ends that holds another one's weights in fewer bits, or in another file format.
_QUANTIZED: Final = re.compile(
    r"[-_.](?:fp8(?:[-_](?:dynamic|block|kv|static))?|(?:nv|mx)?fp[48](?:a16)?|awq(?:[-_](?:int4|4bit|8bit))?"
    r"|gptq(?:[-_](?:int[48]|[48]bit))?|int[48]|w[48]a(?:4|8|16)|(?:unsloth-)?bnb[-_]4bit|[48]bit|gguf|mlx"
    r"|quantized|autoround|exl[23]|dynamic|i?q[2-8](?:_[0k])?(?:_[sml])?|hf|qat|q4_0)$",
    re.IGNORECASE,
)
MOST_CHARS: Final = 200  # of a name
_CACHED: Final = re.compile(r"models--([\w.-]{1,90}?)--([\w.-]{1,90})")
_KAGGLE: Final = re.compile(r"/([\w.-]{1,60})/transformers/([\w.-]{1,60})/[0-9]{1,3}/?$")
_SCHEME: Final = re.compile(r"^(?:[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
# Names of what kvplan does not size, and what that is.
UNSERVED: Final = {
    r"(?<![a-z])flux(?![a-z])|stable-diffusion|sdxl|(?<![a-z])wan-?\d|-diffusers|qwen-image|hunyuan-?video|cogvideo"
    r"|ltx-video|z-image|(?<![a-z])mova(?![a-z])|pixart": "a diffusion model (images, video)",
    r"(?<![a-z])(?:tts|bark|kokoro|cosyvoice|xtts)(?![a-z])": "a speech synthesizer",
}


def in_path(path: str) -> str | None:
    """The catalog's model that a path names by its folders, such as /mnt/llm/Qwen2.5-32B-Instruct-AWQ or those of the
    Hub's cache, ModelScope and Kaggle. Raises UsageError if the folder may be one of two.
    """
    text = re.sub(r"/config\.json$", "", re.sub(r"\\", "/", _SCHEME.sub("", path))).rstrip("/").replace("___", ".")
    if (cached := _CACHED.search(text)) is not None:
        return catalog.find(f"{cached[1]}/{cached[2]}") or by_last_part(cached[2])
    if (mounted := _KAGGLE.search(text)) is not None:
        return by_last_part(f"{re.sub('-(?=[0-9])', '', mounted[1])}-{mounted[2]}")
    owner, _, last = text.rpartition("/")
    return catalog.find(f"{owner.rpartition('/')[2]}/{last}") or by_last_part(last)


def by_last_part(last: str) -> str | None:
    """The catalog's only model with this name, or a repository of this name whatever its owner. Raises UsageError if
    there are two.
    """
    names = catalog.same_names(last)
    if len(names) > 1:
        two = " or ".join(str(catalog.facts(name)["id"]) for name in names[:3])
        raise UsageError(f"model {printable(last, 100)!r}", f"may be {two}", "name one of them")
    return names[0] if names else None


def base_of(name: str) -> str:
    """The name without its owner and what it says about bits and formats, in small letters."""
    last = name.rstrip("/").rpartition("/")[2][-MOST_CHARS:].replace("___", ".")
    while (shorter := _QUANTIZED.sub("", last)) != last:
        last = shorter
    return last.lower()


@cache
def _by_base() -> dict[str, tuple[str, ...]]:
    table: dict[str, dict[str, None]] = {}
    for known, name in entries.names(catalog.path()).items():
        table.setdefault(base_of(known), {})[name] = None
    return {base: tuple(names) for base, names in table.items()}


def relatives(name: str) -> list[str]:
    """The catalog's checkpoints of the model that a name says, those in its own bits first."""
    base, last = base_of(name), name.rpartition("/")[2].lower()
    bits = last[len(base) :].strip("-_.")

    def unlike(known: str) -> tuple[bool, bool]:
        own = str(catalog.facts(known)["id"]).lower()
        return bits.partition("-")[0] not in own, own.rpartition("/")[2] != base

    return sorted(_by_base().get(base, ()), key=unlike)


def copied(name: str) -> str | None:
    """The catalog's unquantized model of exactly this repository's name, which another owner has copied."""
    names = catalog.same_names(name.rpartition("/")[2])
    is_plain = len(names) == 1 and catalog.load(names[0]).quantization is None
    return names[0] if is_plain else None


def explained(name: str, error: KvplanError) -> KvplanError:
    """The error of a model that could not be read, in words of what its name says it is and what to use."""
    last = name.rstrip("/").rpartition("/")[2]
    for pattern, kind in UNSERVED.items():
        if re.search(pattern, last, re.IGNORECASE):
            label = f"model {printable(name, 100)!r}"
            return UnsupportedModelError(label, f"is {kind} by its name", "kvplan sizes models that take text")
    known = [str(catalog.facts(own)["id"]) for own in relatives(name)[:3]]
    if not known:
        return error
    is_files = re.search(r"gguf|mlx|exl[23]", last, re.IGNORECASE)
    kind = "files" if is_files else "a copy" if base_of(name) == last.lower() else "a quantized copy"
    names = " or ".join(known)
    return error.changed(remedy=f"{error.remedy}; by its name {kind} of a model that the catalog has as {names}")
