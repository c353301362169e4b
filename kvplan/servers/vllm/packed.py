"""Caches of many page sizes packed side by side in one block: DeepSeek-V4, GLM-5.3-Flash.

Source: vLLM 0.33 v1/core/kv_cache_planning.py (_get_packed_kv_cache_groups), re-derived; equal to the server's own
capacity code in every compared case (tests/oracles.py).
"""

from collections import Counter

from kvplan.servers.plans.pool import KVSpec
from kvplan.sizing.layout import cdiv

Layers = list[tuple[int, KVSpec]]
STATES = ("state", "ring")


def packed_groups(layers: Layers) -> list[Layers]:
    """Bucket layers by kind, bound and block; split a bucket of one page size to about the size of the mixed ones.

    The size is at least the number of repeats of any page in a mixed bucket, minimizes rounding up over all buckets of
    one page size, and is the larger in a tie. States and rings, and windows if no bucket is mixed evenly, are split
    further if their group would be wider than what a block holds anyway.
    """
    buckets: dict[tuple[object, ...], Layers] = {}
    for index, spec in layers:
        kind = "full" if spec.kind == "latent" else spec.kind
        buckets.setdefault((kind, spec.bound, spec.block_size), []).append((index, spec))
    repeats = [pattern_repeats(bucket) for bucket in buckets.values()]
    size = group_size([(n, not is_plain(b)) for n, b in zip(repeats, buckets.values(), strict=True) if n])
    counts = [cdiv(n, size) if size and n else 1 for n in repeats]
    kinds = STATES if size else (*STATES, "sliding")
    least = max(least_bytes(bucket, count, kinds) for bucket, count in zip(buckets.values(), counts, strict=True))
    cut: list[Layers] = []
    for bucket, count in zip(buckets.values(), counts, strict=True):
        if bucket[0][1].kind in kinds:
            count = max(count, cdiv(len(bucket), max(1, least // bucket[0][1].page)))
        cut += cut_bucket(bucket, count)
    return cut


def cut_bucket(bucket: Layers, count: int) -> list[Layers]:
    """Split a bucket into `count` parts, keeping together layers of different page sizes that form a pattern."""
    pages: dict[int, Layers] = {}
    for index, spec in bucket:
        pages.setdefault(spec.page, []).append((index, spec))
    patterns = [bucket] if count == 1 else list(zip(*pages.values(), strict=True))
    return [[layer for pattern in patterns[i::count] for layer in pattern] for i in range(count)]


def is_plain(bucket: Layers) -> bool:
    """True if all pages of a bucket have one size."""
    return len({spec.page for _, spec in bucket}) == 1


def pattern_repeats(bucket: Layers) -> int:
    """Layers of each page size in a bucket, or 0 if the sizes have different counts."""
    counts = set(Counter(spec.page for _, spec in bucket).values())
    return counts.pop() if len(counts) == 1 else 0


def group_size(repeats: list[tuple[int, bool]]) -> int:
    """Layers of one page size per group, from (repeats, whether sizes are mixed) of each bucket; 0: nothing is
    split.
    """
    least = max([n for n, is_mixed in repeats if is_mixed], default=0)
    sizes = range(least, max([n for n, _ in repeats], default=0) + 1) if least else range(1)
    return min(sizes, key=lambda d: (sum(cdiv(n, d) * d - n for n, _ in repeats) if d else 0, -d))


def least_bytes(bucket: Layers, count: int, states: tuple[str, ...]) -> int:
    """Fewest bytes of a block for a bucket split into `count` groups; for a bucket of states, those of one state."""
    pages = [spec.page for _, spec in bucket]
    if bucket[0][1].kind in states:
        return pages[0]
    return sum(cdiv(pages.count(page), count) * page for page in set(pages))
