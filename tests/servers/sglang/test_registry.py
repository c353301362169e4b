"""SGLang's rules against SGLang 0.5.23's own planning, class by class of its registry.

The rows are tests/facts/architectures_sglang.jsonl (benchmarks/architectures_sglang.py): settings, pools and requests
of a config of each class on one H100 and on two.
"""

from collections import Counter

import pytest

from tests import oracles
from tests.support.architectures_sglang import Row, merged, outcome, rows, weights_of

ANSWERED = [row for row in rows() if "ranks" in row]
SIZED = [row for row in ANSWERED if not row.get("refused") and any("weights" in answer for answer in row["ranks"])]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: f"{row['architecture']} {row['kind']}")
def test_a_class_is_sized_as_the_server_does_or_refused_by_name(row: Row) -> None:
    state, why = outcome(row)
    assert state == (oracles.REFUSED if row.get("refused") else oracles.EQUAL), why


# Relative to a rank's weights. Not loaded as built: the order of groups of packed experts (Kimi K2.5), and layers that
# transformers' plan shards afterwards (torch native). Small: norms, biases, scales and paddings. Mergers and a
# projector of towers: BailingMoeV3VL, GLM-OCR, MiniCPM-V, Step 3.
NEAR = {
    "BailingMoeV3VLForConditionalGeneration": 0.0093, "DeepseekV32ForCausalLM": 3e-9, "FalconH1ForCausalLM": 2e-5,
    "GlmAsrForConditionalGeneration": 3e-5, "GlmOcrForConditionalGeneration": 0.0017,
    "KimiK25ForConditionalGeneration": 0.0051, "LlamaForSequenceClassificationWithNormal_Weights": 4e-6,
    "MiniCPMV4_6ForConditionalGeneration": 0.0077, "MiniCPMV4_7ForConditionalGeneration": 0.0077,
    "MuseGlimmerForCausalLM": 2e-5, "MuseGlimmerForConditionalGeneration": 2e-5, "PhiForCausalLM": 4e-5,
    "SarvamMoEForCausalLM": 6e-6, "Step3VLForConditionalGeneration": 7e-4, "TorchNativeLlamaForCausalLM": 0.37,
    "TorchNativePhi3ForCausalLM": 0.49,
}  # fmt: skip


@pytest.mark.parametrize("row", SIZED, ids=lambda row: str(row["architecture"]))
def test_a_ranks_weights_are_those_of_the_servers_class(row: Row) -> None:
    for own, server in weights_of(row):
        assert own == pytest.approx(server, rel=NEAR.get(row["architecture"], 0), abs=0)


def test_how_many_classes_have_their_weights_compared() -> None:
    assert (len(SIZED), len(NEAR)) == (148, 16)


def test_the_counts_that_the_page_of_models_states() -> None:
    started = [row for row in ANSWERED if all("failed" not in answer for answer in row["ranks"])]
    states = Counter("refused" if row.get("refused") else "compared" for row in started)
    assert (states["compared"], states["refused"], len(ANSWERED) - len(started)) == (176, 57, 2)


def test_a_config_is_changed_key_by_key() -> None:
    config = {"text_config": {"layers": 2, "rope": 1}, "depth": 3}
    assert merged(config, {"text_config": {"rope": None, "width": 4}, "depth": None}) == {
        "text_config": {"layers": 2, "width": 4}
    }
