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


def test_pack_says_that_it_does_not_take_it_and_preflight_does(run: Run) -> None:
    packed = refused(run("pack", "--gpu", "rtx-4090", "--server", f"a={PASTED}"))
    assert "takes no fraction of a GPU" in packed
    assert run("preflight", PASTED, "--gpu", "rtx-4090", "-q").code == 0


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
    assert "others free" not in page


@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-32b", "--gpu", "rtx-4090", "-c", "32768", "-ngl", "99"),
        ("qwen3-30b-a3b", "--gpu", "rtx-4090", "--quant", "Q8_0", "-c", "32768", "-ngl", "99"),
        ("llama-3.1-8b", "--gpu-memory", "6GiB", "-c", "16384", "--fit", "off"),
        ("llama-3.3-70b", "--gpu", "2xrtx-4090", "-c", "65536", "-ngl", "99"),
    ],
)
def test_every_fix_is_the_servers_own_flag_and_leaves_what_fit_would(run: Run, words: tuple[str, ...]) -> None:
    """Each printed fix is added to the line, in place of the flag that it changes, and is tried.

    --fit leaves 1,024 MiB of a GPU (common/arg.cpp); other GPUs leave at least what cuBLAS took in logs.
    """
    line = ("estimate", *words, "--engine", "llama.cpp", "--format", "json", "-q")
    fixes = run(*line).json["fixes"]
    assert fixes
    own = {"-c", "-ngl", "--n-cpu-moe", "-ctk", "-ctv", "--quant"}
    for fix in fixes:
        flags = fix["flag"].split()
        changed = flags[::2]
        others = list(line)
        for flag in changed:
            if flag in others:
                del others[others.index(flag) : others.index(flag) + 2]
        if "without" in fix["flag"] or ("--gpu" in changed and "--gpu-memory" in others):
            del others[others.index("--gpu-memory") : others.index("--gpu-memory") + 2]
        plan = run(*others, *flags).json
        assert plan["fits"], fix
        left = min(place["free"] - place["total"] for place in plan["slots"]["places"] if place["free"])
        outside = next(row["likely"] for row in plan["assumptions"] if row["name"] == "non_torch")
        assert left >= (1024 << 20 if set(changed) <= own else outside), fix
        assert set(changed) <= own | {"--gpu", "--tensor-parallel-size"}, fix


@pytest.mark.parametrize(
    "words",
    [("-c", "0"), ("-ngl", "all"), ("-ngl", "-1"), ("-b", "2048", "-ub", "512")],
)
def test_its_words_for_a_default_are_the_default(run: Run, words: tuple[str, ...]) -> None:
    """-c 0 is the trained context and -ngl -1 all layers; 2048 and 512 are its batches (common/common.h)."""
    line = ("estimate", "qwen3-32b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "--format", "json", "-q")
    stated, plain = run(*line, *words).json, run(*line).json
    assert stated["slots"] == plain["slots"]


@pytest.mark.parametrize("name", ["Qwen3-32B-Q5_K_M.gguf", "unsloth/Qwen3-32B-GGUF:Q5_K_M"])
def test_a_file_or_a_repository_of_its_is_a_model(run: Run, name: str) -> None:
    named = run("estimate", name, "--engine", "llama.cpp", "--gpu", "l40s", "--format", "json", "-q").json
    words = ("qwen3-32b", "--quant", "Q5_K_M", "--engine", "llama.cpp", "--gpu", "l40s")
    assert named["slots"] == run("estimate", *words, "--format", "json", "-q").json["slots"]


@pytest.mark.parametrize(("kind", "near"), [("q4", "Q4_K_M"), ("Q8", "Q8_0"), ("UD-Q5_K_XL", "Q5_K_M")])
def test_a_type_that_is_none_is_corrected(run: Run, kind: str, near: str) -> None:
    line = refused(run("estimate", "qwen3-8b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "--quant", kind))
    assert line.endswith(f"did you mean {near}?")


def test_tables_say_what_is_on_the_host_and_which_file_it_is(run: Run) -> None:
    """llama.cpp's own --fit puts 43 of 81 layers on an RTX 4090 (tests/facts, the oracle's rows)."""
    gpus = run("estimate", "llama-3.3-70b", "--engine", "llama.cpp", "--gpu", "rtx-4090,a100-80g", "-q").out
    assert "43 of 81 layers on the GPU" in gpus
    assert " tokens" not in gpus.splitlines()[0]  # each has its own
    swept = run("sweep", "llama-3.3-70b", "--engine", "llama.cpp", "--gpu", "rtx-4090,a100-80g", "-q").out
    assert "llama-3.3-70b as Q4_K_M" in swept
    assert "yes, 43 of 81 layers on GPUs" in swept
    both = run("sweep", "qwen3-8b", "--engine", "llama.cpp,vllm", "--gpu", "l40s", "--ctx", "8k", "-q").out
    assert {"Q4_K_M", "as stored"} <= {word.strip() for row in both.splitlines() for word in row.split("  ")}
    assert "llama.cpp@0.5" in both
