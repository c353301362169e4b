"""vLLM's encoder budget against its own MultiModalBudget, with its own processors, and against public start-up logs.

tests/facts/encoder_budgets.jsonl: what vLLM 0.33's code answers for the catalog's models, each with the processor
settings that its published checkpoint has, for counts, sizes, steps and processor settings.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm import encoder, items, rules
from kvplan.servers.vllm.encoder import EncoderBudget
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.item_limits import Limit
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "facts/encoder_budgets.jsonl").read_text().splitlines()
]
TEXTS = ("limit_mm_per_prompt", "mm_processor_kwargs")


def args_of(args: dict[str, Any], tp: int = 1) -> EngineArgs:
    read = {name: read_argument(name, json.dumps(args[name]), name) for name in TEXTS if name in args}
    return EngineArgs(tensor_parallel_size=tp, **{**args, **read})


def budget(model: str, args: EngineArgs, engine: str = "vllm@0.33", device: str = "h100-80g") -> EncoderBudget | None:
    spec, release = catalog.load(model), parse_engine(engine)
    return encoder.budget_of(spec, rules.resolve(spec, gpu(device), args, release), args, release)


def refusal(model: str, args: EngineArgs) -> str:
    spec, release = catalog.load(model), parse_engine("vllm@0.33")
    why = encoder.refusal(spec, rules.resolve(spec, gpu("h100-80g"), args, release), args, release)
    return "" if why is None else why.text


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {json.dumps(row['args'], separators=(',', ':'))}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_budget_is_the_servers(row: dict[str, Any]) -> None:
    args = args_of(row["args"], row.get("tp", 1))
    if "error" in row:
        assert "must fit in one step of" in refusal(row["model"], args)
        return
    assert not refusal(row["model"], args)
    answer = budget(row["model"], args)
    if answer is None:
        assert (row["compute"], row["cache"], row["tokens_per_item"]) == (0, 0, {})
        return
    assert (answer.compute, answer.cache) == (row["compute"], row["cache"])
    assert {name: item.tokens for name, item in answer.items.items()} == row["tokens_per_item"]
    assert answer.per_prompt == row["items_per_prompt"]
    assert answer.per_batch == row["items_per_batch"]
    assert answer.profiled == row["profiled"]
    if "patches" in row:
        assert answer.item.patches == row["patches"]


def test_the_facts_cover_every_reader() -> None:
    kinds = {str(catalog.load(row["model"]).config["model_type"]) for row in ROWS}
    assert len({row["model"] for row in ROWS}) >= 30
    elsewhere = {"kimi_vl", "minimax_m3", "minimax_m3_vl"}  # below; in processor_files.jsonl
    alike = {"llava_llama", "qwen4_exp"}  # the same class as llava, as qwen3_5
    assert {*items.READERS} - kinds <= elsewhere | alike | {"deepseek_v41"}  # read in its code, compared with nothing


# (model, release, device, arguments) -> (tokens, items, input) of "Encoder cache will be initialized with a budget of
# ... tokens, and profiled with ... items of the maximum feature size" in public start-up logs and the texts about them.
LOGGED: list[tuple[str, str, dict[str, Any], tuple[int, int, str]]] = [
    ("gemma-3-27b", "0.10", {"max_num_batched_tokens": 8192}, (8192, 31, "image")),
    ("qwen3-vl-30b-a3b", "0.11", {"max_model_len": 65536, "tensor_parallel_size": 4}, (153_600, 1, "video")),
    ("qwen3.5-122b-a10b", "0.16", {"tensor_parallel_size": 2}, (16_384, 1, "image")),
    ("qwen3.6-35b-a3b", "0.19", {}, (16_384, 1, "image")),
    ("qwen3.8-27b", "0.27", {"max_model_len": 32768}, (16_384, 1, "image")),
    ("gemma-4-26b-a4b", "0.19", {"max_num_batched_tokens": 8192}, (8192, 3, "video")),
    ("gemma-4-26b-a4b", "0.19", {"max_num_batched_tokens": 16384}, (16_384, 6, "video")),
    (
        "gemma-4-26b-a4b", "0.33", {"max_num_batched_tokens": 8192, "limit_mm_per_prompt": "image=8,video=0"},
        (8192, 29, "image"),
    ),
    ("mistral-small-3.1-24b", "0.8", {"max_num_batched_tokens": 8192, "limit_mm_per_prompt": "image=10"},
     (8192, 3, "image")),
    ("ministral-3-3b-bf16", "0.20", {"max_num_batched_tokens": 8192, "max_model_len": 8192}, (8192, 2, "image")),
    ("llava-v1.6-mistral-7b", "0.10", {"max_num_batched_tokens": 16384}, (16_384, 5, "image")),
    ("glm-5.3-flash", "0.33", {"max_model_len": 327_680, "max_num_seqs": 2}, (32_242, 1, "video")),
    (
        "qwen2.5-vl-72b", "0.8",
        {
            "max_num_batched_tokens": 2048, "max_num_seqs": 2, "max_model_len": 8192,
            "mm_processor_kwargs": '{"max_pixels":1280,"min_pixels":256}', "tensor_parallel_size": 4,
        },
        (2048, 256, "video"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "release", "args", "logged"), LOGGED)
def test_public_logs_say_the_same(model: str, release: str, args: dict[str, Any], logged: tuple[int, int, str]) -> None:
    answer = budget(model, EngineArgs(**args), f"vllm@{release}", "h200")
    assert answer is not None
    assert (answer.tokens, answer.batch, answer.profiled) == logged


@pytest.mark.parametrize(
    ("limit", "size", "tokens"),
    [
        # (in_token_limit, width and height, vLLM 0.33's KimiVLProcessingInfo.get_num_image_tokens for them)
        (4_096, (1024, 1024), 1_089),
        (4_096, (640, 480), 414),
        (4_096, (300, 1024), 407),
        (16_384, (1024, 1024), 1_369),
        (1_024, (1024, 1024), 256),
        (1_024, (640, 480), 266),
        (1_024, (300, 1024), 270),
    ],
)
def test_kimi_vls_images_have_the_servers_tokens(limit: int, size: tuple[int, int], tokens: int) -> None:
    """Its processor is remote code, which the budget class cannot run here."""
    image = Limit(1, *size)
    processor = items.Processor(
        catalog.load("kimi-vl-a3b").config, 32_768, parse_engine("vllm@0.33"), {"image": image}, {},
        {"images_kwargs": {"in_token_limit": limit}},
    )  # fmt: skip
    assert items.kimi_vl(processor)["image"] == items.Item(tokens, 4 * tokens)


def planned(model: str, engine: str = "vllm@0.33", device: str = "h200", **args: Any) -> Plan:
    flags = EngineArgs(**{"max_model_len": 32_768, "max_num_seqs": 8, **args})
    return plan(Request(catalog.load(model), gpu(device), flags, parse_engine(engine)))


def peak(model: str, **args: Any) -> int:
    return planned(model, **args).estimates["activations"].likely


def test_smaller_images_take_a_smaller_peak() -> None:
    largest = peak("qwen3-vl-8b", max_num_batched_tokens=2048)
    bounded = peak("qwen3-vl-8b", max_num_batched_tokens=2048, mm_processor_kwargs='{"max_pixels":1003520}',
                   limit_mm_per_prompt="video=0")  # fmt: skip
    small = peak("qwen3-vl-8b", max_num_batched_tokens=2048, limit_mm_per_prompt='{"image":{"count":1,"width":512}}')
    none = peak("qwen3-vl-8b", max_num_batched_tokens=2048, language_model_only=True)
    assert none < bounded < largest
    assert none < small < largest


def test_without_profiling_nothing_is_set_aside() -> None:
    assert peak("qwen3-vl-8b", skip_mm_profiling=True) == peak("qwen3-vl-8b", language_model_only=True)


def test_ranks_that_share_the_batch_hold_a_whole_item_each() -> None:
    """One image of 65,536 patches: a rank that shares the layers holds half of their width, one that does not all."""
    shared = planned("qwen3-vl-8b", tensor_parallel_size=2).estimates["activations"]
    whole = planned("qwen3-vl-8b", tensor_parallel_size=2, mm_encoder_tp_mode="data").estimates["activations"]
    assert "65,536 patches x 8,144 elements" in shared.formula  # 1,536 + 2 x 1,152 + (4,304 + 4,304) / 2
    assert "65,536 patches x 12,448 elements" in whole.formula


def test_qwen_omnis_video_is_counted_large_and_profiled_small() -> None:
    """vLLM 0.33's own profile input at 32,768 tokens: 2 x 54 x 54 patches; the budget counts 25,088 tokens."""
    activations = planned("qwen3-omni-30b-a3b").estimates["activations"]
    assert "1 video items of 25,088 tokens" in activations.formula
    # 1,458 tokens of 2,048 x (1 + 3 deepstack layers) in bfloat16
    assert f"encoder outputs {1_458 * 8_192 * 2:,} B" in activations.formula


