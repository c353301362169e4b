"""Tests with the lowest versions that pyproject.toml admits: `python -m tests.support.lowest` (`make test-lowest`).

The light install's and serve's requirements, each at its lower bound; the rest is what an index gives today. Where they
cannot be installed, one line says why.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 600  # a bound for a network that hangs
TOOLS = ("pytest>=8.4", "hypothesis>=6.120", "jsonschema>=4.23", "openai>=2.0", "httpx2>=2.0")
TESTS = ("tests/cli/test_help.py", "tests/serve/test_chat.py", "tests/serve/test_openai_client.py")
LOWER = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)")


def main() -> int:
    requirements = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplan-lowest"
    python = str(folder / "bin" / "python")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_S)
        install = [python, "-m", "pip", "install", "--quiet", *requirements, *TOOLS]
        subprocess.run(install, check=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"lowest: not run, because the versions cannot be installed ({type(error).__name__})", flush=True)
        return 0
    print(f"lowest: {', '.join(requirements)}", flush=True)
    options = ["-q", "-o", "addopts=", "-p", "no:anyio", "-m", "not full and not exhaustive and not gpu"]
    # Old releases of libraries warn of themselves on a new Python.
    command = [python, "-m", "pytest", *options, "-o", "filterwarnings=", *TESTS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


def lowest(pyproject: str) -> list[str]:
    """Each requirement of the light install and of serve at its lower bound: "rich==13.9"."""
    project = tomllib.loads(pyproject)["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    matches = [LOWER.match(requirement) for requirement in requirements]
    return [f"{match['name']}=={match['version']}" for match in matches if match is not None]


if __name__ == "__main__":
    sys.exit(main())
