"""`kvplan profile` with adapters, speculation, offloading and baselines: what they take, and what they save."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import Engine
from kvplan.documents.schema import document_schema
from kvplan.measure.rundir import ENGINE_FIGURES, RunWriter, load_run
from tests.support.cli import Ran, Run
from tests.support.cli import run as run  # the fixture
from tests.support.small_adapters import saved_adapter
from tests.support.small_engines import saved_model

SHAPE = (
    "--device", "cpu", "--dtype", "float32", "--block-size", "4", "--num-seqs", "4", "--prompt-tokens", "24",
    "--output-tokens", "8", "-q",
)  # fmt: skip


def profiled(run: Run, folder: Path, *options: str) -> tuple[Ran, dict[str, Any]]:
    """A run of a small model with weights: (what `reconcile` says as JSON, run.json, which its schema describes)."""
    done = run(
        "profile", "--weights", str(saved_model("llama")), *SHAPE, "--format", "json", "-o", str(folder), *options
    )
    assert (done.code, done.err) == (0, "")
    written = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    jsonschema.validate(written, document_schema("run"))
    return done, written


def rows_of(done: Ran) -> dict[str, dict[str, Any]]:
    return {row["component"]: row for row in done.json["rows"]}


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_the_slots_of_adapters_are_planned_to_the_byte(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = []
    submit = Engine.submit

    def noted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        submitted.append(kwargs["adapter"])
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "submit", noted)
    modules = [
        f"--lora-modules={name}={saved_adapter('llama', rank=8, seed=seed)}" for name, seed in (("x", 1), ("y", 2))
    ]
    done, written = profiled(run, tmp_path / "run", "--max-loras", "2", "--max-lora-rank", "8", *modules)
    assert submitted == ["x", "y", "x", "y"]
    row = rows_of(done)["lora"]
    assert row["predicted"] == row["measured"] == written["memory"]["lora"]
    config = written["model"]["config"]
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    queries = config["num_attention_heads"] * config["head_dim"]
    # Both matrices of q, k, v and o, of gate, up and down: inputs and outputs, at rank 8 for each of 2 slots.
    ends = (hidden + queries) + 2 * (hidden + kv) + (queries + hidden) + 2 * (hidden + wide) + (wide + hidden)
    matrices = 2 * 8 * 4 * ends * config["num_hidden_layers"]
    assert matrices <= row["measured"] < 1.1 * matrices  # the rest says whose tokens are whose
    assert (written["inputs"]["max_loras"], written["inputs"]["max_lora_rank"]) == (2, 8)
    assert written["workload"]["adapters"] == ["x", "y"]
    again = run("reconcile", str(tmp_path / "run"), "--format", "json")
    assert rows_of(again) == rows_of(done)


# --- speculation ------------------------------------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right(run: Run, tmp_path: Path) -> None:
    """Both models' weights, tables and blocks; and its greedy guesses are its own greedy tokens: all are accepted."""
    drafts = json.dumps({"model": str(saved_model("llama")), "num_speculative_tokens": 3})
    done, written = profiled(run, tmp_path / "run", "--speculative-config", drafts)
    _, alone = profiled(run, tmp_path / "alone")
    for name in ("weights", "buffers", "kv_cache"):
        row = rows_of(done)[name]
        assert row["predicted"] == row["measured"] == 2 * alone["memory"][name]
    stats = written["results"]["stats"]
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 0
    # 8 tokens are 1 of the prompt's step and 7 of steps with 3 drafts, of which each gives up to 4: 2 instead of 7.
    assert stats["num_drafts"] == 4 * 2
    assert stats["num_steps"] < alone["results"]["stats"]["num_steps"]
    assert written["engine"]["speculative_config"] == {
        "method": "draft_model", "num_speculative_tokens": 3, "model": saved_model("llama").name,
        "prompt_lookup_min": None, "prompt_lookup_max": None,
    }  # fmt: skip
    assert written["draft"]["config"] == written["model"]["config"]


def test_guesses_from_the_text_are_counted(run: Run, tmp_path: Path) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
    done, written = profiled(run, tmp_path / "run", "--speculative-config", drafts)
    for name in ("weights", "buffers", "kv_cache"):
        assert rows_of(done)[name]["error"] == 0
    stats = written["results"]["stats"]
    (saving,) = [row for row in done.json["savings"] if row["technique"] == "speculation"]
    assert (saving["saved"], saving["base"]) == (stats["num_accepted_tokens"], stats["num_draft_tokens"])
    assert 0 < stats["num_drafts"] <= stats["num_draft_tokens"] <= 2 * stats["num_drafts"]
    assert stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
    assert "draft" not in written
    assert load_run(tmp_path / "run").samples[-1]["num_draft_tokens"] == stats["num_draft_tokens"]


