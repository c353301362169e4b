"""Both servers' own answers for changed configs, other quantizations and flags: every row of oracle2_*.jsonl.

`WITHOUT_FILES` are answers for a folder without weights that a real checkpoint does not get.
"""

from collections import Counter

import pytest

from tests import oracles
from tests.support.oracle_data import DATA, needs_oracle_data

FOLDERS = (DATA / "changed_configs", DATA / "models")
# vLLM 0.33 auto_gptq.py (maybe_update_config) takes the quantized layers from the safetensors files, where a vision
# tower is stored in 16 bits; with no file it quantizes the tower too, whose 4,304 inputs four ranks cannot group by 32.
WITHOUT_FILES = {"vllm": {78}, "sglang": set[int]()}
COMPARE = {"vllm": oracles.compare_case, "sglang": oracles.compare_sglang_in}


@needs_oracle_data
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_no_row_differs_but_the_known_ones(server: str) -> None:
    rows = oracles.read_lines(DATA / f"oracle2_{server}.jsonl")
    outcomes = {line: COMPARE[server](row, *FOLDERS) for line, row in enumerate(rows, 1)}
    print(server, dict(Counter(outcome for outcome, _ in outcomes.values())))
    different = {line: why for line, (outcome, why) in outcomes.items() if outcome == oracles.DIFFERENT}
    assert different.keys() == WITHOUT_FILES[server], different
