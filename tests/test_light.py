"""An estimate is arithmetic on a few facts: it loads none of the heavy libraries."""

import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "pandas", "matplotlib", "pynvml", "numpy")

ESTIMATE = """
import sys
from kvplan.cli.main import main
code = main(["estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g"])
print(f"exit code {code}; loaded:", *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)
"""


def test_an_estimate_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATE, *HEAVY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr
    assert "GiB" in done.stdout
