"""A run's evidence in few files: one archive per group of stages, each bounded in size and replaced as a whole."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACK_LIMIT = 7 * 2**20  # bytes of one archive; seven of them travel with the code where 64 MiB are the most
SAMPLES_LIMIT = 4 * 2**20  # bytes of one samples.jsonl
SAMPLES = "samples.jsonl"
ESSENTIAL = ("result.json", "run.json", "reconciliation.json")  # never left out of an archive


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by one with this content; whoever reads it sees the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk half of it would only take room
        raise


def write_json(path: Path, values: Any) -> None:
    write_whole(path, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())


def thin(path: Path, limit: int = SAMPLES_LIMIT) -> bool:
    """Cut a samples.jsonl down to about `limit` bytes: every n-th sample, and the first and last of each stage.

    The peaks of all samples are in the run's run.json. Returns whether anything was cut.
    """
    size = path.stat().st_size
    if size <= limit:
        return False
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    stages = [_stage_of(line) for line in lines]
    every = -(-size // limit)
    ends = {0, len(lines) - 1} | {j for i in range(1, len(lines)) if stages[i] != stages[i - 1] for j in (i - 1, i)}
    write_whole(path, "".join(line for i, line in enumerate(lines) if i % every == 0 or i in ends).encode())
    return True


def _stage_of(line: str) -> Any:
    try:
        return json.loads(line).get("stage")
    except ValueError:  # cut off where the run was killed
        return None


def pack(archive: Path, work: Path, folders: Iterable[str], limit: int = PACK_LIMIT) -> list[str]:
    """Replace `archive` by one of these folders of `work`; returns the files left out to keep to the limit.

    The largest go first; what says the outcome stays.
    """
    files = sorted(path for folder in folders for path in (work / folder).rglob("*") if path.is_file())
    for path in files:
        if path.name == SAMPLES:
            thin(path)
    left_out: list[str] = []
    while len(content := _archived(files, work)) > limit:
        spare = [path for path in files if path.name not in ESSENTIAL]
        if not spare:
            break
        largest = max(spare, key=lambda path: path.stat().st_size)
        files.remove(largest)
        left_out.append(str(largest.relative_to(work)))
    write_whole(archive, content)
    return left_out


def _archived(files: list[Path], work: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in files:
            archive.add(path, str(path.relative_to(work)), recursive=False)
    return buffer.getvalue()


def unpack(archive: Path, work: Path) -> None:
    """Lay an archive's folders out in `work`."""
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
