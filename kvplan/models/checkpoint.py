"""The weights of a model directory, from headers only: no tensor data is read, no pickle is opened."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NoReturn

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import MIB, load_json, open_regular, os_problem, path_text, printable
from kvplan.models.gguf_header import gguf_header
from kvplan.models.safetensors_header import safetensors_tensors
from kvplan.models.tensors import LFS_POINTER, Checkpoint, TensorInfo

INDEX_NAME = "model.safetensors.index.json"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
MAX_INDEX_BYTES = 100 * MIB

# Pickles that trainers store next to the weights.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|tokenizer|trainer_state)")


def read_checkpoint(model_dir: Path) -> Checkpoint | None:
    """Read the weights of a model directory (or one `.gguf` or `.safetensors` file); None if there are none.

    If there are several formats, safetensors is read, else GGUF; pickles are only sized.
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
    open_regular(path).close()  # a missing file, a FIFO, a link loop: reported before its name is checked
    match path.suffix:
        case ".gguf":
            names = _file_names(path.parent)
            return _read_gguf(path.parent, _one_gguf(path.parent, [path.name], names))
        case ".safetensors":
            return _read_safetensors(path.parent, [path.name])
        case _:
            raise InvalidInputError(
                path_text(path), "holds no weights", "pass a model directory, .safetensors or .gguf"
            )


# --- which files -----------------------------------------------------------------------------------------------------


def _file_names(model_dir: Path) -> list[str]:
    try:
        return sorted(path.name for path in model_dir.iterdir())
    except OSError as error:
        raise os_problem(model_dir, error) from error


def _inside(model_dir: Path, name: str, named_by: str) -> Path | None:
    """Path of the file `name` in the model directory, or None if it is missing.

    A name from an index is not trusted: one that leaves the directory (`..`, absolute, a drive, a link) is rejected,
    the first three before any file access.
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
    except RuntimeError as error:  # raised for link loops before Python 3.13
        raise InvalidInputError(path_text(path), "the symbolic links form a loop", "check the path") from error
    if not any(real.is_relative_to(root) for root in roots):
        _refuse_outside(model_dir, name, named_by)
    return path


def _refuse_outside(model_dir: Path, name: str, named_by: str) -> NoReturn:
    raise InvalidInputError(
        path_text(model_dir / named_by),
        f"'{printable(name)}' is outside model directory",
        "pass the directory that holds the weights",
    )


def _cache_blobs(model_dir: Path) -> list[Path]:
    """Allowed link targets of a Hub cache snapshot: the blobs of the same repository or of the whole cache.

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
    """Paths of required files. Raise an error if one is missing."""
    names = list(names)
    paths = {name: _inside(model_dir, name, named_by) for name in names}
    missing = [name for name in names if paths[name] is None]
    if missing:
        raise InvalidInputError(
            path_text(model_dir / named_by),
            f"shard '{printable(missing[0])}' is missing ({len(missing)} of {len(names)} are)",
            "finish the download",
        )
    return [path for path in paths.values() if path is not None]


