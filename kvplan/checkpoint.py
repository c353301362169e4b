"""What weights a model directory really holds, read from headers alone: no tensor data is read, no pickle is opened.

Sources: the safetensors format page (huggingface.co/docs/safetensors, "Format") and the GGUF specification
(ggml-org/ggml, docs/gguf.md). The headers are walked here because the libraries' readers cost too much for a header:
`safetensors.safe_open` imports numpy, and `gguf.GGUFReader` takes ten seconds over a 128k-token vocabulary (gguf 0.19).
What a GGUF tensor type weighs is still the gguf library's to say.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, Literal, NoReturn

from kvplan.errors import EnvironmentProblem, InvalidInputError
from kvplan.files import MIB, load_json, open_regular, os_problem, parse_json, printable

INDEX_NAME = "model.safetensors.index.json"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
MAX_INDEX_BYTES = 100 * MIB
MAX_HEADER_BYTES = 100_000_000  # of safetensors; the library refuses more, too
MAX_GGUF_HEADER_BYTES = 256 * MIB  # a 256k-token vocabulary with its merges takes about 15 MB
MAX_GGUF_COUNT = 1 << 20  # of tensors, and of metadata keys

# Bits of one element, by the names safetensors 0.8 writes. F4 and F6 are packed; a tensor still ends on a byte.
SAFETENSORS_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Beside the weights a trainer leaves pickles of its own.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|tokenizer|trainer_state)")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    `dtype` is the format's own name ("BF16", "Q4_K"). `shape` is in torch's order, slowest axis first, for GGUF too.
    `num_bytes` is what its data takes on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of one model directory.

    `total_bytes` is the sum over `tensors`. `tensors` is empty where only sizes are known: for pickles, and for a Hub
    cache that holds the index of the weights but not the weights. `notes` are warnings for the user.
    """

    format: Literal["safetensors", "gguf", "pickle-sizes"]
    tensors: tuple[TensorInfo, ...]
    total_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]


def read_checkpoint(model_dir: Path) -> Checkpoint | None:
    """The weights in a model directory (or one `.gguf` or `.safetensors` file); None where there are none.

    Where several formats lie side by side, safetensors is read, else GGUF, else pickles are sized.
    """
    try:
        is_dir = model_dir.is_dir()
    except OSError as error:
        raise os_problem(model_dir, error) from error
    if not is_dir:
        return _read_file(model_dir)
    names = _file_names(model_dir)
    if INDEX_NAME in names:
        return _read_index(model_dir)
    if shards := _loose_shards(model_dir, names):
        return _read_safetensors(model_dir, shards)
    if ggufs := [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]:
        return _read_gguf(model_dir, _one_gguf(model_dir, ggufs, names))
    return _size_pickles(model_dir, names)


def _read_file(path: Path) -> Checkpoint:
    open_regular(path).close()  # a missing file, a FIFO, a link loop: said before its name is judged
    match path.suffix:
        case ".gguf":
            names = _file_names(path.parent)
            return _read_gguf(path.parent, _one_gguf(path.parent, [path.name], names))
        case ".safetensors":
            return _read_safetensors(path.parent, [path.name])
        case _:
            raise InvalidInputError(f"{_shown(path)}: holds no weights; pass a model directory, .safetensors or .gguf")


def _shown(path: Path) -> str:
    return printable(str(path), 400)


# --- which files -----------------------------------------------------------------------------------------------------


def _file_names(model_dir: Path) -> list[str]:
    try:
        return sorted(path.name for path in model_dir.iterdir())
    except OSError as error:
        raise os_problem(model_dir, error) from error