def test_a_pool_has_room_for_the_drafts_of_a_request_alone(run: Run, tmp_path: Path) -> None:
    """A request of 24 + 8 tokens computes 31, in 8 blocks of 4; with 3 drafts up to 34, in 9, and one block is null."""
    drafts = json.dumps({"model": str(saved_model("llama")), "num_speculative_tokens": 3})
    options = ("--ctx", "48", "--speculative-config", drafts, "--num-blocks")
    refused = run("profile", "--weights", str(saved_model("llama")), *SHAPE, *options, "9", "-o", str(tmp_path / "run"))
    assert (refused.code, len(refused.errors)) == (2, 1)
    assert "raise --num-blocks to 10" in refused.err
    _, written = profiled(run, tmp_path / "run", *options, "10")
    assert written["results"]["num_finished"] == 4


# --- beyond the device ------------------------------------------------------------------------------------------------

# 4 tokens x K and V x 2 layers: 3,072 bytes (the row `block_bytes`), in memory a page of 4,096. Of 0.001 GiB, 262 such;
# of 0.0002 GiB, 51 files of 4,096 bytes and 40 of the format's name and a hash.
TIERS = (
    "--kv-offloading-size",
    "0.001",
    "--kv-offloading-disk-size",
    "0.0002",
    "--num-blocks",
    "30",
    "--num-seqs",
    "12",
)


