"""Which server's rules: `vllm`, `vllm@0.33`, `sglang@0.5`."""

from kvplan.errors import UsageError
from kvplan.rules import sglang, vllm
from kvplan.rules.releases import Version

NEWEST = {"vllm": vllm.NEWEST, "sglang": sglang.NEWEST}


def parse_engine(text: str) -> Version:
    """`vllm`, `vllm@0.33`, `vllm@0.11.0`, `sglang`, `sglang@0.4.3`."""
    name, _, number = text.partition("@")
    if name not in NEWEST:
        raise UsageError(f"--engine {text!r}: is not an engine kvplan models; use vllm, vllm@VERSION or sglang")
    if not number:
        return vllm.version(vllm.NEWEST) if name == "vllm" else sglang.version(sglang.NEWEST)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        example = "vllm@0.33 or vllm@0.11.0" if name == "vllm" else "sglang@0.5 or sglang@0.4.3"
        raise UsageError(f"--engine {text!r}: is not a version; write {example}")
    numbers = tuple(int(field) for field in fields)
    return vllm.version((numbers[0], numbers[1])) if name == "vllm" else sglang.version(numbers)