def _inside(model_dir: Path, name: str, named_by: str) -> Path | None:
    """The file `name` of the model directory; None where it is missing.

    A name from an index is not trusted: one that leaves the directory (`..`, absolute, a drive, a link) is refused, the
    first three before anything is looked up.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0] == "/" or "\\" in name or PureWindowsPath(name).drive or "\0" in name:
        _refuse_outside(model_dir, name, named_by)
    path = model_dir / name
    try:
        real = path.resolve(strict=True)
        roots = [model_dir.resolve(strict=True), *_cache_blobs(model_dir)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_problem(path, error) from error
    except RuntimeError as error:  # how Python before 3.13 reports a loop of links
        raise InvalidInputError(f"{_shown(path)}: the symbolic links form a loop; check the path") from error
    if not any(real.is_relative_to(root) for root in roots):
        _refuse_outside(model_dir, name, named_by)
    return path


def _refuse_outside(model_dir: Path, name: str, named_by: str) -> NoReturn:
    raise InvalidInputError(
        f"{_shown(model_dir / named_by)}: '{printable(name)}' is outside model directory; "
        "pass the directory that holds the weights"
    )


def _cache_blobs(model_dir: Path) -> list[Path]:
    """Where the links of a Hub cache snapshot may point: into the blobs of the same repository or of the whole cache.

    The layout is huggingface_hub's: `models--org--name/snapshots/<commit>/<file>` links to `../../blobs/<hash>`, which
    since 2.x may itself link into the `blobs` folder of the cache.
    """
    folder = model_dir.resolve()
    for candidate in (folder, *folder.parents):
        if candidate.parent.name == "snapshots" and candidate.parent.parent.name.startswith("models--"):
            repository = candidate.parent.parent
            return [repository / "blobs", repository.parent / "blobs"]
    return []


def _present(model_dir: Path, names: Iterable[str], named_by: str) -> list[Path]:
    """The paths of files that must be there."""
    names = list(names)
    paths = {name: _inside(model_dir, name, named_by) for name in names}
    missing = [name for name in names if paths[name] is None]
    if missing:
        raise InvalidInputError(
            f"{_shown(model_dir / named_by)}: shard '{printable(missing[0])}' is missing "
            f"({len(missing)} of {len(names)} are); finish the download"
        )
    return [path for path in paths.values() if path is not None]


def _numbered(name: str) -> list[str]:
    """All names of the numbered set that `name` belongs to (`base-00002-of-00004.ext`), or just `name`."""
    if not (found := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)", name)):
        return [name]
    base, _, count, suffix = found.groups()
    return [f"{base}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def _loose_shards(model_dir: Path, names: Sequence[str]) -> list[str]:
    """The safetensors files that make up the model where no index says so.

    A directory may hold the same weights twice (Mistral ships `consolidated.safetensors` beside Hugging Face's files)
    and adapters beside the weights, so the first of these that is there is taken alone.
    """
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    for pattern in (r"model\.safetensors", r"model-\d{5}-of-\d{5}\.safetensors", r"consolidated.*"):
        if chosen := [name for name in shards if re.fullmatch(pattern, name)]:
            return list(dict.fromkeys(chain.from_iterable(map(_numbered, chosen))))
    return list(dict.fromkeys(chain.from_iterable(map(_numbered, shards))))


def _one_gguf(model_dir: Path, ggufs: Sequence[str], names: Sequence[str]) -> list[str]:
    """The parts of the one GGUF model among `ggufs`; several models (one per quantisation) are not guessed between."""
    models = {_numbered(name)[0]: _numbered(name) for name in ggufs}
    if len(models) > 1:
        some = ", ".join(printable(name, 60) for name in list(models)[:3])
        raise InvalidInputError(f"{_shown(model_dir)}: holds {len(models)} GGUF models ({some}); pass the path of one")
    (parts,) = models.values()
    return parts


# --- safetensors -----------------------------------------------------------------------------------------------------


def _read_index(model_dir: Path) -> Checkpoint | None:
    """The shards that `model.safetensors.index.json` names."""
    weight_map, total_size = _index(model_dir, INDEX_NAME)
    shards = sorted(set(weight_map.values()))
    if _cache_blobs(model_dir) and any(_inside(model_dir, shard, INDEX_NAME) is None for shard in shards):
        if total_size is None:
            return None
        note = f"the weights are not in the Hub cache: sized by total_size of {INDEX_NAME}"
        return Checkpoint("safetensors", (), total_size, tuple(shards), (note,))
    return _read_safetensors(model_dir, shards, weight_map, total_size)


def _index(model_dir: Path, index_name: str) -> tuple[dict[str, str], int | None]:
    """(tensor name -> shard, the total size it states in bytes) of a weight index."""
    path = _inside(model_dir, index_name, index_name)
    where = _shown(model_dir / index_name)
    if path is None:
        raise InvalidInputError(f"{where}: a link to nothing; fetch the index again")
    index = load_json(path, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{where}: no weight_map from tensors to shards; fetch the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            value = printable(repr(shard), 40)
            raise InvalidInputError(
                f"{where}: weight_map has no file name for '{printable(name)}' ({value}); fetch the index again"
            )
    return weight_map, _total_size(index)


def _total_size(index: dict[str, Any]) -> int | None:
    """`metadata.total_size`, written as a float by some tools; None where it is absent or no size."""
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(stated, bool) or not isinstance(stated, int | float) or stated != int(stated):
        return None
    return int(stated) if 0 < stated < 1 << 63 else None


def _read_safetensors(
    model_dir: Path, shards: Sequence[str], weight_map: dict[str, str] | None = None, total_size: int | None = None
) -> Checkpoint:
    named_by = INDEX_NAME if weight_map else shards[0]
    paths = _present(model_dir, shards, named_by)
    by_shard = {shard: list(_safetensors_tensors(path)) for shard, path in zip(shards, paths, strict=True)}
    if weight_map:
        _refuse_absent_tensors(model_dir, weight_map, by_shard)
    found = _checkpoint("safetensors", model_dir, by_shard)
    if total_size is None or total_size == found.total_bytes:
        return found
    note = f"{INDEX_NAME} states {total_size:,} bytes, the shards hold {found.total_bytes:,}, which counts"
    return replace(found, notes=(note,))


def _refuse_absent_tensors(model_dir: Path, weight_map: dict[str, str], by_shard: dict[str, list[TensorInfo]]) -> None:
    held = {shard: {tensor.name for tensor in tensors} for shard, tensors in by_shard.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise InvalidInputError(
                f"{_shown(model_dir / INDEX_NAME)}: tensor '{printable(name)}' is not in its shard "
                f"'{printable(shard)}'; fetch both again"
            )


def _checkpoint(
    kind: Literal["safetensors", "gguf"], model_dir: Path, by_shard: dict[str, list[TensorInfo]]
) -> Checkpoint:
    """All shards together; a tensor stored twice would be counted twice, so it is refused."""
    home: dict[str, str] = {}
    for shard, held in by_shard.items():
        for tensor in held:
            if (other := home.setdefault(tensor.name, shard)) != shard:
                raise InvalidInputError(
                    f"{_shown(model_dir)}: tensor '{printable(tensor.name)}' is in both '{printable(other)}' and "
                    f"'{printable(shard)}'; remove the files of one of the two models"
                )
    if not home:
        raise InvalidInputError(f"{_shown(model_dir)}: '{printable(next(iter(by_shard)))}' holds no tensors; fetch it")
    tensors = tuple(chain.from_iterable(by_shard.values()))
    return Checkpoint(kind, tensors, sum(tensor.num_bytes for tensor in tensors), tuple(by_shard), ())


def _safetensors_tensors(path: Path) -> Iterator[TensorInfo]:
    """The tensors of one file, in the order of their data, which must cover the file without gap or overlap."""
    where = _shown(path)
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            file.seek(0)
            header = _safetensors_header(file, size, where)
            data_size = size - file.tell()
        except OSError as error:
            raise os_problem(path, error) from error
    header.pop("__metadata__", None)
    entries = [(name, *_entry(name, entry, where)) for name, entry in header.items()]
    end = 0
    for name, dtype, shape, begin, stop in sorted(entries, key=lambda entry: entry[3:]):
        if begin != end:
            raise InvalidInputError(
                f"{where}: tensor '{printable(name)}' starts at byte {begin} of the data, not {end}: "
                f"tensors {'overlap' if begin < end else 'leave a gap'}; fetch the file again"
            )
        end = stop
        yield TensorInfo(name, dtype, shape, stop - begin)
    if end != data_size:
        cut = "cut short" if end > data_size else "longer than its tensors"
        raise InvalidInputError(
            f"{where}: {cut} ({data_size:,} bytes of data, the header describes {end:,}); fetch the file again"
        )


def _safetensors_header(file: BinaryIO, size: int, where: str) -> dict[str, Any]:
    """The header as JSON: eight bytes of length, then as many bytes of text; the file stands behind it afterwards."""
    start = file.read(8)
    if (start + file.read(len(_LFS_POINTER) - 8)).startswith(_LFS_POINTER):
        raise InvalidInputError(f"{where}: a Git LFS pointer, not the weights; run `git lfs pull`")
    if len(start) < 8:
        raise InvalidInputError(f"{where}: too short for a safetensors header ({size} bytes); fetch the file again")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"{where}: header length {length:,} is over {MAX_HEADER_BYTES:,}; it is no safetensors file or is damaged"
        )
    if length > size - 8:
        raise InvalidInputError(f"{where}: header length {length:,} is more than the file ({size:,}); fetch it again")
    file.seek(8)
    try:
        text = file.read(length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{where}: header is not UTF-8 (byte {8 + error.start}); fetch the file again"
        ) from None
    if not text.startswith("{"):
        raise InvalidInputError(f"{where}: header is not a JSON object (byte 8); it is no safetensors file")
    return parse_json(text, f"{where} header")


def _entry(name: str, entry: object, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, byte behind the last) of a tensor; the bytes must be what dtype and shape need."""
    of_tensor = f"{where}: tensor '{printable(name)}'"
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{of_tensor}: not an object; fetch the file again")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        value = printable(repr(dtype), 40)
        raise InvalidInputError(f"{of_tensor}: unknown dtype ({value}); kvplan knows {', '.join(SAFETENSORS_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        value = printable(repr((shape, offsets)), 80)
        raise InvalidInputError(f"{of_tensor}: shape and data_offsets are not sizes {value}; fetch the file again")
    bits, begin, stop = math.prod(shape) * SAFETENSORS_BITS[dtype], offsets[0], offsets[1]
    if bits != 8 * (stop - begin):
        raise InvalidInputError(
            f"{of_tensor}: {dtype} {printable(repr(shape), 60)} needs {bits / 8:,g} bytes, its data_offsets span "
            f"{stop - begin:,}; fetch the file again"
        )
    return dtype, tuple(shape), begin, stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


# --- GGUF ------------------------------------------------------------------------------------------------------------

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # metadata value type -> bytes
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS


def _read_gguf(model_dir: Path, parts: Sequence[str]) -> Checkpoint:
    paths = _present(model_dir, parts, parts[0])
    return _checkpoint("gguf", model_dir, {part: _gguf_tensors(path) for part, path in zip(parts, paths, strict=True)})


@cache
def _gguf_types() -> dict[int, tuple[str, int, int]]:
    """GGUF tensor type -> (name, elements per block, bytes per block), as the gguf library has them."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise EnvironmentProblem(
            "gguf: not installed, and only that library knows what GGUF tensors weigh; run `pip install gguf`"
        ) from error
    return {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}


class _Header:
    """A GGUF header read forward: every length is checked against the file before it is believed."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file = file
        self._buffer = b""
        self._size = min(size, MAX_GGUF_HEADER_BYTES)
        self.where = where
        self.offset = 0

    def refuse(self, complaint: str) -> NoReturn:
        raise InvalidInputError(f"{self.where}: {complaint} (byte {self.offset}); fetch the file again")

    def need(self, count: int) -> None:
        """Refuse unless `count` more bytes are there; bring them into the buffer."""
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
        """The next numbers, little-endian, by their struct letters."""
        self.need(struct.calcsize("<" + layout))
        found = struct.unpack_from("<" + layout, self._buffer, self.offset)
        self.offset += struct.calcsize("<" + layout)
        return found

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

    def skip_value(self, kind: int, depth: int = 0) -> None:
        """Step over a metadata value of any type; it may be an array of arrays."""
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
        self.need(8 * count)  # the least that strings or arrays take: bounds the loop before it runs
        for _ in range(count):
            self.skip_value(kind, depth)


def _gguf_tensors(path: Path) -> list[TensorInfo]:
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            file.seek(0)
            header = _Header(file, size, _shown(path))
            num_tensors, num_keys = _gguf_preamble(header)
            alignment = _gguf_metadata(header, num_keys)
            found = [_gguf_tensor(header) for _ in range(num_tensors)]
        except OSError as error:
            raise os_problem(path, error) from error
    if found:
        _check_gguf_data(header, found, alignment, size)
    return [tensor for _, tensor in found]


def _gguf_preamble(header: _Header) -> tuple[int, int]:
    """(number of tensors, number of metadata keys), checked before anything is allocated for them."""
    header.need(4)
    magic = struct.pack("<I", *header.numbers("I"))
    if magic != b"GGUF":
        if _LFS_POINTER.startswith(magic):
            raise InvalidInputError(f"{header.where}: a Git LFS pointer, not the weights; run `git lfs pull`")
        header.refuse(f"bad GGUF magic ({printable(repr(magic), 40)})")
    (version,) = header.numbers("I")
    if version & 0xFFFF == 0 and version:
        raise InvalidInputError(f"{header.where}: a big-endian GGUF file; convert it with gguf-convert-endian")
    if version not in (2, 3):
        header.refuse(f"GGUF version {version}, kvplan reads 2 and 3")
    num_tensors, num_keys = header.numbers("QQ")
    for count, what in ((num_tensors, "tensors"), (num_keys, "metadata keys")):
        if count > MAX_GGUF_COUNT:
            header.refuse(f"{count:,} {what}, at most {MAX_GGUF_COUNT:,}")
    return num_tensors, num_keys


def _gguf_metadata(header: _Header, num_keys: int) -> int:
    """Step over the metadata; the alignment of the tensor data, in bytes."""
    alignment = 32  # the specification's default
    for _ in range(num_keys):
        key = header.string()
        (kind,) = header.numbers("I")
        if key == "general.alignment" and kind == _UINT32:
            (alignment,) = header.numbers("I")
            if alignment < 1 or alignment & (alignment - 1):
                header.refuse(f"general.alignment {alignment} is not a power of two")
        else:
            header.skip_value(kind)
    return alignment


def _gguf_tensor(header: _Header) -> tuple[int, TensorInfo]:
    """(offset in the tensor data, the tensor) at the header's place."""
    name = header.string()
    (num_dimensions,) = header.numbers("I")
    if num_dimensions > _MAX_DIMENSIONS:
        header.refuse(f"tensor '{printable(name)}' has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS}")
    shape = header.numbers(f"{num_dimensions}Q")
    kind, offset = header.numbers("IQ")
    if kind not in _gguf_types():
        header.refuse(f"tensor '{printable(name)}' has unknown type {kind}, a newer gguf library may know it")
    dtype, block, block_bytes = _gguf_types()[kind]
    if math.prod(shape) >= 1 << 63 or (shape[0] if shape else 1) % block:
        header.refuse(f"tensor '{printable(name)}' of {dtype} cannot have shape {shape}")
    num_bytes = math.prod(shape) // block * block_bytes
    return offset, TensorInfo(name, dtype, shape[::-1], num_bytes)


def _check_gguf_data(header: _Header, found: list[tuple[int, TensorInfo]], alignment: int, size: int) -> None:
    """Refuse tensors that lie over each other, off their alignment or beyond the end of the file."""
    names = {tensor.name for _, tensor in found}
    if len(names) != len(found):
        header.refuse("two tensors of one name")
    start = -(-header.offset // alignment) * alignment
    end = 0
    for offset, tensor in sorted(found, key=lambda entry: (entry[0], entry[1].num_bytes)):
        if offset % alignment or offset < end:
            header.refuse(f"tensor '{printable(tensor.name)}' overlaps another or is not aligned to {alignment}")
        end = offset + tensor.num_bytes
    if start + end > size:
        raise InvalidInputError(
            f"{header.where}: cut short ({size:,} bytes, the header describes {start + end:,}); fetch the file again"
        )


# --- pickles ---------------------------------------------------------------------------------------------------------


def _size_pickles(model_dir: Path, names: Sequence[str]) -> Checkpoint | None:
    """Pickle weights by size alone: opening a pickle runs what is in it."""
    if PICKLE_INDEX_NAME in names:
        weight_map, total_size = _index(model_dir, PICKLE_INDEX_NAME)
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            _inside(model_dir, shard, PICKLE_INDEX_NAME)
        if total_size is not None:
            note = f"pickle weights are sized by total_size of {PICKLE_INDEX_NAME}, never opened"
            return Checkpoint("pickle-sizes", (), total_size, tuple(shards), (note,))
        return _file_sizes(model_dir, shards, PICKLE_INDEX_NAME)
    candidates = [name for name in names if not _NOT_WEIGHTS.match(name)]
    for pattern in (r"pytorch_model.*\.bin", r".*\.bin", r"consolidated.*\.pth", r".*\.pth", r".*\.pt"):
        if chosen := [name for name in candidates if re.fullmatch(pattern, name)]:
            shards = list(dict.fromkeys(chain.from_iterable(map(_numbered, chosen))))
            return _file_sizes(model_dir, shards, shards[0])
    return None


def _file_sizes(model_dir: Path, shards: Sequence[str], named_by: str) -> Checkpoint:
    sizes = [_pickle_size(path) for path in _present(model_dir, shards, named_by)]
    note = "pickle weights are sized from file sizes, never opened"
    return Checkpoint("pickle-sizes", (), sum(sizes), tuple(shards), (note,))


def _pickle_size(path: Path) -> int:
    with open_regular(path) as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise InvalidInputError(f"{_shown(path)}: a Git LFS pointer, not the weights; run `git lfs pull`")
        return file.seek(0, 2)