def test_a_sound_of_the_whole_context_is_encoded_at_once() -> None:
    """Voxtral at 8,192 tokens: 22 chunks of 30 s, 1,500 positions each; 2 x 1,280 + 2 x 5,120 elements in a layer."""
    activations = planned("voxtral-mini-3b", max_model_len=8192).estimates["activations"]
    assert "1 audio items of 8,192 tokens: 33,000 patches x 12,800 elements" in activations.formula


@pytest.mark.parametrize(("model", "first"), [("glm-4.1v-9b", "0.26"), ("qwen3-omni-30b-a3b", "0.17")])
def test_before_its_rule_a_budget_is_not_known(model: str, first: str) -> None:
    before = f"0.{int(first[2:]) - 1}"
    assert budget(model, EngineArgs(max_model_len=32768), f"vllm@{before}") is None
    assert budget(model, EngineArgs(max_model_len=32768), f"vllm@{first}") == budget(
        model, EngineArgs(max_model_len=32768)
    )


def test_an_item_larger_than_the_context_is_said_never_to_be_served(run: Run) -> None:
    command = ("estimate", "qwen3-vl-8b", "--gpu", "h200", "--ctx", "8k")
    notes = run(*command).err
    assert "the largest image takes 16,384 tokens, more than max_model_len 8,192: it can never be served" in notes
    assert "never be served" not in run(*command, "--mm-processor-kwargs", '{"max_pixels": 1003520}').err


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (
            "qwen3-vl-8b",
            {"mm_processor_kwargs": '{"num_crops":4}'},
            "--mm-processor-kwargs: num_crops: what it changes",
        ),
        ("kimi-k2.5", {"mm_processor_kwargs": '{"max_pixels":4}'}, "max_pixels: what it changes for kimi_k25"),
        ("glm-4.1v-9b", {"mm_processor_kwargs": '{"min_pixels":4}'}, "min_pixels: what it changes for glm4v"),
        ("voxtral-mini-3b", {"mm_processor_kwargs": '{"max_pixels":4}'}, "max_pixels: what it changes for voxtral"),
        (
            "qwen3-omni-30b-a3b",
            {"mm_processor_kwargs": '{"use_audio_in_video":true}'},
            "use_audio_in_video: what it changes for qwen3_omni_moe",
        ),
        ("qwen3-vl-8b", {"mm_processor_kwargs": '{"max_pixels":"4"}'}, "max_pixels is not a positive count"),
    ],
)
def test_what_cannot_be_sized_is_refused(model: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(KvplanError, match=message):
        planned(model, tensor_parallel_size=8, **args)


def test_a_step_without_room_for_a_whole_item_does_not_start(run: Run) -> None:
    command = ("estimate", "mistral-small-3.1-24b", "--gpu", "h200", "--ctx", "8k", "--max-num-batched-tokens", "2048")
    ran = run(*command, "--disable-chunked-mm-input")
    assert "the largest image has 3,025 tokens, which must fit in one step of 2,048" in ran.out
    assert "--max-num-batched-tokens 3025" in ran.out
    assert "does not start" not in run(*command).out


def test_a_processor_that_is_not_known_is_said(run: Run) -> None:
    notes = run("estimate", "minimax-m3", "--gpu", "h200", "--tp", "8", "--ctx", "8k").err
    assert "the encoder's largest batch is not known for minimax_m3 on vllm@0.33" in notes


def test_a_model_of_text_takes_the_flags_as_the_server_does(run: Run) -> None:
    command = ("estimate", "qwen3-8b", "--gpu", "h200", "--ctx", "8k", "--mm-processor-kwargs", '{"max_pixels": 4}')
    assert "nothing is changed, as no image, video or sound is served" in run(*command).err


@pytest.mark.parametrize("text", ["{", "[1]", "4", '"a"', ""])
def test_settings_that_are_no_object_are_refused(text: str, run: Run) -> None:
    ran = run("estimate", "qwen3-vl-8b", "--gpu", "h200", "--ctx", "8k", "--mm-processor-kwargs", text)
    assert ran.code == 2
    assert "--mm-processor-kwargs is not a JSON object" in ran.err


def test_the_budget_stands_in_the_document_the_screen_and_the_explanation(run: Run) -> None:
    """vLLM 0.33's own answer for Gemma 4 at 8,192 tokens a step: 3 videos of 2,496 tokens."""
    command = ("estimate", "gemma-4-31b", "--gpu", "h200", "--ctx", "32k")
    assert run(*command, "--format", "json").json["encoder"] == {
        "compute_tokens": 8192, "cache_tokens": 8192, "profiled": "video", "items_per_batch": 3,
        "tokens_per_item": {"image": 280, "video": 2496}, "items_per_prompt": {"image": 117, "video": 13},
    }  # fmt: skip
    out = run(*command, "--explain").out
    assert "profiled    3 largest videos at once" in out
    assert "= 8,192 tokens; profiled with min(8,192 / 2,496, 1,024 sequences x 13 a prompt) = 3 [exact" in out
    assert run("estimate", "qwen3-8b", *command[2:], "--format", "json").json["encoder"] is None
    skipped = run(*command, "--skip-mm-profiling", "--format", "json").json["encoder"]
    assert (skipped["compute_tokens"], skipped["items_per_batch"]) == (8192, 0)


def test_sweep_and_check_take_the_arguments(run: Run, tmp_path: Path) -> None:
    options = ("--gpu", "rtx-4090", "--ctx", "16k", "--format", "json")
    limit = ("--limit-mm-per-prompt", '{"image": {"count": 1, "width": 512, "height": 512}, "video": 0}')
    rows = [run("sweep", "qwen3.5-4b", *options, *more).json["rows"][0] for more in ((), limit)]
    assert rows[1]["kv_cache"] > rows[0]["kv_cache"]
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ntargets:\n  - id: a\n    model: mistral-small-3.1-24b\n    gpu: h200\n    max_model_len: 8k\n"
        "    max_num_batched_tokens: 2048\n    disable_chunked_mm_input: true\n    rules: {fits: true}\n"
    )
    checked = run("check", policy)
    assert checked.code == 1
    assert "the largest image has 3,025 tokens" in checked.out


