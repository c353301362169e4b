"""Names of modules in checkpoints: prefixes of the decoder layers, and alternative names of the same modules."""

import re
from functools import lru_cache

# Prefixes of "layers." or "h.": in text-only models, multimodal ones, and those inside a larger pipeline.
LAYER_PREFIXES = (
    "model.layers.",
    "language_model.model.layers.",
    "model.language_model.layers.",
    "model.language_model.model.layers.",
    "backbone.layers.",
    "layers.",
    "language_model.layers.",
    "language_model.backbone.layers.",
    "thinker.model.layers.",
    "transformer.h.",
)
# The same for a module outside the layers.
OUTER_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "thinker.")
_HEADS = frozenset(LAYER_PREFIXES)
WILD = re.compile(r"[*?\[]")


def is_pattern(entry: str) -> bool:
    """True if a list entry is a glob or an expression rather than a name."""
    return entry.startswith("re:") or WILD.search(entry) is not None


# Mixtral's and MiniMax's experts, Llama 4's and Jamba's MLPs, MXFP4's blocks and scales.
RENAMED = (
    (re.compile(r"^(block_sparse_moe|feed_forward)(?=\.|$)"), "mlp"),
    (re.compile(r"\.experts\.0\.w1$"), ".experts.0.gate_proj"),
    (re.compile(r"\.experts\.0\.w3$"), ".experts.0.up_proj"),
    (re.compile(r"\.experts\.0\.w2$"), ".experts.0.down_proj"),
    (re.compile(r"_(blocks|scales|bias)$"), ""),
    (re.compile(r"\.shared_expert(?=\.|$)"), ".shared_experts"),
    (re.compile(r"\.router$"), ".gate"),
)
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$)")


def in_layer(name: str) -> tuple[int, str] | None:
    """(layer, role within it) of a decoder layer's module, or None for a module elsewhere."""
    for mark in ("layers.", "h."):
        head, separator, tail = name.partition(mark)
        if separator and head + mark in _HEADS:
            index, _, role = tail.partition(".")
            return (int(index), role) if index.isdecimal() and len(index) < 6 else None
    return None


@lru_cache(maxsize=65536)
def usual(role: str) -> str:
    """A role's most common name, with any expert as the first: `block_sparse_moe.experts.7.w1` is
    `mlp.experts.0.gate_proj`.
    """
    role = _EXPERT.sub("0", role)
    for pattern, name in RENAMED:
        role = pattern.sub(name, role)
    return role


@lru_cache(maxsize=65536)
def spellings(role: str) -> tuple[str, ...]:
    """Every name of a role in checkpoints, its own first."""
    names = [role]
    stem, dot, tail = role.partition(".")
    if stem in ("mlp", "block_sparse_moe", "feed_forward"):
        names += [other + dot + tail for other in ("mlp", "block_sparse_moe", "feed_forward")]
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        names += [name.removesuffix(old) + new for name in names if ".experts.0." in name and name.endswith(old)]
    for old, new in ((".shared_experts.", ".shared_expert."), (".shared_expert.", ".shared_experts.")):
        names += [name.replace(old, new) for name in names if old in name]
    return tuple(dict.fromkeys(names))
