"""`make test-twin` runs what it says, or says in one line why not; libraries that stand in are loaded like the real."""

import ctypes
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import twin


def test_every_test_it_names_is_there() -> None:
    for name in twin.TESTS:
        path, _, function = name.partition("::")
        assert f"def {function}" in (twin.ROOT / path).read_text(encoding="utf-8")


def test_it_consists_of_what_kvplan_and_its_engine_admit() -> None:
    lines = twin.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {
        str(canonicalize_name(requirement.name)): str(requirement.specifier).removeprefix("==")
        for requirement in pinned
    }
    project = tomllib.loads((twin.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for need in map(Requirement, project["dependencies"] + project["optional-dependencies"]["engine"]):
        assert versions[canonicalize_name(need.name)] in need.specifier, need
    # the GPU machines' (engine's findings: Python 3.12.3, torch 2.11.0, triton 3.6.0, numpy 2.5.2)
    assert (versions["torch"], versions["triton"], versions["numpy"]) == ("2.11.0", "3.6.0", "2.5.2")


def says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    """What is printed where only the commands of a folder are to be had."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
    monkeypatch.setenv("PATH", str(path))
    assert twin.main() == 0
    return capsys.readouterr().out


def command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_its_python_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert says(capsys, monkeypatch, tmp_path) == "twin: not run, because no python3.12 is here\n"
    command(tmp_path / "python3.12", "exit 127")  # a version manager's
    assert says(capsys, monkeypatch, tmp_path) == "twin: not run, because no python3.12 is here\n"


def test_what_cannot_be_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(
        tmp_path / "python3.12",
        f"""case "$*" in
            "-c import ssl") ;;
            "-m venv --clear "*) /bin/mkdir -p {tmp_path}/cache/kvplan-twin/bin
                /bin/cp {tmp_path}/python3.12 {tmp_path}/cache/kvplan-twin/bin/python ;;
            *) echo "ERROR: No matching distribution found for torch==2.11.0" >&2; exit 1 ;;
        esac""",
    )
    out = says(capsys, monkeypatch, tmp_path)
    assert out.startswith("twin: not run, because ")
    assert out.endswith("pip install failed: ERROR: No matching distribution found for torch==2.11.0\n")
    assert out.count("\n") == 1
    assert not (tmp_path / "cache/kvplan-twin/made-from").exists()  # so it is tried again


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("ldd")), reason="needs a C compiler and ldd")
def test_a_library_whose_needs_are_absent_loads_with_stand_ins(tmp_path: Path) -> None:
    def build(name: str, source: str, *flags: str) -> None:
        (tmp_path / "a.c").write_text(source)
        command = ["gcc", "-shared", "-fPIC", "-o", name, "a.c", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", *flags]
        subprocess.run(command, cwd=tmp_path, check=True)

    (tmp_path / "versions").write_text("ABSENT_2 { global: with_version; };\n")
    build("libversioned.so.2", "int with_version(void) { return 1; }\n", "-Wl,--version-script=versions")
    build("libplain.so.1", "int without(void) { return 2; }\n")
    build(
        "libuser.so",
        "int with_version(void); int without(void); int (*held)(void) = without;\n"
        "int both(void) { return with_version() * 1000 + held(); }\n",
        "libversioned.so.2", "libplain.so.1",
    )  # fmt: skip
    for name in ("libversioned.so.2", "libplain.so.1"):
        (tmp_path / name).unlink()
    twin.stand_in(tmp_path)
    assert ctypes.CDLL(str(tmp_path / "libuser.so")).both() == 100 * 1000 + 100
