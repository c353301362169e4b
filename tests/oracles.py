"""Compare kvplan with data from elsewhere: `python tests/oracles.py capacity CASES DIR` or `models DIR`.

Prints each difference and the counts `equal / refused by name / different`; exits 1 when anything differs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvplan import hf_config  # noqa: E402  (run as a script from anywhere)
from kvplan.errors import KvplanError  # noqa: E402
from kvplan.spec import (  # noqa: E402
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
)

EQUAL, REFUSED, DIFFERENT = "equal", "refused by name", "different"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def geometry_of(caches: tuple[LayerCache, ...]) -> tuple[Any, ...]:
    """(type, kv_heads, k_head_dim, v_head_dim, window) of a layer, in the words of kv_geometry.jsonl."""
    match caches:
        case (FullAttention(h, k, v),):
            return ("full", h, k, v, None)
        case (SlidingWindow(h, k, v, window),):
            return ("sliding", h, k, v, window)
        case (ChunkedAttention(h, k, v, chunk),):
            return ("chunked", h, k, v, chunk)
        case (CrossAttention(h, k, v),):
            return ("cross-attention (image tokens only)", h, k, v, None)
        case (LatentAttention(latent, rope, False),):
            return ("mla", 1, latent + rope, 0, None)
        case (LatentAttention(latent, rope, True),) | (LatentAttention(latent, rope, True), SparseIndexer()):
            return ("mla+dsa-indexer", 1, latent + rope, 0, None)
        case (FullAttention(h, k, v), KeyIndex()):
            return ("full+msa-indexer", h, k, v, None)
        case (RecurrentState(kind="mamba1"),):
            return ("mamba1", None, None, None, None)
        case (RecurrentState(kind="mamba2"),):
            return ("mamba2", None, None, None, None)
        case (RecurrentState(),):
            return ("linear", None, None, None, None)
        case (FullAttention(h, k, v), RecurrentState(kind="mamba2")):
            return ("full+mamba2 (parallel)", h, k, v, None)
    raise AssertionError(f"no word for {caches}")


def ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    out: list[list[int]] = []
    for i in layers:
        if out and out[-1][1] == i - 1:
            out[-1][1] = i
        else:
            out.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def geometry(spec: ModelSpec) -> set[tuple[Any, ...]]:
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for i, caches in enumerate(spec.layers):
        if not caches:  # the reference lists layers without a cache for some models only
            continue
        grouped.setdefault((*geometry_of(caches), tuple(sorted(index_dims(caches)))), []).append(i)
    return {(*key, len(layers), ranges(layers)) for key, layers in grouped.items()}


def index_dims(caches: tuple[LayerCache, ...]) -> Iterator[int]:
    for cache in caches:
        if isinstance(cache, SparseIndexer | KeyIndex):
            yield cache.head_dim


def expected_geometry(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    keys = ("type", "kv_heads", "k_head_dim", "v_head_dim", "window")
    return {
        (*(g[k] for k in keys), (g["indexer_dim"],) if g.get("indexer_dim") else (), g["count"], g["layers"])
        for g in row["groups"]
        if not g["type"].startswith("none")
    }


def text_params(spec: ModelSpec) -> int:
    return sum(w.num_params for w in spec.weights if w.group != "vision_audio")


def total_params(spec: ModelSpec) -> int:
    return sum(w.num_params for w in spec.weights)


def compare_model(folder: Path, geo: dict[str, Any], params: dict[str, Any]) -> tuple[str, str, bool]:
    """(outcome, what differs, total with towers exact)."""
    try:
        spec = hf_config.load_spec(folder)
    except KvplanError as error:
        return REFUSED, str(error), False
    wrong = []
    if geometry(spec) != expected_geometry(geo):
        wrong.append(f"geometry {sorted(map(str, geometry(spec) ^ expected_geometry(geo)))}")
    expected = params.get("text_params")
    if expected is not None and text_params(spec) != expected:
        wrong.append(f"text_params {text_params(spec):,} for {expected:,} ({text_params(spec) - expected:+,})")
    total = params.get("total_params")
    if total is not None and total_params(spec) != total:
        towers = total_params(spec) - text_params(spec)
        return (DIFFERENT if wrong else EQUAL), "; ".join([*wrong, f"[towers {towers:,} for {total - (expected or 0):,}]"]), False
    return (DIFFERENT if wrong else EQUAL), "; ".join(wrong), total is not None


def models(directory: Path) -> int:
    geo = {row["model"].replace("/", "__"): row for row in read_lines(directory / "kv_geometry.jsonl")}
    params = {row["model"].replace("/", "__"): row for row in read_lines(directory / "params.jsonl")}
    counts = {EQUAL: 0, REFUSED: 0, DIFFERENT: 0}
    totals = 0
    for folder in sorted(path.parent for path in directory.glob("*/config.json")):
        outcome, why, total = compare_model(folder, geo[folder.name], params[folder.name])
        counts[outcome] += 1
        totals += total
        if why:
            print(f"{folder.name}: {outcome}: {why}")
    print(" / ".join(f"{n} {word}" for word, n in counts.items()), f"({totals} totals with towers exact)")
    return 1 if counts[DIFFERENT] else 0


def main(argv: list[str]) -> int:
    match argv:
        case ["models", directory]:
            return models(Path(directory))
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
