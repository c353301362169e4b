"""--limit-mm-per-prompt: how many images, videos and sounds a prompt may hold, and how large they are."""

import re
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass

NO_LIMIT: Final = 999  # vLLM's count for a modality whose options set none


@dataclass(frozen=True, slots=True)
class Limit:
    """Most items of a modality in a prompt, and the largest item that the profiling run uses; None: unlimited.

    length  audio samples
    """

    count: int = NO_LIMIT
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    length: int | None = None

    @property
    def document(self) -> Any:
        """Return the count, or an object if sizes are given too."""
        sizes = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        return {"count": self.count, **sizes} if sizes else self.count


SIZES: Final = ("width", "height", "num_frames", "length")
SIZES_OF: Final = {"image": SIZES[:2], "video": SIZES[:3], "audio": SIZES[3:]}  # vLLM 0.33 config/multimodal.py


def limits(text: str, option: str) -> str | None:
    """Parse per-prompt item limits as "image=2,video=0" or, with sizes, as JSON; None if there are none.

    vLLM takes a JSON object whose values are counts or options with a count; its older releases took the first form,
    and its log shows Python syntax.
    """
    import json

    pairs = limit_pairs(text)
    read = {name: limit_of(name, value) for name, value in pairs.items()}
    if None in read.values():
        raise UsageError(
            option,
            f"is not a list of counts ({printable(text, 60)!r})",
            'write image=0,video=0, {"image": 0} or {"video": {"count": 1, "num_frames": 32}}',
        )
    documents = {name: limit.document for name, limit in read.items() if limit is not None}
    if any(isinstance(value, dict) for value in documents.values()):
        return json.dumps(documents, separators=(",", ":"))
    return ",".join(f"{name}={count}" for name, count in documents.items()) or None


def limit_pairs(text: str) -> dict[str, Any]:
    """Split limits into modality -> value; return an invalid pair if the text is not a list of limits."""
    import json

    if text.lstrip().startswith("{"):
        try:
            parsed = json.loads(text.replace("'", '"'))
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"": None}
    return {
        name.strip(): int(count) if re.fullmatch(r"\s*[0-9]{1,6}\s*", count) else None
        for name, _, count in (pair.partition("=") for pair in text.split(","))
    }


def limit_of(name: str, value: Any) -> Limit | None:
    """Parse one limit, or return None if vLLM would reject it."""
    options = value if isinstance(value, dict) else {"count": value}
    if not re.fullmatch(r"[a-z_]{1,30}", name) or not {*options} <= {"count", *SIZES_OF.get(name, ())}:
        return None
    numbers = {option: number for option, number in options.items() if number is not None}
    for option, number in numbers.items():
        least, beyond = (0, 10**6) if option == "count" else (1, 10**9)
        if type(number) is not int or not least <= number < beyond:
            return None
    return Limit(**numbers) if numbers or isinstance(value, dict) else None


def limits_of(text: str | None) -> dict[str, Limit]:
    """Parse the limits that EngineArgs stores."""
    read = {name: limit_of(name, value) for name, value in limit_pairs(text).items()} if text else {}
    return {name: limit for name, limit in read.items() if limit is not None}
