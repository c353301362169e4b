"""llama.cpp's answers in its own words; what is placed where is compared in tests/servers/llamacpp."""

import shlex
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan.asked.pasted import parse
from kvplan.models import catalog
from kvplan.models.gguf_model import gguf_of
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.gguf_files import saved, write

# An RTX 4090 as llama.cpp's own --fit was asked about: 24,077 MiB, of which 23,600 were free.
ON_4090 = ("--engine", "llama.cpp", "--gpu", "rtx-4090", "--gpu-memory", "24077MiB")
# What it chose there (llama.cpp 0c1e57098, common_fit_params), and the layers that are then on the GPU.
CHOICES = {
    ("qwen3-32b", "Q4_K_M"): "15,616 tokens for one user, all 65 layers on the GPU",
    ("llama-3.3-70b", "Q4_K_M"): "4,096 tokens for one user, 43 of 81 layers on the GPU",
    ("llama-3.1-8b", "F16"): "64,512 tokens for one user, all 33 layers on the GPU",
    ("qwen3-30b-a3b", "Q4_K_M"): "40,960 tokens for one user, all 49 layers on the GPU",
}


@pytest.mark.parametrize(("model", "kind"), CHOICES)
def test_the_first_line_is_what_fit_chooses(run: Run, model: str, kind: str) -> None:
    ran = run("estimate", model, *ON_4090, "--quant", kind)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == f"{model} on rtx-4090 of 23.51 GiB: {CHOICES[model, kind]}"


def test_slots_share_a_cache_unless_they_are_counted(run: Run) -> None:
    shared = run("estimate", "qwen3-8b", *ON_4090, "-c", "16k").out.splitlines()
    assert shared[1] == "4 slots share 16,384 tokens: 1 user at 16,384, or 4 at 4,096."
    own = run("estimate", "qwen3-8b", *ON_4090, "-c", "16k", "-np", "4").out.splitlines()
    assert own[0].endswith("4 users at 4,096 tokens each, all 37 layers on the GPU")


def test_the_rows_of_each_place_add_up(run: Run) -> None:
    document = run("estimate", "llama-3.3-70b", *ON_4090, "--format", "json").json
    for place in document["places"]:
        assert sum(place["rows"].values()) - place["missing"] == place["total"]
    slots = document["slots"]
    assert [place["name"] for place in slots["places"]] == ["GPU 0", "host"]
    assert all(place["weights"] + place["context"] + place["compute"] == place["total"] for place in slots["places"])


