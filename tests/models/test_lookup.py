"""Which model a name stands for: folders of other machines, repositories without an owner, copies by others."""

import json
from pathlib import Path

import pytest

import kvplan
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.models import catalog
from kvplan.models.lookup import base_of, copied, in_path, relatives
from tests.support.cli import config_file


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("gemma-3-27b-it", "google/gemma-3-27b-it"),
        ("Qwen2.5-32B-Instruct-AWQ", "Qwen/Qwen2.5-32B-Instruct-AWQ"),
        ("Qwen3-Coder-30B-A3B-Instruct-FP8", "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"),
    ],
)
def test_a_repository_is_known_without_its_owner(name: str, hub_id: str) -> None:
    own = catalog.find(name)
    assert own is not None
    assert own == catalog.find(hub_id)


@pytest.mark.parametrize(
    "path",
    [
        "/mnt/llm/Qwen3-8B",
        "/mnt/llm/Qwen3-8B/",
        "/mnt/llm/Qwen3-8B/config.json",
        "/data/modelscope/Qwen/Qwen3-8B",
        "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64d72725edaf899c6cb9c377fd0709d9c5",
        "/kaggle/input/qwen-3/transformers/8b/1",
        r"D:\models\Qwen3-8B",
        "models/Qwen/Qwen3-8B",
        "$MODEL_ROOT/Qwen3-8B",
        "s3://bucket/llm/Qwen3-8B",
        "pvc://claim/Qwen3-8B",
    ],
)
def test_a_folder_of_another_machine_is_known_by_its_name(path: str) -> None:
    assert in_path(path) == "qwen3-8b"
    answer = kvplan.estimate(gpu="h100", command=f"vllm serve '{path}' --max-model-len 8192")
    assert answer.plan.request.spec.name == "qwen3-8b"
    assert any("is not on this machine; it is taken as Qwen/Qwen3-8B, by its name" in note for note in answer.notes)


@pytest.mark.parametrize("path", ["/models/my-model", "/models/qwen3-8b-merged", "/mnt/models", "/", "checkpoint-500"])
def test_another_folder_is_not_guessed(path: str) -> None:
    assert in_path(path) is None


def test_two_models_of_one_name_are_not_chosen_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "same_names", lambda last: ("qwen3-8b", "qwen3-4b"))
    with pytest.raises(UsageError, match="may be Qwen/Qwen3-8B or Qwen/Qwen3-4B"):
        in_path("/models/some-model")


def test_what_exists_here_wins(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    config_file(folder)
    spec = kvplan.estimate(str(folder), gpu="h100").plan.request.spec
    assert spec.name != "qwen3-8b"


def test_a_folder_wins_over_a_repository_without_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config_file(Path("gemma-3-27b-it"))  # Llama's config
    assert kvplan.estimate("gemma-3-27b-it", gpu="h100").plan.request.spec.model_type == "llama"


def test_the_hubs_cache_is_read_at_its_main_branch(tmp_path: Path) -> None:
    cache, commit = tmp_path / "models--org--a", "9c925d64d72725edaf899c6cb9c377fd0709d9c5"
    (cache / "snapshots" / commit).mkdir(parents=True)
    config_file(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    assert kvplan.estimate(str(cache), gpu="h100").fits


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen3-8b"),
        ("bartowski/Qwen3-8B-GGUF", "qwen3-8b"),
        ("nvidia/Qwen3-8B-NVFP4", "qwen3-8b"),
        ("org/Qwen3-8B-quantized.w4a16", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
    ],
)
def test_bits_and_formats_are_not_part_of_a_models_name(name: str, base: str) -> None:
    assert base_of(name) == base


def test_checkpoints_in_the_same_bits_come_first() -> None:
    first, *others = relatives("someone/Qwen3-8B-AWQ")
    assert first == "qwen3-8b-awq"
    assert "qwen3-8b" in others


def test_an_unquantized_copy_is_the_model_itself() -> None:
    assert copied("unsloth/Qwen3-8B") == "qwen3-8b"
    assert copied("someone/Qwen3-8B-AWQ") is None  # sized by models/copies.py, as its tool writes it
    answer = kvplan.estimate("unsloth/Qwen3-8B", gpu="h100", offline=True)
    assert any(note.endswith("it is taken as Qwen/Qwen3-8B, by its name") for note in answer.notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/Qwen3-8B-NVFP4", r"a quantized copy of a model that the catalog has as Qwen/Qwen3-8B or "),
        ("bartowski/Qwen3-8B-GGUF", r"files of a model that the catalog has as Qwen/"),
        ("/models/Qwen3-8B-4bit", r"a quantized copy of a model that the catalog has as Qwen/"),
    ],
)
def test_a_quantized_copy_is_named_for_what_it_is(name: str, words: str) -> None:
    with pytest.raises(KvplanError, match=words):
        kvplan.estimate(name, gpu="h100", offline=True)


def test_a_model_that_is_not_served_is_said_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"is a diffusion model \(images, video\) by its name"):
        kvplan.estimate("black-forest-labs/FLUX.1-dev", gpu="h100", offline=True)


# --- folders without a config.json ------------------------------------------------------------------------------------


def folder(path: Path, **files: object) -> str:
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return str(path)


def test_an_adapter_names_its_base_and_the_command_that_plans_it(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA", "r": 24}
    with pytest.raises(KvplanError, match=r"is an adapter \(LORA, rank 24\) of Qwen/Qwen3-8B") as caught:
        kvplan.estimate(folder(tmp_path, adapter_config__json=config), gpu="h100")
    assert caught.value.remedy == "run `kvplan estimate Qwen/Qwen3-8B --enable-lora --max-lora-rank 32`"
    assert kvplan.estimate("Qwen/Qwen3-8B", gpu="h100", enable_lora=True, max_lora_rank=32).fits


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model_index__json": {"_class_name": "FluxPipeline"}}, r"is a diffusion pipeline \(FluxPipeline\)"),
        ({"a__gguf": 0}, r"holds GGUF files and no config.json \(a.gguf\); run .* MODEL --weights-bytes 1`"),
        ({"trainer_state__json": {}, "optimizer__pt": 0}, "is a checkpoint of a training run"),
        ({"adapter_config__json": {"r": "many"}}, "is an adapter"),
        ({"adapter_config__json": [1]}, "adapter_config.json"),
        ({}, "no such file"),
    ],
)
def test_a_folder_without_a_config_is_named_for_what_it_holds(
    tmp_path: Path, files: dict[str, object], words: str
) -> None:
    with pytest.raises(KvplanError, match=words):
        kvplan.estimate(folder(tmp_path, **files), gpu="h100")
