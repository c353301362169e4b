"""Ranks on two nodes give the tokens of ranks on one: two agents of torchrun on this machine, a process each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import resolve
from engine.tp import local_size
from tests.engine.test_tp import DRAWN, NUM_TOKENS, PROMPTS, ROOT, TIMEOUT_S, free_port, job, run_ranks
from tests.support.small_engines import wrong_greedy_tokens

# Too little for all that could be used, 1 + 8 requests * 24 blocks.
SMALL_HOST: dict[str, Any] = {"num_blocks": None, "memory_limit": 700_000}


def run_nodes(jobs: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """Each node's answers to the jobs."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    group = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    torchrun = (sys.executable, "-m", "torch.distributed.run", *group)
    nodes = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), "-m", "tests.support.tp_worker", str(path)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        ended = [node.communicate(timeout=TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # an agent ends its workers
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(stderr for _, stderr in ended)
    return [[json.loads(line) for line in stdout.splitlines()] for stdout, _ in ended]


@pytest.mark.full
def test_two_nodes_give_the_tokens_of_one_and_of_one_rank(tmp_path: Path) -> None:
    jobs = [job("llama", 2), job("llama", 2, DRAWN), job("llama", 2) | {"own_prompts": True}]
    small = job("llama", 2, **SMALL_HOST)
    (first, second), on_one = run_nodes([*jobs, small], tmp_path), run_ranks([*jobs, small], 2)[0]
    tokens = [answer["tokens"] for answer in first]
    assert tokens == [answer["tokens"] for answer in second] == [answer["tokens"] for answer in on_one]
    for prompt, token_ids in zip(PROMPTS, tokens[0], strict=True):  # transformers' own, which one rank gives too
        assert len(token_ids) == NUM_TOKENS
        assert wrong_greedy_tokens("llama", prompt, token_ids) == []
    assert tokens[2] == tokens[0]  # rank 0's prompts run, not the other node's
    assert [answer["weights"] for answer in first] == [answer["weights"] for answer in on_one]
    # A node's memory is its own ranks': one where the other run had two. While activations are measured gloo may still
    # hold a tensor of the step, 24 tokens * 64 * 4 bytes: four blocks of 3 layers * 2 * 4 tokens * 16 * 4 bytes.
    assert first[-1]["num_blocks"] == second[-1]["num_blocks"]
    assert abs(first[-1]["num_blocks"] - 2 * on_one[-1]["num_blocks"]) <= 1 + 2 * 4


def test_a_gpu_is_chosen_by_the_rank_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 is the second of the second node of two GPUs each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, number in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    assert resolve.device("cuda", 4) == resolve.device("auto", 4) == torch.device("cuda:1")
    assert local_size(4) == 2


def test_without_torchrun_all_ranks_are_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (local_size(1), local_size(4)) == (1, 4)
