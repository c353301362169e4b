"""What a layer computes, twice with the same functions: Triton on a GPU, plain torch anywhere.

A backend is a module, found by `load`; each has every function that engine/layers.py calls.
"""

import os
from importlib import import_module
from types import ModuleType

from kvplan.core.errors import UsageError

BACKENDS = {"triton": "engine.kernels.triton_backend", "torch": "engine.kernels.torch_backend"}


def load(backend: str, device_type: str) -> ModuleType:
    """The backend's module; "auto" is triton on a GPU and torch elsewhere."""
    if backend == "auto":
        backend = "triton" if device_type == "cuda" else "torch"
    # TRITON_INTERPRET=1 is Triton's own switch: its kernels then run in Python, anywhere and very slowly.
    if backend == "triton" and device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(f"backend: triton kernels run on a GPU only (device {device_type}); use backend torch")
    return import_module(BACKENDS[backend])
