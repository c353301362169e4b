"""Fixes pass one gate: the kind of cause, the log's own numbers and the server's settings allow them."""

from typing import Any

from kvplan.asked.form import Form
from kvplan.documents.diagnosis import diagnosis_document
from kvplan.measure.why import diagnose

BANNER = "INFO 11-20 10:00:00 [api_server.py:1755] vLLM API server version 0.23.0"
ARGS = "INFO [utils.py:233] non-default args: {{'model_tag': '{0}', 'model': '{0}', 'port': 8011{1}}}"
TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 14.56 GiB of which 112.00 MiB is free."  # noqa: E501


def answer(*lines: str, **options: Any) -> dict[str, Any]:
    return dict(diagnosis_document(diagnose(Form(options), lines)))


def flags(document: dict[str, Any]) -> list[str]:
    return [" ".join(cure["flags"]) for cure in document["cures"]]


def test_no_plan_of_memory_is_a_fix_of_a_port() -> None:
    port = "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8011): address already in use"
    document = answer(BANNER, ARGS.format("Qwen/Qwen3-8B", ""), port, gpu=["l40s"])
    assert flags(document) == ["--port 8012", ""]


def test_a_fraction_is_above_what_the_weights_alone_take() -> None:
    """125.65 / (125.65 + 12.25) = 0.9112; the server asks for 0.9113."""
    loaded = "Load weight end. quant=fp8, fmt=e4m3, avail mem=12.25 GB, mem usage=125.65 GB."
    error = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88."
    advice = "Raise --mem-fraction-static to at least 0.9113."
    assert flags(answer(loaded, error, advice))[0] == "--mem-fraction-static 0.92"
    assert flags(answer(loaded, error))[0] == "--mem-fraction-static 0.92"


def test_a_pool_of_fixed_size_is_raised_itself() -> None:
    """4.26 GiB are rounded to two decimals: up to 4.265, which are 4,368 MiB."""
    fixed = (
        "INFO [gpu_worker.py:492] reserved 4.25 GiB memory for KV Cache as specified by kv_cache_memory_bytes config"
    )
    error = (
        "ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (4.25 GiB). Based on the available memory, "
        "the estimated maximum model length is 99840."
    )
    printed = flags(answer(BANNER, fixed, error))
    assert printed[:2] == [f"--kv-cache-memory-bytes {4368 * 2**20}", "--max-model-len 99840"]
    assert not any("utilization" in flag for flag in printed)


def test_a_model_of_text_has_no_images_to_limit_and_a_quantized_checkpoint_comes_before_gpus() -> None:
    loaded = "INFO [gpu_model_runner.py:1] Model loading took 14.19 GiB and 30.0 seconds"
    frame = '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 6430, in profile_run'
    document = answer(
        BANNER.replace("0.23.0", "0.12.0"),
        ARGS.format("Qwen/Qwen2.5-7B-Instruct", ", 'dtype': 'half', 'max_model_len': 8192"),
        loaded,
        frame,
        TORCH,
        gpu=["t4"],
    )
    kinds = [cure["kind"] for cure in document["cures"]]
    assert "limit_mm_per_prompt" not in kinds
    assert kinds.index("quantization") < kinds.index("tensor_parallel_size")
    assert "Qwen2.5-7B-Instruct-AWQ" in document["cures"][kinds.index("quantization")]["text"]


def test_what_the_log_names_as_the_reason_comes_first() -> None:
    free = (
        "ValueError: Free memory on device (54.34/79.18 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    document = answer(BANNER, ARGS.format("Qwen/Qwen3-8B", ""), free, gpu=["a100-80g"])
    assert "24.84 GiB" in document["cures"][0]["text"]  # 79.18 - 54.34
    assert document["cures"][1]["command"].endswith("--port 8011 --gpu-memory-utilization 0.68")


def test_a_gpu_that_shares_the_host_s_memory_wants_its_page_cache_freed() -> None:
    document = answer(BANNER, "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)")
    assert [("page cache" in cure["text"], "container" in cure["text"]) for cure in document["cures"]] == [
        (True, False)
    ]


def test_which_side_is_too_old_follows_from_the_gpu() -> None:
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    assert "newer image" in answer(BANNER, error, gpu=["rtx-5090"])["cures"][0]["text"]
    assert "older release" in answer(BANNER, error, gpu=["t4"])["cures"][0]["text"]
    assert "no kernels for this GPU" in answer(BANNER, error)["summary"]


def test_a_container_s_limit_is_named_with_the_weights() -> None:
    described = [
        "Reason:       OOMKilled",
        "Exit Code:    137",
        "Limits:",
        "  memory:          16Gi",
        "  nvidia.com/gpu:  1",
    ]
    document = answer(*described, "INFO [model_runner.py:1] Model loading took 61.03 GiB and 3 seconds")
    assert "16.00 GiB, and weights of 61.03 GiB" in document["cures"][0]["text"]
