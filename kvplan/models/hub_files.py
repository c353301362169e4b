"""Files of a model on the Hub, fetched into huggingface_hub's cache with a limit of bytes and of time.

huggingface_hub's own download names a file after the server's ETag, which may lead out of the cache, and has neither
limit. Here a file is named by its commit (40 hexadecimal digits) and its name, and what already lies there is not
fetched again. The cache's layout is huggingface_hub's, without its links: docs "Understand caching".
"""

import io
import os
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from kvplan.core.errors import EnvironmentProblem
from kvplan.models.safetensors_header import MAX_HEADER_BYTES, header_tensors
from kvplan.models.tensors import TensorInfo

DOWNLOAD_S = 120  # for one file; the largest published index has 9 MB
HEAD_BYTES = 100_000  # holds most headers whole (huggingface_hub reads as much)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Full(Exception):
    """More bytes than a file may have."""


class _Sink(io.BytesIO):
    """Bytes in memory, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def write(self, data: Any) -> int:
        room = self.max_bytes - self.tell()
        if len(data) > room:
            super().write(data[:room])
            raise _Full
        return super().write(data)


def fetch(library: ModuleType, model_id: str, name: str, revision: str, max_bytes: int) -> Path:
    """Path of a file in the cache, downloaded unless this commit's is there."""
    metadata = _metadata(library, model_id, name, revision)
    if metadata.size is not None and metadata.size > max_bytes:
        raise _too_large(model_id, name, f"{metadata.size:,} bytes", max_bytes)
    repository = library.file_download.repo_folder_name(repo_id=model_id, repo_type="model")
    folder = Path(library.constants.HF_HUB_CACHE, repository)
    path: Path = folder / "snapshots" / metadata.commit_hash / name
    if not path.exists():
        sink = _Sink(max_bytes)
        try:
            _download(library, model_id, name, revision, sink, metadata.size)
        except _Full:
            raise _too_large(model_id, name, "its length was not stated", max_bytes) from None
        _write(path, sink.getvalue())
    reference = folder / "refs" / revision
    if revision != metadata.commit_hash and not _says(reference, metadata.commit_hash):
        _write(reference, metadata.commit_hash.encode())
    return path


def remote_tensors(library: ModuleType, model_id: str, name: str, revision: str) -> list[TensorInfo]:
    """Tensors of a safetensors file, from its header, which alone is fetched."""
    size = _metadata(library, model_id, name, revision).size
    where = f"{model_id}: {name}"
    start = _beginning(library, model_id, name, revision, HEAD_BYTES)
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < end <= 8 + MAX_HEADER_BYTES:
        start = _beginning(library, model_id, name, revision, end)
    return list(header_tensors(io.BytesIO(start), len(start) if size is None else size, where))


def _metadata(library: ModuleType, model_id: str, name: str, revision: str) -> Any:
    url = library.hf_hub_url(model_id, name, revision=revision)
    metadata = library.get_hf_file_metadata(url, timeout=library.constants.HF_HUB_ETAG_TIMEOUT)
    if not _COMMIT.fullmatch(metadata.commit_hash or ""):
        raise library.errors.FileMetadataError("the answer names no commit, so it is not the Hub's")
    return metadata


def _beginning(library: ModuleType, model_id: str, name: str, revision: str, num_bytes: int) -> bytes:
    """The first bytes of a file, whether or not the server answers the range."""
    sink = _Sink(num_bytes)
    with suppress(_Full):
        _download(library, model_id, name, revision, sink, None, {"Range": f"bytes=0-{num_bytes - 1}"})
    return sink.getvalue()


def _download(
    library: ModuleType,
    model_id: str,
    name: str,
    revision: str,
    sink: _Sink,
    size: int | None,
    headers: dict[str, str] | None = None,
) -> None:
    """Fill the sink. A server that sends a byte a second keeps each time limit of the library's, so that the download
    is waited for, and left with its thread."""
    url = library.hf_hub_url(model_id, name, revision=revision)
    headers = {**library.utils.build_hf_headers(), "Accept-Encoding": "identity", **(headers or {})}
    faults: list[BaseException] = []

    def download() -> None:
        try:
            library.file_download.http_get(url, sink, headers=headers, expected_size=size)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_S)
    if thread.is_alive():
        sink.max_bytes = 0  # ends the thread with its next bytes
        raise EnvironmentProblem(
            model_id, f"{name} did not arrive within {DOWNLOAD_S} s", "retry, or pass a local config.json"
        )
    if faults:
        raise faults[0]


def _too_large(model_id: str, name: str, size: str, max_bytes: int) -> EnvironmentProblem:
    return EnvironmentProblem(model_id, f"{name} is too large ({size}, at most {max_bytes:,})")


def _says(path: Path, text: str) -> bool:
    return path.is_file() and path.stat().st_size == len(text) and path.read_text() == text


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink()
        raise
