"""Tiles that were timed on a GPU: the format of tiles.json, read and checked.

    {"schema": "kvplan/tiles@1", "entries": [{
        "kernel": "decode", "arch": 90, "head_dim": 128, "group": 4, "kv": "16-bit", "block_size": 16,
        "tile": {"block_n": 64, "num_warps": 4, "num_stages": 3, "block_m": 16, "mask_all": false, "programs": 3},
        "found": {"gpu": "NVIDIA H200", "commit": "1f3c...", "utc": "2026-11-23T10:00:00+00:00", "us": 131.2,
                  "default_us": 140.9}}]}

benchmarks/tune_kernels.py writes it. Times are geometric means over the shapes that it timed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from kvplan.core.errors import InvalidInputError

SCHEMA = "kvplan/tiles@1"
PROGRAMS_PER_PROCESSOR = 3  # decode programs that run at once on one multiprocessor, by their shared memory
CURE = "make it anew with benchmarks/tune_kernels.py"

Kernel = Literal["decode", "prefill", "latent"]
Kind = Literal["float32", "16-bit", "float8"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """block_n tokens of KV at a time.

    block_m   rows of queries times heads; decode has as many as its heads need
    mask_all  prefill: one loop that masks every tile, where a second one for whole tiles would spill registers
    programs  decode and latent: programs that are to run at once on one multiprocessor
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16
    mask_all: bool = False
    programs: int = PROGRAMS_PER_PROCESSOR


class Key(NamedTuple):
    """What a tile was timed for.

    arch      compute capability in tenths
    head_dim  of keys or values, whichever is larger; of latents a whole row
    group     query heads that share a KV head; of latents all heads
    kv        what is stored; float32 where the products are float32
    """

    kernel: Kernel
    arch: int
    head_dim: int
    group: int
    kv: Kind
    block_size: int


@dataclass(frozen=True, slots=True)
class Trial:
    """How a tile was found: where, by which code, when, and what it takes beside the default tile."""

    gpu: str
    commit: str
    utc: str
    us: float
    default_us: float


@dataclass(frozen=True, slots=True)
class Entry:
    key: Key
    tile: AttentionTile
    trial: Trial


def read_tiles(path: Path) -> dict[Key, Entry]:
    """The table in a file; raises InvalidInputError, in one line, for one that is damaged or of another kind."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path.name}: cannot be read ({error.strerror}); {CURE}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path.name}: is not JSON ({str(error)[:80]}); {CURE}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InvalidInputError(f"{path.name}: is not {SCHEMA}; {CURE}")
    values = document.get("entries")
    if not isinstance(values, list):
        raise InvalidInputError(f"{path.name}: has no list of entries; {CURE}")
    table: dict[Key, Entry] = {}
    for number, value in enumerate(values):
        try:
            entry = _entry(value)
            if entry.key in table:
                raise ValueError("is there twice")
        except ValueError as error:
            raise InvalidInputError(f"{path.name}: entry {number}: {error}; {CURE}") from error
        table[entry.key] = entry
    return table


def document_of(entries: Mapping[Key, Entry]) -> dict[str, Any]:
    """What a file has for these entries, in the order of their keys."""
    ordered = [entries[key] for key in sorted(entries)]
    return {
        "schema": SCHEMA,
        "entries": [{**e.key._asdict(), "tile": asdict(e.tile), "found": asdict(e.trial)} for e in ordered],
    }


def _entry(value: Any) -> Entry:
    _need_keys("it", value, {*Key._fields, "tile", "found"})
    _need_keys("tile", value["tile"], {field.name for field in fields(AttentionTile)})
    _need_keys("found", value["found"], {field.name for field in fields(Trial)})
    _check_key(value)
    _check_tile(value["tile"], value)
    _check_trial(value["found"])
    key = Key(**{name: value[name] for name in Key._fields})
    return Entry(key, AttentionTile(**value["tile"]), Trial(**value["found"]))


def _check_key(value: dict[str, Any]) -> None:
    _need("kernel", value["kernel"], value["kernel"] in get_args(Kernel))
    _need("kv", value["kv"], value["kv"] in get_args(Kind))
    _need("arch", value["arch"], _is_count(value["arch"], 80, 999))
    max_dim = 256 if value["kernel"] != "latent" else 2048
    _need("head_dim", value["head_dim"], _is_count(value["head_dim"], 1, max_dim))
    _need("group", value["group"], _is_count(value["group"], 1, 1024))
    _need("block_size", value["block_size"], _is_power(value["block_size"], 16, 1 << 20))


def _check_tile(tile: dict[str, Any], key: dict[str, Any]) -> None:
    _need("block_n", tile["block_n"], _is_power(tile["block_n"], 16, 512))
    _need("block_m", tile["block_m"], _is_power(tile["block_m"], 16, 512))
    _need("num_warps", tile["num_warps"], _is_power(tile["num_warps"], 1, 16))
    _need("num_stages", tile["num_stages"], _is_count(tile["num_stages"], 1, 8))
    _need("programs", tile["programs"], _is_count(tile["programs"], 1, 32))
    _need("mask_all", tile["mask_all"], isinstance(tile["mask_all"], bool))
    # A tile of prefill holds one query of all heads that share a KV head.
    _need("block_m", tile["block_m"], key["kernel"] != "prefill" or tile["block_m"] >= key["group"])


def _check_trial(trial: dict[str, Any]) -> None:
    for name in ("gpu", "commit"):
        _need(name, trial[name], isinstance(trial[name], str) and trial[name] != "")
    _need("utc", trial["utc"], isinstance(trial["utc"], str) and _is_date(trial["utc"]))
    for name in ("us", "default_us"):
        number = trial[name]
        _need(name, number, type(number) in (int, float) and math.isfinite(number) and number > 0)


def _need_keys(what: str, value: Any, names: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table of keys ({value!r:.40})")
    if wrong := sorted(names ^ value.keys()):
        raise ValueError(f"{what} {'lacks' if wrong[0] in names else 'has an unknown key'} {wrong[0]!r:.40}")


def _need(name: str, value: Any, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{name} cannot be {value!r:.40}")


def _is_count(value: Any, least: int, greatest: int) -> bool:
    return type(value) is int and least <= value <= greatest


def _is_power(value: Any, least: int, greatest: int) -> bool:
    return _is_count(value, least, greatest) and value & (value - 1) == 0


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
