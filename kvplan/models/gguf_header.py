"""The metadata and tensors of a GGUF file, from its header only.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md). Parsed here because the library's reader takes ten seconds
for a 128k-token vocabulary (gguf 0.19).
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import MIB, open_regular, os_problem, path_text, printable
from kvplan.models.ggml_types import TYPES
from kvplan.models.tensors import LFS_POINTER, TensorInfo

MAX_GGUF_HEADER_BYTES = 256 * MIB  # a 256k-token vocabulary with merges takes about 15 MB
MAX_GGUF_COUNT = 1 << 20  # limit for tensors, and for metadata keys
# Metadata value type -> its struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_BYTES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_LIST = 4096  # longer lists are vocabularies, not a value for each layer
MAX_TEXT = 1 << 16  # longer texts are chat templates


class _Header:
    """Sequential reader of a GGUF header: every length is checked against the file before it is used."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file = file
        self._buffer = b""
        self._size = min(size, MAX_GGUF_HEADER_BYTES)
        self.where = where
        self.offset = 0

    def refuse(self, complaint: str) -> NoReturn:
        raise InvalidInputError(self.where, f"{complaint} (byte {self.offset})", "fetch the file again")

    def need(self, count: int) -> None:
        """Buffer `count` more bytes, or raise an error if the file is too short."""
        end = self.offset + count
        if end > self._size:
            self.refuse("the header is cut short or larger than any real one")
        if end > len(self._buffer):
            self._buffer += self._file.read(max(end - len(self._buffer), len(self._buffer), MIB))
            if end > len(self._buffer):
                self.refuse("the file became shorter while it was read")

    def skip(self, count: int) -> None:
        self.need(count)
        self.offset += count

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Read little-endian numbers by their struct codes."""
        self.need(struct.calcsize("<" + layout))
        values = struct.unpack_from("<" + layout, self._buffer, self.offset)
        self.offset += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        self.need(length)
        data = self._buffer[self.offset : self.offset + length]
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("a name is not UTF-8")
        self.offset += length
        return text

    def value(self, kind: int) -> object:
        """Read a metadata value; None for one that is only skipped: a long text or list, a list of texts."""
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        start = self.offset
        if kind == _STRING:
            (length,) = self.numbers("Q")
            self.offset = start
            if length <= MAX_TEXT:
                return self.string()
        elif kind == _ARRAY:
            inner, count = self.numbers("IQ")
            if inner in _SCALARS and count <= MAX_LIST:
                return list(self.numbers(f"{count}{_SCALARS[inner]}"))
            self.offset = start
        self.skip_value(kind)
        return None

    def skip_value(self, kind: int, depth: int = 0) -> None:
        """Skip a metadata value of any type; it may be an array of arrays."""
        if kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self.skip(self.numbers("Q")[0])
        elif kind == _ARRAY and depth < 4:
            inner, count = self.numbers("IQ")
            if inner in _SCALAR_BYTES:
                self.skip(count * _SCALAR_BYTES[inner])
            else:
                self._skip_values(inner, count, depth + 1)
        else:
            self.refuse(f"unknown metadata type {kind}")

    def _skip_values(self, kind: int, count: int, depth: int) -> None:
        self.need(8 * count)  # minimum size of strings or arrays: bounds the loop before it runs
        for _ in range(count):
            self.skip_value(kind, depth)


def gguf_header(path: Path) -> tuple[dict[str, object], list[TensorInfo]]:
    """(metadata without vocabularies and long texts, tensors in the file's order)."""
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            file.seek(0)
            header = _Header(file, size, path_text(path))
            num_tensors, num_keys = _gguf_preamble(header)
            metadata, alignment = _gguf_metadata(header, num_keys)
            tensors = [_gguf_tensor(header) for _ in range(num_tensors)]
        except OSError as error:
            raise os_problem(path, error) from error
    if tensors:
        _check_gguf_data(header, tensors, alignment, size)
    return metadata, [tensor for _, tensor in tensors]


def _gguf_preamble(header: _Header) -> tuple[int, int]:
    """(number of tensors, number of metadata keys), checked before any allocation for them."""
    header.need(4)
    magic = struct.pack("<I", *header.numbers("I"))
    if magic != b"GGUF":
        if LFS_POINTER.startswith(magic):
            raise InvalidInputError(header.where, "a Git LFS pointer, not the weights", "run `git lfs pull`")
        header.refuse(f"bad GGUF magic ({printable(repr(magic), 40)})")
    (version,) = header.numbers("I")
    if version & 0xFFFF == 0 and version:
        raise InvalidInputError(header.where, "a big-endian GGUF file", "convert it with gguf-convert-endian")
    if version not in (2, 3):
        header.refuse(f"GGUF version {version}, kvplan reads 2 and 3")
    num_tensors, num_keys = header.numbers("QQ")
    for count, what in ((num_tensors, "tensors"), (num_keys, "metadata keys")):
        if count > MAX_GGUF_COUNT:
            header.refuse(f"{count:,} {what}, at most {MAX_GGUF_COUNT:,}")
    return num_tensors, num_keys


def _gguf_metadata(header: _Header, num_keys: int) -> tuple[dict[str, object], int]:
    """(metadata, alignment of the tensor data in bytes)."""
    alignment = 32  # the specification's default
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = header.string()
        (kind,) = header.numbers("I")
        value = header.value(kind)
        if key == "general.alignment" and kind == _UINT32 and isinstance(value, int):
            alignment = value
            if alignment < 1 or alignment & (alignment - 1):
                header.refuse(f"general.alignment {alignment} is not a power of two")
        if value is not None:
            metadata[key] = value
    return metadata, alignment


def _gguf_tensor(header: _Header) -> tuple[int, TensorInfo]:
    """(offset in the tensor data, the tensor) at the header's position."""
    name = header.string()
    (num_dimensions,) = header.numbers("I")
    if num_dimensions > _MAX_DIMENSIONS:
        header.refuse(f"tensor '{printable(name)}' has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS}")
    shape = header.numbers(f"{num_dimensions}Q")
    kind, offset = header.numbers("IQ")
    if kind not in TYPES:
        header.refuse(f"tensor '{printable(name)}' has unknown type {kind}, a newer release may know it")
    dtype, block, block_bytes = TYPES[kind]
    if math.prod(shape) >= 1 << 63 or (shape[0] if shape else 1) % block:
        header.refuse(f"tensor '{printable(name)}' of {dtype} cannot have shape {shape}")
    num_bytes = math.prod(shape) // block * block_bytes
    return offset, TensorInfo(name, dtype, shape[::-1], num_bytes)


def _check_gguf_data(header: _Header, tensors: list[tuple[int, TensorInfo]], alignment: int, size: int) -> None:
    """Reject tensors that overlap, are misaligned or end beyond the file."""
    names = {tensor.name for _, tensor in tensors}
    if len(names) != len(tensors):
        header.refuse("two tensors of one name")
    start = -(-header.offset // alignment) * alignment
    end = 0
    for offset, tensor in sorted(tensors, key=lambda entry: (entry[0], entry[1].num_bytes)):
        if offset % alignment or offset < end:
            header.refuse(f"tensor '{printable(tensor.name)}' overlaps another or is not aligned to {alignment}")
        end = offset + tensor.num_bytes
    if start + end > size:
        raise InvalidInputError(
            header.where,
            f"cut short ({size:,} bytes, the header describes {start + end:,})",
            "fetch the file again",
        )
