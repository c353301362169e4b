"""Flags that switch a model's images, videos and sounds off, or spread their encoder otherwise: what weights they take.

Differences of bytes are those between vLLM 0.33's own parameters with the flag and without it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.log import flags_of
from kvplan.asked.pasted import read_command
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.measure.serverlog.log import read_log
from kvplan.models import catalog
from kvplan.models.families import towers
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

NO_IMAGES, NOTHING = "image=0", "image=0,video=0"


def planned(model: str, tp: int = 1, engine: str = "vllm", device: str = "h200", **args: Any) -> Plan:
    flags = EngineArgs(tensor_parallel_size=tp, max_model_len=8192, **args)
    return plan(Request(catalog.load(model), gpu(device), flags, parse_engine(engine)))


def difference(model: str, tp: int = 1, **args: Any) -> int:
    """What a flag adds to the weights of a rank."""
    return planned(model, tp, **args).memory.weights - planned(model, tp).memory.weights


@pytest.mark.parametrize(
    ("model", "tp", "args", "added"),
    [
        ("gemma-3-27b", 1, {"language_model_only": True}, -846_120_672),
        ("gemma-3-27b", 2, {"limit_mm_per_prompt": NO_IMAGES}, -434_840_688),
        ("qwen2.5-vl-7b", 1, {"limit_mm_per_prompt": NOTHING}, -1_353_100_288),
        ("qwen2.5-vl-7b", 2, {"limit_mm_per_prompt": NOTHING}, -678_224_128),
        ("qwen2.5-vl-7b", 2, {"limit_mm_per_prompt": NO_IMAGES}, 0),  # the tower serves videos too
        ("qwen2.5-vl-7b", 2, {"mm_encoder_tp_mode": "data"}, 674_876_160),
        ("qwen3-vl-30b-a3b", 2, {"mm_encoder_tp_mode": "data"}, 533_981_808),
        ("qwen3.5-27b", 2, {"language_model_only": True}, -465_348_976),
        ("qwen3.5-27b", 2, {"mm_encoder_tp_mode": "data"}, 456_111_216),
        ("gemma-3n-e2b", 2, {"language_model_only": True}, -1_958_764_224),
        ("gemma-3n-e2b", 2, {"limit_mm_per_prompt": NO_IMAGES}, -592_718_464),  # it goes on hearing
        ("gemma-4-e4b", 2, {"limit_mm_per_prompt": NOTHING}, -338_661_376),
        ("gemma-4-e4b", 2, {"limit_mm_per_prompt": "image=0,video=0,audio=0"}, -956_174_912),
        ("gemma-4-31b", 2, {"limit_mm_per_prompt": NO_IMAGES}, 0),
        ("gemma-4-31b", 2, {"mm_encoder_tp_mode": "data"}, 0),  # its class has no such mode, and falls back
        ("llama-4-scout", 8, {"mm_encoder_tp_mode": "data"}, 1_487_244_864),  # but for its projector
        ("llama-4-scout", 8, {"limit_mm_per_prompt": NO_IMAGES}, -219_919_808),
        ("ministral-3-3b-bf16", 2, {"language_model_only": True}, -424_931_328),
        ("mistral-small-3.1-24b", 2, {"mm_encoder_tp_mode": "data"}, 0),
        ("kimi-k2.5", 8, {"language_model_only": True}, -222_547_868),
        ("kimi-k2.5", 8, {"limit_mm_per_prompt": NOTHING}, 0),  # its inputs are called vision_chunk
        ("kimi-k2.5", 8, {"limit_mm_per_prompt": "vision_chunk=0"}, -222_547_868),
        ("kimi-k2.5", 8, {"mm_encoder_tp_mode": "data"}, 719_739_972),
        ("qwen3-8b", 1, {"language_model_only": True, "limit_mm_per_prompt": NOTHING}, 0),
    ],
)
def test_weights_change_as_the_servers_do(model: str, tp: int, args: dict[str, Any], added: int) -> None:
    assert difference(model, tp, **args) == added


def test_without_items_no_encoder_runs() -> None:
    formulas = {
        only: planned("gemma-3-27b", language_model_only=only).estimates["activations"].formula
        for only in (False, True)
    }
    assert "encoder outputs" in formulas[False]
    assert "encoder outputs" not in formulas[True]


@pytest.mark.parametrize("kind", sorted(towers.TOWERS))
def test_every_tower_says_what_it_serves(kind: str) -> None:
    assert towers.TOWERS[kind][2]
    assert set(towers.BY_DATA) <= set(towers.TOWERS)


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("--language-model-only", {"language_model_only": True}),
        ("--no-language-model-only", {"language_model_only": False}),
        ("--mm-encoder-tp-mode data", {"mm_encoder_tp_mode": "data"}),
        ("""--limit-mm-per-prompt '{"image": 0, "video": 2}'""", {"limit_mm_per_prompt": "image=0,video=2"}),
        ("--limit-mm-per-prompt image=4,video=0", {"limit_mm_per_prompt": "image=4,video=0"}),
        (
            """--limit-mm-per-prompt '{"video": {"count": 1, "num_frames": 32}, "image": {"width": 512}}'""",
            {"limit_mm_per_prompt": '{"video":{"count":1,"num_frames":32},"image":{"count":999,"width":512}}'},
        ),
        ("--limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video=0", {"limit_mm_per_prompt": "image=0,video=0"}),
        ("--limit-mm-per-prompt '{}'", {"limit_mm_per_prompt": None}),
        ("--limit-mm-per-prompt.image.count 0", {"limit_mm_per_prompt": "image=0"}),
        (
            "--limit-mm-per-prompt.video.count 1 --limit-mm-per-prompt.video.num_frames 8",
            {"limit_mm_per_prompt": '{"video":{"count":1,"num_frames":8}}'},
        ),
        (
            """--mm-processor-kwargs '{"max_pixels": 1003520, "do_resize": true}'""",
            {"mm_processor_kwargs": '{"max_pixels": 1003520, "do_resize": true}'},
        ),
        (
            "--mm-processor-kwargs.max_pixels 1003520 --mm-processor-kwargs.images_kwargs.min_pixels=256",
            {"mm_processor_kwargs": '{"max_pixels": 1003520, "images_kwargs": {"min_pixels": 256}}'},
        ),
        ("--mm-processor-kwargs '{}' --skip-mm-profiling", {"mm_processor_kwargs": "{}", "skip_mm_profiling": True}),
        ("--disable-chunked-mm-input", {"disable_chunked_mm_input": True}),
    ],
)
def test_a_pasted_command_says_them(words: str, args: dict[str, Any]) -> None:
    command = read_command(f"vllm serve google/gemma-3-27b-it {words}")
    assert command.args == args
    assert not command.ignored


def test_a_servers_log_says_them(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "INFO 11-20 10:00:00 [utils.py:3] non-default args: {'model': 'google/gemma-3-27b-it', 'max_model_len': 8192, "
        "'language_model_only': True, 'limit_mm_per_prompt': {'image': 0, 'video': 0}, 'mm_encoder_tp_mode': 'data'}\n"
        "INFO 11-20 10:00:01 [core.py:1] GPU KV cache size: 97,541 tokens\n"
    )
    flags = flags_of(read_log(str(path)))
    args = {name: read_argument(name, text, name) for name, text in flags.items()}
    assert args["language_model_only"] is True
    assert (args["limit_mm_per_prompt"], args["mm_encoder_tp_mode"]) == ("image=0,video=0", "data")


def test_a_limit_of_an_input_that_the_model_lacks_is_noted(run: Run) -> None:
    words = ("estimate", "gemma-3-27b", "--gpu", "h200", "--ctx", "8k", "--limit-mm-per-prompt")
    assert "--limit-mm-per-prompt: gemma-3-27b takes no images; its inputs are image" in run(*words, "images=0").err
    assert "takes no" not in run(*words, "image=0,video=0,audio=0").err  # as a command for many models has it


@pytest.mark.parametrize("text", ["image", "image=x", "image=-1", "{", "[1]", '{"image": "0"}', '{"image": true}', ""])
def test_a_limit_that_vllm_would_not_read_is_refused(text: str, run: Run) -> None:
    ran = run("estimate", "gemma-3-27b", "--gpu", "h200", "--ctx", "8k", "--limit-mm-per-prompt", text)
    assert ran.code == 2
    assert "--limit-mm-per-prompt is not a list of counts" in ran.err


def test_the_printed_command_reads_back_as_the_plan() -> None:
    flags: dict[str, Any] = {"limit_mm_per_prompt": "image=0,video=2", "mm_encoder_tp_mode": "data"}
    for args in ({"language_model_only": True}, flags):
        answer = planned("qwen3-vl-30b-a3b", 2, **args)
        words = serve_command(answer)
        read = read_command(" ".join(f"'{word}'" for word in words)).args
        assert {name: read[name] for name in args} == args
    assert json.loads(words[words.index("--limit-mm-per-prompt") + 1]) == {"image": 0, "video": 2}


def test_options_reach_the_plan_and_its_document(run: Run) -> None:
    words = ("estimate", "gemma-3-27b", "--gpu", "h200", "--ctx", "8k", "--format", "json")
    doc = run(*words, "--limit-mm-per-prompt", '{"image": 0}', "--mm-encoder-tp-mode", "data").json
    assert doc["inputs"]["args"]["limit_mm_per_prompt"] == "image=0"
    assert doc["inputs"]["args"]["mm_encoder_tp_mode"] == "data"
    plain = run(*words).json
    assert plain["memory"]["weights"] - doc["memory"]["weights"] == 846_120_672
    pairs = run(*words, "--engine-arg", "language_model_only=true", "--engine-arg", "limit_mm_per_prompt=image=0").json
    assert pairs["memory"]["weights"] == doc["memory"]["weights"]


@pytest.mark.parametrize(
    ("engine", "args", "message"),
    [
        (
            "vllm@0.16",
            {"language_model_only": True},
            "--language-model-only: vllm@0.16 does not support it; .* vllm@0.17",
        ),
        (
            "vllm@0.10",
            {"mm_encoder_tp_mode": "data"},
            "--mm-encoder-tp-mode data: vllm@0.10 does not support it; .* vllm@0.11",
        ),
        ("sglang", {"language_model_only": True}, "--language-model-only: SGLang has no such flag"),
        ("sglang", {"limit_mm_per_prompt": NO_IMAGES}, "--limit-mm-per-prompt: SGLang has no such flag"),
    ],
)
def test_a_server_without_the_flag_refuses_it(engine: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned("gemma-3-27b", engine=engine, **args)


def test_before_0_16_it_was_up_to_the_class_and_the_tower_is_counted() -> None:
    old = planned("gemma-3-27b", engine="vllm@0.14", limit_mm_per_prompt=NO_IMAGES)
    assert old.memory.weights == planned("gemma-3-27b", engine="vllm@0.14").memory.weights
    assert any(
        "whether vllm@0.14 skips a tower at 0 depends on the model's class; it is counted" in note for note in old.notes
    )
