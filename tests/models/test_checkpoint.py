"""Weights are sized from headers, as the libraries that wrote them size them; a header that lies is refused."""

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvplan.core.errors import InvalidInputError, KvplanError
from kvplan.models.checkpoint import INDEX_NAME, read_checkpoint
from kvplan.models.safetensors_header import SAFETENSORS_BITS
from kvplan.models.tensors import Checkpoint, TensorInfo
from tests.support.counted_reads import reads_of

Entry = dict[str, Any]


def safetensors_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_checkpoint(path)
    assert caught.value.exit_code == 2
    assert str(caught.value).isprintable()
    return str(caught.value)


def checkpoint_at(path: Path) -> Checkpoint:
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None
    return checkpoint


def write_index(model_dir: Path, weight_map: object, total_size: object = None) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (model_dir / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def save_two_shards(model_dir: Path) -> None:
    """a: 2 x 3 x 2 = 12 bytes and b: 4 x 4 = 16 bytes in the first shard, c: 8 bytes in the second: 36 bytes."""
    model_dir.mkdir(parents=True, exist_ok=True)
    first: dict[str, Any] = {"a": np.zeros((2, 3), np.float16), "b": np.zeros(4, np.float32)}
    save_file(first, model_dir / "model-00001-of-00002.safetensors")
    save_file({"c": np.zeros((8, 1), np.int8)}, model_dir / "model-00002-of-00002.safetensors")


TWO_SHARDS = {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors",
}
TWO_SHARDS_TENSORS = {
    TensorInfo("a", "F16", (2, 3), 12),
    TensorInfo("b", "F32", (4,), 16),
    TensorInfo("c", "I8", (8, 1), 8),
}


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "training_args.bin").write_bytes(b"x" * 100)
    assert read_checkpoint(tmp_path) is None


@pytest.mark.parametrize("total_size", [36, 36.0, None])
def test_the_index_leads_to_every_shard(tmp_path: Path, total_size: float | None) -> None:
    save_two_shards(tmp_path)
    write_index(tmp_path, TWO_SHARDS, total_size)
    checkpoint = checkpoint_at(tmp_path)
    assert set(checkpoint.tensors) == TWO_SHARDS_TENSORS
    assert (checkpoint.format, checkpoint.total_bytes, checkpoint.notes) == ("safetensors", 36, ())
    assert checkpoint.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_the_headers_count_where_the_index_states_another_size(tmp_path: Path) -> None:
    save_two_shards(tmp_path)
    write_index(tmp_path, TWO_SHARDS, 72)
    checkpoint = checkpoint_at(tmp_path)
    assert checkpoint.total_bytes == 36
    assert checkpoint.notes == (f"{INDEX_NAME} states 72 bytes, the shards hold 36, which counts",)


def test_loose_shards_are_one_model(tmp_path: Path) -> None:
    save_two_shards(tmp_path)
    assert set(checkpoint_at(tmp_path).tensors) == TWO_SHARDS_TENSORS
    assert set(checkpoint_at(tmp_path / "model-00002-of-00002.safetensors").tensors) == {
        TensorInfo("c", "I8", (8, 1), 8)
    }


def test_weights_shipped_twice_are_counted_once(tmp_path: Path) -> None:
    weights = {"a": np.zeros(4, np.float32)}
    for name in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        save_file(weights, tmp_path / name)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)
    assert checkpoint_at(tmp_path).files == ("model.safetensors",)
    assert checkpoint_at(tmp_path).total_bytes == 16


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("left.safetensors", "right.safetensors"):
        save_file({"a": np.zeros(4, np.float32)}, tmp_path / name)
    assert refusal(tmp_path) == (
        f"{tmp_path}: tensor 'a' is in both 'left.safetensors' and 'right.safetensors'; "
        "remove the files of one of the two models"
    )


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_BITS))
def test_every_dtype_takes_the_bytes_the_library_gives_it(tmp_path: Path, dtype: str) -> None:
    num_bytes = 24 * SAFETENSORS_BITS[dtype] // 8
    content = safetensors_file({"a": tensor(dtype, [2, 12], 0, num_bytes)}, b"\0" * num_bytes)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert checkpoint_at(tmp_path).tensors == (TensorInfo("a", dtype, (2, 12), num_bytes),)
    assert library_tensors(content) == set(checkpoint_at(tmp_path).tensors)


