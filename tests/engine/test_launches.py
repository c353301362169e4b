"""A launcher checks its arguments once for each set of layouts; what it asks of them stays what it was."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.launches import calls_of, launches, without_gpu
from engine.kernels import checks, triton_backend

# Functions that a launch called when every launch checked everything, Triton's own left out (commit 3c784ae).
CALLS_BEFORE = {
    "rms_norm": 53, "rotate_and_store": 147, "paged_decode": 115, "paged_prefill": 114, "latent_decode": 85,
    "store_latent": 46, "gated_activation": 16, "route": 28, "moe_mlp": 111, "int4_linear": 63,
    "fp8_block_linear": 66, "fp8_rows": 22, "best_tokens": 21, "nucleus_floors": 67, "draw": 66,
}  # fmt: skip
LAYER = ("rms_norm", "rotate_and_store", "paged_decode", "rms_norm", "gated_activation")


@pytest.fixture(autouse=True)
def _without_gpu() -> Iterator[None]:
    with without_gpu():
        yield


def test_a_layout_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def need_attention(q: torch.Tensor, *args: Any) -> int:
        shapes.append(q.shape)
        return checks.need_attention(q, *args)

    monkeypatch.setattr("engine.kernels.decode.need_attention", need_attention)
    for num_seqs in (64, 64, 8, 64):  # steps, each of other tensors
        launches(num_seqs)["paged_decode"]()
    assert shapes == [(64, 32, 128), (8, 32, 128)]


def test_a_launch_of_a_known_layout_calls_less_than_half_of_what_it_did() -> None:
    calls = {}
    for name, launch in launches().items():
        launch()
        calls[name] = calls_of(launch)
    assert calls.keys() == CALLS_BEFORE.keys()
    assert sum(calls.values()) < sum(CALLS_BEFORE.values()) / 2
    assert {name for name in calls if calls[name] > CALLS_BEFORE[name]} == set()
    assert sum(calls[name] for name in LAYER) < sum(CALLS_BEFORE[name] for name in LAYER) / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 32, dtype=torch.float64)}, r"x must be of one of .* \(torch.float64\)"),
        ({"x": torch.zeros(64, 4).T}, r"x must be contiguous in its last dimension, .* \(\(1, 4\)\)"),
        ({"weight": torch.zeros(32)}, r"weight must be of shape \(64,\) \(torch.Size\(\[32\]\)\)"),
        ({"weight": torch.zeros(128)[::2]}, r"weight must be contiguous, not of these strides \(\(2,\)\)"),
        ({"weight": torch.zeros(64, device="meta")}, r"weight must be on cpu like x \(meta\)"),
        ({"residual": torch.zeros(3, 64)}, r"residual must be of shape .* like x \(torch.Size\(\[3, 64\]\)\)"),
    ],
    ids=["dtype", "stride", "shape", "strided weight", "device", "residual"],
)
def test_what_is_wrong_is_refused_whatever_was_right_before(change: dict[str, Any], message: str) -> None:
    """Each change differs from what was launched in one of: dtype, strides, shape, device."""
    right: dict[str, Any] = {"x": torch.zeros(4, 64), "weight": torch.zeros(64), "eps": 1e-5, "residual": None}
    wrong = {**right, **change}
    triton_backend.rms_norm(**right)
    for _ in range(2):  # what was refused is not remembered as good
        with pytest.raises(ValueError, match=re.compile(message)):
            triton_backend.rms_norm(**wrong)
    triton_backend.rms_norm(**right)


def test_numbers_are_told_apart_too() -> None:
    k, cache, slots = torch.zeros(4, 2, 64), torch.zeros(2, 16, 2, 64), torch.zeros(4, dtype=torch.int64)
    triton_backend.store_kv(k, k, cache, cache, slots)
    with pytest.raises(ValueError, match=r"^k_scale must be 1.0 for a torch.float32 cache \(2.0\)$"):
        triton_backend.store_kv(k, k, cache, cache, slots, 2.0)
    with pytest.raises(ValueError, match=r"^v_scale must be above 0 \(nan\)$"):
        triton_backend.store_kv(k, k, cache, cache, slots, 1.0, float("nan"))


def test_steps_with_prompts_of_any_length_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_LAYOUTS", 8)
    sizes = []

    @checks.once_per_layout
    def shape_of(x: torch.Tensor) -> torch.Size:
        return x.shape

    for length in range(30):
        assert shape_of(torch.zeros(length)) == (length,)
        sizes.append(len(checks._remembered[-1]))
    assert max(sizes) == 8
    checks._remembered.pop()


def test_what_is_forgotten_is_asked_again() -> None:
    calls = []

    @checks.once_per_layout
    def check(x: torch.Tensor, scale: float) -> None:
        calls.append((x.shape, scale))

    for x in (torch.zeros(2), torch.ones(2), torch.zeros(4)[::2]):
        check(x, 1.0)
    check(torch.zeros(2), 2.0)
    assert calls == [((2,), 1.0), ((2,), 1.0), ((2,), 2.0)]  # values do not count; strides and numbers do
    checks.forget()
    check(torch.zeros(2), 1.0)
    assert len(calls) == 4
    checks._remembered.pop()
