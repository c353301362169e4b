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


PREFLIGHT = """
import sys
from kvplan.cli.main import main
code = main(["preflight", "-q", "vllm serve Qwen/Qwen3-8B --max-model-len 8192", "--gpu", "l40s"])
ours = (name for name in sys.modules if name.startswith("kvplan."))
others = sorted({*sys.argv[1:]} & {*sys.modules})
rare = ("sglang", "bundled", "policy.file", "simulate", "manifest", "cures", "failure", "diagnosis", "options.")
others += [name for name in ours if any(part in name for part in rare)]
print(f"exit code {code}; loaded:", *others, file=sys.stderr)
"""


def test_a_preflight_loads_only_what_it_reads_the_machine_with() -> None:
    others = [name for name in HEAVY if name != "pynvml"]
    done = subprocess.run(
        [sys.executable, "-c", PREFLIGHT, *others, "rich"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr


MODULES = """
import sys
from kvplan.cli.main import main
code = main(["estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g"])
import os
ours = sorted(
    name for name, module in sys.modules.items()
    if name.split(".")[0] == "kvplan" and os.path.getsize(module.__file__)  # an empty __init__.py holds nothing
)
print(f"exit code {code}; loaded:", *ours, file=sys.stderr)
"""
MOST_MODULES = 54  # lower it when you can; rare features load with the flag that asks for them


def test_an_estimate_loads_no_more_modules_than_it_did() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, timeout=900, check=False)
    summary, _, names = done.stderr.strip().splitlines()[-1].partition(": ")
    assert summary == "exit code 0; loaded", done.stderr
    assert len(names.split()) <= MOST_MODULES, names
    rare = ("models.listed", "models.patterns", "servers.sglang", "servers.bundled", "simulate", "measure", "policy")
    loaded = [name for name in names.split() if name.startswith(tuple(f"kvplan.{room}" for room in rare))]
    assert loaded == [], names
