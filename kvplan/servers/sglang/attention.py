"""What SGLang refuses of a requested attention backend, looked up in a table of its own answers.

attention.json: asked by benchmarks/start_attention_sglang.py of SGLang 0.5.23, which compares it with fresh answers.
"""

import json
from functools import cache
from importlib import resources
from typing import Any, Final

KV_NAMES: Final = {"fp8": "fp8_e4m3", "bf16": "bfloat16", "float16": "bfloat16"}  # names that were not asked


def refused(phase: str, backend: str, kv: str, sm: int, *, latent: bool) -> tuple[str, bool] | None:
    """Return SGLang's reason not to start, and whether another KV dtype would do; None if it starts.

    kv  as stated; sm  a capability that was not asked is taken for the nearest older one
    """
    capability = max((item for item in _data()["asked"] if item <= sm), default=sm)
    cell = {"kv": KV_NAMES.get(kv, kv), "latent": latent, "sm": capability}
    named = (row for row in _data()["refused"] if (row["phase"], row["backend"]) == (phase, backend))
    row = next((row for row in named if all(cell[axis] in row[axis] for axis in cell if axis in row)), None)
    return None if row is None else (str(row["why"]).partition(". ")[0].rstrip("."), "kv" in row)


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath("attention.json").read_text())
    return data