COMMANDS = {
    "-m Qwen3-8B-Q4_K_M.gguf -ngl 20 -c 8192 -np 2 -ctk q8_0 -ctv q8_0 -fa 1 --jinja -t 8": {
        "gpu_layers": 20, "max_model_len": 8192, "max_num_seqs": 2, "cache_type_k": "q8_0", "cache_type_v": "q8_0",
        "flash_attn": "on", "quantization": "Q4_K_M",
    },
    "-hf unsloth/Qwen3-30B-A3B-GGUF:Q8_0 -ngl all --n-cpu-moe 12 -ub 1024 -b 4096": {
        "n_cpu_moe": 12, "micro_batch_size": 1024, "max_num_batched_tokens": 4096, "quantization": "Q8_0",
    },
    "-hf ggml-org/gpt-oss-20b-GGUF -c 0 -nkvo -kvu --swa-full -cmoe --no-op-offload": {
        "kv_offload": False, "kv_unified": True, "swa_full": True, "cpu_moe": True, "op_offload": False,
    },
    r"-hf Qwen/Qwen3-8B-GGUF -ot '\.ffn_.*=CPU' -ts 3,1 -sm layer -mg 1 --fit off": {
        "override_tensor": r"\.ffn_.*=CPU", "tensor_split": "3,1", "split_mode": "layer", "main_gpu": 1, "fit": "off",
        "tensor_parallel_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_a_pasted_command_is_read(words: str) -> None:
    command = parse(f"llama-server {words}")
    assert (command.args, command.unknown, command.refused) == (COMMANDS[words], [], {})
    assert command.engine == "llamacpp"


@pytest.mark.parametrize(
    "text",
    [
        "kubectl logs $POD -c llama-server --tail=20",
        "cmake --build build --target llama-server -j",
        "docker pull ghcr.io/ggml-org/llama.cpp:server-cuda",
    ],
)
def test_a_command_about_the_server_does_not_start_it(run: Run, text: str) -> None:
    assert "contains no server command" in refused(run("estimate", "--from-command", text, "--gpu", "rtx-4090"))


def test_an_image_and_a_compose_file_start_it(run: Run) -> None:
    image = "ghcr.io/ggml-org/llama.cpp:server-cuda"
    words = "-hf Qwen/Qwen3-8B-GGUF:Q4_K_M -c 4096"
    by_image = parse(f"docker run --gpus all -p 8080:8080 {image} {words}")
    compose = f"services:\n  llama:\n    image: {image}\n    command: {words}\n"
    assert parse(compose).args == by_image.args == {"max_model_len": 4096, "quantization": "Q4_K_M"}


def test_a_script_passes_its_parameters_on() -> None:
    text = """bash -c 'exec /app/llama-server "$@"' -- -hf Qwen/Qwen3-8B-GGUF -c 4096"""
    assert parse(text).args == {"max_model_len": 4096}


def test_variables_are_flags(run: Run) -> None:
    start = "llama-server -hf Qwen/Qwen3-8B-GGUF:Q4_K_M"
    where = ("--gpu", "rtx-4090", "--format", "json")
    by_flags = run("estimate", "--from-command", f"{start} -c 8192 -ctk q8_0 -ctv q8_0", *where).json
    variables = "LLAMA_ARG_CTX_SIZE=8192 LLAMA_ARG_CACHE_TYPE_K=q8_0 LLAMA_ARG_CACHE_TYPE_V=q8_0"
    assert run("estimate", "--from-command", f"{variables} {start}", *where).json["slots"] == by_flags["slots"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-hf Qwen/Qwen3-8B-GGUF --mmproj tower.gguf", "tower.gguf: no such file"),
        ("-hf Qwen/Qwen3-8B-GGUF --control-vector v.gguf", "--control-vector: kvplan does not size control vectors"),
        ("-hf Qwen/Qwen3-8B-GGUF -md Llama-3.2-1B-Q8_0.gguf", "llama.cpp refuses more than 128 apart"),
        ("-hf Qwen/Qwen3-8B-GGUF -md Qwen3-0.6B-Q8_0.gguf -ctkd q8_0", "-ctkd: kvplan sizes a draft"),
        ("-hf Qwen/Qwen3-8B-GGUF --spec-type draft-mtp", "the model's file has no layer for it"),
        ("-hf Qwen/Qwen3-8B-GGUF --spec-type draft-dflash", "--spec-type: draft-dflash is not sized"),
        ("-m Qwen3.6-27B-Q8_0.gguf -md Qwen3.5-0.8B-Q8_0.gguf --spec-type draft-mtp", "is a second file with"),
        ("-hf Qwen/Qwen3-8B-GGUF -ctv q8_0 -fa off", "a quantized V cache needs flash attention"),
        ("-hf Qwen/Qwen3-8B-GGUF -c many", "is not a whole number ('many')"),
        ("-hf Qwen/Qwen3-8B-GGUF --gpu-layer 5", "did you mean --gpu-layers?"),
        (r"-hf Qwen/Qwen3-8B-GGUF -ot 'ffn=CUDA3'", "names no place; write REGEX=CPU, CUDA0"),
    ],
)
def test_what_is_not_sized_is_refused_by_its_flag(run: Run, words: str, message: str) -> None:
    ran = run("estimate", "--from-command", f"llama-server {words}", "--gpu", "rtx-4090")
    assert ran.code == 2
    assert message in ran.errors[0]


def test_another_servers_argument_is_refused(run: Run) -> None:
    message = refused(run("estimate", "qwen3-8b", *ON_4090, "--gpu-memory-utilization", "0.9"))
    assert "is no argument of llama.cpp" in message


def test_a_file_is_served_as_it_is(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "Qwen3-8B-Q4_K_M.gguf", gguf_of(catalog.load("qwen3-8b")))
    by_file = run("estimate", path, *ON_4090, "-c", "16k", "--format", "json").json
    by_name = run("estimate", "qwen3-8b", *ON_4090, "-c", "16k", "--quant", "Q4_K_M", "--format", "json").json
    assert by_file["slots"] == by_name["slots"]
    ran = run("estimate", path, *ON_4090, "--quant", "Q8_0")
    assert (ran.code, "--quant Q8_0: the file is Q4_K_M" in ran.errors[0]) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-32b",),
        ("llama-3.3-70b", "-c", "8k"),
        ("qwen3-30b-a3b", "-np", "2", "-ctk", "q8_0", "-ctv", "q8_0"),
        ("gemma-3-27b", "--quant", "Q5_K_M", "--swa-full"),
    ],
)
def test_a_printed_command_is_its_plan(run: Run, words: tuple[str, ...]) -> None:
    """The file is named as the model and its type; --fit then chooses the same layers."""
    plan = run("estimate", *words, *ON_4090, "--format", "json").json
    text = shlex.join(plan["flags"]["argv"])
    where = ("--gpu", "rtx-4090", "--gpu-memory", "24077MiB", "--format", "json")
    again = run("estimate", "--from-command", text, *where)
    assert again.code == 0, again.err
    assert again.json["slots"] == plan["slots"]