def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path) -> None:
    save_file({"s": np.array(1.0), "e": np.zeros((0, 8), np.int32)}, tmp_path / "model.safetensors")
    assert set(checkpoint_at(tmp_path).tensors) == {TensorInfo("s", "F64", (), 8), TensorInfo("e", "I32", (0, 8), 0)}


F32_PAIR = {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 8, 12)}
BAD_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short for a safetensors header (0 bytes)"),
    "seven bytes": (b"\0" * 7, "too short for a safetensors header (7 bytes)"),
    "header over the file": (struct.pack("<Q", 1000) + b"{}", "header length 1,000 is more than the file (10)"),
    "header of 2^63": (struct.pack("<Q", 2**63) + b"{}", "header length 9,223,372,036,854,775,808 is over 100,000,000"),
    "header not JSON": (safetensors_file(b"{oops}"), "header: line 1 column 2: not JSON"),
    "header a list": (safetensors_file([]), "header is not a JSON object (byte 8)"),
    "header padded in front": (safetensors_file(b" {}"), "header is not a JSON object (byte 8)"),
    "header not UTF-8": (safetensors_file(b'{"\xff": 1}'), "header is not UTF-8 (byte 10)"),
    "header deep": (safetensors_file(b'{"a":' * 50_000), "header: nested more than 100 levels"),
    "overlap": (
        safetensors_file({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, b"\0" * 12),
        "tensor 'b' starts at byte 4 of the data, not 8: tensors overlap",
    ),
    "gap": (
        safetensors_file({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 12, 16)}, b"\0" * 16),
        "tensor 'b' starts at byte 12 of the data, not 8: tensors leave a gap",
    ),
    "data cut": (safetensors_file(F32_PAIR, b"\0" * 11), "cut short (11 bytes of data, the header describes 12)"),
    "data over": (safetensors_file(F32_PAIR, b"\0" * 13), "longer than its tensors (13 bytes of data, the header"),
    "unknown dtype": (safetensors_file({"a": tensor("F7", [8], 0, 7)}, b"\0" * 7), "tensor 'a': unknown dtype ('F7')"),
    "no dtype": (safetensors_file({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"\0"), "unknown dtype (None)"),
    "shape and bytes differ": (
        safetensors_file({"a": tensor("BF16", [3, 3], 0, 16)}, b"\0" * 16),
        "tensor 'a': BF16 [3, 3] needs 18 bytes, its data_offsets span 16",
    ),
    "half a byte": (
        safetensors_file({"a": tensor("F4", [3], 0, 1)}, b"\0"),
        "tensor 'a': F4 [3] needs 1.5 bytes, its data_offsets span 1",
    ),
    "negative shape": (
        safetensors_file({"a": tensor("F32", [-1, -2], 0, 8)}, b"\0" * 8),
        "tensor 'a': shape and data_offsets are not sizes ([-1, -2], [0, 8])",
    ),
    "offsets backwards": (
        safetensors_file({"a": tensor("F32", [0], 8, 0)}, b"\0" * 8),
        "tensor 'a': shape and data_offsets are not sizes ([0], [8, 0])",
    ),
    "huge shape": (safetensors_file({"a": tensor("F32", [2**62, 2**62], 0, 8)}, b"\0" * 8), "needs"),
    "entry a number": (safetensors_file({"a": 1}), "tensor 'a': not an object"),
    "a name to fool a terminal": (safetensors_file({"\x1b[2J": 1}), r"tensor '\x1b[2J': not an object"),
    "the same name twice": (
        safetensors_file(b'{"a": {}, "a": {}}'),
        "header: duplicate key 'a'",
    ),
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_a_bad_safetensors_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, reason = BAD_SAFETENSORS[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert refusal(tmp_path).startswith(str(path))
    assert reason in refusal(tmp_path)


# The format page says that a header begins with `{`; the library (0.8) lets spaces pass.
@pytest.mark.parametrize("case", [case for case in BAD_SAFETENSORS if case != "header padded in front"])
def test_the_library_refuses_them_too(case: str) -> None:
    assert library_tensors(BAD_SAFETENSORS[case][0]) is None


def library_tensors(content: bytes) -> set[TensorInfo] | None:
    """What the library reads; None where it refuses."""
    try:
        entries: Any = safetensors.deserialize(content)  # type: ignore[no-untyped-call]  # it ships no types for it
    except safetensors.SafetensorError:
        return None
    return {TensorInfo(name, e["dtype"], tuple(e["shape"]), len(e["data"])) for name, e in entries}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F4", "U8", "BF16", "F32", "F9"]),
            st.lists(st.integers(0, 4), max_size=3),
            st.integers(0, 20),
            st.integers(0, 20),
        ),
        max_size=3,
    ),
    st.integers(0, 24),
    st.booleans(),
)
def test_the_library_and_we_agree_on_any_header(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[str, list[int], int, int]],
    data_len: int,
    tidy: bool,
) -> None:
    """Both read the same tensors or both refuse; half of the draws get offsets that fit, so both sides are met."""
    header, end = {}, 0
    for number, (dtype, shape, begin, stop) in enumerate(drawn):
        if tidy:
            begin, stop = end, end + int(np.prod(shape)) * SAFETENSORS_BITS.get(dtype, 8) // 8
            data_len = end = stop
        header[f"t{number}"] = tensor(dtype, shape, begin, stop)
    path = tmp_path_factory.getbasetemp() / "drawn.safetensors"
    content = safetensors_file(header, b"\0" * data_len)
    path.write_bytes(content)
    try:
        ours: set[TensorInfo] | None = set(checkpoint_at(path).tensors)
    except InvalidInputError as error:
        ours = set() if "holds no tensors" in str(error) else None
    assert ours == library_tensors(content)


