"""llama-server's logs, and Ollama's with the same lines: what they say, compared with the plan buffer by buffer.

tests/facts/llamacpp_logs.jsonl has the sizes of public logs in MiB, by buffer (weights, caches, compute), what the
server was started with, and which of them the plan has to the last digit that was logged. Breakdowns have whole MiB,
without the fraction.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.measure.server_metrics import server_stats
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "facts" / "llamacpp_logs.jsonl").read_text("utf-8").splitlines()
]
LINES = ("load_tensors: {:>12} model buffer size = {:8.2f} MiB", "llama_kv_cache: {:>10} KV buffer size = {:8.2f} MiB",
         "sched_reserve: {:>10} compute buffer size = {:8.2f} MiB")  # fmt: skip


def log_of(fact: dict[str, Any]) -> str:
    """A log with these figures, in llama.cpp's own format (its printf strings)."""
    lines = [f"llama-server -m /m/{fact['model']}-{fact['type']}.gguf {fact['command']}"]
    if fact["outputs"] is not None:
        lines.append(f"llama_context: n_outputs_max         = {fact['outputs']}")
    if fact["whole_mib"]:
        lines.append(
            "common_memory_breakdown_print: | memory breakdown [MiB] | total free self model context compute |"
        )
    for device, sizes in fact["mib"].items():
        weights, caches, compute = (size or 0 for size in sizes)
        if not fact["whole_mib"]:
            pairs = zip(LINES, sizes, strict=True)
            lines += [line.format(device, size) for line, size in pairs if size is not None]
            continue
        total, parts = weights + caches + compute, f"{weights:>6} + {caches:>6} + {compute:>6}"
        if device == "Host":
            lines.append(
                f"common_memory_breakdown_print: |   - Host               |       {total:>8} = {parts}       |"
            )
        else:
            gpu = f"24124 = 23860 + ({total:>6} = {parts}) + {-total:>8}"
            lines.append(f"common_memory_breakdown_print: |   - {device} (a GPU)   | {gpu} |")
    return "\n".join([*lines, ""])


def compared(run: Run, tmp_path: Path, fact: dict[str, Any]) -> dict[str, bool]:
    log = tmp_path / "server.log"
    log.write_text(log_of(fact), encoding="utf-8")
    rows = run("reconcile", "--log", log, "--model", fact["model"], "--gpu", "h200", "--format", "json", "-q").json[
        "rows"
    ]
    return {row["name"]: bool(row["exact"]) for row in rows if row["logged"] and row["unit"] == "bytes"}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["log"])
def test_each_buffer_of_a_public_log_is_what_the_facts_say_of_it(
    run: Run, tmp_path: Path, fact: dict[str, Any]
) -> None:
    rows = compared(run, tmp_path, fact)
    names = {f"{place} {kind}" for place, kind in places(fact)}
    assert rows.keys() == names
    assert sorted(name for name, is_equal in rows.items() if is_equal) == fact["equal"]


def places(fact: dict[str, Any]) -> list[tuple[str, str]]:
    """(place, kind) of each size in a fact."""
    kinds = ("weights", "caches", "compute")
    named = {device: "host" if device.startswith(("CPU", "Host")) or device.endswith("_Host") else f"GPU {device[-1]}"
             for device in fact["mib"]}  # fmt: skip
    return [(named[device], kind) for device, sizes in fact["mib"].items()
            for kind, size in zip(kinds, sizes, strict=True) if size]  # fmt: skip


def test_the_score_by_buffer() -> None:
    """Of all logs: caches to the last digit, weights where llama-quantize made the file, compute of few builds."""
    sizes, equal = Counter[str](), Counter[str]()
    for fact in FACTS:
        sizes.update(kind for _, kind in places(fact))
        equal.update(name.rpartition(" ")[2] for name in fact["equal"])
    assert {kind: (equal[kind], count) for kind, count in sorted(sizes.items())} == SCORE


# In six logs that the rules were read on, and six that were drawn when they stood.
SCORE = {"caches": (8, 9), "compute": (7, 18), "weights": (12, 20)}


# --- logs of failures, in llama.cpp's own format: what failed last names the buffer -----------------------------------

