"""Files in a directory of KV chunks (`--kv-offloading-dir`) that others can write: good ones, and those that attack.

    python -m benchmarks.attacks.tier_files [--seed 5]

Each is there before the directory is opened, or takes the place of a good one after it; then chunks are read and
written. A good file breaks when its bytes are not read; a hostile one, when other bytes are, when a file outside the
directory is made or changed, or when reading has no end.
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.attacks.outcomes import LIMIT_KIB, NoEnd, Tally, limited, peak_kib, replaced
from engine.disk_tier import MAGIC, DiskTier
from kvplan.core.errors import KvplanError

CHUNK, CAPACITY = 1024, 1 << 20
KEY = (bytes.fromhex("ab" * 32), 0)
NAME = "ab" * 32 + ".g0"
PAYLOAD = b"x" * CHUNK
GOOD = MAGIC + hashlib.sha256(PAYLOAD).digest() + PAYLOAD  # a file's form: engine/disk_tier.py
Change = Callable[[Path], object]


def place(tier: Path) -> Path:
    return tier / "ab" / NAME


def linked(path: Path, target: Path) -> None:
    """Move a file, and leave a link to it."""
    path.rename(target)
    path.symlink_to(target)


def of_a_file() -> Iterator[tuple[str, Change]]:
    """What takes the place of a good file."""
    yield "another payload", lambda tier: place(tier).write_bytes(GOOD[:-1] + b"y")
    yield "another header", lambda tier: place(tier).write_bytes(b"y" + GOOD[1:])
    yield "empty", lambda tier: place(tier).write_bytes(b"")
    yield "cut", lambda tier: place(tier).write_bytes(GOOD[:-1])
    yield "longer", lambda tier: place(tier).write_bytes(GOOD + b"x")
    yield "FIFO", lambda tier: replaced(place(tier), os.mkfifo)
    yield "folder", lambda tier: replaced(place(tier), Path.mkdir)
    yield "full folder", lambda tier: replaced(place(tier), lambda path: (path / "x").mkdir(parents=True))
    yield "endless device", lambda tier: replaced(place(tier), lambda path: path.symlink_to("/dev/zero"))
    yield "link to a good file", lambda tier: linked(place(tier), tier / "z")
    yield "link to itself", lambda tier: replaced(place(tier), lambda path: path.symlink_to(NAME))
    yield "8 GiB", lambda tier: os.truncate(place(tier), 8 << 30)
    yield "gone", lambda tier: place(tier).unlink()
    yield "unreadable", lambda tier: place(tier).chmod(0)


def beside(name: str, tier: Path) -> None:
    """A good file's content under another name."""
    (tier / "ab" / name).write_bytes(GOOD)


def of_a_directory() -> Iterator[tuple[str, Change]]:
    """What lies beside a good file, which is read or, where its own place is taken, lost."""
    for name in (".g0", "ab.g", "zz.g0", "AB" * 32 + ".g0", "ab" * 32 + ".g-1", "ab" * 32 + ".g 0", "ab" * 32 + ".g٣"):
        yield f"named {name[-8:]!r}", partial(beside, name)
    yield "in another folder", lambda tier: shutil.copytree(tier / "ab", tier / "cd")
    yield "10,000 files", lambda tier: [(tier / "ab" / f"{n:064x}.g0").write_bytes(GOOD) for n in range(10_000)]
    yield "draft that is a link", lambda tier: (tier / "ab" / f".{NAME}.tmp").symlink_to("../../victim")
    yield "draft that is a FIFO", lambda tier: os.mkfifo(tier / "ab" / f".{NAME}.tmp")
    yield "draft that is a folder", lambda tier: (tier / "ab" / f".{NAME}.tmp" / "x").mkdir(parents=True)
    yield "lock that is a folder", lambda tier: (tier / ".lock").mkdir()
    yield "lock that is a link", lambda tier: (tier / ".lock").symlink_to("../made")
    yield "lock that is a FIFO", lambda tier: os.mkfifo(tier / ".lock")
    yield "folder that is a link", lambda tier: replaced(tier / "ab", lambda path: path.symlink_to("../elsewhere"))
    yield "folder that is a file", lambda tier: replaced(tier / "ab", Path.touch)


def used(tier: DiskTier, rng: random.Random, allowed: Collection[bytes | None]) -> str | None:
    """Read and write chunks; what breaks."""
    read = tier.read(KEY)
    if read not in allowed:
        return f"read {read and read[:8]!r}"
    other = (rng.randbytes(32), rng.randrange(3))
    for key in (KEY, other):
        if tier.write(key, memoryview(PAYLOAD)) and tier.read(key) != PAYLOAD:
            return "a chunk is not read as it was written"
    return None


def opened(tier: Path, rng: random.Random, late: Change, allowed: Collection[bytes | None]) -> tuple[bool, str | None]:
    """(whether the directory was refused, what broke)."""
    with warnings.catch_warnings(), suppress(NoEnd), limited():
        warnings.simplefilter("ignore")
        try:
            files = DiskTier(tier, CAPACITY, CHUNK)
        except KvplanError:
            return True, None
        try:
            late(tier)
            return False, used(files, rng, allowed)
        finally:
            files.close()
    return False, "did not end"


def tried(tier: Path, rng: random.Random, change: Change | None, *, is_late: bool) -> tuple[bool, str | None]:
    """A fresh directory with a good file and what a case changes; whether it was refused, and what broke."""
    root = tier.parent
    place(tier).parent.mkdir(parents=True)
    place(tier).write_bytes(GOOD)
    (root / "victim").write_text("precious")
    (root / "elsewhere").mkdir()
    before = peak_kib()
    if change is not None and not is_late:
        change(tier)
    late = change if change is not None and is_late else lambda tier: None
    refused, problem = opened(tier, rng, late, (PAYLOAD,) if change is None else (PAYLOAD, None))
    if (root / "victim").read_text() != "precious" or (root / "made").exists() or list((root / "elsewhere").iterdir()):
        problem = "a file outside the directory was made or changed"
    if peak_kib() - before > LIMIT_KIB:
        problem = "took more than 1 GiB"
    return refused, problem


def cases(num_valid: int) -> Iterator[tuple[str, str, Change | None, bool]]:
    """(kind, name, change, whether it is made after the directory was opened)."""
    for number in range(num_valid):
        yield "valid", f"{number}", None, False
    for name, change in of_a_file():
        yield "hostile", name, change, False
        yield "hostile", f"{name}, after the start", change, True
    for name, change in of_a_directory():
        yield "hostile", name, change, False


def attack(seed: int, num_valid: int = 40) -> Tally:
    rng, tally = random.Random(seed), Tally()
    for kind, name, change, is_late in cases(num_valid):
        with tempfile.TemporaryDirectory() as folder:
            refused, problem = tried(Path(folder) / "tier", rng, change, is_late=is_late)
        tally.counts[kind] += 1
        tally.counts["refused"] += refused
        if problem is None and kind == "valid" and refused:
            problem = "refused"
        if problem is not None:
            tally.broken.append(f"{kind}, {name}: {problem}")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=5)
    return attack(parser.parse_args(argv).seed).closing()


if __name__ == "__main__":
    sys.exit(main())