def _numbered(name: str) -> list[str]:
    """All names of the numbered set that `name` belongs to (`base-00002-of-00004.ext`), or only `name`."""
    if not (match := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)", name)):
        return [name]
    base, _, count, suffix = match.groups()
    return [f"{base}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def _loose_shards(model_dir: Path, names: Sequence[str]) -> list[str]:
    """The safetensors files that make up the model if there is no index.

    A directory may contain the same weights twice (Mistral ships `consolidated.safetensors` in addition to Hugging
    Face's files) and adapters as well, so only the first of these patterns that matches is used.
    """
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    for pattern in (r"model\.safetensors", r"model-\d{5}-of-\d{5}\.safetensors", r"consolidated.*"):
        if chosen := [name for name in shards if re.fullmatch(pattern, name)]:
            return list(dict.fromkeys(chain.from_iterable(map(_numbered, chosen))))
    return list(dict.fromkeys(chain.from_iterable(map(_numbered, shards))))


def _one_gguf(model_dir: Path, ggufs: Sequence[str], names: Sequence[str]) -> list[str]:
    """The parts of the only GGUF model in `ggufs`; several models (one per quantization) are an error rather
    than a guess.
    """
    models = {_numbered(name)[0]: _numbered(name) for name in ggufs}
    if len(models) > 1:
        some = ", ".join(printable(name, 60) for name in list(models)[:3])
        raise InvalidInputError(
            path_text(model_dir), f"holds {len(models)} GGUF models ({some})", "pass the path of one"
        )
    (parts,) = models.values()
    return parts


# --- safetensors -----------------------------------------------------------------------------------------------------


def _read_index(model_dir: Path) -> Checkpoint | None:
    """Read the shards named in `model.safetensors.index.json`."""
    weight_map, total_size = _index(model_dir, INDEX_NAME)
    shards = sorted(set(weight_map.values()))
    if _cache_blobs(model_dir) and any(_inside(model_dir, shard, INDEX_NAME) is None for shard in shards):
        if total_size is None:
            return None
        note = f"the weights are not in the Hub cache: sized by total_size of {INDEX_NAME}"
        return Checkpoint("safetensors", (), total_size, tuple(shards), (note,))
    return _read_safetensors(model_dir, shards, weight_map, total_size)


def index_files(path: Path) -> tuple[str, ...]:
    """The files that a weight index names, each once."""
    return tuple(sorted(set(_index(path.parent, path.name)[0].values())))


def _index(model_dir: Path, index_name: str) -> tuple[dict[str, str], int | None]:
    """(tensor name -> shard, total size in bytes as given) of a weight index."""
    path = _inside(model_dir, index_name, index_name)
    where = path_text(model_dir / index_name)
    if path is None:
        raise InvalidInputError(where, "broken symbolic link", "fetch the index again")
    index = load_json(path, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(where, "no weight_map from tensors to shards", "fetch the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            value = printable(repr(shard), 40)
            raise InvalidInputError(
                where, f"weight_map has no file name for '{printable(name)}' ({value})", "fetch the index again"
            )
    return weight_map, _total_size(index)


def _total_size(index: dict[str, Any]) -> int | None:
    """`metadata.total_size`, a float from some tools, or None if it is missing or not a size."""
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
    by_shard = {shard: list(safetensors_tensors(path)) for shard, path in zip(shards, paths, strict=True)}
    if weight_map:
        _refuse_absent_tensors(model_dir, weight_map, by_shard)
    checkpoint = _checkpoint("safetensors", model_dir, by_shard)
    if total_size is None or total_size == checkpoint.total_bytes:
        return checkpoint
    note = f"{INDEX_NAME} states {total_size:,} bytes, the shards hold {checkpoint.total_bytes:,}, which counts"
    return replace(checkpoint, notes=(note,))


def _refuse_absent_tensors(model_dir: Path, weight_map: dict[str, str], by_shard: dict[str, list[TensorInfo]]) -> None:
    names = {shard: {tensor.name for tensor in tensors} for shard, tensors in by_shard.items()}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise InvalidInputError(
                path_text(model_dir / INDEX_NAME),
                f"tensor '{printable(name)}' is not in its shard '{printable(shard)}'",
                "fetch both again",
            )


def _checkpoint(
    kind: Literal["safetensors", "gguf"], model_dir: Path, by_shard: dict[str, list[TensorInfo]]
) -> Checkpoint:
    """Combine all shards; a tensor stored twice is rejected, as it would be counted twice."""
    home: dict[str, str] = {}
    for shard, shard_tensors in by_shard.items():
        for tensor in shard_tensors:
            if (other := home.setdefault(tensor.name, shard)) != shard:
                raise InvalidInputError(
                    path_text(model_dir),
                    f"tensor '{printable(tensor.name)}' is in both '{printable(other)}' and '{printable(shard)}'",
                    "remove the files of one of the two models",
                )
    if not home:
        raise InvalidInputError(
            path_text(model_dir), f"'{printable(next(iter(by_shard)))}' holds no tensors", "fetch it"
        )
    tensors = tuple(chain.from_iterable(by_shard.values()))
    return Checkpoint(kind, tensors, sum(tensor.num_bytes for tensor in tensors), tuple(by_shard), ())


def _read_gguf(model_dir: Path, parts: Sequence[str]) -> Checkpoint:
    paths = _present(model_dir, parts, parts[0])
    headers = {part: gguf_header(path) for part, path in zip(parts, paths, strict=True)}
    stored = _checkpoint("gguf", model_dir, {part: tensors for part, (_, tensors) in headers.items()})
    return replace(stored, metadata=headers[parts[0]][0])


# --- pickles ---------------------------------------------------------------------------------------------------------


def _size_pickles(model_dir: Path, names: Sequence[str]) -> Checkpoint | None:
    """Size pickle weights without opening them: unpickling runs code."""
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
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InvalidInputError(path_text(path), "a Git LFS pointer, not the weights", "run `git lfs pull`")
        return file.seek(0, 2)
