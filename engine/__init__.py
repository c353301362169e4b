"""The bundled inference engine: it runs a model and measures itself, independent of kvplan's arithmetic.

`from engine import Engine, EngineConfig, SamplingParams`; nothing is imported before it is asked for, so that
engine.scheduler and engine.block_manager, which are plain Python, load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig, SamplingParams
    from engine.llm import Engine

__all__ = ["Engine", "EngineConfig", "SamplingParams"]

_HOMES = {"Engine": "engine.llm", "EngineConfig": "engine.config", "SamplingParams": "engine.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