def test_an_explanation_says_what_is_on_each_place(run: Run) -> None:
    ran = run("estimate", "llama-3.3-70b", *ON_4090, "-c", "8k", "--explain")
    assert ran.code == 0, ran.err
    places = run("estimate", "llama-3.3-70b", *ON_4090, "-c", "8k", "--format", "json").json["slots"]["places"]
    for place in places:
        assert f"{place['name']}: weights {place['weights']:,} B + caches {place['context']:,} B" in ran.out


def test_tables_say_how_many_layers_are_on_the_gpu(run: Run) -> None:
    assert "43 of 81 layers on the GPU" in run("estimate", "llama-3.3-70b", *ON_4090, "-c", "4k,8k").out


def test_a_smaller_type_is_named_that_keeps_all_layers_on_the_gpu(run: Run) -> None:
    """The type that is named does, and the next larger one does not."""
    ran = run("estimate", "qwen3-32b", *ON_4090, "--quant", "Q8_0", "-c", "16k")
    assert "--quant Q4_K_S (" in ran.err
    smaller = run("estimate", "qwen3-32b", *ON_4090, "--quant", "Q4_K_S", "-c", "16k")
    assert "16,384 tokens for one user, all 65 layers on the GPU" in smaller.out
    larger = run("estimate", "qwen3-32b", *ON_4090, "--quant", "Q4_K_M", "-c", "16k")
    assert "all 65 layers on the GPU" not in larger.out


def test_what_does_not_fit_says_how_much_is_missing(run: Run) -> None:
    ran = run("estimate", "llama-3.3-70b", *ON_4090, "-c", "8k", "--fit", "off")
    assert ran.code == 0
    assert "does not fit at 8,192 tokens, 18.7" in ran.out.splitlines()[0]


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_of(run: Run, *words: str) -> dict[str, Any]:
    return dict(run("estimate", *words, "--engine", "llama.cpp", "--format", "json", "-q").json["slots"]["speed"])


def test_published_speeds_of_a_3090_lie_in_the_ranges(run: Run) -> None:
    speed = speed_of(run, "llama-2-7b", "--quant", "Q4_0", "--gpu", "rtx-3090", "--ctx", "4k")
    assert speed["empty"]["low"] < 158.16 < speed["empty"]["high"]  # llama.cpp's discussion 15013
    assert speed["prompt"]["low"] < 5174.69 < speed["prompt"]["high"]
    assert speed["full"]["likely"] < speed["empty"]["likely"]


def test_layers_on_the_host_need_its_bandwidth(run: Run) -> None:
    words = ("llama-3.3-70b", "--gpu", "rtx-4090", "--ctx", "4k")
    unknown, stated = speed_of(run, *words), speed_of(run, *words, "--host-bandwidth", "90GB/s")
    assert (unknown["empty"], unknown["full"], unknown["prompt"]) == (None, None, None)
    assert "--host-bandwidth" in unknown["lacks"]
    assert 0 < stated["empty"]["low"] < stated["empty"]["high"] < 90e9 / 15e9  # 15 GB of layers are on the host


def test_one_memory_has_one_bandwidth(run: Run) -> None:
    assert speed_of(run, "qwen3-8b", "--gpu", "m4-pro-24g", "--ctx", "4k")["empty"] is not None


def adapter(path: Path, **metadata: str) -> str:
    """A file with one pair of tensors of rank 8, 64 KiB each; or a tower's, of the same bytes."""
    pair: list[tuple[str, tuple[int, ...], str]] = [
        ("blk.0.attn_q.weight.lora_a", (4096, 8), "F16"),
        ("blk.0.attn_q.weight.lora_b", (8, 4096), "F16"),
    ]
    return str(write(path, metadata, pair))


def weights_of(ran: Any) -> dict[str, int]:
    return {place["name"]: place["weights"] for place in ran.json["slots"]["places"]}


def test_an_adapter_and_a_tower_are_read_from_their_files(run: Run, tmp_path: Path) -> None:
    lora = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3"}
    adapter_file = adapter(tmp_path / "lora.gguf", **lora)
    tower = adapter(tmp_path / "mmproj.gguf", **{"general.architecture": "clip"})
    plain = weights_of(run("estimate", "qwen3-8b", *ON_4090, "-c", "8k", "--format", "json"))
    beside = run(
        "estimate", "qwen3-8b", *ON_4090, "-c", "8k", "--lora", adapter_file, "--mmproj", tower, "--format", "json"
    )
    assert weights_of(beside)["GPU 0"] - plain["GPU 0"] == 4 * 65_536  # two files of two
    command = (
        f"llama-server -hf Qwen/Qwen3-8B-GGUF -c 8192 --lora-scaled {adapter_file}:0.5 -mm {tower} --no-mmproj-offload"
    )
    pasted = weights_of(run("estimate", "--from-command", command, "--gpu", "rtx-4090", "--format", "json"))
    assert (pasted["GPU 0"] - plain["GPU 0"], pasted["host"] - plain["host"]) == (2 * 65_536, 2 * 65_536)


