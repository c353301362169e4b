"""Which server's rules: `vllm`, `vllm@0.33`, `vllm@0.9+flashinfer`, `sglang@0.5`."""

from kvplan.core.errors import UsageError
from kvplan.servers.releases import Version, told
from kvplan.servers.vllm import rules as vllm

ENGINES = ("vllm", "sglang")


def parse_engine(text: str) -> Version:
    """`vllm`, `vllm@0.33`, `vllm@0.11.0`, `vllm@0.9+flashinfer`, `sglang`, `sglang@0.4.3`."""
    server, *words = text.split("+")
    name, _, number = server.partition("@")
    if name not in ENGINES:
        raise UsageError(f"--engine {text!r}: is not an engine kvplan models; use vllm, vllm@VERSION or sglang")
    if words and name != "vllm":
        raise UsageError(f"--engine {text}: +{words[0]} is of vLLM alone; leave it out")
    if not number:
        return told(vllm.version(vllm.NEWEST), words) if name == "vllm" else _sglang(None)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        example = "vllm@0.33 or vllm@0.11.0" if name == "vllm" else "sglang@0.5 or sglang@0.4.3"
        raise UsageError(f"--engine {text!r}: is not a version; write {example}")
    numbers = tuple(int(field) for field in fields)
    return told(vllm.version((numbers[0], numbers[1])), words) if name == "vllm" else _sglang(numbers)


def _sglang(numbers: tuple[int, ...] | None) -> Version:
    from kvplan.servers.sglang import rules as sglang  # vLLM is planned without it

    return sglang.version(sglang.NEWEST if numbers is None else numbers)