DEVICE = "llama_prepare_model_devices: using device CUDA0 (NVIDIA GeForce RTX 4090) (0000:01:00.0) - {} MiB free\n"
LOADED = "llama_model_loader: loaded meta data with 32 key-value pairs and 707 tensors from /m/{} (version GGUF V3)\n"
REFUSED = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {:.2f} MiB on device 0: cudaMalloc failed: out of memory\n"
)
CONTEXT = "llama_context: n_seq_max             = 1\nllama_context: n_ctx                 = {}\n"
FAILED = {
    "weights": ("llama_model_load: error loading model: unable to allocate CUDA0 buffer\n", "loading the weights"),
    "kv": ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n",
           "allocating the KV cache"),
    "pp": ("llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers\n",
           "reserving the compute buffers"),
    "old": ("llama_new_context_with_model: failed to allocate compute buffers\n", "reserving the compute buffers"),
}  # fmt: skip


def why(run: Run, tmp_path: Path, text: str) -> str:
    log = tmp_path / "server.log"
    log.write_text(text, encoding="utf-8")
    return run("why", log).out


@pytest.mark.parametrize("buffer", FAILED)
def test_the_buffer_that_failed_is_named_with_its_size(run: Run, tmp_path: Path, buffer: str) -> None:
    line, phase = FAILED[buffer]
    size = "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 8589934592\n"
    answer = why(run, tmp_path, REFUSED.format(8192) + size + line)
    assert f"llama.cpp did not start: the GPU ran out of memory {phase}" in answer.splitlines()[0]
    assert "it requested 8.00 GiB" in answer.splitlines()[0]
    flags = {"weights": "-ngl", "kv": "-ctk q8_0 -ctv q8_0", "pp": "-ub", "old": "-ub"}
    assert flags[buffer] in answer


def test_a_fix_is_planned_in_the_memory_that_was_free(run: Run, tmp_path: Path) -> None:
    """Qwen3-32B at 32,768 tokens needs 17.99 + 8 GiB: each fix fits in the log's 21,603 MiB, beside --fit's GiB."""
    text = (
        "llama-server -m /m/Qwen3-32B-Q4_K_M.gguf -c 32768 -ngl 99 -np 1 --fit off --jinja\n"
        + DEVICE.format(21_603) + LOADED.format("Qwen3-32B-Q4_K_M.gguf") + CONTEXT.format(32_768)
        + REFUSED.format(8_192) + FAILED["kv"][0]
    )  # fmt: skip
    log = tmp_path / "server.log"
    log.write_text(text, encoding="utf-8")
    cures = run("why", log, "--format", "json").json["cures"]
    assert {cure["kind"] for cure in cures} == {"quantization", "max_model_len", "gpu_layers"}
    for cure in cures:
        assert cure["starts"], cure
        flags = " ".join(cure["flags"]).split()
        words = ["-c", "32768", "-ngl", "99", "-np", "1", "--fit", "off"]
        if flags[0] in words:
            del words[words.index(flags[0]) : words.index(flags[0]) + 2]
        plan = run(
            "estimate",
            "qwen3-32b",
            "--engine",
            "llama.cpp",
            "--gpu",
            "rtx-4090",
            *words,
            *flags,
            "--format",
            "json",
            "-q",
        )
        used = plan.json["slots"]["places"][0]["total"]
        assert used <= (21_603 - 1_024) << 20, cure
    shorter = next(cure for cure in cures if cure["kind"] == "max_model_len")
    assert "-m /m/Qwen3-32B-Q4_K_M.gguf" in shorter["command"]
    assert shorter["command"].count("-c ") + shorter["command"].count("--ctx-size") == 1


def test_a_second_try_without_pipelines_is_no_failure(run: Run, tmp_path: Path) -> None:
    """As in ggml-org/llama.cpp#26297: the buffers of several GPUs at once do not fit, those of one at a time do."""
    text = (
        REFUSED.format(51_748.72) + "graph_reserve: failed to allocate compute buffers\n"
        "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism\n"
        "srv    load_model: initializing, n_slots = 1, n_ctx_slot = 50176, kv_unified = 'false'\n"
    )  # fmt: skip
    assert why(run, tmp_path, text) == "llama.cpp started: the log shows no failure.\n"


