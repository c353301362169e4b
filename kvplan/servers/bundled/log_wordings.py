"""Lines that the bundled engine logs when it starts, as `kvplan serve` writes and `kvplan reconcile --log` reads them.

Sizes are whole bytes. With several ranks, every line begins with its rank: "[rank 1] kvplan engine: ...".
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.servers.logs.log import Wording

FORM: Final = 1  # of these lines; a change that an older kvplan would misread gets the next number
OPENING: Final = "kvplan engine: arguments ("
ROWS: Final = ("weights", "buffers", "activations", "lora", "kv_cache", "kv_offload")
# The only line that the table of an engine before its lines were read has to itself.
BEFORE: Final = f"{'bytes':<12} {'planned':>16} {'measured':>16}"
SOURCE: Final = "kvplan/servers/bundled/log_wordings.py"


def prefix(rank: int, num_ranks: int) -> str:
    return f"[rank {rank}] " if num_ranks > 1 else ""


def arguments_line(values: Mapping[str, Any]) -> str:
    """Arguments by name, None left out; the form of the log comes first."""
    pairs = {"log_form": FORM, **{name: value for name, value in values.items() if value is not None}}
    return OPENING + ", ".join(f"{name}={value!r}" for name, value in pairs.items()) + ")"


def device_line(device: str, gpu: str | None, backend: str, batches_in_flight: int, total: int, non_torch: int) -> str:
    named = f"{device} ({gpu})" if gpu else device
    return (
        f"kvplan engine: device {named}, backend {backend}, batches in flight {batches_in_flight}, "
        f"total {total:,} bytes, outside torch {non_torch:,} bytes"
    )


def host_line(free: int, ranks: int) -> str:
    """Of a rank on a CPU: what was free before its pool, and how many ranks share it."""
    return f"kvplan engine: host memory: {free:,} bytes free, ranks on it {ranks}"


def others_line(size: int) -> str:
    return f"kvplan engine: other processes hold {size:,} bytes of the device, which count as outside torch"


def fallback_line(name: str, why: str) -> str:
    """What a rank does without, of the functions of its kernels or "CUDA graphs"."""
    instead = f"decode steps run without {name}" if " " in name else f"plain torch stands for {name}"
    return f"kvplan engine: {instead}: {why}"


def row_line(name: str, planned: int, measured: int) -> str:
    return f"kvplan engine: {name}: planned {planned:,} bytes, measured {measured:,} bytes"


def pool_line(num_blocks: int, tokens: int) -> str:
    return f"kvplan engine: pool: {num_blocks:,} blocks, {tokens:,} tokens"


def simulated_line(engine: str, gpu: str, total: int) -> str:
    """Opens the log of a simulated server, whose other lines are the simulated server's own."""
    return f"kvplan simulates: {engine} on {gpu}, {total / 2**30:.8f} GiB"


def _own(phrase: str, pattern: str) -> Wording:
    return Wording("kvplan", phrase, pattern, "1", SOURCE)


def _row(name: str) -> Wording:
    phrase = f"kvplan engine: {name}: "
    return _own(phrase, rf"{phrase}planned [0-9,]{{1,26}} bytes, measured <{name}_bytes> bytes")


WORDINGS: Final = (
    _own(
        "kvplan engine: device ",
        r"kvplan engine: device <engine_device>(?: \(<gpu>\))?, backend <backend>, batches in flight "
        r"<batches_in_flight>, total <total_bytes> bytes, outside torch <non_torch_bytes> bytes",
    ),
    _own(
        "kvplan engine: host memory: ",
        "kvplan engine: host memory: <host_free_bytes> bytes free, ranks on it <host_ranks>",
    ),
    *map(_row, ROWS),
    _own("kvplan engine: pool: ", "kvplan engine: pool: <num_blocks> blocks, <kv_tokens> tokens"),
    _own(BEFORE, "<before>"),
    # Of the simulated server's log: the lines that follow are of the server that is simulated.
    Wording(
        "vllm", "kvplan simulates: ", r"kvplan simulates: <simulated> on <gpu>, <total_memory> GiB", "1", SOURCE
    ),
)  # fmt: skip
