"""How many requests fit in a run's pool, by context length."""

from collections.abc import Callable, Iterable

from kvplan.core.errors import KvplanError
from kvplan.core.table import Column, Table, Value
from kvplan.measure.run_manifest import inputs_of, spec_of
from kvplan.measure.rundir import Run
from kvplan.report.run_record import num_groups, usable_blocks
from kvplan.servers.bundled.rules import group_sizes, kind_of

SMALLEST_CONTEXT = 1024


def contexts_table(run: Run) -> Table:
    """Number of requests that the measured pool holds, by length: powers of two, the run's own, the longest."""
    columns = (
        Column("context", "tokens"), Column("blocks_per_request", "count"), Column("bytes_per_request", "bytes"),
        Column("requests", "count"),
    )  # fmt: skip
    usable = usable_blocks(run)
    rows: list[tuple[Value, ...]] = []
    if usable:
        inputs, block_bytes = inputs_of(run), run.manifest["memory"]["block_bytes"]
        windows = windows_of(run)
        in_flight = inputs.batches_in_flight * inputs.max_num_batched_tokens

        def blocks(tokens: int) -> int:
            return blocks_per_request(tokens, windows, inputs.block_size, in_flight)

        for tokens in contexts(blocks, usable, inputs.block_size, inputs.max_model_len, context_limit(run)):
            rows.append((tokens, blocks(tokens), blocks(tokens) * block_bytes, usable // blocks(tokens)))
    return Table("contexts", "Requests the pool holds, by context", columns, tuple(rows))


def contexts(blocks: Callable[[int], int], usable: int, block_size: int, own: int, limit: int | None) -> list[int]:
    """Lengths to show: 1k, 2k, 4k, ... as far as one request fits, the run's own and the longest possible."""
    limit_or_max = limit or 2**31 - 1
    longest = limit_or_max if blocks(limit_or_max) <= usable else _longest(blocks, usable, block_size, limit_or_max)
    powers: list[int] = []
    while (tokens := SMALLEST_CONTEXT << len(powers)) < longest:
        powers.append(tokens)
    return sorted({*powers, longest, *([own] if own <= longest else [])} - {0})


def _longest(blocks: Callable[[int], int], usable: int, block_size: int, limit: int) -> int:
    """The longest request, in whole blocks, that fits; blocks never decrease with the length."""
    low, high = 0, limit // block_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if blocks(middle * block_size) <= usable else (low, middle)
    return low * block_size


def context_limit(run: Run) -> int | None:
    """The longest context that the model supports, if its config says so."""
    try:
        return spec_of(run).context_limit
    except KvplanError:
        return None


def windows_of(run: Run) -> list[int]:
    """One entry per group of layers that share a block table: its window in tokens, 0 for all tokens.

    Contiguous and static allocation keep every token.
    """
    groups = num_groups(run)
    if run.engine.get("allocator") in ("contiguous", "static"):
        return [0] * groups
    try:
        spec = spec_of(run)
        size = max(group_sizes(spec))
        kinds = [kind_of(caches) for caches in spec.layers]
    except KvplanError:
        return [0] * groups
    counted = {kind: -(-kinds.count(kind) // size) for kind in dict.fromkeys(kinds)}
    windows = [window for (_, window), count in counted.items() for _ in range(count)]
    return windows if len(windows) == groups else [0] * groups


def blocks_per_request(tokens: int, windows: Iterable[int], block_size: int, in_flight: int) -> int:
    """Blocks of one request of this many tokens: in each group all of them, or what a window and one step span."""
    whole = -(-tokens // block_size)
    # A window need not start on a block boundary: one more block.
    spans = [-(-min(window - 1 + in_flight, tokens) // block_size) + 1 if window else whole for window in windows]
    return sum(min(whole, span) for span in spans)
