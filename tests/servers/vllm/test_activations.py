"""Peaks of vLLM's profile run, against its own model classes and samplers.

Rows of tests/facts/peak.jsonl are what vLLM 0.33's own code has live at once when its profile run runs on tensors
without data, eagerly or in the pieces that inductor compiles, on an H100: largest bytes less those that stay. Rows with
`part` have the language model alone, whose embeddings lie in a buffer of the runner.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import MIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.servers.plans.plan import Estimate
from kvplan.servers.vllm import activations, overheads, rules
from kvplan.servers.words.arguments import EngineArgs

FILE = Path(__file__).parents[2] / "facts" / "peak.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
READ = [row for row in ROWS if activations.is_read(catalog.load(row["model"]))]


def peak_of(row: dict[str, Any]) -> Estimate:
    args = EngineArgs(
        max_model_len=row["context"],
        tensor_parallel_size=row["tp"],
        max_num_batched_tokens=row["tokens"],
        max_num_seqs=row["seqs"],
        enforce_eager=row["mode"] == "eager",
    )
    return planned(row["model"], "h100", args, whole="part" not in row)


def planned(model: str, card: str, args: EngineArgs, *, whole: bool = True) -> Estimate:
    spec, device = catalog.load(model), gpu(card)
    settings = rules.resolve(spec, device, args, rules.version((0, 33)))
    if not whole:
        return activations.forward(spec, settings, args, settings.version, device, settings.max_num_seqs)
    return activations.activations(spec, settings, args, settings.version, device)


def label(row: dict[str, Any]) -> str:
    return f"{row['model']}-{row['mode']}-tp{row['tp']}-{row['tokens']}-{row['seqs']}"


def is_near(row: dict[str, Any]) -> bool:
    return bool(abs(peak_of(row).likely - row["peak"]) <= max(32 * MIB, 0.02 * row["peak"]))


def test_at_least_97_percent_of_the_peaks_are_within_2_percent_or_32_mib() -> None:
    far = [label(row) for row in READ if not is_near(row)]
    assert len(READ) > 100
    assert len(far) <= 0.03 * len(READ), far


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("tp", [1, 8])
def test_peaks_of_llama_are_equal_to_the_byte(mode: str, tp: int) -> None:
    rows = [row for row in ROWS if (row["model"], row["mode"], row["tp"]) == ("llama-3-8b", mode, tp)]
    passes = [row for row in rows if "hidden" in peak_of(row).formula and "vocab" not in peak_of(row).formula]
    assert rows
    for row in passes:
        assert peak_of(row).likely == row["peak"]


@pytest.mark.parametrize("row", [row for row in ROWS if row not in READ], ids=label)
def test_classes_that_were_not_read_lie_in_their_range(row: dict[str, Any]) -> None:
    estimate = peak_of(row)
    assert estimate.low <= row["peak"] <= estimate.high
    assert estimate.kind == "calibrated" or "vocab" in estimate.formula


def test_a_compiled_pass_of_llama_by_hand() -> None:
    # attention and residual, which the caller keeps, o_proj's output, gate and up, and the activation's output
    args = EngineArgs(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=64)
    assert planned("llama-3.1-8b", "h100", args).likely == 8192 * 2 * (4096 + 2 * 4096 + 28_672 + 14_336)


def test_what_an_all_reduce_writes_is_not_divided() -> None:
    # on 8 GPUs: five whole hidden states and a rank's part of the attention: 8,192 x 2 x (5 x 8,192 + 1,024)
    args = EngineArgs(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=64, tensor_parallel_size=8)
    assert planned("llama-3.1-70b", "h100", args).likely == 8192 * 2 * (5 * 8192 + 1024)


class TestSampler:
    """Of vLLM 0.33: flashinfer_sampler_supported of v1/sample/ops/topk_topp_sampler.py, topk_topp_triton.py."""

    ARGS = EngineArgs(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=1024)

    @pytest.mark.parametrize(("card", "per_entry"), [("h100", 14), ("rtx-3090", 14), ("t4", 6), ("mi300x", 6)])
    def test_depends_on_the_gpu(self, card: str, per_entry: int) -> None:
        hidden = 2 * (2048 + 1024) * 1024  # hidden states of the step, and of the sampled rows
        assert planned("qwen3-0.6b", card, self.ARGS).likely == hidden + 1024 * 151_936 * per_entry

    def test_of_triton_keeps_a_row_for_each_multiprocessor(self) -> None:
        spec, card = catalog.load("qwen3-0.6b"), gpu("t4")
        settings = rules.resolve(spec, card, self.ARGS, rules.version((0, 33)))
        bare = overheads.buffers(spec, settings, self.ARGS)
        assert (
            overheads.buffers(spec, settings, self.ARGS, gpu=card).likely - bare.likely == 40 * 151_936 * 4 + 8_519_680
        )  # cuBLAS

    def test_does_not_run_in_a_pooling_server(self) -> None:
        pooling = EngineArgs(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=1024, runner="pooling")
        peak = planned("qwen3-8b", "h100", pooling)
        assert peak.likely == 8192 * 2 * (4096 + 2 * 4096 + 24_576 + 12_288)


def test_embeddings_of_a_model_that_sees_have_a_buffer() -> None:
    """vLLM 0.33 model_states/default.py and mm/encoder_runner.py: one of max_num_batched_tokens x hidden size."""
    spec, device = catalog.load("qwen3-vl-8b"), gpu("h100")
    sees = EngineArgs(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=64)
    reads = replace(sees, language_model_only=True)
    sizes = []
    for args in (sees, reads):
        settings = rules.resolve(spec, device, args, rules.version((0, 33)))
        sizes.append(overheads.buffers(spec, settings, args).likely)
    assert sizes[0] - sizes[1] == (1 + 3) * 8192 * 4096 * 2  # and one for each of three inner outputs of the tower
