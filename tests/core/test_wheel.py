"""What `pip install .` installs: both packages, the facts they read, the licence and the command."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from a copy of the checkout, so that nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "models.yaml"):
        shutil.copy2(ROOT / name, source)
    for name in ("kvplan", "engine"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", *offline, "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("kvplan-*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_the_facts_and_both_packages(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    carried = {
        "kvplan/models.yaml",
        "kvplan/hardware/gpus.yaml",
        "kvplan/py.typed",
        "kvplan/cli/main.py",
        "engine/__init__.py",
        "engine/py.typed",
    }
    assert carried <= set(names)
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "models.yaml"))]


def test_the_facts_in_the_wheel_are_those_of_the_checkout(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("kvplan/models.yaml") == (ROOT / "models.yaml").read_bytes()
    assert wheel.read("kvplan/hardware/gpus.yaml") == (ROOT / "kvplan/hardware/gpus.yaml").read_bytes()


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT)) for name in ("kvplan", "engine") for path in (ROOT / name).rglob("*.py")}
    assert modules <= set(wheel.namelist())


def test_the_wheel_declares_the_command_and_light_dependencies(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "kvplan = kvplan.cli.main:run" in wheel.read(entry_points).decode()
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    required = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: ")]
    core = {
        line.removeprefix("Requires-Dist: ").split("<")[0].split(">")[0] for line in required if "extra" not in line
    }
    assert core == {"typer", "rich", "pyyaml", "nvidia-ml-py", "google-re2"}