def test_a_git_lfs_pointer_is_told_apart_from_weights(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    for name in ("model.safetensors", "model.gguf", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(pointer)
        assert refusal(tmp_path) == f"{tmp_path / name}: a Git LFS pointer, not the weights; run `git lfs pull`"
        (tmp_path / name).unlink()


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 1 TiB (sparse: it takes no disk) costs no more than its header."""
    header = safetensors_file({"a": tensor("U8", [1 << 40], 0, 1 << 40)})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + (1 << 40))
    lengths = reads_of(monkeypatch, "kvplan.models.safetensors_header")
    assert checkpoint_at(tmp_path).total_bytes == 1 << 40
    assert 0 < sum(lengths) < 2 * len(header)


# --- the index -------------------------------------------------------------------------------------------------------


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    save_two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    write_index(tmp_path, TWO_SHARDS)
    problem = "shard 'model-00002-of-00002.safetensors' is missing (1 of 2 are); finish the download"
    assert refusal(tmp_path) == f"{tmp_path / INDEX_NAME}: {problem}"
    (tmp_path / INDEX_NAME).unlink()
    assert refusal(tmp_path).endswith(problem)  # the number in the first shard's name says so, too


def test_a_tensor_that_is_not_in_its_shard_is_refused(tmp_path: Path) -> None:
    save_two_shards(tmp_path)
    write_index(tmp_path, {**TWO_SHARDS, "d": "model-00002-of-00002.safetensors"})
    assert refusal(tmp_path) == (
        f"{tmp_path / INDEX_NAME}: tensor 'd' is not in its shard 'model-00002-of-00002.safetensors'; fetch both again"
    )


@pytest.mark.parametrize(
    "name",
    [
        "../../x.safetensors",
        "/etc/passwd",
        "..",
        "",
        ".",
        "sub/../../x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "a\0b",
        "\x1b[2J/../..",
    ],
)
def test_a_shard_outside_the_model_directory_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_index(tmp_path, {"a": name})
    opened = []
    open_file = os.open

    def watched(path: str, *args: int) -> int:
        opened.append(Path(path).name)
        return open_file(path, *args)

    monkeypatch.setattr(os, "open", watched)
    message = refusal(tmp_path)
    if name != ".":  # the directory itself: inside, but no file
        assert "is outside model directory; pass the directory that holds the weights" in message
    assert opened == [INDEX_NAME]


def test_a_link_out_of_the_model_directory_is_refused(tmp_path: Path) -> None:
    elsewhere, model_dir = tmp_path / "elsewhere", tmp_path / "model"
    save_two_shards(elsewhere)
    model_dir.mkdir()
    for name in set(TWO_SHARDS.values()):
        (model_dir / name).symlink_to(elsewhere / name)
    write_index(model_dir, TWO_SHARDS)
    problem = f"{model_dir / INDEX_NAME}: 'model-00001-of-00002.safetensors' is outside model directory"
    assert refusal(model_dir).startswith(problem)


def test_a_link_inside_and_a_linked_model_directory_are_fine(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    save_two_shards(model_dir / "blobs")
    for name in set(TWO_SHARDS.values()):
        (model_dir / name).symlink_to(Path("blobs") / name)
    write_index(model_dir, TWO_SHARDS)
    (tmp_path / "link").symlink_to(model_dir)
    assert checkpoint_at(tmp_path / "link").total_bytes == 36


def cached_model(tmp_path: Path, blobs: str) -> Path:
    """The layout of the Hub's cache, its files linked to `blobs` beside the snapshot."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    store = snapshot / blobs
    save_two_shards(store)
    write_index(store, TWO_SHARDS, 36)
    for path in store.iterdir():
        (snapshot / path.name).symlink_to(Path(blobs) / path.name)
    return snapshot


@pytest.mark.parametrize("blobs", ["../../blobs", "../../../blobs"])
def test_links_of_the_hub_cache_are_followed(tmp_path: Path, blobs: str) -> None:
    assert checkpoint_at(cached_model(tmp_path, blobs)).total_bytes == 36


@pytest.mark.parametrize("blobs", ["../../../../blobs", "../../../models--org--other/blobs"])
def test_links_from_the_hub_cache_to_elsewhere_are_not(tmp_path: Path, blobs: str) -> None:
    assert "is outside model directory" in refusal(cached_model(tmp_path, blobs))


def test_a_hub_cache_without_the_shards_is_sized_by_its_index(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path, "../../blobs")
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    checkpoint = checkpoint_at(snapshot)
    assert (checkpoint.tensors, checkpoint.total_bytes) == ((), 36)
    assert checkpoint.notes == (f"the weights are not in the Hub cache: sized by total_size of {INDEX_NAME}",)
    (snapshot / INDEX_NAME).unlink()
    write_index(snapshot, TWO_SHARDS, True)
    assert read_checkpoint(snapshot) is None


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({}, "no weight_map from tensors to shards"),
        ({"weight_map": {}}, "no weight_map from tensors to shards"),
        ({"weight_map": ["a"]}, "no weight_map from tensors to shards"),
        ({"weight_map": {"a": 1}}, "weight_map has no file name for 'a' (1)"),
        ({"weight_map": {"a": None}}, "weight_map has no file name for 'a' (None)"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: object, reason: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    assert refusal(tmp_path) == f"{tmp_path / INDEX_NAME}: {reason}; fetch the index again"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, ": no such file or directory"),
        (os.mkfifo, ": not a regular file"),
        (lambda path: path.symlink_to(path), ": the symbolic links form a loop"),
        (lambda path: path.write_text("x", encoding="utf-8"), " holds no weights; pass a model directory"),
    ],
    ids=["missing", "fifo", "loop", "text"],
)
def test_what_is_no_model_directory_is_refused(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    path = tmp_path / "model"
    make(path)
    assert refusal(path).startswith(f"{path}{reason}")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, ": not a regular file"),
        (lambda path: path.symlink_to(path), ": the symbolic links form a loop"),
        (lambda path: path.mkdir(), " is a directory, not a file; name the file in it"),
    ],
    ids=["fifo", "loop", "directory"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "pytorch_model.bin", INDEX_NAME])
