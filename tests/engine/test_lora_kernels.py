"""The kernels of adapters: torch's against float64, tiles of tokens, and an engine on Triton's in the interpreter.

Triton's own against float64 are among the cases of tests/engine/test_kernels.py.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda_graphs import SIZES
from engine.kernels import torch_backend
from engine.kernels.lora_rows import FEW_TOKENS, NOBODY, LoraRows, most_tiles, tile_rows, tiles_of
from tests.engine.test_lora import wrong_tokens
from tests.support.small_adapters import merged_model, saved_adapter
from tests.support.small_engines import saved_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TOKENS = (tuple(range(5, 25)), (7, 8, 9), (11, 12, 13, 14)), 3


@cache
def interpreted() -> list[str]:
    """The lines of tests/support/lora_interpreted.py, of one process for all tests."""
    paths = [saved_model("llama"), *adapters()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.lora_interpreted", *map(str, paths)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def adapters() -> list[Path]:
    return [saved_adapter("llama", seed=1), saved_adapter("llama", rank=8, seed=2)]


@pytest.mark.full
@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_on_triton_serves_each_request_its_adapter(graphs: bool) -> None:
    tokens = json.loads(interpreted()[graphs])
    folders = [*(merged_model("llama", path) for path in adapters()), saved_model("llama")]
    for folder, prompt, token_ids in zip(folders, PROMPTS, tokens, strict=True):
        assert len(token_ids) == TOKENS
        assert wrong_tokens(folder, list(prompt), token_ids) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_adds_what_float64_says(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    slots, outputs = [1, NOBODY, 0, 1, *[0] * 300], (40, 24)
    x, y = (torch.randn(len(slots), width, generator=source).to(dtype) for width in (48, 64))
    a = torch.randn(2, 2, 8, 48, generator=source).to(dtype)
    b = torch.randn(2, 64, 8, generator=source).to(dtype)
    rows = LoraRows.empty(len(slots), 2, torch.device("cpu"))
    _, _, by_slot = tiles_of(np.array(slots, np.int32), len(rows.tile_slots))
    rows.by_slot = [(slot, torch.from_numpy(mine).long()) for slot, mine in by_slot]
    exact = y.double()
    for token, slot in enumerate(slots):
        if slot != NOBODY:
            small = a[slot].double() @ x[token].double()  # [layers, rank]
            exact[token, :40] += b[slot, :40].double() @ small[0]
            exact[token, 40:] += b[slot, 40:].double() @ small[1]
    starts = torch.tensor([0, 40, 64], dtype=torch.int32)
    torch_backend.lora_expand(y, torch_backend.lora_shrink(x, a, rows), b, starts, max(outputs), rows)
    # float32: sums of 48 and 8 products; bfloat16: half a unit in the last place of the result
    factor = 0.5 if dtype == torch.bfloat16 else 8
    assert (y.double() - exact).abs().max() <= factor * torch.finfo(dtype).eps * exact.abs().max()


def test_the_largest_graph_has_its_tiles_however_small_a_step_is() -> None:
    """A graph of 8 rows runs steps of up to 8 tokens; its kernels walk the tiles of 8."""
    room = LoraRows.empty(5, 8, torch.device("cpu"))
    assert max(SIZES) <= FEW_TOKENS
    for size in SIZES:
        assert room.num_tiles(size) <= len(room.tile_slots)
        assert room.num_tiles(size) * tile_rows(size) <= len(room.rows)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 512, 513, 700])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_token_is_in_one_tile_of_its_adapter(num_tokens: int, num_slots: int) -> None:
    rng = np.random.default_rng(num_tokens)
    slots = rng.integers(-1, num_slots, num_tokens).astype(np.int32)
    room = LoraRows.empty(700, num_slots, torch.device("cpu"))
    rows, tile_slots, by_slot = tiles_of(slots, len(room.tile_slots))
    block = tile_rows(num_tokens)
    used = int((tile_slots != NOBODY).sum())
    assert used <= most_tiles(num_tokens, num_slots) <= len(room.tile_slots)
    assert used * block == len(rows) <= len(room.rows)
    placed = [(int(row), int(tile_slots[i // block])) for i, row in enumerate(rows) if row != NOBODY]
    assert sorted(placed) == [(i, int(slot)) for i, slot in enumerate(slots) if slot != NOBODY]
    assert {slot: mine.tolist() for slot, mine in by_slot} == {
        int(slot): np.flatnonzero(slots == slot).tolist() for slot in set(slots.tolist()) - {NOBODY}
    }
