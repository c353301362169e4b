"""GGUF files without weights: sparse files with true headers, written by the gguf library."""

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import gguf
import numpy

from kvplan.models.gguf_model import GGUFModel

BYTE: Final = numpy.dtype("uint8")


def write(path: Path, metadata: Mapping[str, Any], tensors: list[tuple[str, tuple[int, ...], str]]) -> Path:
    """A GGUF file of true length without weights."""
    architecture = metadata["general.architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    size = 0
    for name, shape, kind in tensors:
        info = gguf.GGMLQuantizationType[kind]
        row, size_of_row = gguf.GGML_QUANT_SIZES[info]
        packed = (shape[0] // row * size_of_row, *shape[1:])  # as the library wants it: bytes of a row
        num_bytes = prod(packed)
        writer.add_tensor_info(name, packed[::-1], BYTE, num_bytes, raw_dtype=info)
        size += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + size)
    return path


def saved(path: Path, model: GGUFModel) -> Path:
    return write(path, model.metadata, [(tensor.name, tensor.shape, tensor.kind) for tensor in model.tensors])