def test_weights_that_are_no_file_are_refused(
    tmp_path: Path, make: Callable[[Path], object], reason: str, name: str
) -> None:
    make(tmp_path / name)
    assert refusal(tmp_path).startswith(f"{tmp_path / name}{reason}")


# --- GGUF ------------------------------------------------------------------------------------------------------------


def save_gguf(path: Path, alignment: int | None = None, vocabulary: int = 10) -> None:
    """embed: 4 x 256 x 4 = 4096 bytes; down: 2 rows of 256 in Q4_K, 144 bytes per 256 = 288; norm: 3 x 4 = 12."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_token_list([f"token {number}" for number in range(vocabulary)])
    writer.add_token_scores([0.5] * vocabulary)
    writer.add_array("nested.bools", [True, False])
    writer.add_tensor("embed", np.zeros((4, 256), np.float32))
    writer.add_tensor("down", np.zeros((2, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.add_tensor("norm", np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_TENSORS = (
    TensorInfo("embed", "F32", (4, 256), 4096),
    TensorInfo("down", "Q4_K", (2, 256), 288),
    TensorInfo("norm", "F32", (3,), 12),
)


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_gguf_file_is_sized_as_its_library_sizes_it(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, alignment)
    checkpoint = checkpoint_at(tmp_path)
    assert checkpoint == checkpoint_at(path)
    assert checkpoint.tensors == GGUF_TENSORS
    assert (checkpoint.format, checkpoint.total_bytes, checkpoint.files) == ("gguf", 4396, ("model.gguf",))
    theirs = [(t.name, t.tensor_type.name, tuple(t.shape[::-1]), t.n_bytes) for t in gguf.GGUFReader(path).tensors]
    assert [(t.name, t.dtype, t.shape, t.num_bytes) for t in checkpoint.tensors] == theirs


def test_a_large_vocabulary_is_stepped_over_in_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, vocabulary=100_000)
    lengths = reads_of(monkeypatch, "kvplan.models.gguf_header")
    assert checkpoint_at(tmp_path).tensors == GGUF_TENSORS
    assert sum(lengths) <= path.stat().st_size
    assert 0 < len(lengths) < 10  # the buffer doubles


def test_split_gguf_files_are_one_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.zeros(8, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = checkpoint_at(tmp_path)
    assert checkpoint.files == tuple(f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    assert checkpoint.total_bytes == 5 * 16
    assert checkpoint_at(tmp_path / "model-00002-of-00003.gguf") == checkpoint
    (tmp_path / "model-00003-of-00003.gguf").unlink()
    assert refusal(tmp_path).endswith("shard 'model-00003-of-00003.gguf' is missing (1 of 3 are); finish the download")


def test_several_gguf_models_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("model-Q4_K.gguf", "model-Q8_0.gguf", "mmproj-F16.gguf"):
        save_gguf(tmp_path / name)
    reason = "holds 2 GGUF models (model-Q4_K.gguf, model-Q8_0.gguf); pass the path of one"
    assert refusal(tmp_path) == f"{tmp_path} {reason}"
    assert checkpoint_at(tmp_path / "mmproj-F16.gguf").total_bytes == 4396


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_header(num_tensors: int, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def gguf_tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return gguf_string(name) + dimensions + struct.pack("<IQ", kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return gguf_string(name) + struct.pack("<I", kind) + value


NESTED = struct.pack("<IQ", 9, 1) * 8
BAD_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the header is cut short or larger than any real one (byte 0)"),
    "bad magic": (b"GGJT" + b"\0" * 40, "bad GGUF magic (b'GGJT')"),
    "version 1": (gguf_header(1, version=1), "GGUF version 1, kvplan reads 2 and 3"),
    "version 4": (gguf_header(1, version=4), "GGUF version 4, kvplan reads 2 and 3"),
    "version 0": (gguf_header(1, version=0), "GGUF version 0, kvplan reads 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 0), "a big-endian GGUF file; convert it"),
    "2^60 tensors": (gguf_header(2**60), "1,152,921,504,606,846,976 tensors, at most 1,048,576"),
    "2^60 keys": (gguf_header(0, 2**60), "1,152,921,504,606,846,976 metadata keys, at most 1,048,576"),
    "a million tensors in no bytes": (gguf_header(1 << 20), "the header is cut short"),
    "key of 2^60 bytes": (gguf_header(0, 1) + struct.pack("<Q", 2**60), "the header is cut short"),
    "array of 2^60": (gguf_header(0, 1) + key(b"a", 9, struct.pack("<IQ", 4, 2**60)), "the header is cut short"),
    "strings 2^60": (gguf_header(0, 1) + key(b"a", 9, struct.pack("<IQ", 8, 2**60)), "the header is cut short"),
    "arrays of arrays": (gguf_header(0, 1) + key(b"a", 9, NESTED) + b"\0" * 99, "unknown metadata type 9"),
    "unknown value type": (gguf_header(0, 1) + key(b"a", 13, b"\0" * 8), "unknown metadata type 13"),
    "name not UTF-8": (gguf_header(1) + gguf_tensor(b"\xff", (1,)), "a name is not UTF-8"),
    "unknown tensor type": (gguf_header(1) + gguf_tensor(b"a", (32,), 9999), "tensor 'a' has unknown type 9999"),
    "five dimensions": (gguf_header(1) + gguf_tensor(b"a", (1,) * 5), "tensor 'a' has 5 dimensions, at most 4"),
    "half a block": (gguf_header(1) + gguf_tensor(b"a", (100,), 12), "tensor 'a' of Q4_K cannot have shape (100,)"),
    "product over 2^63": (gguf_header(1) + gguf_tensor(b"a", (2**40, 2**40)), "tensor 'a' of F32 cannot have shape"),
    "data cut short": (gguf_header(1) + gguf_tensor(b"a", (1024,)) + b"\0" * 100, "cut short ("),
    "offset off": (gguf_header(1) + gguf_tensor(b"a", (8,), 0, 2**60) + b"\0" * 100, "cut short ("),
    "misaligned": (gguf_header(1) + gguf_tensor(b"a", (8,), 0, 8) + b"\0" * 100, "is not aligned to 32"),
    "overlap": (
        gguf_header(2) + gguf_tensor(b"a", (16,)) + gguf_tensor(b"b", (16,), 0, 32) + b"\0" * 300,
        "tensor 'b' overlaps another",
    ),
    "one name twice": (
        gguf_header(2) + gguf_tensor(b"a", (8,)) + gguf_tensor(b"a", (8,), 0, 32) + b"\0" * 300,
        "two tensors of one name",
    ),
    "alignment 0": (
        gguf_header(0, 1) + key(b"general.alignment", 4, struct.pack("<I", 0)),
        "general.alignment 0 is not a power of two",
    ),
    "no tensors": (gguf_header(0), "'model.gguf' holds no tensors"),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_a_bad_gguf_file_is_refused(tmp_path: Path, case: str) -> None:
    content, reason = BAD_GGUF[case]
    (tmp_path / "model.gguf").write_bytes(content)
    assert reason in refusal(tmp_path)


def test_a_gguf_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    save_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut").mkdir()
    for cut in range(0, len(whole) - 32, 7):  # the writer pads the last tensor by up to 31 bytes
        (tmp_path / "cut" / "model.gguf").write_bytes(whole[:cut])
        assert str(tmp_path / "cut" / "model.gguf") in refusal(tmp_path / "cut")


# --- pickles ---------------------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a mark when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "consolidated.00.pth", "weights.pth", "model.pt"])
def test_pickles_are_sized_and_never_opened(tmp_path: Path, name: str) -> None:
    content = pickle.dumps(Bomb())
    (tmp_path / name).write_bytes(content)
    (tmp_path / "optimizer.pt").write_bytes(b"x" * 1000)
    (tmp_path / "training_args.bin").write_bytes(b"x" * 1000)
    note = "pickle weights are sized from file sizes, never opened"
    assert checkpoint_at(tmp_path) == Checkpoint("pickle-sizes", (), len(content), (name,), (note,))


def test_pickle_shards_are_sized_by_their_index(tmp_path: Path) -> None:
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for name in weight_map.values():
        (tmp_path / name).write_bytes(b"x" * 100)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 180}, "weight_map": weight_map}), encoding="utf-8")
    note = "pickle weights are sized by total_size of pytorch_model.bin.index.json, never opened"
    assert (checkpoint_at(tmp_path).total_bytes, checkpoint_at(tmp_path).notes) == (180, (note,))
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert checkpoint_at(tmp_path).total_bytes == 200
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}), encoding="utf-8")
    assert "'../x.bin' is outside model directory" in refusal(tmp_path)
    index.unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    assert "shard 'pytorch_model-00001-of-00002.bin' is missing" in refusal(tmp_path)


# --- anything --------------------------------------------------------------------------------------------------------


def seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    save_gguf(folder / "seed.gguf")
    yield "model.gguf", (folder / "seed.gguf").read_bytes()
    yield "model.safetensors", safetensors_file(F32_PAIR, b"\0" * 12)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.booleans())
def test_any_damage_ends_in_a_checkpoint_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]], of_gguf: bool
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    name, content = list(seeds(folder))[0 if of_gguf else 1]
    damaged = bytearray(content)
    for place, value in damage:
        damaged[place % len(damaged)] = value
    path = folder / name
    path.write_bytes(damaged)
    try:
        read_checkpoint(path)
    except KvplanError as error:
        outcome = str(error)
    else:
        outcome = "read"
    assert outcome.isprintable()
