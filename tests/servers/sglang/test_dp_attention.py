"""Weights of a rank under SGLang's DP attention against its own classes, and logs of it.

tests/facts/dp_attention_sglang.jsonl: flags, and the bytes of all parameters of SGLang 0.5.23's own class on torch's
meta device, on one rank. A model stands for its catalog entry.
"""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.spread import spread
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.server_logs import rows_of

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "dp_attention_sglang.jsonl").read_text().splitlines()]
# Scales of MXFP4 experts that SGLang pads otherwise, of KV caches and of an index, vectors of Mamba layers, and an
# index of INT4 experts that is emptied after loading: relative to a rank's weights.
NEAR = {
    "gpt-oss-20b": 0.033, "gpt-oss-120b": 0.055, "minimax-m2.5": 2e-5, "deepseek-v3.2": 0.0007, "kimi-k2.5": 0.0165,
    "nemotron-nano-9b-v2": 4e-5, "nemotron-h-56b": 4e-5, "nemotron-h-8b": 4e-5,
}  # fmt: skip
SCALES = 1e-7  # 8 to 16 bytes a layer of quantized checkpoints
GIB = 2**30


def request_of(row: dict[str, Any]) -> Request:
    inputs = row["inputs"]
    words = f"python -m sglang.launch_server --model-path a/b --tp {inputs['tp']} {shlex.join(inputs['argv'])}"
    args = EngineArgs(**read_command(words).args)
    return Request(spec=catalog.load(inputs["model"]), gpu=gpu("h100"), args=args, release=parse_engine("sglang"))


def outcome(row: dict[str, Any]) -> str:
    request, name = request_of(row), row["inputs"]["model"]
    try:
        sglang_models.check_dp_attention(request.spec, request.args)
    except UnsupportedModelError as error:
        return "undivided" if "over all ranks" in str(error) else "refused"
    own = sum(rank_weights(spread(request), 0).values())
    if request.spec.quantization is None:
        assert own == row["params"] or name in NEAR
    assert own == pytest.approx(row["params"], rel=NEAR.get(name, SCALES), abs=0), row
    return "equal" if name not in NEAR else "near"


def test_weights_equal_sglangs_own_classes() -> None:
    assert Counter(map(outcome, ROWS)) == {"equal": 70, "near": 13, "refused": 6, "undivided": 65}


def test_classes_that_ignore_it_hold_less_than_divided_attention_would() -> None:
    """Why they are refused: their own class splits attention over all ranks, and a plan would count too much."""
    for row in ROWS:
        if outcome(row) == "undivided":
            assert sum(rank_weights(request_of(row), 0).values()) > row["params"]


def test_a_plan_of_such_a_class_is_refused() -> None:
    request = request_of({"inputs": {"model": "llama-3.1-8b", "tp": 4, "argv": ["--enable-dp-attention", "--dp", "4"]}})
    with pytest.raises(UnsupportedModelError, match="still splits attention over all ranks"):
        plan(request)


LOG = """\
[2026-09-05 03:50:00] server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-V3', tp_size=8, dp_size={dp}, \
attn_dp_size={attn}, enable_dp_attention=True, mem_fraction_static=0.9, page_size=1, context_length=None, \
kv_cache_dtype='auto')
[2026-09-05 03:50:10 DP0 TP0] Load weight begin. avail mem=139.21 GB
[2026-09-05 03:50:58 DP0 TP0] Load weight end. type=DeepseekV3ForCausalLM, avail mem=55.52 GB, mem usage=83.69 GB.
[2026-09-05 03:50:58 DP1 TP2] Load weight end. type=DeepseekV3ForCausalLM, avail mem=55.52 GB, mem usage=83.69 GB.
[2026-09-05 03:55:08 DP0 TP0] KV Cache is allocated. #tokens: 635612, KV size: 41.60 GB
[2026-09-05 03:55:08 DP1 TP2] KV Cache is allocated. #tokens: 635612, KV size: 41.60 GB
[2026-09-05 03:55:08 DP0 TP0] max_total_num_tokens=635612, max_running_requests=2048, context_len=163840
"""


@pytest.mark.parametrize(("dp", "attn"), [(4, 1), (1, 4)])  # as given, and as 0.5.23 lists what it resolved
def test_a_log_is_compared_rank_by_rank(run: Run, tmp_path: Path, dp: int, attn: int) -> None:
    """89,769,834,352 B are the parameters of SGLang's own class on a rank: 83.60 GiB; the pool is what
    55.52 - 139.21 x (1 - 0.9) GiB leave, 635,612 tokens of 70,272 B."""
    (tmp_path / "log").write_text(LOG.format(dp=dp, attn=attn))
    answer = run("reconcile", "--log", str(tmp_path / "log"), "--format", "json")
    rows = rows_of(answer.json)
    assert rows["weights"]["predicted"] == pytest.approx(89_769_834_352, rel=0.0025)  # and what segments round up
    assert rows["kv_cache"]["relative"] == pytest.approx(0, abs=0.001)
    assert rows["tokens"]["relative"] == pytest.approx(0, abs=0.001)
    assert answer.json["data_parallel_size"] == 4


def test_tokens_of_a_published_pool_follow_from_its_bytes(run: Run, tmp_path: Path) -> None:
    """sgl-project/sglang#6027: DeepSeek-V3-0324 on 16 H100 of 0.4.6, DP attention over all of them."""
    line = "[2025-05-05 03:55:08 TP0] KV Cache is allocated. #tokens: 274934, KV size: 17.99 GB\n"
    args = "tp_size=16, dp_size=16, enable_dp_attention=True, page_size=1, context_length=None, kv_cache_dtype='auto'"
    (tmp_path / "log").write_text(
        f"[2025-05-05 03:50:00] server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-V3-0324', {args})\n{line}"
    )
    document = run("reconcile", "--log", str(tmp_path / "log"), "--model", "deepseek-v3", "--format", "json").json
    assert rows_of(document, "given")["tokens"]["exact"] is True


def test_its_ranks_are_those_of_one_server(run: Run) -> None:
    """Eight ranks of attention within eight tensor ranks, as SGLang makes them."""
    words = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention"
    ran = run("estimate", "--from-command", words, "--gpu", "8xh200", "--ctx", "16k")
    assert ran.out.splitlines()[0].endswith(", on each of 8 data-parallel ranks")
    assert "Users of one data-parallel rank; 8 data-parallel ranks hold 8 times as many" in ran.out
    assert "one server with 8 data-parallel ranks of 1 GPU" in ran.err
