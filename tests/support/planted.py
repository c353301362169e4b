"""Run code in a process of its own, with a module of kvplan changed as somebody would change its file."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANT = """
import importlib.util, json, sys
name, changes, given = json.loads(sys.argv[1])
spec = importlib.util.find_spec(name)
with open(spec.origin, encoding="utf-8") as file:
    text = file.read()
for before, after in changes:
    assert text.count(before) == 1, (before, text.count(before))
    text = text.replace(before, after)
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
exec(compile(text, spec.origin, "exec"), module.__dict__)
"""


def answer_of(code: str, module: str, changes: Sequence[tuple[str, str]], question: Any, folder: Path) -> Any:
    """What the code prints as JSON when it runs in a folder. changes: (old text of the file, new text)."""
    done = subprocess.run(
        [sys.executable, "-c", PLANT + code, json.dumps((module, list(changes), question))],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
