"""`kvplan preflight` as one file that a bare Python runs: `python -m tests.support.single_file OUT.pyz`, size printed.

It holds kvplan without the rooms that the command does not use, and its dependencies as installed here, pure Python
only. Data files are read by path, so the file unpacks itself once into the user's cache; where that cannot be written,
into a temporary folder that it removes. Modules are compiled for the Python that makes it; any other compiles them.
"""

import compileall
import hashlib
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
BUNDLED: Final = ("typer", "rich", "pyyaml", "nvidia-ml-py", "shellingham", "annotated-doc")
UNUSED: Final = ("simulate", "serve")  # rooms of kvplan
SUFFIXES: Final = (".py", ".yaml", ".json", ".txt")
EPOCH: Final = (2020, 1, 1, 0, 0, 0)  # of every entry: the same sources give the same file

LOADER: Final = '''
import os, shutil, sys, tempfile, zipfile

DIGEST = "{digest}"


def unpacked(folder):
    """Unpack into a folder of the cache that is whole or not there; return whether it is there."""
    if not os.path.isdir(folder):
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        part = tempfile.mkdtemp(prefix=DIGEST, dir=os.path.dirname(folder))
        with zipfile.ZipFile(sys.argv[0]) as archive:
            archive.extractall(part)
        try:
            os.rename(part, folder)
        except OSError:  # another process was first
            shutil.rmtree(part, ignore_errors=True)
    return os.path.isdir(folder) and os.stat(folder).st_uid == os.getuid()


def main():
    if sys.version_info < (3, 11):
        sys.stderr.write("kvplan: error: Python 3.11 or newer is needed; run this file with one\\n")
        return 3
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder, own = os.path.join(cache, "kvplan", DIGEST), None
    try:
        is_there = unpacked(folder)
    except OSError:
        is_there = False
    if not is_there:
        folder = own = tempfile.mkdtemp(prefix="kvplan-")
        with zipfile.ZipFile(sys.argv[0]) as archive:
            archive.extractall(folder)
    sys.path.insert(0, folder)
    try:
        from kvplan.cli.app import main as run

        return run(["preflight", *sys.argv[1:]])
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
'''


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    build(out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, compiled for Python {sys.version_info[0]}.{sys.version_info[1]}")
    return 0


def build(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gather(folder)
        compileall.compile_dir(folder, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, stripdir=name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
        with out.open("wb") as file:
            file.write(b"#!/usr/bin/env python3\n")
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                add(archive, "__main__.py", LOADER.format(digest=digest.hexdigest()[:24]).encode())
                for path in files:
                    add(archive, path.relative_to(folder).as_posix(), path.read_bytes())
    out.chmod(0o755)


def add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def gather(folder: Path) -> None:
    """Copy kvplan, its facts, and its dependencies with their licenses."""
    for path in sorted((ROOT / "kvplan").rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix in SUFFIXES and parts[1] not in UNUSED:
            copy(path, folder / path.relative_to(ROOT))
    copy(ROOT / "models.yaml", folder / "kvplan" / "models.yaml")
    copy(ROOT / "LICENSE", folder / "kvplan" / "LICENSE")
    for name in BUNDLED:
        for file in distribution(name).files or ():
            is_info = ".dist-info" in file.parts[0] and ("METADATA" in file.name or "LICENSE" in file.name.upper())
            if ".." not in file.parts and (file.suffix == ".py" or is_info):
                copy(Path(str(file.locate())), folder / file)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
