"""A model's folder says how its images, videos and sounds are made: vLLM's budget follows its files.

tests/facts/processor_files.jsonl: what vLLM 0.33's MultiModalBudget answers for folders whose preprocessor_config.json,
video_preprocessor_config.json or processor_config.json differ from the published ones.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm import encoder, rules
from kvplan.servers.vllm.encoder import EncoderBudget
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "facts/processor_files.jsonl").read_text().splitlines()
]
TEXTS = ("limit_mm_per_prompt", "mm_processor_kwargs")


def folder(place: Path, model: str, files: dict[str, Any]) -> Path:
    """A model's folder: its config as the catalog has it, and the files of its processor."""
    place.mkdir(exist_ok=True)
    for name, values in {"config.json": catalog.expand(catalog.facts(model)["config"]), **files}.items():
        (place / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return place


def budget(spec: ModelSpec, args: dict[str, Any]) -> EncoderBudget | None:
    read = {name: read_argument(name, json.dumps(args[name]), name) for name in TEXTS if name in args}
    flags, release = EngineArgs(**{**args, **read}), parse_engine("vllm@0.33")
    return encoder.budget_of(spec, rules.resolve(spec, gpu("h100-80g"), flags, release), flags, release)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {json.dumps(row['files'])[:60]}")
def test_the_budget_follows_the_folders_files(tmp_path: Path, row: dict[str, Any]) -> None:
    answer = budget(load_spec(folder(tmp_path / "model", row["model"], row["files"])), row["args"])
    assert answer is not None
    assert (answer.compute, answer.cache) == (row["compute"], row["cache"])
    assert {name: item.tokens for name, item in answer.items.items()} == row["tokens_per_item"]
    assert answer.per_prompt == row["items_per_prompt"]
    assert answer.per_batch == row["items_per_batch"]
    assert answer.profiled == row["profiled"]


def test_a_video_whose_timestamps_are_tokens_is_not_sized(tmp_path: Path) -> None:
    """GLM-4.6V is of GLM-4.5V's type; its processor's name says that timestamps count, and only its tokenizer how."""
    files = {"preprocessor_config.json": {"processor_class": "Glm46VProcessor"}}
    spec = load_spec(folder(tmp_path / "model", "glm-4.5v", files))
    assert budget(spec, {"max_model_len": 32768}) is None
    still = budget(spec, {"max_model_len": 32768, "limit_mm_per_prompt": {"video": 0}})
    assert still is not None
    assert {name: item.tokens for name, item in still.items.items()} == {"image": 6084}


def test_the_facts_cover_files_of_eight_models() -> None:
    assert len({row["model"] for row in ROWS}) >= 8
    assert {name for row in ROWS for name in row["files"]} >= {
        "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    }  # fmt: skip


def test_a_folder_without_such_files_is_as_the_published_one(tmp_path: Path) -> None:
    plain = load_spec(folder(tmp_path / "model", "qwen2.5-vl-7b", {}))
    assert budget(plain, {}) == budget(catalog.load("qwen2.5-vl-7b"), {})


def test_the_path_of_a_config_means_its_folder(tmp_path: Path) -> None:
    """Servers load a folder: one named by its config.json is read with the same files. Another file is read alone."""
    place = folder(tmp_path / "model", "qwen2.5-vl-7b", {"preprocessor_config.json": {"max_pixels": 50176}})
    named, whole = load_spec(place / "config.json"), load_spec(place)
    assert budget(named, {}) == budget(whole, {})
    alone = (place / "config.json").rename(place / "published.json")
    assert budget(load_spec(alone), {}) == budget(catalog.load("qwen2.5-vl-7b"), {}) != budget(whole, {})


def test_what_cannot_be_read_is_refused_by_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"preprocessor_config\.json"):
        load_spec(folder(tmp_path / "model", "qwen2.5-vl-7b", {"preprocessor_config.json": "{"}))


@pytest.mark.parametrize("odd", [0, -3, "many", True, 1.5])
def test_odd_settings_are_refused_by_the_files_name(tmp_path: Path, odd: Any) -> None:
    spec = load_spec(folder(tmp_path / "model", "qwen2.5-vl-7b", {"preprocessor_config.json": {"max_pixels": odd}}))
    with pytest.raises(UsageError, match=r"preprocessor_config\.json: max_pixels is not a positive count"):
        budget(spec, {})


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("qwen2.5-vl-7b", {"max_pixels": 10**29}),
        ("qwen3-vl-8b", {"size": {"longest_edge": 10**18, "shortest_edge": 1}}),
        ("internvl3-8b", {"max_patches": 10**9}),
        ("llama-4-scout", {"max_patches": 10**9}),
        ("kimi-k2.5", {"media_proc_cfg": {"in_patch_limit": 10**20}}),
    ],
)
def test_a_size_beyond_all_images_is_refused_at_once(tmp_path: Path, model: str, files: dict[str, Any]) -> None:
    spec = load_spec(folder(tmp_path / "model", model, {"preprocessor_config.json": files}))
    with pytest.raises(UsageError, match="is beyond what can be sized"):
        budget(spec, {"max_model_len": 8192})


def test_estimate_of_a_folder_follows_its_files(tmp_path: Path, run: Run) -> None:
    small = folder(tmp_path / "small", "qwen2.5-vl-7b", {"preprocessor_config.json": {"max_pixels": 1_003_520}})
    large = folder(tmp_path / "large", "qwen2.5-vl-7b", {})
    options = ("--gpu", "h100-80g", "--ctx", "8k", "--limit-mm-per-prompt", "image=2,video=0")
    assert "it can never be served" in run("estimate", str(large), *options).err
    assert "it can never be served" not in run("estimate", str(small), *options).err


def test_minimax_m3_without_its_files_has_no_known_largest_item(tmp_path: Path) -> None:
    assert budget(catalog.load("minimax-m3"), {}) is None
    assert budget(load_spec(folder(tmp_path / "model", "minimax-m3", {})), {}) is None


def test_minimax_m3_with_its_pixels_as_an_argument_needs_no_files() -> None:
    """vLLM 0.33 on a folder of other files, which the argument goes before: 1,225 and 32,000 tokens."""
    settings = {"max_model_len": 32_768, "mm_processor_kwargs": {"max_pixels": 1_003_520}}
    answer = budget(catalog.load("minimax-m3"), settings)
    assert answer is not None
    assert {name: item.tokens for name, item in answer.items.items()} == {"image": 1_225, "video": 32_000}


def test_a_text_models_folder_is_not_asked_for_them(tmp_path: Path) -> None:
    assert not load_spec(folder(tmp_path / "model", "qwen3-8b", {"preprocessor_config.json": "{"})).processor
