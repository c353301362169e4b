"""Launch parameters: a tile that was timed on a GPU is used, others fall back, and a damaged table is refused."""

import copy
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hatchling.builders.wheel import WheelBuilder

from engine.kernels import configs, tiles
from engine.kernels.configs import AttentionTile
from engine.kernels.tiles import Key
from kvplan.core.errors import InvalidInputError

ROOT = Path(__file__).resolve().parents[2]
TILE = {"block_n": 128, "num_warps": 8, "num_stages": 2, "block_m": 16, "mask_all": False, "programs": 4}
FOUND = {"gpu": "NVIDIA H200", "commit": "c0ffee", "utc": "2026-11-23T10:00:00+00:00", "us": 131.2, "default_us": 140.9}
DECODE = {
    "kernel": "decode", "arch": 90, "head_dim": 128, "group": 4, "kv": "16-bit", "block_size": 16,
    "tile": TILE, "found": FOUND,
}  # fmt: skip
PREFILL = {**DECODE, "kernel": "prefill", "tile": {**TILE, "block_m": 128}}
LATENT = {**DECODE, "kernel": "latent", "head_dim": 576, "group": 16, "block_size": 64}
LLAMA_8B = (90, 128, torch.bfloat16, torch.bfloat16)


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"schema": "kvplan/tiles@1", "entries": list(entries)}))
    return path


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts entries in the place of the checked-in ones."""

    def put(*entries: dict[str, Any]) -> None:
        monkeypatch.setattr(configs, "TILES", write(tmp_path / "tiles.json", *entries))
        configs.tuned.cache_clear()

    yield put
    configs.tuned.cache_clear()


# --- what is used -----------------------------------------------------------------------------------------------------


def test_an_entry_is_used_for_its_own_shape_and_no_other(table: Any) -> None:
    default = configs.decode_tile(*LLAMA_8B)
    table(DECODE)
    timed = AttentionTile(block_n=128, num_warps=8, num_stages=2, block_m=16, mask_all=False, programs=4)
    assert default != timed
    assert configs.decode_tile(*LLAMA_8B, group=4, block_size=16) == timed
    float16 = (90, 128, torch.float16, torch.float16)  # 16 bits as well
    assert configs.decode_tile(*float16, group=4, block_size=16) == timed
    assert configs.decode_tile(*LLAMA_8B, group=8, block_size=16) == default
    assert configs.decode_tile(*LLAMA_8B, group=4, block_size=32) == default
    assert configs.decode_tile(*LLAMA_8B) == default
    fp8 = (90, 128, torch.float8_e4m3fn, torch.bfloat16)
    assert configs.decode_tile(*fp8, group=4, block_size=16) == configs.decode_tile(*fp8)
    assert configs.decode_tile(80, *LLAMA_8B[1:], group=4, block_size=16) == configs.decode_tile(80, *LLAMA_8B[1:])
    assert configs.prefill_tile(*LLAMA_8B, 8192, group=4, block_size=16) == configs.prefill_tile(*LLAMA_8B, 8192)


def test_each_kernel_finds_its_own_entry(table: Any) -> None:
    table(DECODE, PREFILL, LATENT)
    assert configs.prefill_tile(*LLAMA_8B, 8192, group=4, block_size=16).block_m == 128
    assert configs.latent_tile(90, 16, torch.bfloat16, width=576, block_size=64).programs == 4
    assert configs.latent_tile(90, 16, torch.bfloat16) != configs.latent_tile(
        90, 16, torch.bfloat16, width=576, block_size=64
    )


def test_a_short_chunk_takes_half_of_a_large_tile_whether_it_was_timed_or_not(table: Any) -> None:
    table(PREFILL)
    assert configs.prefill_tile(*LLAMA_8B, 64, group=4, block_size=16).block_m == 64
    assert configs.prefill_tile(*LLAMA_8B, 64).block_m == 64


def test_the_checked_in_table_is_sound_and_in_the_wheel() -> None:
    """What timed an entry is no guess: a file that names none of it would not be read."""
    entries = tiles.read_tiles(configs.TILES)
    assert tiles.document_of(entries) == json.loads(configs.TILES.read_text())
    for entry in entries.values():
        assert entry.key.arch in configs.SHARED_MEMORY
        assert entry.trial.us <= entry.trial.default_us
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert "engine/kernels/tiles.json" in packed


def test_the_table_is_read_once(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table(DECODE)
    reads = []

    def read(path: Path) -> dict[Key, tiles.Entry]:
        reads.append(path)
        return {}

    monkeypatch.setattr(configs, "read_tiles", read)
    for _ in range(3):
        configs.decode_tile(*LLAMA_8B, group=4, block_size=16)
    assert len(reads) == 1


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    read = tiles.read_tiles(write(tmp_path / "a.json", PREFILL, LATENT, DECODE))
    assert set(read) == {
        Key("decode", 90, 128, 4, "16-bit", 16),
        Key("prefill", 90, 128, 4, "16-bit", 16),
        Key("latent", 90, 576, 16, "16-bit", 64),
    }
    (tmp_path / "b.json").write_text(json.dumps(tiles.document_of(read)))
    assert tiles.read_tiles(tmp_path / "b.json") == read


# --- what is refused --------------------------------------------------------------------------------------------------


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    entry = copy.deepcopy(DECODE)
    change(entry)
    return entry


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (damaged(lambda e: e.update(kernel="encode")), "kernel cannot be 'encode'"),
        (damaged(lambda e: e.update(kv="bf16")), "kv cannot be 'bf16'"),
        (damaged(lambda e: e.update(arch="90")), "arch cannot be '90'"),
        (damaged(lambda e: e.update(head_dim=512)), "head_dim cannot be 512"),
        (damaged(lambda e: e.update(group=0)), "group cannot be 0"),
        (damaged(lambda e: e.update(block_size=48)), "block_size cannot be 48"),
        (damaged(lambda e: e["tile"].update(block_n=96)), "block_n cannot be 96"),
        (damaged(lambda e: e["tile"].update(block_m=True)), "block_m cannot be True"),
        (damaged(lambda e: e["tile"].update(num_warps=3)), "num_warps cannot be 3"),
        (damaged(lambda e: e["tile"].update(num_stages=2.0)), "num_stages cannot be 2.0"),
        (damaged(lambda e: e["tile"].update(programs=0)), "programs cannot be 0"),
        (damaged(lambda e: e["tile"].update(mask_all=0)), "mask_all cannot be 0"),
        (damaged(lambda e: e["tile"].update(speed=1)), "tile has an unknown key 'speed'"),
        (damaged(lambda e: e["tile"].pop("block_n")), "tile lacks 'block_n'"),
        (damaged(lambda e: e.update(tile=None)), "tile is no table of keys (None)"),
        (damaged(lambda e: e.pop("found")), "it lacks 'found'"),
        (damaged(lambda e: e["found"].update(gpu="")), "gpu cannot be ''"),
        (damaged(lambda e: e["found"].update(utc="yesterday")), "utc cannot be 'yesterday'"),
        (damaged(lambda e: e["found"].update(us=float("nan"))), "us cannot be nan"),
        (damaged(lambda e: e["found"].update(default_us=-1)), "default_us cannot be -1"),
        ({**PREFILL, "group": 256}, "block_m cannot be 128"),  # a tile holds one query of all heads
        (DECODE, "is there twice"),
        ([], "it is no table of keys ([])"),
    ],
)
def test_a_damaged_entry_is_refused_in_one_line(tmp_path: Path, entry: Any, fault: str) -> None:
    path = write(tmp_path / "tiles.json", DECODE, entry)
    with pytest.raises(InvalidInputError) as refused:
        tiles.read_tiles(path)
    assert str(refused.value) == f"tiles.json: entry 1: {fault}; make it anew with benchmarks/tune_kernels.py"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"schema": "kvplan/tiles@1", "entries": [', "is not JSON (Expecting value: line 1 column 42 (char 41))"),
        ("[" * 100_000, "is not JSON (maximum recursion depth exceeded"),
        ("[]", "is not kvplan/tiles@1"),
        ('{"schema": "kvplan/tiles-trial@1", "entries": []}', "is not kvplan/tiles@1"),
        ('{"schema": "kvplan/tiles@1"}', "has no list of entries"),
        (b"\xff\xfe", "is not JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
    ],
)
def test_a_file_that_is_no_table_is_refused_in_one_line(tmp_path: Path, text: str | bytes, fault: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidInputError) as refused:
        tiles.read_tiles(path)
    assert str(refused.value).startswith(f"tiles.json {fault}")
    assert str(refused.value).endswith("; make it anew with benchmarks/tune_kernels.py")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_missing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^tiles\.json cannot be read \(No such file or directory\); make"):
        tiles.read_tiles(tmp_path / "tiles.json")


COMPILED = Path(__file__).parents[2] / "reports" / "kernels" / "compiled.csv"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resident() -> Iterator[tuple[AttentionTile, int]]:
    """Each tile of decode that was compiled, and how many of its programs fit a multiprocessor of that GPU."""
    with COMPILED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kernel"] not in ("decode_kernel", "latent_decode_kernel"):
                continue
            _, dtypes, size, *_ = row["job"].split(" ")
            name, _, fp8 = dtypes.partition("+")
            compute, arch, programs = DTYPES[name], int(row["arch"]), int(row["programs"])
            if row["kernel"] == "decode_kernel":
                stored = torch.float8_e4m3fn if fp8 else compute
                yield configs.decode_tile(arch, int(size), stored, compute), programs
            else:
                yield configs.latent_tile(arch, int(size), compute), programs


def test_no_plan_counts_on_more_programs_than_a_multiprocessor_holds() -> None:
    tiles = list(resident())
    assert len(tiles) > 40
    assert [(tile, programs) for tile, programs in tiles if tile.programs > programs] == []
    assert any(tile.programs == programs for tile, programs in tiles)
