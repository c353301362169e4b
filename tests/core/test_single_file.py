"""`make preflight`: one file that a Python without any package runs, from a cache or, without one, from a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.single_file import build

COMMAND = ("--gpu", "rtx-4090", "vllm", "serve", "Qwen/Qwen3-14B")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "preflight.pyz"
    build(path)
    return path


@pytest.mark.full
def test_one_file_runs_without_packages(file: Path, tmp_path: Path) -> None:
    cache, blocked = tmp_path / "cache", tmp_path / "blocked"
    blocked.write_text("a file, in which no folder can be made", encoding="utf-8")
    for folder in (cache, cache, blocked):
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(file), *COMMAND],
            capture_output=True, text=True, timeout=900, check=False,
            env={"XDG_CACHE_HOME": str(folder), "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, done.stdout[:3]) == (1, "No:"), done.stderr
    assert len([*(cache / "kvplan").iterdir()]) == 1
    assert not [*tmp_path.glob("kvplan-*")]


@pytest.mark.full
def test_the_same_sources_make_the_same_file(file: Path, tmp_path: Path) -> None:
    build(tmp_path / "again.pyz")
    assert (tmp_path / "again.pyz").read_bytes() == file.read_bytes()