def test_a_healthy_log_gets_one_calm_line(run: Run, tmp_path: Path) -> None:
    text = LOADED.format("Qwen3-32B-Q4_K_M.gguf") + "main: server is listening on http://127.0.0.1:8080\n"
    assert why(run, tmp_path, text) == "llama.cpp started: the log shows no failure.\n"


def test_what_fit_probes_is_not_what_was_loaded(run: Run, tmp_path: Path) -> None:
    """Ollama's llama-server prints a breakdown before anything is loaded, with less than nothing unaccounted for."""
    fact = next(fact for fact in FACTS if fact["log"] == "ollama/ollama#17482")
    log = tmp_path / "server.log"
    log.write_text(log_of(fact), encoding="utf-8")
    rows = run("reconcile", "--log", log, "--model", "qwen3.6-27b", "--gpu", "rtx-3090", "--format", "json", "-q").json
    assert "outside" not in {row["name"] for row in rows["rows"]}


def test_its_metrics_are_read() -> None:
    """The names are those of tools/server/server-task.cpp; it says no share of its cache."""
    page = "".join(
        f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
        for name, kind, value in (
            ("prompt_tokens_total", "counter", 1234), ("tokens_predicted_total", "counter", 567),
            ("requests_processing", "gauge", 2), ("requests_deferred", "gauge", 1),
        )
    )  # fmt: skip
    stats = server_stats(page)
    assert (stats.kind, stats.running, stats.waiting, stats.kv_usage) == ("llamacpp", 2, 1, None)
    assert (stats.prompt_tokens, stats.generation_tokens) == (1234, 567)


# Errors in the words of llama.cpp 0c1e57098 (src/llama-model.cpp, llama-model-loader.cpp, llama-context.cpp and
# llama-vocab.cpp, ggml/src/gguf.cpp, common/arg.cpp, tools/server/server-http.cpp) -> what the first line says.
ERRORS = {
    "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'new3'":
        "llama.cpp did not start: this installation knows no model of type new3.",
    "llama_model_load: error loading model: error loading model vocabulary: unknown pre-tokenizer type: 'new3'":
        "llama.cpp did not start: this installation does not know the model.",
    "llama_model_load: error loading model: missing tensor 'blk.0.attn_q.weight'":
        "llama.cpp did not start: the file's tensors or tokenizer are not those expected of its architecture.",
    "llama_model_load: error loading model: error loading model vocabulary: cannot find tokenizer merges in model file":
        "llama.cpp did not start: the file's tensors or tokenizer are not those expected of its architecture.",
    "llama_model_load: error loading model: done_getting_tensors: wrong number of tensors; expected 292, got 291":
        "llama.cpp did not start: the file's tensors or tokenizer are not those expected of its architecture.",
    "llama_model_load: error loading model: tensor 'a.weight' data is not within the file bounds, model is corrupted":
        "llama.cpp did not start: a weight file is missing or incomplete.",
    "llama_model_load: error loading model: illegal split file idx: 1, model must be loaded with the first split":
        "llama.cpp did not start: a weight file is missing or incomplete.",
    "gguf_init_from_file_impl: invalid magic characters: '<!do', expected 'GGUF'":
        "The server did not start: a weight file is missing or incomplete.",
    "llama_init_from_model: quantized V cache requires flash_attn to be enabled":
        "llama.cpp did not start: no attention backend for this model on this GPU reads a KV cache of this type.",
    "error: invalid argument: --ctx-sise": "The server did not start: it does not know the argument --ctx-sise.",
    "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080":
        "The server did not start: port 8080 is in use by another process.",
    "llama_model_load: error loading model: unordered_map::at":
        "llama.cpp did not start: llama_model_load: error loading model: unordered_map::at.",
}  # fmt: skip


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_that_no_memory_cures_is_named(run: Run, tmp_path: Path, line: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(f"{line}\n")
    result = run("why", str(path))
    assert result.out.startswith(ERRORS[line])
