"""How many users an LLM server's GPU memory holds, and why; `kvplan.estimate` and `kvplan.sweep` answer from Python.

Nothing is loaded before it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplan.api import (
        Answer,
        EnvironmentProblem,
        InvalidInputError,
        KvplanError,
        UnsupportedModelError,
        UsageError,
        estimate,
        sweep,
    )

__all__ = (
    "Answer",
    "EnvironmentProblem",
    "InvalidInputError",
    "KvplanError",
    "UnsupportedModelError",
    "UsageError",
    "estimate",
    "sweep",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvplan' has no attribute {name!r}")
    from kvplan import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
