"""What a misspelt name may have meant: only what is near it, and nothing where nothing is."""

import pytest

from kvplan.core.near import near_names
from tests.support.cli import Run
from tests.support.cli import run as run

OPTIONS = (
    "--gpu", "--gpu-memory", "--gpu-memory-utilization", "--ep", "--tp", "--pp", "--dp", "--tp-size", "--dtype",
    "--kv-cache-dtype", "--max-model-len", "--max-num-seqs", "--max-total-tokens", "--max-loras", "--usage", "--format",
    "--report", "--quiet", "--block-size", "--tensor-parallel-size", "--data-parallel-size",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--help-me", []),  # --ep had three of its letters
        ("--seed", []),
        ("--outptu", []),
        ("--foo", []),
        ("--x", []),
        ("--", []),
        ("--formt", ["--format"]),
        ("--max_model_len", ["--max-model-len"]),
        ("--max-len", ["--max-model-len"]),
        ("--max-seqs", ["--max-num-seqs"]),
        ("--tensor-parallel", ["--tensor-parallel-size"]),
        ("--gpu-util", ["--gpu-memory-utilization"]),
        ("--gpus", ["--gpu"]),
        ("--blok-size", ["--block-size"]),
    ],
)
def test_only_near_names_are_named(typed: str, meant: list[str]) -> None:
    assert near_names(typed, OPTIONS) == meant


def test_a_command_line_names_them(run: Run) -> None:
    assert run("estimate", "--help-me").err == (
        "kvplan: error: --help-me: no such option; see `kvplan estimate --help`\n"
    )
    assert "no such command; did you mean estimate?" in run("estimat").err
