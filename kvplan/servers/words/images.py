"""Container image names: the server release that an image's tag implies, if the tag counts that server's releases.

Sources: the tags that hub.docker.com lists for vllm/vllm-openai (v0.11.0, v0.19.0-cu130), lmsysorg/sglang
(v0.5.9-cu129, v0.4.6.post1-rocm630), rocm/vllm (rocm6.4.1_vllm_0.10.1_20250909), rocm/sgl-dev
(v0.5.5.post3-rocm700-mi35x-20251113), lmcache/vllm-openai (v0.3.9, 2025-09-16-v0.3.6); docs.nvidia.com (25.09-py3).
"""

import re
from collections.abc import Iterable
from typing import Final

from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.base import server_of

_IMAGE: Final = re.compile(
    r"(?P<path>(?:[\w.:-]+/)*)(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?(?:@sha256:[0-9a-f]+)?", re.ASCII
)
_RELEASE: Final = r"v?(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)(?!\.?\d)"
# Publishers whose tags count their own releases, by the image's registry path.
OWN_TAGS: Final = {"lmcache": "LMCache's", "nvcr.io/nvidia": "the container's own", "ai-dynamo": "Dynamo's"}


@dataclass(frozen=True, slots=True)
class Tagged:
    """Server release implied by an image ("vllm@0.11.0"), or a note why its tag implies none."""

    label: str | None = None
    note: str | None = None


def tagged(server: str, image: str) -> Tagged | None:
    """Server release implied by an image's tag, or None if the image is not of that server."""
    match = _IMAGE.fullmatch(image)
    names = (server, *server_of(server).pasted().starts.images)
    if match is None or not any(name in match["name"] for name in names):
        return None
    tag = match["tag"]
    if tag is None:
        return Tagged()
    whose = next((words for place, words in OWN_TAGS.items() if f"/{match['path']}".endswith(f"/{place}/")), None)
    if whose is not None:
        return Tagged(note=_unknown(image, whose, server))
    named = re.search(rf"(?:^|[_.-]){server}[_-]?{_RELEASE}", tag)  # ROCm tags begin with ROCm's own release
    number = named or re.match(_RELEASE, tag)
    if number is not None:
        return Tagged(f"{server}@{number[1]}")
    return Tagged(note=_unknown(image, "ROCm's", server) if re.match(r"rocm\d", tag) else None)


def _unknown(image: str, whose: str, server: str) -> str:
    title = server_of(server).terms.title
    return f"the tag of {printable(image, 80)} is {whose}, so it does not give the release of {title}"


def of_words(server: str, words: Iterable[str]) -> Tagged:
    """Server release implied by the images among the words; the last one that implies a release wins."""
    tags = [tag for word in words if (tag := tagged(server, word)) is not None]
    label = next((tag.label for tag in reversed(tags) if tag.label), None)
    note = next((tag.note for tag in reversed(tags) if tag.note), None)
    return Tagged(label, None if label else note)
