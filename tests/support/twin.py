"""The engine's tests with what the GPU machines have, on a CPU: `python -m tests.support.twin` (`make test-twin`).

That is Python 3.12 and the versions in constraints/twin.txt: torch 2.11, triton 3.6, numpy 2.5. Kernels' own tests are
left out: Triton's interpreter breaks with that numpy. Where a part is not to be had, one line says which.

An index may offer this torch only as built for CUDA, whose libraries take gigabytes that a CPU never uses. So it is
installed without them, and libraries that do nothing stand in: torch finds no GPU, and computes on the CPU as always.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "constraints" / "twin.txt"
PYTHON = "python3.12"
INSTALL_S = 600  # a bound for a network that hangs
TESTS = (
    "tests/engine/test_batch.py",
    "tests/engine/test_block_manager.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_layers.py",
    "tests/engine/test_loader.py",
    "tests/engine/test_sampler.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_torch_backend.py",
    "tests/engine/test_work_list.py",
    "tests/engine/test_kernels.py::test_rows_of_fp8_products_are_scaled_by_any_torch",
)
NO_DEVICE = 100  # cudaErrorNoDevice, which torch takes for a machine without a GPU


class NotToBeHad(Exception):
    """What the twin lacks here, as an end of the sentence 'not run, because ...'."""


def main() -> int:
    try:
        python = twin(home())
    except NotToBeHad as lack:
        print(f"twin: not run, because {lack}", flush=True)
        return 0
    requirements = re.findall(r"(?m)^(?:torch|triton|numpy)==.*", REQUIREMENTS.read_text(encoding="utf-8"))
    print(f"twin: {PYTHON}, {', '.join(requirements)}", flush=True)
    return subprocess.run([python, "-m", "pytest", "-q", "-n", "2", *TESTS], cwd=ROOT, check=False).returncode


def home() -> Path:
    """Where the twin is kept, outside the checkout: a fresh clone need not install it again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplan-twin"


def twin(folder: Path) -> Path:
    """The Python of a twin in this folder, made anew where what it consists of has changed."""
    python, stamp = folder / "bin" / "python", folder / "made-from"
    made_from = REQUIREMENTS.read_text(encoding="utf-8") + Path(__file__).read_text(encoding="utf-8")
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == made_from:
        return python
    try:
        done([interpreter(), "-m", "venv", "--clear", str(folder)])
        done([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)])
        stand_in(next(folder.glob("lib/python*/site-packages/torch/lib")))
        done([str(python), "-c", "import torch, triton, transformers"])
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"its packages were not installed in {INSTALL_S} s") from None
    except OSError as error:
        raise NotToBeHad(str(error)) from None
    stamp.write_text(made_from, encoding="utf-8")
    return python


def interpreter() -> str:
    """A Python 3.12: one that answers, as a version manager's command may be there without its Python."""
    candidates = [shutil.which(PYTHON)]
    if pyenv := shutil.which("pyenv"):
        versions = Path(subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip())
        candidates += sorted(map(str, versions.glob(f"versions/3.12*/bin/{PYTHON}")), reverse=True)
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", "import ssl"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise NotToBeHad(f"no {PYTHON} is here")


def done(command: list[str]) -> str:
    """What a command prints; one that fails is a lack."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if ran.returncode != 0:
        last = (ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[-1]
        raise NotToBeHad(f"{' '.join(map(str, command[:4]))} failed: {last}")
    return ran.stdout


# --- libraries that do nothing ----------------------------------------------------------------------------------------


def stand_in(folder: Path) -> None:
    """Lay beside the libraries in a folder what they need and the machine lacks: functions that find no device."""
    libraries = sorted(folder.glob("*.so*"))
    lacking = {name for library in libraries for name in re.findall(r"(\S+) => not found", done(["ldd", str(library)]))}
    if not lacking:
        return
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        raise NotToBeHad(f"torch needs {', '.join(sorted(lacking))}, and no C compiler is here to make stand-ins of")
    functions: dict[str, set[tuple[str, str]]] = {name: set() for name in lacking}
    unversioned = set()
    for library in libraries:
        owners = owners_of_versions(library)
        for name, version in undefined(library):
            if not version:
                unversioned.add((name, ""))
            elif owners[version] in functions:
                functions[owners[version]].add((name, version))
    # Which library a symbol without a version is of, nobody says: any will do.
    here = {line.split()[-1] for library in libraries for line in symbols(library, "--defined-only")}
    functions[min(lacking)] |= {function for function in unversioned if function[0] not in here}
    for name in sorted(lacking):
        compile_stand_in(compiler, folder / name, functions[name])


def symbols(library: Path, which: str) -> list[str]:
    return done(["nm", "-D", which, str(library)]).splitlines()


def undefined(library: Path) -> Iterator[tuple[str, str]]:
    """(function, version or "") of all that a library takes from others, but for Python's."""
    for line in symbols(library, "--undefined-only"):
        kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind == "U" and not name.startswith(("Py", "_Py")):
            yield name, version.lstrip("@")


def owners_of_versions(library: Path) -> dict[str, str]:
    """Version of a symbol -> the library it is to come from."""
    owners, owner = defaultdict(str), ""
    for kind, name in re.findall(r"\b(File|Name): (\S+)", done(["readelf", "-V", "-W", str(library)])):
        if kind == "File":
            owner = name
        else:
            owners[name] = owner
    return owners


def compile_stand_in(compiler: str, library: Path, functions: set[tuple[str, str]]) -> None:
    of_version = defaultdict(list)
    for name, version in sorted(functions):
        of_version[version].append(name)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.c"), Path(folder, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name, _ in sorted(functions)))
        script.write_text("".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in of_version.items() if v))
        versions = [f"-Wl,--version-script={script}"] if any(of_version) else []
        flags = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library.name}"]
        done([compiler, *flags, *versions, "-o", str(library), str(source)])


if __name__ == "__main__":
    sys.exit(main())
