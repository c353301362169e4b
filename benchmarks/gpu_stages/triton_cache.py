"""Triton's compiled kernels, carried from call to call: compiling them again would take most of the tests' time.

A cache's index files name their kernels by absolute paths, which are those of the next call once unpacked. Of a kernel
its binary and its facts are kept, and the launchers; the texts that the compiler made on the way are not needed.
"""

import io
import tarfile
from pathlib import Path
from typing import Final

from benchmarks.gpu_stages.evidence import write_whole

NAME: Final = "triton-cache"
KEPT: Final = (".cubin", ".json", ".so")
LIMIT: Final = 14 * 2**20  # bytes of the archive: a file of 16 MiB comes back at most
PLACE: Final = b"@CACHE@"  # stands for the cache's folder in packed index files


def archive_of(out: Path) -> Path:
    return out / f"{NAME}.tar.gz"


def pack_cache(out: Path, work: Path, limit: int = LIMIT) -> int:
    """Replace the archive in `out` by one of work/triton-cache, the smallest kernels first; returns how many it has."""
    place = str(work / NAME).encode()
    kernels = {
        folder: [path for path in sorted(folder.iterdir()) if path.suffix in KEPT]
        for folder in sorted((work / NAME).glob("*/"))
    }
    kernels = {folder: files for folder, files in kernels.items() if files}
    buffer, packed = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for folder in sorted(kernels, key=lambda folder: sum(path.stat().st_size for path in kernels[folder])):
            if buffer.tell() > limit - sum(path.stat().st_size for path in kernels[folder]):
                break
            for path in kernels[folder]:
                content = path.read_bytes().replace(place, PLACE)
                entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
            packed += 1
    if packed:
        write_whole(archive_of(out), buffer.getvalue())
    return packed


def unpack_cache(out: Path, work: Path) -> None:
    """Lay a packed cache out in work/triton-cache; raises tarfile.TarError, EOFError or OSError for a damaged one."""
    folder = work / NAME
    with tarfile.open(archive_of(out)) as packed:
        packed.extractall(folder, filter="data")
    for path in folder.rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(PLACE, str(folder).encode()))
