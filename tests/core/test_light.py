"""An estimate is arithmetic on a few facts: it loads none of the heavy libraries."""

import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "pandas", "matplotlib", "pynvml", "numpy", "re2")

ESTIMATE = """
import sys
from kvplan.cli.main import main
code = main(["estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g"])
print(f"exit code {code}; loaded:", *sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)
"""


def test_an_estimate_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATE, *HEAVY], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr
    assert "GiB" in done.stdout


CLASSES = """
import sys
from kvplan.core import records
from kvplan.cli.main import main
code = main(["estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g"])
compiled = {
    f"{value.__module__}.{value.__qualname__}"
    for name, module in list(sys.modules.items()) if name.startswith("kvplan.")
    for value in vars(module).values()
    if isinstance(value, type) and "__dataclass_params__" in vars(value) and value.__dataclass_params__.frozen
    and value.__setattr__ is not records._refuse_to_set
}
print(f"exit code {code}; compiled:", *sorted(compiled), file=sys.stderr)
"""


def test_frozen_classes_of_an_estimate_are_made_the_quick_way() -> None:
    """`dataclasses` takes three to four times as long for each, a third of the whole command: kvplan.core.records."""
    done = subprocess.run([sys.executable, "-c", CLASSES], capture_output=True, text=True, timeout=900, check=False)
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; compiled:"], done.stderr