# (model, release, GPU, logged GiB of weights, arguments, logged GiB for the KV cache) of public start-up logs on which
# nothing is fitted; the second log is the first with twice the videos.
POOLS: list[tuple[str, str, str, float, dict[str, Any], float]] = [
    ("gemma-4-26b-a4b", "0.19", "rtx-5090", 15.77,
     {"gpu_memory_utilization": 0.85, "max_model_len": 98_304, "max_num_seqs": 2, "max_num_batched_tokens": 8192,
      "kv_cache_dtype": "fp8_e4m3"}, 9.08),
    ("gemma-4-26b-a4b", "0.19", "rtx-5090", 15.67,
     {"gpu_memory_utilization": 0.85, "max_model_len": 256_000, "max_num_seqs": 2, "max_num_batched_tokens": 16_384,
      "kv_cache_dtype": "fp8_e4m3"}, 7.15),
    ("gemma-3-27b", "0.11", "mi300x", 51.7891,
     {"max_model_len": 4096, "max_num_seqs": 1024, "limit_mm_per_prompt": "image=2"}, 109.86),
    ("qwen3.6-35b-a3b", "0.22", "gb10", 21.93,
     {"gpu_memory_utilization": 0.85, "max_model_len": 262_144, "max_num_seqs": 4, "max_num_batched_tokens": 8192},
     73.13),
]  # fmt: skip


