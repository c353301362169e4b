"""What `kvplan estimate` of published configs costs in processor time, against a small catalog model.

    python benchmarks/configs.py FOLDER [--tp 8] [--gpu b200]

FOLDER holds `<model>/config.json`. Prints the ten slowest: user CPU seconds of the process, their ratio to the same
command on llama-3.1-8b, and how many names the patterns of the quantization's lists were matched against, all at once.
The ratio is what may be compared between machines.
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

from kvplan.core.errors import KvplanError
from kvplan.models import hf_config
from kvplan.models.patterns import Patterns
from kvplan.sizing.weights import Layout, total_weights

SLOWEST = 10


def user_seconds(model: str, tp: int, gpu: str) -> float:
    """User CPU seconds of one `kvplan estimate`, start-up included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    argv = [sys.executable, "-m", "kvplan", "estimate", model, "--gpu", gpu, "--tp", str(tp)]
    subprocess.run(argv, check=False, capture_output=True, env=os.environ)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def tries(folder: Path, tp: int) -> int:
    """How often the patterns meet a name while the config is read and sized for each of four layouts."""
    count = 0
    real = Patterns.matching

    def counting(self: Patterns, name: str) -> frozenset[int]:
        nonlocal count
        count += 1
        return real(self, name)

    Patterns.matching = counting  # type: ignore[method-assign]
    try:
        spec = hf_config.load_spec(folder)
        for ranks in sorted({1, 2, 4, tp}):
            total_weights(spec, Layout(tp=ranks))
    except KvplanError:
        pass  # a config that is refused costs what it costs until then
    finally:
        Patterns.matching = real  # type: ignore[method-assign]
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--gpu", default="b200")
    options = parser.parse_args()
    base = min(user_seconds("llama-3.1-8b", 1, options.gpu) for _ in range(3))
    folders = sorted(path.parent for path in options.folder.glob("*/config.json"))
    rows = [(user_seconds(str(folder), options.tp, options.gpu), folder) for folder in folders]
    print(f"llama-3.1-8b: {base:.2f} s; {len(rows)} configs")
    for seconds, folder in sorted(rows, reverse=True)[:SLOWEST]:
        print(f"{seconds:6.2f} s {seconds / base:6.2f}x {tries(folder, options.tp):8,} tries  {folder.name}")


if __name__ == "__main__":
    main()
