"""Near matches of misspelled names."""

from collections.abc import Collection, Iterable
from typing import Final

ALIKE: Final = 0.7  # fraction of the letters of both
BEHIND_THE_BEST: Final = 0.15  # names that are less similar than the best match by more than this are dropped


def near_names(typed: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Known names similar to the typed one, the most similar first; leading dashes are ignored.

    Similar names share most letters in order, or have the same words shortened or omitted: "max-len" for
    "max-model-len". Names much less similar than the best match are dropped.
    """
    from difflib import SequenceMatcher

    word = plain(typed)
    matcher = SequenceMatcher(b=word)
    scores: dict[str, float] = {}
    for name in known:
        matcher.set_seq1(plain(name))
        if matcher.quick_ratio() >= ALIKE and matcher.ratio() >= ALIKE:
            scores[name] = matcher.ratio()
        elif is_short_for(word, plain(name)):
            scores[name] = ALIKE
    best = max(scores.values(), default=0.0)
    near = [name for name, score in scores.items() if score >= best - BEHIND_THE_BEST]
    return sorted(near, key=lambda name: -scores[name])[:limit]


def plain(name: str) -> str:
    return name[:100].strip().lstrip("-").replace("_", "-").lower()


def is_short_for(short: str, name: str) -> bool:
    """True if each word of a text is the prefix of a word of a name, in order, starting with the first."""
    words, unread = short.split("-"), name.split("-")
    if len(words[0]) < 2 or not unread[0].startswith(words[0]):
        return False
    for word in words:
        while unread and not unread[0].startswith(word):
            unread = unread[1:]
        if not word or not unread:
            return False
        unread = unread[1:]
    return True


def meant(near: Collection[str], other: str, joint: str = ", ") -> str:
    """The next step: the near names, or `other` if there are none."""
    return f"did you mean {joint.join(near)}?" if near else other
