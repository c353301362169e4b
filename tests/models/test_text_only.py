"""--text-only: the language model alone, where a tower is not wanted or cannot be sized; every answer says so."""

import json
from pathlib import Path

import pytest

from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.sizing.weights import Layout, total_weights
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

AT = ("--gpu", "h100-80g", "--ctx", "8k")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Llama-3.1-8B behind a tower that kvplan cannot size."""
    text = catalog.expand(catalog.facts("llama-3.1-8b")["config"])
    config = {"model_type": "nobodys_vlm", "architectures": ["LlavaForConditionalGeneration"], "text_config": text,
              "vision_config": {"model_type": "nobodys_tower"}}  # fmt: skip
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm" / "config.json").write_text(json.dumps(config))
    return tmp_path / "vlm"


def test_an_unsizeable_tower_is_refused_and_the_cure_named(run: Run, folder: Path) -> None:
    line = refused(run("estimate", folder, *AT))
    assert "cannot size the vision or audio tower of model_type 'nobodys_vlm'; use --text-only" in line


def test_text_only_sizes_the_language_model_and_says_so(run: Run, folder: Path) -> None:
    result = run("estimate", folder, *AT, "--text-only", "--format", "json")
    doc = json.loads(result.out)
    assert doc["memory"]["weights"] == 16_060_522_496  # vLLM 0.33's parameters of Llama-3.1-8B alone
    assert doc["inputs"]["model"]["name"] == f"{folder} (text only)"
    assert doc["inputs"]["model"]["id"] == str(folder)  # what a server is started with
    assert "warning: --text-only: the vision or audio tower is not counted" in result.err


def test_every_command_that_takes_a_model_takes_it(run: Run, folder: Path, tmp_path: Path) -> None:
    for command in ("estimate", "sweep", "recommend"):
        users = ("--users", "4") if command == "recommend" else ()
        result = run(command, folder, *AT, *users, "--text-only")
        assert result.code == 0, result.err
        assert "(text only)" in result.out
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,64,8\n1,64,8\n")
    simulated = run("simulate", folder, *AT, "--trace", trace, "--text-only")
    assert "(text only)" in simulated.out, simulated.err
    compared = run("diff", folder, "llama-3.1-8b", *AT, "--text-only")
    assert "(text only)" in compared.out, compared.err
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        f"version: 1\ntargets:\n  - id: a\n    model: {folder}\n    gpu: h100-80g\n    max_model_len: 8k\n"
        "    text_only: true\n    rules: {fits: true}\n"
    )
    checked = run("check", policy)
    assert checked.code == 0, checked.err
    assert "--text-only: the vision or audio tower is not counted" in checked.err
    written = run("check", "--init", folder, *AT, "--text-only", "-o", tmp_path / "new.policy.yaml")
    assert written.code == 0, written.err
    assert "text_only: true" in (tmp_path / "new.policy.yaml").read_text()


def test_a_catalog_model_is_planned_without_its_tower(run: Run) -> None:
    whole, text = (
        json.loads(run("estimate", "gemma-3-27b", *AT, *flag, "--format", "json").out)
        for flag in ((), ("--text-only",))
    )
    assert whole["memory"]["weights"] - text["memory"]["weights"] == 846_120_672  # what --language-model-only takes off
    assert text["inputs"]["model"]["name"] == "gemma-3-27b (text only)"
    assert text["inputs"]["model"]["id"] == "google/gemma-3-27b-it"


def test_a_model_without_a_tower_is_sized_whole_with_a_note(run: Run) -> None:
    result = run("estimate", "llama-3.1-8b", *AT, "--text-only")
    assert "llama-3.1-8b has no vision or audio tower; it is sized whole" in result.err
    assert "(text only)" not in result.out


def test_a_text_only_model_equals_its_text_config() -> None:
    config = catalog.expand(catalog.facts("gemma-3-27b")["config"])
    alone = read_config(config, "config.json", "x", text_only=True)
    inner = read_config(config["text_config"], "config.json", "x")
    assert total_weights(alone, Layout()) == total_weights(inner, Layout())
    assert (alone.layers, alone.multimodal, alone.text_only) == (inner.layers, False, True)


@pytest.mark.parametrize(("engine", "printed"), [("vllm@0.33", True), ("vllm@0.17", True), ("vllm@0.16", False)])
def test_the_command_leaves_the_tower_out_where_the_release_can(run: Run, engine: str, printed: bool) -> None:
    """vLLM has --language-model-only from 0.17 (its wheel; 0.16's config/multimodal.py lacks it)."""
    text = run("estimate", "gemma-3-27b", *AT, "--engine", engine, "--text-only", "--format", "json").json
    command = text["flags"]["command"]
    assert ("--language-model-only" in command) == printed
    if printed:
        again = run(
            "estimate", "--from-command", command, "--gpu", "h100-80g", "--engine", engine, "--format", "json"
        ).json
        assert again["memory"]["weights"] == text["memory"]["weights"]
        assert again["concurrency"]["users"] == text["concurrency"]["users"]


def test_a_tower_that_cannot_be_sized_need_not_be_where_the_command_leaves_it_out(run: Run, folder: Path) -> None:
    text = run("estimate", folder, *AT, "--text-only", "--format", "json").json
    again = run("estimate", "--from-command", text["flags"]["command"], "--gpu", "h100-80g", "--format", "json")
    assert again.json["memory"] == text["memory"]
    assert "the vision or audio tower is not counted" in again.err
