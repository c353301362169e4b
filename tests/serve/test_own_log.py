"""The engine's own log: what `kvplan serve` writes and `reconcile --log` reads, beside an engine's known truth."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, kernels
from engine.draft_rules import SpeculativeConfig
from engine.kv_cache import KVCache, group_layers
from engine.loader import NoWeights
from engine.memory import nbytes
from engine.stages import StageModel, groups_on
from engine.tp import TensorParallel
from kvplan.models import catalog
from kvplan.serve.real import arguments_of, held_by_others, start_log
from kvplan.servers.bundled.log_wordings import (
    BEFORE,
    arguments_line,
    device_line,
    pool_line,
    prefix,
    row_line,
    simulated_line,
)
from tests.engine.test_engine_memory import host_with
from tests.engine.test_tiers import offloading
from tests.engine.test_tp import free_port
from tests.serve.test_adapters import engine_with_adapters
from tests.serve.test_commands import environment_with, two_ranks_of_llama
from tests.support.cli import Run, refused, run
from tests.support.fake_nvml import FakeGpu, Install, install
from tests.support.small_engines import engine_for, saved_model

__all__ = ["install", "run"]  # fixtures


def log_of(engine: Engine, name: str = "llama") -> str:
    """The log of a start, with a collector's times before its lines."""
    stated = arguments_line(arguments_of(engine.spec, engine.config, f"/models/{name}", "0.1.0"))
    own = [f"{prefix(engine.tp.rank, engine.tp.size)}{stated}", *start_log(engine)]
    notes = ["kvplan: note: serve: llama has random weights", *own, "kvplan: note: serve: llama on http://127.0.0.1:1"]
    return "\n".join(notes)


def compared(run: Run, tmp_path: Path, text: str, *words: Any, model: str = "llama") -> dict[str, dict[str, Any]]:
    log = tmp_path / "server.log"
    log.write_text(text)
    ran = run("reconcile", "--log", log, "--model", saved_model(model), "--format", "json", *words)
    assert ran.code == 0, ran.err
    return {row["name"]: row for row in ran.json["rows"]}


def drafted() -> Engine:
    ngram = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
    return engine_for("llama", num_blocks=40, speculative_config=ngram)