def test_memory_and_files_beyond_the_device_are_planned_to_the_byte(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "files"
    done, written = profiled(run, tmp_path / "run", *TIERS, "--kv-offloading-dir", str(files))
    assert {row["component"]: (row["predicted"], row["measured"]) for row in done.json["outside"]} == {
        "host_memory": (262 * 4096, 262 * 4096), "disk_space": (51 * 4136, 51 * 4136), "disk_files": (51 * 4136,) * 2,
    }  # fmt: skip
    assert sum(path.stat().st_size for path in files.rglob("*") if path.is_file()) == 51 * 4136
    assert sum(row["measured"] for row in done.json["rows"]) == done.json["reported"] + done.json["unreached"]
    assert "host_memory" not in done.json["total"]["of"]
    folder = str(tmp_path / "run")
    kinds = {
        line.split(",")[1]: line.split(",")[0] for line in run("reconcile", folder, "--format", "csv").out.splitlines()
    }
    assert (kinds["host_memory"], kinds["disk_files"]) == ("host bytes", "disk bytes")
    assert run("reconcile", folder, "--max-error", "host_memory=0.01%", "--max-error", "disk_files=0.01%").code == 0
    report = tmp_path / "report.json"
    assert run("report", folder, "-o", str(report)).code == 0
    tables = json.loads(report.read_text(encoding="utf-8"))["runs"][0]["tables"]
    assert [row["measured"] for row in tables["outside"]] == [262 * 4096, 51 * 4136, 51 * 4136]
    written["results"]["offload"]["memory"] -= 4096
    (tmp_path / "run" / "run.json").write_text(json.dumps(written), encoding="utf-8")
    off = run("reconcile", folder, "--max-error", "host_memory=0.01%")
    assert (off.code, "host_memory" in off.err) == (1, True)
    written["results"]["offload"]["memory"] = "much"
    (tmp_path / "run" / "run.json").write_text(json.dumps(written), encoding="utf-8")
    assert "results.offload must be whole numbers" in run("reconcile", folder).err


# --- what each technique saved ----------------------------------------------------------------------------------------


def test_the_savings_of_a_prefix_and_of_paging_are_those_of_arithmetic(run: Run, tmp_path: Path) -> None:
    """Of 4 prompts of 24 tokens, 3 find the 12 that the first shares with them; 60 tokens of context take 15 of the
    pool's 64 blocks: 4 of 12 requests run at once with either reserving allocator.
    """
    done, _ = profiled(run, tmp_path / "prefix", "--shared-prefix", "12")
    assert done.json["savings"] == [
        {"technique": "prefix_caching", "saved": 36, "base": 96, "unit": "tokens", "share": 36 / 96}
    ]
    pool = ("--num-seqs", "12", "--num-blocks", "65", "--ctx", "60", "--no-enable-prefix-caching")
    done, written = profiled(run, tmp_path / "run", *pool, "--baseline", "contiguous", "--baseline", "static")
    results = written["results"]
    own, others = results["densest"], [results["baseline"]["densest"], results["second_baseline"]["densest"]]
    # 64 blocks by the tokens in them, against 4 reservations of 15 blocks by theirs
    tokens = [part["num_filled_slots"] for part in (own, *others)]
    blocks = [part["num_used_blocks"] for part in (own, *others)]
    assert blocks[1:] == [60, 60]
    for row, name, filled, used in zip(
        done.json["savings"], ("contiguous", "static"), tokens[1:], blocks[1:], strict=True
    ):
        assert row["technique"] == f"paging_vs_{name}"
        assert row["base"] == 3072 * used / filled
        assert row["saved"] == row["base"] - 3072 * blocks[0] / tokens[0]
    counts = [(part["allocator"], part["most_running"]) for part in done.json["served"]]
    assert counts[1:] == [("contiguous", 4), ("static", 4)]
    assert counts[0][1] > 4
    report = tmp_path / "report.md"
    assert run("report", str(tmp_path / "run"), "-o", str(report)).code == 0
    text = report.read_text(encoding="utf-8")
    assert "contiguous ones 4 and static ones 4" in text
    assert "| paging vs static |" in text


def test_a_run_without_techniques_saves_nothing(run: Run, tmp_path: Path) -> None:
    done, written = profiled(run, tmp_path / "run", "--no-enable-prefix-caching")
    assert (done.json["savings"], done.json["outside"]) == ([], [])
    assert rows_of(done)["lora"]["measured"] == 0
    assert "max_loras" not in written["inputs"]
    assert "adapters" not in written["workload"]


def test_what_was_asked_for_and_saved_nothing_is_a_row(run: Run, tmp_path: Path) -> None:
    done, _ = profiled(run, tmp_path / "run", "--kv-offloading-size", "0.001")
    assert [(row["technique"], row["saved"], row["base"]) for row in done.json["savings"]] == [("kv_offloading", 0, 96)]


def test_a_second_baseline_cut_off_is_put_together_from_its_samples(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", {"results": {"num_finished": 7, "baseline": {"allocator": "contiguous"}}})
    writer.event(5.0, "stage", stage="second_baseline", allocator="static")
    figures = dict.fromkeys(ENGINE_FIGURES, 3)
    for name in ("baseline", "second_baseline"):
        writer.sample({"t": 6.0, "stage": name, **figures})
    writer.finish("partial")
    results = load_run(tmp_path / "run").results
    assert results["baseline"] == {"allocator": "contiguous"}
    assert (results["second_baseline"]["allocator"], results["second_baseline"]["most_running"]) == ("static", 3)


def test_a_serving_that_others_slowed_is_said_not_to_be_comparable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts what a thread waits for a processor (Documentation/scheduler/sched-stats.rst), in nanoseconds."""
    from kvplan.measure import profile as runs

    schedstat = tmp_path / "schedstat"
    monkeypatch.setattr(runs, "SCHEDSTAT", schedstat)
    schedstat.write_text("2500000000 1500000000 42\n")
    assert runs.waited_s() == 1.5
    schedstat.write_text("none\n")
    assert runs.waited_s() == 0
    profiled(run, tmp_path / "alone", "--baseline", "static")
    assert waiting(tmp_path / "alone") == []
    waited = count(0, 10**6)
    monkeypatch.setattr(runs, "waited_s", lambda: next(waited))
    profiled(run, tmp_path / "busy", "--baseline", "static")
    assert [text.partition(" allocator")[0].rpartition(" ")[2] for text in waiting(tmp_path / "busy")] == [
        "paged", "static",
    ]  # fmt: skip


def waiting(folder: Path) -> list[str]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event["text"] for event in map(json.loads, lines) if "had the processors" in event.get("text", "")]


# --- refusals ---------------------------------------------------------------------------------------------------------


NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--lora-modules", "x=X"), "there is no slot for adapters; add --enable-lora"),
        (("--enable-lora", "--lora-modules", "x"), "must be NAME=DIR"),
        (("--enable-lora", "--lora-modules", "x=nowhere"), "nowhere"),
        (
            ("--enable-lora", "--lora-modules", "x=RANK32"),
            "has rank 32, and the slots are for 16; raise --max-lora-rank",
        ),
        (("--no-enable-lora", "--max-loras", "2"), "contradicts --max-loras"),
        (("--max-loras", "1", "--max-lora-rank", "7"), "--max-lora-rank must be one of 1, 8, 16"),
        (("--speculative-config", "{"), "--speculative-config is not a JSON object"),
        (("--speculative-config", '{"method": "eagle"}'), "method must be ngram or draft_model ('eagle')"),
        (("--speculative-config", '{"eagle": 1}'), "is not a key that the bundled engine has"),
        (("--speculative-config", '{"model": "nowhere", "num_speculative_tokens": 2}'), "has no weights"),
        (("--speculative-config", NGRAM, "--kv-offloading-size", "0.01"), "--kv-offloading-size"),
        (
            ("--speculative-config", NGRAM, "--baseline", "static"),
            "--baseline static: would run without drafts: only the paged allocator takes them",
        ),
        (("--baseline", "paged"), "--baseline 'paged' must be contiguous or static"),
        (("--baseline", "static", "--baseline", "static"), "--baseline static is given twice"),
        (("--speculative-config", NGRAM, "--allocator", "static"), "needs the paged"),
        (("--server", "http://localhost:1", "--enable-lora"), "works only with the bundled engine"),
        (("--server", "http://localhost:1", "--speculative-config", NGRAM), "works only with the bundled engine"),
    ],
)
def test_what_cannot_be_profiled_is_one_line_and_leaves_no_directory(
    run: Run, tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    places = {"x=X": f"x={saved_adapter('llama')}", "x=RANK32": f"x={saved_adapter('llama', rank=32)}"}
    words = [places.get(word, word) for word in options]
    taken = () if "--server" in options else ("--weights", str(saved_model("llama")), *SHAPE)
    refused = run("profile", *taken, "-o", str(tmp_path / "run"), *words)
    assert (refused.code, len(refused.errors)) == (2, 1), refused.err
    assert complaint in refused.err
    assert not (tmp_path / "run").exists()
