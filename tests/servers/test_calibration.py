"""Constants measured on a GPU stand in for modelled ones on such a GPU, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

TOTAL = 85_029_158_912  # bytes of an H100 80GB as CUDA reports them, within 1% of the table's
MEASURED = {"context": 600_000_000, "non_torch": 700_000_000, "cuda_graphs": 5, "allocator_slack": 6}
ASK = ("estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "h100-80g", "--format", "json")


def calibration(folder: Path, **changes: Any) -> Path:
    content = {
        "schema": "kvplan/calibration@1", "for": {"device": "NVIDIA H100 80GB HBM3"}, "device_total": TOTAL,
        "measured": MEASURED, **changes,
    }  # fmt: skip
    path = folder / "constants.json"
    path.write_text(json.dumps(content))
    return path


def test_measured_constants_replace_modelled_ones_and_say_so(tmp_path: Path, run: Run) -> None:
    plain = run(*ASK).json["plans"][0] if "plans" in run(*ASK).json else run(*ASK).json
    ran = run(*ASK, "--calibration", calibration(tmp_path))
    assert ran.code == 0, ran.err
    plan = ran.json
    memory, origin = plan["memory"], plan["provenance"]
    assert memory["non_torch"] == 700_000_000
    assert memory["unused_detail"]["context"] == 600_000_000
    assert origin["memory.non_torch"]["kind"] == origin["memory.unused_detail.context"]["kind"] == "measured"
    assert origin["memory.cuda_graphs"]["kind"] == "calibrated"  # another server's kernels decide its graphs
    # What non-torch memory does not take, the pool does, to a block of 16 tokens x 131,072 bytes.
    freed = plain["memory"]["non_torch"] - memory["non_torch"]
    assert abs(memory["kv_cache"] - plain["memory"]["kv_cache"] - freed) <= 16 * 131_072


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"device_total": 25_276_514_304}, "h100-80g has"),
        ({"schema": "kvplan/plan@1"}, "is not a calibration"),
        ({"measured": [1]}, "is not a calibration"),
        ({"measured": {**MEASURED, "context": "600 MB"}}, "must hold bytes"),
        ({"measured": {**MEASURED, "context": -1}}, "must hold bytes"),
        ({"measured": {"context": 1}}, "measured.non_torch is missing"),
        ({"graph_bytes": {"8": 0.5}}, "must hold bytes"),
        ({"graph_bytes": [8]}, "graph_bytes or run_id cannot be read"),
        ({"model": 8}, "model, graph_bytes or run_id cannot be read"),
    ],
)
def test_what_was_measured_elsewhere_or_is_damaged_is_refused(
    changes: dict[str, Any], complaint: str, tmp_path: Path, run: Run
) -> None:
    assert complaint in refused(run(*ASK, "--calibration", calibration(tmp_path, **changes)))
