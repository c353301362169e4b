"""The tensors of a safetensors file, from its header only.

Source: the safetensors format page (huggingface.co/docs/safetensors, "Format"). Parsed here because the library's
`safe_open` imports numpy, which costs more than the header.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import open_regular, os_problem, parse_json, path_text, printable
from kvplan.models.tensors import LFS_POINTER, TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the library has the same limit

# Bits per element, by safetensors 0.8's names. F4 and F6 are packed; a tensor still ends on a byte.
SAFETENSORS_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def safetensors_tensors(path: Path) -> Iterator[TensorInfo]:
    """Tensors of one file, in data order; they must cover the file without gap or overlap."""
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            file.seek(0)
            yield from header_tensors(file, size, path_text(path))
        except OSError as error:
            raise os_problem(path, error) from error


def header_tensors(file: BinaryIO, size: int, where: str) -> Iterator[TensorInfo]:
    """Tensors of a file of `size` bytes, of which the header is read."""
    header = _safetensors_header(file, size, where)
    data_size = size - file.tell()
    header.pop("__metadata__", None)
    entries = [(name, *_entry(name, entry, where)) for name, entry in header.items()]
    end = 0
    for name, dtype, shape, begin, stop in sorted(entries, key=lambda entry: entry[3:]):
        if begin != end:
            raise InvalidInputError(
                where,
                f"tensor '{printable(name)}' starts at byte {begin} of the data, not {end}: tensors "
                f"{'overlap' if begin < end else 'leave a gap'}",
                "fetch the file again",
            )
        end = stop
        yield TensorInfo(name, dtype, shape, stop - begin)
    if end != data_size:
        cut = "cut short" if end > data_size else "longer than its tensors"
        raise InvalidInputError(
            where, f"{cut} ({data_size:,} bytes of data, the header describes {end:,})", "fetch the file again"
        )


def _safetensors_header(file: BinaryIO, size: int, where: str) -> dict[str, Any]:
    """Parse the header as JSON: eight bytes of length, then that many bytes of text; the file is positioned
    after it.
    """
    start = file.read(8)
    if (start + file.read(len(LFS_POINTER) - 8)).startswith(LFS_POINTER):
        raise InvalidInputError(where, "a Git LFS pointer, not the weights", "run `git lfs pull`")
    if len(start) < 8:
        raise InvalidInputError(where, f"too short for a safetensors header ({size} bytes)", "fetch the file again")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidInputError(
            where,
            f"header length {length:,} is over {MAX_HEADER_BYTES:,}",
            "it is not a safetensors file or is damaged",
        )
    if length > size - 8:
        raise InvalidInputError(where, f"header length {length:,} is more than the file ({size:,})", "fetch it again")
    file.seek(8)
    try:
        text = file.read(length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            where, f"header is not UTF-8 (byte {8 + error.start})", "fetch the file again"
        ) from None
    if not text.startswith("{"):
        raise InvalidInputError(where, "header is not a JSON object (byte 8)", "it is not a safetensors file")
    return parse_json(text, f"{where} header")


def _entry(name: str, entry: object, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, end byte) of a tensor; the byte count must match dtype and shape."""
    of_tensor = f"{where}: tensor '{printable(name)}'"
    if not isinstance(entry, dict):
        raise InvalidInputError(of_tensor, "not an object", "fetch the file again")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        value = printable(repr(dtype), 40)
        raise InvalidInputError(of_tensor, f"unknown dtype ({value})", f"kvplan knows {', '.join(SAFETENSORS_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        value = printable(repr((shape, offsets)), 80)
        raise InvalidInputError(of_tensor, f"shape and data_offsets are not sizes {value}", "fetch the file again")
    bits, begin, stop = math.prod(shape) * SAFETENSORS_BITS[dtype], offsets[0], offsets[1]
    if bits != 8 * (stop - begin):
        raise InvalidInputError(
            of_tensor,
            f"{dtype} {printable(repr(shape), 60)} needs {bits / 8:,g} bytes, its data_offsets span {stop - begin:,}",
            "fetch the file again",
        )
    return dtype, tuple(shape), begin, stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