ENGINES = {
    "plain": lambda: engine_for("llama", num_blocks=40),
    "sized by itself": lambda: engine_for("llama", num_blocks=None, max_num_seqs=2),
    "adapters": engine_with_adapters,
    "offloading": lambda: offloading("llama", num_blocks=40, num_chunks=100),
    "drafts": drafted,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_every_logged_figure_is_the_engines(kind: str, run: Run, tmp_path: Path) -> None:
    """The truth is the engine's own report of its tensors; weights, buffers, slots and KV are as planned, too."""
    engine = ENGINES[kind]()
    memory = engine.memory_report()
    truth = {
        **{name: getattr(memory, name) for name in ("weights", "buffers", "activations", "kv_cache")},
        **({"lora": memory.lora} if engine.config.max_loras else {}),
        **({} if engine.tiers is None else {"kv_offload": engine.tiers.host.memory.nbytes}),
        "blocks": memory.num_blocks,
        "tokens": memory.num_blocks * engine.config.block_size,
    }
    rows = compared(run, tmp_path, log_of(engine))
    assert {name: row["logged"] for name, row in rows.items()} == truth
    assert {name for name, row in rows.items() if not row["exact"]} <= {"activations"}
    if engine.tiers is not None:
        engine.close()


def test_a_pool_bounded_by_the_host_is_planned_from_what_was_free(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 KiB of blocks of 3,072 bytes."""
    host_with(2000 * 1024, monkeypatch, tmp_path)
    text = log_of(engine_for("llama", num_blocks=None, max_num_seqs=64))
    rows = compared(run, tmp_path, text)
    assert rows["blocks"]["logged"] == 333
    assert all(rows[name]["exact"] for name in ("kv_cache", "blocks", "tokens"))


@pytest.mark.parametrize("num_blocks", [40, None])
def test_states_in_blocks_are_planned_as_the_engine_lays_them(num_blocks: int | None, run: Run, tmp_path: Path) -> None:
    """Qwen3-Next with prefix caching: blocks grow to 8 tokens, which the command's own --block-size 4 does not say."""
    engine = engine_for("qwen3_next", num_blocks=num_blocks, max_num_seqs=2)
    config = replace(engine.config, block_size=4)  # as `serve` has it before the model is loaded
    own = [arguments_line(arguments_of(engine.spec, config, "/models/qwen3", "0.1.0")), *start_log(engine)]
    rows = compared(run, tmp_path, "\n".join(own), model="qwen3_next")
    memory = engine.memory_report()
    assert (engine.config.block_size, rows["kv_cache"]["logged"]) == (8, memory.kv_cache)
    assert all(rows[name]["exact"] for name in ("weights", "buffers", "kv_cache", "blocks", "tokens")), rows


def test_the_screen_names_the_engine_and_its_device(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(log_of(engine_for("llama", num_blocks=40)))
    ran = run("reconcile", "--log", log, "--model", saved_model("llama"))
    assert ran.out.splitlines()[0] == "KV cache as logged; weights as logged"
    assert re.search(r"on a CPU of [0-9.]+ GiB, kvplan's engine 0\.1\.0, 96 tokens per request", ran.out)
    assert "vllm" not in (ran.out + ran.err).lower()


def test_a_model_of_the_catalog_is_read_from_the_log(run: Run, tmp_path: Path) -> None:
    """SmolLM2's 134,515,008 parameters of 2 bytes (its model card), and one rotary table of 64 x 512 float32."""
    text = log_of(engine_for("llama", num_blocks=40)).replace("/models/llama", "HuggingFaceTB/SmolLM2-135M")
    log = tmp_path / "server.log"
    log.write_text(text.replace("dtype='float32'", "dtype='bfloat16'").replace("max_model_len=96", "max_model_len=512"))
    ran = run("reconcile", "--log", log, "--format", "json")
    rows = {row["name"]: row for row in ran.json["rows"]}
    assert rows["weights"]["predicted"] == 134_515_008 * 2
    assert rows["buffers"]["predicted"] == 64 * 512 * 4
    assert ran.json["model"] == "smollm2-135m"


def two_ranks(text: str) -> tuple[list[str], list[str]]:
    """The lines of two ranks that hold alike."""
    lines = [line for line in text.splitlines() if "kvplan engine: " in line]
    lines = [line.replace("tensor_parallel_size=1", "tensor_parallel_size=2") for line in lines]
    return [f"[rank 0] {line}" for line in lines], [f"[rank 1] {line}" for line in lines]


def test_ranks_are_kept_apart(run: Run, tmp_path: Path) -> None:
    first, second = two_ranks(log_of(engine_for("llama", num_blocks=40)))
    alone = compared(run, tmp_path, "\n".join(first))
    by_turns = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert compared(run, tmp_path, by_turns) == alone
    more = by_turns.replace("[rank 1] kvplan engine: weights: planned 501,504 bytes, measured 501,504", "[rank 1] "
                            "kvplan engine: weights: planned 501,504 bytes, measured 900,000")  # fmt: skip
    assert compared(run, tmp_path, more)["weights"]["logged"] == 900_000
    ran = run("reconcile", "--log", tmp_path / "server.log", "--model", saved_model("llama"))
    assert "the ranks differ in weights (501,504 on rank 0, 900,000 on rank 1); rank 1 is compared" in ran.err
    (tmp_path / "server.log").write_text("\n".join(first))
    ran = run("reconcile", "--log", tmp_path / "server.log", "--model", saved_model("llama"))
    assert "1 of 2 ranks in the log; the others are not compared" in ran.err


def log_of_stages(partition: str | None) -> tuple[str, list[dict[str, int]]]:
    """(the log of two stages of Llama's three layers; bytes of the tensors of each, which NoWeights lays out)."""
    engine, truth = engine_for("llama"), list[dict[str, int]]()
    config = replace(engine.config, pipeline_parallel_size=2, pp_layer_partition=partition, num_blocks=40)
    text = list[str]()
    for stage in range(2):
        ranks = TensorParallel(0, 1, stage, 2)
        facts = (kernels.load("torch", "cpu"), ranks, torch.float32, torch.device("meta"), 96)
        model = StageModel(config, engine.spec, NoWeights(), *facts)
        groups = groups_on(group_layers(engine.spec, 4), model.mine)
        cache = KVCache(engine.spec, groups, 40, 4, torch.float32, torch.device("meta"), ranks)
        sizes = {
            "weights": nbytes(model.weights), "buffers": nbytes(list(model.buffers.values())),
            "kv_cache": cache.num_bytes,
        }  # fmt: skip
        truth.append(sizes)
        own = [
            arguments_line(arguments_of(engine.spec, config, "/models/llama", "0.1.0")),
            device_line("cpu", None, "torch", 1, 2**34, 0),
            *(row_line(name, 0, size) for name, size in sizes.items()),
            pool_line(40, 160),
        ]
        text += [prefix(stage, 2) + line for line in own]
    return "\n".join(text), truth


@pytest.mark.parametrize("partition", ["1,2", "1, 2", None])
def test_stages_are_planned_with_the_layers_that_each_got(partition: str | None, run: Run, tmp_path: Path) -> None:
    """Of Llama's three layers, vLLM's rule gives two to the first stage and the partition one: 1 x 4 tokens x 2 (keys
    and values) x 2 heads x 16 floats x 40 blocks for each layer less.
    """
    text, truth = log_of_stages(partition)
    rows = compared(run, tmp_path, text)
    assert {name for name in ("weights", "buffers", "kv_cache", "blocks", "tokens") if not rows[name]["exact"]} == set()
    first = "\n".join(line for line in text.splitlines() if line.startswith("[rank 0]"))
    rows = compared(run, tmp_path, first)
    assert {name: rows[name]["predicted"] for name in truth[0]} == truth[0]
    layers = 2 if partition is None else 1
    assert truth[0]["kv_cache"] == layers * 40 * 4 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("logged", "line"),
    [
        ("1;2", "log: pp_layer_partition='1;2' is not a list of counts of layers; restart"),
        ("1,3", "log has pp_layer_partition='1,3', which is not of 2 stages and 3 layers; name the model"),
    ],
)
def test_a_partition_that_cannot_be_is_one_line(logged: str, line: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(log_of_stages("1,2")[0].replace("'1,2'", f"'{logged}'"))
    ran = run("reconcile", "--log", tmp_path / "server.log", "--model", saved_model("llama"))
    assert (ran.code, line in ran.err) == (2, True), ran.err


def test_the_last_start_is_read(run: Run, tmp_path: Path) -> None:
    text = log_of(engine_for("llama", num_blocks=40))
    again = text.replace("measured 501,504", "measured 501,506")
    rows = compared(run, tmp_path, f"{text}\n{again}")
    assert rows["weights"]["logged"] == 501_506


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("log_form=1", "log_form=2"), "log has form 2 of the engine's lines; this kvplan reads form 1; read it with"),
        (("log_form=1, ", ""), "log is of kvplan's engine and has none of its arguments; restart"),
        (("block_size=4", "block_size=x"), "log: block_size='x' is not a count; restart"),
        (("gpu_memory_utilization=0.9", "gpu_memory_utilization=9"), "log: gpu_memory_utilization='9' is not"),
        (("kvplan engine: device cpu", "kvplan engine: device tpu"), "log: ends before the engine measured its memory"),
    ],
    ids=lambda value: value[1][:20] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_log_that_cannot_be_read_is_one_line(change: tuple[str, str], line: str, run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(log_of(engine_for("llama", num_blocks=40)).replace(*change))
    assert refused(run("reconcile", "--log", log, "--model", saved_model("llama"))).startswith(line)


def test_the_table_of_an_older_release_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by kvplan 0.1 before its engine's lines were read: vLLM's words above a table of bytes."""
    text = (
        f"Using max model len 96\nGPU KV cache size: 640 tokens\n{BEFORE}\nweights          501,504          501,504\n"
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert refused(run("reconcile", "--log", "-")) == (
        "log was written by kvplan's engine before its lines could be read; restart the server with this release of "
        "kvplan, and save its log or page again"
    )


@pytest.mark.parametrize("words", [("--gpu", "h100-80g"), ("--max-num-seqs", "8"), ("--engine", "vllm@0.33")], ids=str)
def test_what_the_log_states_is_not_stated_again(words: Sequence[str], run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(log_of(engine_for("llama", num_blocks=40)))
    line = refused(run("reconcile", "--log", log, "--model", saved_model("llama"), *words))
    assert line.startswith(f"{words[0]} cannot be used: the log is of kvplan's engine, which logs its own settings")


def test_a_model_that_nobody_lists_is_asked_for(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(log_of(engine_for("llama", num_blocks=40), "mine"))
    line = (
        "log: its model '/models/mine' is not one that `kvplan models` lists; add --model NAME or --config config.json"
    )
    assert refused(run("reconcile", "--log", log)) == line


def test_a_simulated_servers_log_reads_as_one(run: Run, tmp_path: Path) -> None:
    """The GPU is in it, and what is compared was never measured."""
    from kvplan.servers.vllm.log_lines import log_lines
    from tests.support.serving import planned

    answer = planned()
    log = tmp_path / "server.log"
    opening = simulated_line("vllm@0.33", answer.request.gpu.device_name, answer.request.gpu.total_memory)
    log.write_text("\n".join([opening, *log_lines(answer)]))
    ran = run("reconcile", "--log", log, "--max-error", "0.01%")
    assert ran.code == 0, ran.err
    assert "the server is simulated (vllm@0.33): its figures are its plan's own, nothing was measured" in ran.err
    assert "on h100-80g" in ran.out
    with log.open("a") as lines:
        lines.write("\nINFO:     Application startup complete.\n")
    assert run("why", log).out.startswith("The simulated server started: the log shows no failure.")


@pytest.mark.parametrize(("planned", "measured"), [(0, 0), (10**15, 1)])
def test_a_row_holds_sizes_of_any_length(planned: int, measured: int, run: Run, tmp_path: Path) -> None:
    text = log_of(engine_for("llama", num_blocks=40))
    changed = re.sub("kvplan engine: buffers: .*", row_line("buffers", planned, measured), text)
    assert compared(run, tmp_path, changed)["buffers"]["logged"] == measured


# --- a start that failed ----------------------------------------------------------------------------------------------


def why(run: Run, tmp_path: Path, *words: Any) -> dict[str, Any]:
    """What `why` finds in the output of a start that fails."""
    ran = run("serve", saved_model("llama"), "--device", "cpu", "--dtype", "float32", "--port", "0", *words)
    assert ran.code in (2, 3)
    log = tmp_path / "server.log"
    log.write_text(ran.err)
    answer = run("why", log, "--model", saved_model("llama"), "--format", "json")
    assert answer.code == 0, answer.err
    document: dict[str, Any] = answer.json
    assert document["engine"] == "kvplan"
    return document


def test_a_pool_without_room_is_cured_by_a_share_with_which_it_starts(run: Run, tmp_path: Path) -> None:
    document = why(run, tmp_path, "--gpu-memory-utilization", "0.000001", "--max-num-seqs", "4", "--ctx", "64")
    assert (document["outcome"], document["cause"]) == ("failed", "no_kv_memory")
    share = next(cure for cure in document["cures"] if cure["kind"] == "gpu_memory_utilization")
    (flag,) = share["flags"]
    config = {"gpu_memory_utilization": float(flag.split()[1]), "num_blocks": None, "max_num_seqs": 4}
    engine = engine_for("llama", **config)  # it starts
    assert engine.memory_report().num_blocks * engine.config.block_size > 64
    options = flags_of_serve()
    assert all(flag.split()[0] in options for cure in document["cures"] for flag in cure["flags"])


def flags_of_serve() -> set[str]:
    from kvplan.cli.serve_options import ServeOptions
    from kvplan.cli.typed import option_words

    return set(option_words(ServeOptions).values())


def test_a_context_beyond_the_model_is_cured_by_its_own(run: Run, tmp_path: Path) -> None:
    document = why(run, tmp_path, "--ctx", "99k")
    assert document["cause"] == "max_len_above_model"
    assert document["cures"][0]["flags"] == ["--max-model-len 512"]  # max_position_embeddings of the config
    assert document["memory_question"] is False


@pytest.mark.parametrize(
    ("line", "cause", "flags"),
    [
        # 141.1 GB in bfloat16 on two devices are 70.6 each; a float32 checkpoint of 8.03 billion parameters is 32.1.
        ("llama-3.1-70b: its weights need 131.42 GiB on cuda:0, 79.10 GiB are free", "oom_loading_weights",
         ["--tensor-parallel-size 2"]),
        ("--host ::1 --port 8000 cannot be used (Address already in use); choose another --port", "not_memory", []),
        ("KV offloading directory /kv/1 is in use by another process; name another one", "not_memory", []),
        ("model 'nosuch': not in the catalog; `kvplan models` lists those that are", "not_memory", []),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_of_serve_has_its_cause_and_its_own_remedy(
    line: str, cause: str, flags: list[str], run: Run, tmp_path: Path
) -> None:
    config = engine_for("llama", num_blocks=40).config
    stated = arguments_line(
        arguments_of(
            catalog.load("llama-3.1-70b"), replace(config, dtype="auto", max_model_len=8192), "llama-3.1-70b", "0"
        )
    )
    log = tmp_path / "server.log"
    log.write_text(f"{stated}\nkvplan: error: {line}\n")
    ran = run("why", log, "--format", "json")
    assert (ran.json["engine"], ran.json["outcome"], ran.json["cause"]) == ("kvplan", "failed", cause)
    assert [flag for cure in ran.json["cures"] for flag in cure["flags"]] == flags
    if "; " in line:
        assert ran.json["cures"][-1]["text"] == line.rpartition("; ")[2]


def test_a_start_that_did_not_fail_reads_as_one(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(log_of(engine_for("llama", num_blocks=40)))
    assert run("why", log).out.startswith("kvplan's engine started: the log shows no failure.")


def test_a_simulated_server_without_room_is_short_of_memory(run: Run, tmp_path: Path) -> None:
    """The command's own line, which `why` reads: llama-3.1-8b takes 16 GiB of KV cache for 131,072 tokens."""
    failed = run("serve", "llama-3.1-8b", "--simulate", "a10g", "--ctx", "128k")
    assert re.search(r"^kvplan: error: simulate: llama-3\.1-8b on a10g does not fit, [0-9.]+ GiB short; ", failed.err)
    log = tmp_path / "server.log"
    log.write_text(failed.err)
    document = run("why", log, "--format", "json").json
    assert (document["cause"], document["memory_question"]) == ("kv_too_small_for_max_len", True)


def test_a_stop_under_torchrun_is_no_failure(run: Run, tmp_path: Path) -> None:
    """torch 2.x distributed/elastic/multiprocessing/api.py: the launcher raises SignalException on SIGTERM."""
    log = tmp_path / "server.log"
    log.write_text(
        f"{log_of(engine_for('llama', num_blocks=40))}\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3/torch/distributed/elastic/multiprocessing/api.py", line 86, in '
        "_terminate_process_handler\n"
        '    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)\n'
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12896 got signal: 15\n"
    )
    assert run("why", log).out.startswith("kvplan's engine started: the log shows no failure.")
    assert "warning" not in run("reconcile", "--log", log, "--model", saved_model("llama")).err


def test_a_port_is_named_with_all_that_it_may_be(run: Run) -> None:
    line = refused(run("serve", "llama", "--port", "99999"))
    assert "--port must be at most 65,535 ('99999'); write a whole number from 1 to 65,535, or 0 for any free" in line


@pytest.mark.full
def test_two_ranks_of_torchrun_log_what_they_measured(run: Run, tmp_path: Path) -> None:
    """Rank 0's log alone, and both in one file: each rank's half is as planned."""
    words = two_ranks_of_llama()
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "kvplan", *words]
    both = tmp_path / "both.log"
    ranks = []
    with both.open("w") as file:
        for rank in ("0", "1"):
            own = environment_with(**group, RANK=rank, LOCAL_RANK=rank)
            ranks.append(subprocess.Popen(command, env=own, stderr=file))
        try:
            while " on http://" not in both.read_text():
                assert all(process.poll() is None for process in ranks), both.read_text()
        finally:
            for process in ranks:
                process.terminate()
                process.wait(timeout=120)
    for text in (both.read_text(), "".join(
        line for line in both.read_text().splitlines(keepends=True) if "[rank 1]" not in line
    )):  # fmt: skip
        rows = compared(run, tmp_path, text)
        assert all(rows[name]["exact"] for name in ("weights", "buffers", "kv_cache", "blocks", "tokens"))
        assert rows["weights"]["logged"] < 501_504  # of one rank


# --- memory that is not the engine's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "size"),
    [
        ([(os.getpid(), 7 << 30), (99, 2 << 30), (98, 1 << 30)], 3 << 30),
        ([(os.getpid(), 7 << 30)], 0),
        ([(99, 2 << 30)], 0),  # this process has another number there: any of these may be it
    ],
)
def test_what_other_processes_hold_is_read_from_the_driver(
    install: Install, processes: list[tuple[int, int]], size: int
) -> None:
    install(FakeGpu(used=12 << 30, compute=processes))
    assert held_by_others(torch.device("cuda:0")) == size
    assert held_by_others(torch.device("cpu")) == 0


def test_a_start_beside_other_processes_says_so_and_its_log_is_read(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    engine = engine_for("llama")
    alone = compared(run, tmp_path, log_of(engine))
    monkeypatch.setattr("kvplan.serve.real.held_by_others", lambda device: 3_000_000_000)
    (line,) = [line for line in start_log(engine) if "other processes" in line]
    assert line.endswith("other processes hold 3,000,000,000 bytes of the device, which count as outside torch")
    assert compared(run, tmp_path, log_of(engine)) == alone