def test_a_draft_is_planned_and_printed(run: Run) -> None:
    """Bytes of the draft: llama.cpp's own (tests/facts/llamacpp_beside.jsonl), 633,495,552 on the GPU."""
    command = "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 16384 -md Qwen3-0.6B-Q8_0.gguf -ngld 99 --spec-type draft-simple"
    ran = run("estimate", "--from-command", command, "--gpu", "rtx-4090", "--format", "json")
    plain = run("estimate", "qwen3-8b", *ON_4090, "-c", "16k", "--format", "json")
    assert weights_of(ran)["GPU 0"] - weights_of(plain)["GPU 0"] == 633_495_552
    text = run("estimate", "--from-command", command, "--gpu", "rtx-4090").out
    serve = next(line.removeprefix("Serve  ") for line in text.splitlines() if line.startswith("Serve  "))
    assert "--model-draft Qwen3-0.6B-Q8_0.gguf --spec-type draft-simple" in serve
    again = run("estimate", "--from-command", serve, "--gpu", "rtx-4090", "--format", "json")
    assert again.json["slots"] == ran.json["slots"]


def test_layers_that_draft_are_planned_and_printed(run: Run) -> None:
    """Bytes on the GPU: llama.cpp's own (tests/facts/llamacpp_mtp.jsonl), 1,544,421,376 and 67,108,864 of caches."""
    flags = "-c 16384 -np 1 --fit off --spec-type draft-mtp --spec-draft-n-max 2"
    command = f"llama-server -m Qwen3.6-27B-Q4_K_M.gguf {flags}"
    ran = run("estimate", "--from-command", command, "--gpu", "rtx-5090", "--format", "json")
    gpu = next(place for place in ran.json["slots"]["places"] if place["name"] == "GPU 0")
    assert (gpu["weights"], gpu["context"]) == (16_084_563_968, 1_544_421_376 + 67_108_864)
    text = run("estimate", "--from-command", command, "--gpu", "rtx-5090").out
    serve = next(line.removeprefix("Serve  ") for line in text.splitlines() if line.startswith("Serve  "))
    assert "--spec-type draft-mtp" in serve
    again = run("estimate", "--from-command", serve, "--gpu", "rtx-5090", "--format", "json")
    assert again.json["slots"] == ran.json["slots"]
    hub = run("estimate", "--from-command", f"llama-server -hf unsloth/Qwen3.6-27B-GGUF {flags}", "--gpu", "rtx-5090")
    assert "llama-server loads it instead" in hub.err


def test_devices_are_counted(run: Run) -> None:
    start = "llama-server -hf Qwen/Qwen3-8B-GGUF -c 8192"
    two = run("estimate", "--from-command", f"{start} -dev CUDA0,CUDA1", "--gpu", "rtx-4090", "--format", "json")
    assert [place["name"] for place in two.json["slots"]["places"]] == ["GPU 0", "GPU 1", "host"]
    refusal = run("estimate", "--from-command", f"{start} -dev none", "--gpu", "rtx-4090")
    assert (refusal.code, "is not a list of GPUs ('none')" in refusal.errors[0]) == (2, True)


def test_an_image_that_serves_alone_needs_no_command(run: Run) -> None:
    compose = "services:\n  ollama:\n    image: ollama/ollama\n    environment: [OLLAMA_CONTEXT_LENGTH=8192]\n"
    ran = run("estimate", "qwen3-8b", "--from-command", compose, "--gpu", "rtx-4090", "--format", "json")
    by_flags = run(
        "estimate", "qwen3-8b", "--engine", "ollama", "--num-ctx", "8192", "--gpu", "rtx-4090", "--format", "json"
    )
    assert ran.json["slots"] == by_flags.json["slots"]
    other = compose.replace("ollama/ollama", "vllm/vllm-openai")  # which would serve a model of its own choice
    assert "no container in it runs a server" in refused(run("estimate", "--from-command", other, "--gpu", "rtx-4090"))


def test_python_recommends_the_types_that_the_command_does(run: Run) -> None:
    words = ("recommend", "qwen3-8b", "--users", "1", "--ctx", "8k", "--gpu", "rtx-4090", "--engine", "llama.cpp")
    answer = kvplan.recommend("qwen3-8b", users=1, max_model_len="8k", gpu="rtx-4090", engine="llama.cpp")
    assert answer.to_dict() == run(*words, "--format", "json").json
    assert answer.holds
    assert [placement["num_gpus"] for placement in answer.placements] == [1] * len(answer.to_dict()["offers"])
