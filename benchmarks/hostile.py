"""Whether reading grows with the size of a file only: how many times longer twice the file takes, whatever is in it.

    python -m benchmarks.hostile [--runs 5]

Ratios of processor time: 2 is linear, 4 is quadratic. Sizes are the largest that the readers take (256 KiB), and half.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvplan.core.errors import KvplanError
from kvplan.core.files import parse_json
from kvplan.core.strict_yaml import parse
from kvplan.measure.serverlog.log import read_log
from kvplan.workloads.trace import read

SIZE = 256 * 1024 - 16
UNITS = {
    "yaml": ("9", "9.", "9_", "1:2", "+", "0", "1e", ".", "-1", "~"),
    "yaml, nested": ("[", "{a: ", "- "),
    "trace": ("\n", ",", '"', "[", "{", '{"a":', "9", "\r\n", "1,1\n", "a", '""', "\\", '{"a":[', " ", "{}\n"),
    "json": ("[", "{", '{"a":', "9", '"', "\\", " ", '""', ","),
    "log": (
        "9", "9,", "(", "'\\", "\x1b[", "[3", "(Worker_TP1 ", "\n", '{"log":"', "'a' -", "GPU KV cache size: ",
        "args: Namespace(", "vllm serve \\\n", "Load weight end. avail mem=",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for reader, unit, run in readings(Path(folder)):
            half, whole = (lowest(run, size, options.runs) for size in (SIZE // 2, SIZE))
            rows.append((whole / half, f"{whole / half:5.2f}  {whole * 1000:8.1f} ms  {reader} of {unit!r}"))
            print(rows[-1][1], flush=True)
    print(f"{len(rows)} files; the largest:", max(rows)[1])


def readings(folder: Path) -> Iterator[tuple[str, str, Callable[[int], object]]]:
    """(reader, what the file repeats, a call that reads such a file of so many bytes)."""

    def of_file(read: Callable[[str], object], unit: str, size: int) -> object:
        path = folder / "file"
        path.write_text(repeated(unit, size), encoding="utf-8", newline="")
        return read(str(path))

    for unit in UNITS["yaml"]:
        yield "yaml", unit, lambda size, unit=unit: parse(f"a: {repeated(unit, size)}\n", "file")
    for unit in UNITS["yaml, nested"]:
        yield "yaml, nested", unit, lambda size, unit=unit: parse(repeated(unit, size), "file")
    for unit in UNITS["json"]:
        yield "json", unit, lambda size, unit=unit: parse_json(repeated(unit, size), "file")
    for unit in UNITS["trace"]:
        yield "trace", unit, lambda size, unit=unit: of_file(lambda path: read(Path(path)), unit, size)
    for unit in UNITS["log"]:
        yield "log", unit, lambda size, unit=unit: of_file(read_log, unit, size)


def repeated(unit: str, size: int) -> str:
    return unit * (size // len(unit))


def lowest(run: Callable[[int], object], size: int, runs: int) -> float:
    """Seconds of processor time, the least of several: what disturbs only adds."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        with suppress(KvplanError):
            run(size)
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