@pytest.mark.parametrize(("model", "release", "device", "weights", "args", "logged"), POOLS)
def test_pools_of_public_logs_are_within_a_tenth(
    model: str, release: str, device: str, weights: float, args: dict[str, Any], logged: float
) -> None:
    flags, label = EngineArgs(**args), parse_engine(f"vllm@{release}")
    answer = plan(Request(catalog.load(model), gpu(device), flags, label, weights_bytes=int(weights * 2**30)))
    assert answer.available / 2**30 == pytest.approx(logged, rel=0.1)


def test_a_log_is_compared_with_the_budget(run: Run, tmp_path: Path) -> None:
    """Gemma 3 at 8,192 tokens a step: vLLM 0.33's own answer is 32 images (tests/facts/encoder_budgets.jsonl)."""
    path = tmp_path / "server.log"
    path.write_text(
        "INFO 06-01 21:36:00 [api_server.py:1] vLLM API server version 0.22.0\n"
        "INFO 06-01 21:36:00 [utils.py:233] non-default args: {'model': 'google/gemma-3-27b-it', "
        "'max_model_len': 32768, 'max_num_seqs': 64, 'limit_mm_per_prompt': {'image': {'count': 2, 'width': 512}}, "
        "'mm_processor_kwargs': {'do_pan_and_scan': False}}\n"
        "INFO 06-01 21:40:51 [gpu_model_runner.py:6140] Encoder cache will be initialized with a budget of 8192 "
        "tokens, and profiled with 32 image items of the maximum feature size.\n"
        "INFO 06-01 21:42:18 [gpu_worker.py:469] Available KV cache memory: 15.13 GiB\n"
        "INFO 06-01 21:42:18 [kv_cache_utils.py:1733] GPU KV cache size: 32,658 tokens\n"
    )
    out = run("reconcile", "--log", path, "--gpu", "h100-80g").out
    assert "encoder_tokens      8,192      8,192           as logged       exact  predicted with 32 image items" in out
