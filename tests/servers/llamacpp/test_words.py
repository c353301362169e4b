"""llama.cpp in commands that were made for servers with a pool of blocks: what they answer, or that they do not."""

from pathlib import Path

import pytest

from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

PASTED = "llama-server -hf unsloth/Qwen3-14B-GGUF:Q8_0 -c 32768 -np 4 -ngl 99"


@pytest.mark.parametrize("flag", ["-ctk", "-ctv"])
def test_a_type_that_no_cache_has_is_refused_with_those_there_are(run: Run, flag: str) -> None:
    """The types are those of common/arg.cpp (kv_cache_types)."""
    line = refused(run("estimate", "qwen3-8b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "-c", "8192", flag, "q9"))
    assert line.endswith("is not a cache type; use f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1")


def test_commands_for_pools_say_that_they_do_not_take_it(run: Run) -> None:
    packed = refused(run("pack", "--gpu", "rtx-4090", "--server", f"a={PASTED}"))
    assert "takes no fraction of a GPU" in packed
    assert "preflight does not check it" in refused(run("preflight", PASTED, "--gpu", "rtx-4090", "-q"))
    users = refused(run("recommend", "qwen3-8b", "--engine", "llama.cpp", "--users", "4"))
    assert "--parallel is the number of users" in users


def test_a_policy_that_was_written_for_it_holds(run: Run, tmp_path: Path) -> None:
    """Four slots of 8,192 tokens: the policy has the whole cache's 32,768."""
    policy = tmp_path / "kvplan.policy.yaml"
    assert run("check", "--init", "--from-command", PASTED, "--gpu", "l4", "-o", policy, "-q").code == 0
    assert "max_model_len: 32768" in policy.read_text(encoding="utf-8")
    assert run("check", policy).code == 0


def test_the_hosts_weights_are_counted_once(run: Run) -> None:
    """With no layer on the GPU they are the 18.40 GiB of the file, as the note says: it is mapped, not read besides."""
    words = ("estimate", "qwen3-32b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "-ngl", "0", "-c", "4k")
    host = run(*words, "--format", "json", "-q").json["places"][-1]
    assert host["name"] == "host"
    assert round(host["rows"]["weights"] / 2**30, 2) == 18.40
    assert host["total"] == sum(host["rows"].values())
    assert "checkpoint" not in host["rows"]


def test_layers_that_the_user_placed_get_no_other_file_type(run: Run) -> None:
    ran = run("estimate", "qwen3-32b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "-ngl", "0", "-c", "4k")
    assert "keeps all" not in ran.err


def test_its_log_gets_no_flag_of_another_server(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "ggml_cuda_init: found 1 CUDA devices\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 18000.00 MiB on device 0: "
        "cudaMalloc failed: out of memory\n"
        "llama_init_from_model: failed to initialize the context\n"
    )
    ran = run("why", log)
    assert "cudaMalloc failed" in ran.out
    assert not {"--max-num-seqs", "--enforce-eager", "--tensor-parallel-size"} & set(ran.out.replace(":", " ").split())


def test_a_page_has_the_places_of_the_screen(run: Run) -> None:
    words = ("estimate", "qwen3-32b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "-c", "8192", "-q")
    page, screen = run(*words, "--format", "markdown").out, run(*words).out
    for place in ("GPU 0", "host"):
        cells = [cell.strip() for row in page.splitlines() if row.startswith(f"| {place}") for cell in row.split("|")]
        row = next(row for row in screen.splitlines() if row.startswith(place))
        assert [cell for cell in cells[2:] if cell] == row.removeprefix(place).split(maxsplit=4)
    assert "kept free" not in page
