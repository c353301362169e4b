"""Words in a vLLM label such as `vllm@0.9+flashinfer`: what they set, and in which releases they are valid."""

from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.releases import SIZES_MIB, WORDS, Version, number_text
from kvplan.servers.vllm.changes import since

# Word of a label -> releases it applies to: from the first change, before the second, and from the third on again;
# None: unbounded.
SAID_OF: Final[dict[str, tuple[str | None, str | None, str | None]]] = {
    "v0": (None, "v1_only", None),
    "v1": ("v1", None, None),
    "flashinfer": ("v1", "lean_sampler", None),
    "no-flashinfer": ("v1", "lean_sampler", "sampler_warm_up"),
    "runner-v1": (None, None, None),
    "runner-v2": ("runner_v2_by_name", None, None),
    "no-graph-estimate": ("graphs_in_budget", None, None),
    "unpinned-weights": ("prefetched_weights", None, None),
}
TOLD_SIZES: Final[dict[str, tuple[str, str | None, str | None]]] = {
    "indexer": ("indexer_logits_mib", None, None),
    "experts": ("expert_tokens", None, "whole_expert_batches"),
}


def with_words(release: Version, words: list[str]) -> Version:
    """Apply the words of a label (`+flashinfer`) to a release of vLLM.

    Raise UsageError for a word that is unknown, contradicts another, or does not apply to this release.
    """
    fields: dict[str, Any] = {}
    for word in words:
        name, value = field_of(release, word)
        if fields.setdefault(name, value) != value:
            raise UsageError(
                f"--engine {release.label}+{'+'.join(words)}", "contradicts itself", "keep one of the words"
            )
    return replace(release, **fields)


def field_of(release: Version, word: str) -> tuple[str, bool | int]:
    """(field of Version, its value) set by a word of a label."""
    kind, _, size = word.partition("-")
    if kind in TOLD_SIZES and size.isascii() and size.isdigit() and len(size) < 7 and int(size) in SIZES_MIB:
        name, first, last = TOLD_SIZES[kind]
        check_told(release, word, first, last)
        return name, int(size)
    if word not in WORDS:
        raise UsageError(
            f"--engine {release.label}+{printable(word, 40)}",
            "is not a word kvplan knows",
            f"use {', '.join(WORDS)}, indexer-MIB or experts-TOKENS",
        )
    check_told(release, word, *SAID_OF[word])
    return WORDS[word]


def check_told(release: Version, word: str, first: str | None, last: str | None, again: str | None = None) -> None:
    """Reject a word for a release before the change `first`, or from `last` on and before `again`."""
    if first and not release.has(first):
        raise UsageError(
            f"--engine {release.label}+{word}", f"applies to vLLM from {number_text(since(first))} on", "remove it"
        )
    if last and release.has(last) and not (again and release.has(again)):
        raise UsageError(
            f"--engine {release.label}+{word}", f"applies to vLLM before {number_text(since(last))}", "remove it"
        )
