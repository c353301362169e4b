"""A pasted server command is read as in vLLM; what would give a wrong answer is refused."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import parse, read_command
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.servers.sglang import command as sglang_command
from kvplan.servers.sglang.arguments import NO_EFFECT as SGLANG_NO_EFFECT
from kvplan.servers.sglang.arguments import OTHERS as SGLANG_OTHERS
from kvplan.servers.sglang.arguments import REFUSED as SGLANG_REFUSED
from kvplan.servers.vllm.arguments import NO_EFFECT, OTHERS, REFUSED
from kvplan.servers.vllm.command import ARGUMENT_NAMES
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, EngineArgs
from kvplan.servers.words.command import ServeCommand, read_pair
from kvplan.servers.words.standing import others

FACTS = Path(__file__).parents[1] / "facts"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def test_every_engine_argument_can_be_said() -> None:
    assert set(ARGUMENTS) == {field.name for field in fields(EngineArgs)}


@pytest.mark.parametrize("lists", [(NO_EFFECT, REFUSED), (SGLANG_NO_EFFECT, SGLANG_REFUSED)])
def test_no_flag_stands_in_two_lists(lists: tuple[dict[str, str], ...]) -> None:
    names = [name.partition("=")[0].rstrip("!") for flags in lists for text in flags.values() for name in text.split()]
    assert len(names) == len(set(names))


def test_a_flag_that_is_an_argument_of_the_table_is_no_other() -> None:
    listed = {"the HTTP server": "host max_num_seqs max_running_requests"}
    assert others("vllm", listed, {}, {}).keys() == {"host", "max_running_requests"}
    assert others("sglang", listed, {}, {}).keys() == {"host", "max_num_seqs"}
    assert not ARGUMENT_NAMES & OTHERS.keys()
    assert not sglang_command.NAMES.keys() & SGLANG_OTHERS.keys()


@pytest.mark.parametrize(
    ("text", "model", "args"),
    [
        (f"vllm serve {MODEL}", MODEL, {}),
        (f"vllm serve {MODEL} --max-model-len 32k", MODEL, {"max_model_len": 32_000}),  # vLLM: k is 1000
        (f"vllm serve {MODEL} --max-model-len=32K", MODEL, {"max_model_len": 32_768}),  # and K 1024
        (f"vllm serve {MODEL} --max-model-len 25.6k", MODEL, {"max_model_len": 25_600}),
        (f"vllm serve {MODEL} --max-model-len -1", MODEL, {"max_model_len": "auto"}),
        (f"vllm serve {MODEL} --max-model-len auto", MODEL, {"max_model_len": "auto"}),
        (f"vllm serve {MODEL} --kv-cache-memory-bytes 20G", MODEL, {"kv_cache_memory_bytes": 20 * 2**30}),
        (f"vllm serve {MODEL} --kv-cache-memory-bytes 20g", MODEL, {"kv_cache_memory_bytes": 20 * 10**9}),
        (f"vllm serve {MODEL} --max-num-batched-tokens 8k", MODEL, {"max_num_batched_tokens": 8_000}),
        (f"vllm serve {MODEL} -tp 4 -pp 2 -dp 3", MODEL, {
            "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3}),
        (f"vllm serve {MODEL} --tensor_parallel_size 4 -q awq", MODEL, {
            "tensor_parallel_size": 4, "quantization": "awq"}),
        (f"vllm serve {MODEL} -tp=4", MODEL, {"tensor_parallel_size": 4}),
        (f"vllm serve {MODEL} --no-enable-prefix-caching --enforce-eager", MODEL, {
            "enable_prefix_caching": False, "enforce_eager": True}),
        (f"vllm serve {MODEL} --no-async-scheduling -ep", MODEL, {
            "async_scheduling": False, "enable_expert_parallel": True}),
        (f"vllm serve {MODEL} --gpu-memory-utilization 0.95 --kv-cache-dtype fp8", MODEL, {
            "gpu_memory_utilization": 0.95, "kv_cache_dtype": "fp8"}),
        (f"vllm serve {MODEL} --kv-offloading-size 32", MODEL, {"kv_offloading_size": 32 * 2**30}),
        (f"vllm serve {MODEL} --enable-lora", MODEL, {"max_loras": 1}),  # vLLM's default
        (f"vllm serve {MODEL} --enable-lora --max-loras 4 --max-lora-rank 64", MODEL, {
            "max_loras": 4, "max_lora_rank": 64}),
        (f"vllm serve {MODEL} --max-loras 4", MODEL, {}),  # nothing is reserved without --enable-lora
        (f"CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V1=1 vllm serve {MODEL} -tp 2", MODEL, {"tensor_parallel_size": 2}),
        (f"nohup /opt/venv/bin/vllm serve {MODEL} -tp 2 > log.txt 2>&1 &", MODEL, {"tensor_parallel_size": 2}),
        (f"vllm serve {MODEL} \\\n  --tensor-parallel-size 2 \\\r\n  --enforce-eager", MODEL, {
            "tensor_parallel_size": 2, "enforce_eager": True}),
        (f"python -m vllm.entrypoints.openai.api_server --model {MODEL} -tp 2", MODEL, {"tensor_parallel_size": 2}),
        (f"python3 -m vllm.entrypoints.openai.api_server --model={MODEL}", MODEL, {}),
        (f"vllm bench throughput --model {MODEL} --input-len 100", MODEL, {"usage": "offline"}),
        (f"vllm serve --trust-remote-code {MODEL}", MODEL, {}),  # a switch takes no value
        (f"vllm serve {MODEL} --served-model-name a b c --max-num-seqs 64", MODEL, {"max_num_seqs": 64}),
        (f"vllm serve '{MODEL}' --override-generation-config '{{\"max_new_tokens\": 4096}}'", MODEL, {}),
        (f"vllm serve {MODEL} --cpu-offload-gb 0", MODEL, {"cpu_offload_gb": 0}),
        (f"vllm serve {MODEL} --max-cudagraph-capture-size 64", MODEL, {"max_cudagraph_capture_size": 64}),
        (f"vllm serve {MODEL} -cc.max_cudagraph_capture_size=64", MODEL, {"max_cudagraph_capture_size": 64}),
        (f"vllm serve {MODEL} -cc '{{\"mode\": 3, \"max_cudagraph_capture_size\": 8}}'", MODEL, {
            "max_cudagraph_capture_size": 8, "compilation_config": '{"mode": 3}'}),
        (f"vllm serve {MODEL} --performance-mode throughput", MODEL, {"performance_mode": "throughput"}),
        (f"vllm serve {MODEL} --async-scheduling", MODEL, {"async_scheduling": True}),
        # a line of a shell, of which one command starts the server
        (f"export X=1 && vllm serve {MODEL} -tp 2", MODEL, {"tensor_parallel_size": 2}),
        (f"cd /opt/x && vllm serve {MODEL} -tp 2 | tee log.txt", MODEL, {"tensor_parallel_size": 2}),
        (f"export X=1; vllm serve {MODEL} -tp 2; echo done", MODEL, {"tensor_parallel_size": 2}),
        (f"ray start --head --port 6379 && vllm serve {MODEL} -pp 2", MODEL, {"pipeline_parallel_size": 2}),
        (f"vllm serve {MODEL} -tp 2  # two GPUs, don't use one", MODEL, {"tensor_parallel_size": 2}),
        (f"# on two GPUs\nvllm serve {MODEL} -tp 2", MODEL, {"tensor_parallel_size": 2}),
        (f"vllm serve {MODEL} --chat-template 'a # b' -tp 2", MODEL, {"tensor_parallel_size": 2}),  # no comment
        (f"vllm serve {MODEL} --chat-template a#b -tp 2", MODEL, {"tensor_parallel_size": 2}),  # likewise
    ],
)  # fmt: skip
def test_a_command_is_read(text: str, model: str, args: dict[str, Any]) -> None:
    command = read_command(text)
    assert (command.model, command.args) == (model, args)


def test_an_image_names_the_release_and_what_stands_before_it_is_of_no_account() -> None:
    command = read_command(
        "docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface "
        '--env "HF_TOKEN=hf_secret" -p 8000:8000 --ipc=host --name vllm vllm/vllm-openai:v0.11.2 '
        f"--model {MODEL} --max-model-len 16384 --api-key sk-secret"
    )
    assert command == ServeCommand(
        model=MODEL, engine="vllm@0.11.2", args={"max_model_len": 16384}, ignored=["--api-key"],
        environment={"HF_TOKEN": None},
    )  # fmt: skip


@pytest.mark.parametrize("image", ["vllm/vllm-openai:latest", "hub.local:5000/team/vllm-openai", "vllm/vllm-openai"])
def test_an_image_without_a_release_names_none(image: str) -> None:
    command = read_command(f"sudo docker run --rm -it {image} {MODEL} -tp 2")
    assert (command.engine, command.model, command.args) == (None, MODEL, {"tensor_parallel_size": 2})


def test_a_number_that_kvplan_itself_would_read_differently_is_noted() -> None:
    (note,) = read_command(f"vllm serve {MODEL} --max-model-len 32k").readings
    assert note.of("command") == "command --max-model-len 32k is 32,000 as in vLLM; 32K would be binary"
    assert read_command(f"vllm serve {MODEL} --max-model-len 32768").readings == []


def test_flags_of_no_account_are_listed_without_their_values() -> None:
    command = read_command(f"vllm serve {MODEL} --port 8000 --api-key sk-123 --chat-template ./x.jinja --enable-foo")
    assert command.ignored == ["--port", "--api-key", "--chat-template"]
    assert command.unknown == ["--enable-foo"]
    assert "sk-123" not in repr(command)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--load-format tensorizer", "--load-format: may store other weights than the checkpoint's"),
        ("--sleep-mode-backend vmm", "--sleep-mode-backend: releases and reclaims GPU memory at run time"),
        ("--mm-ipc-gpu-memory-gb 2", "--mm-ipc-gpu-memory-gb keeps images' tensors in GPU memory"),
    ],
)
def test_a_flag_that_moves_bytes_is_refused_by_name(flags: str, fault: str) -> None:
    with pytest.raises(UsageError, match=f"^--from-command {fault}.*; remove it|name a quantized"):
        read_command(f"vllm serve {MODEL} {flags}")
    assert parse(f"vllm serve {MODEL} {flags}").refused  # a log's command is read all the same


@pytest.mark.parametrize(
    "flags",
    [
        "-O3", "-O2", "--load-format auto", "--mm-ipc-gpu-memory-gb 0",
        "--no-enable-return-routed-experts", "--num-redundant-experts 0",
    ],
)  # fmt: skip
def test_a_flag_that_says_what_is_so_by_default_is_taken(flags: str) -> None:
    assert read_command(f"vllm serve {MODEL} {flags}").args == {}


@pytest.mark.parametrize(
    ("flags", "args"),
    [
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": False}),
        ("--disable-chunked-prefill", {"enable_chunked_prefill": False}),
        ("--device-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
        ("--dcp-kv-cache-interleave-size 8", {"cp_kv_cache_interleave_size": 8}),
        ("-ac.backend=FLASHINFER", {"attention_backend": "FLASHINFER"}),
        (
            """--attention-config '{"backend": "FLASH_ATTN", "flash_attn_version": 3}'""",
            {"attention_backend": "FLASH_ATTN"},
        ),
    ],
)
def test_the_pairs_of_switches_of_newer_releases_are_read(flags: str, args: dict[str, Any]) -> None:
    """vLLM 0.33's own parser has --disable-X for --enable-X, and the other way round."""
    assert read_command(f"vllm serve {MODEL} {flags}").args == args


@pytest.mark.parametrize(
    "flags",
    [
        """--compilation-config '{"cudagraph_mode": "NONE"}'""",
        """--compilation-config '{"level": 0}'""",
        """-cc '{"use_cudagraph": false}'""",
        "--compilation-config 0",
        "--compilation-config.cudagraph_mode NONE",
        "-cc.cudagraph_mode=none",
        "-O0",
        "-O 0",
        "-O.cudagraph_mode=NONE",
        "--optimization-level 0",
        "--cudagraph-mode NONE",
    ],
)
def test_a_command_without_cuda_graphs_is_sized_without_them(flags: str) -> None:
    command = read_command(f"vllm serve {MODEL} {flags}")
    assert command.args == {"enforce_eager": True}
    assert "--enforce-eager" in command.notes[0].text


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("--compilation-config.mode 3", {"mode": 3}),
        (
            """-cc '{"cudagraph_mode": "FULL_AND_PIECEWISE", "custom_ops": ["all"]}'""",
            {"cudagraph_mode": "FULL_AND_PIECEWISE", "custom_ops": ["all"]},
        ),
        (
            """--compilation-config '{"mode": 0, "custom_ops": ["none"], "cache_dir": null}'""",
            {"mode": 0, "custom_ops": ["none"]},
        ),
        ("--compilation-config.cudagraph_mode FULL_DECODE_ONLY", {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        ("""-cc '{"level": 0, "cudagraph_mode": "FULL"}'""", {"cudagraph_mode": "FULL"}),  # it wins over the level
        ("-O0 -cc.cudagraph_mode=FULL", {"cudagraph_mode": "FULL"}),
        ("-O1", {"cudagraph_mode": "PIECEWISE"}),  # vLLM 0.33 config/vllm.py (OPTIMIZATION_LEVEL_01)
        ("""-cc '{"cudagraph_capture_sizes": [1, 2, 4]}'""", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("--cudagraph-capture-sizes 4 2 1 --port 80", {"cudagraph_capture_sizes": [4, 2, 1]}),
    ],
)
def test_what_is_compiled_and_captured_is_one_config(flags: str, config: dict[str, Any]) -> None:
    command = read_command(f"vllm serve {MODEL} {flags}")
    assert json.loads(command.args.pop("compilation_config")) == config
    assert command.args == {}


@pytest.mark.parametrize(
    ("flags", "draft", "tokens"),
    [
        ('--speculative-config \'{"model": "org/small", "num_speculative_tokens": 5}\'', "org/small", 5),
        ("--speculative-config.model org/small --speculative-config.num_speculative_tokens 5", "org/small", 5),
        ("--speculative-model org/small --num-speculative-tokens 5", "org/small", 5),
    ],
)
def test_a_draft_model_is_read(flags: str, draft: str | None, tokens: int) -> None:
    command = read_command(f"vllm serve {MODEL} {flags}")
    assert (command.draft_model, command.args) == (draft, {"num_speculative_tokens": tokens})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "contains no server command"),
        ("ls -la", "contains no server command"),
        ("vllm chat", "contains no server command"),
        ("docker run nginx", "contains no server command"),
        (f"vllm serve {MODEL} --max-modle-len 32k", "did you mean --max-model-len"),
        (f"vllm serve {MODEL} --tensor-paralel-size 2", "did you mean --tensor-parallel-size"),
        (f"vllm serve {MODEL} --tp 2", "--tp is not a flag of vLLM; did you mean --tensor-parallel-size"),
        (f"vllm serve {MODEL} --max-model-len", "needs one value"),
        (f"vllm serve {MODEL} --max-model-len 32kb", "is not a number that vLLM accepts"),
        (f"vllm serve {MODEL} --gpu-memory-utilization 1.2", r"must be greater than 0 and at most 1"),
        (f"vllm serve {MODEL} --enforce-eager=true", "takes no value"),
        (f"vllm serve {MODEL} other", "has an argument without a flag"),
        (f"vllm serve {MODEL} --no-such-flag 3", "^--from-command --no-such-flag is not a flag that kvplan knows"),
        (f"vllm serve {MODEL} --no-enable-prefix-caching 3", r"has an argument without a flag \('3'\)"),
        (f"vllm serve {MODEL} --port 1 --no-enforce-eager 3", "has an argument without a flag"),
        (f"vllm serve {MODEL} --served-model-name 'x", "quotes do not match"),
        ("vllm serve $MODEL", r"no value in the text for \$MODEL \(MODEL\)"),
        (f"vllm serve {MODEL} -tp $(nproc)", r"no value in the text for \$\(nproc\) \(--tp\)"),
        (f"vllm serve {MODEL} -tp 4096", "must be at most 1,024"),
        (f"vllm serve {MODEL} --cpu-offload-params mlp", "not modeled"),
        (f"vllm serve {MODEL} --config serve.yaml", "a file of more flags"),
        (f'vllm serve {MODEL} --model-class-overrides \'{{"A": "b"}}\'', "replaces the model's class"),
        (f"vllm serve {MODEL} --hf-overrides nonsense", "JSON"),
        (f"vllm serve {MODEL} --speculative-config nonsense", "not a JSON object"),
        (f"vllm serve {MODEL} --performance-mode fast", "not one of balanced, interactivity, throughput"),
        (f"vllm serve {MODEL} --kv-cache-memory-bytes 16", "implausibly small"),
        (f"vllm serve {MODEL} --compilation-config nonsense", "not a JSON object"),
        (f"cd /opt && echo {MODEL}", "contains no server command"),
        (f"vllm serve {MODEL} --served-model-name {'a ' * 32768}", "is longer than 65,536 characters"),
        (f"# vllm serve {MODEL}\ntrue", "contains no server command"),
    ],
)
def test_a_command_that_would_be_misread_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        read_command(text)
    assert "\n" not in str(caught.value)


def test_each_fault_of_a_command_is_one_error() -> None:
    with pytest.raises(UsageError) as caught:
        read_command(f"vllm serve {MODEL} --kv-cache-dtyp fp8")
    assert [error.problem.partition(" (")[0] for error in caught.value.all] == ["is ambiguous to vLLM"]
    with pytest.raises(UsageError) as caught:
        read_command(f"vllm serve {MODEL} --kv-cache-dtype fp7 --max-num-seqs lots")
    assert [error.subject for error in caught.value.all] == ["--kv-cache-dtype 'fp7'", "--from-command --max-num-seqs"]


ABBREVIATED = [json.loads(line) for line in (FACTS / "abbreviated_flags.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ABBREVIATED, ids=lambda row: row["words"][0])
def test_a_flag_is_abbreviated_as_vllm_takes_it(row: dict[str, Any]) -> None:
    text = f"vllm serve {MODEL} {shlex.join(row['words'])}"
    if "refused" in row:
        with pytest.raises(UsageError, match=re.escape(row["words"][0])):
            read_command(text)
        return
    command = read_command(text)
    assert (sorted(command.args), command.unknown) == (row["sets"], [])


@pytest.mark.parametrize("method", ["custom_class", "extract_hidden_states", "medusa"])
def test_a_method_that_is_not_sized_is_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=method):
        read_command(f'vllm serve {MODEL} --speculative-config \'{{"method": "{method}"}}\'')


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_model_len=32k", "max_model_len", 32_768),  # kvplan's own reading
        ("max-model-len=-1", "max_model_len", "auto"),
        ("tp=4", "tensor_parallel_size", 4),
        ("--block-size=32", "block_size", 32),
        ("async_scheduling=false", "async_scheduling", False),
        ("kv_offloading_size=1.5", "kv_offloading_size", 3 * 2**29),
        ("usage=offline", "usage", "offline"),
    ],
)
def test_an_engine_argument_is_read(text: str, name: str, value: object) -> None:
    assert read_pair(text) == (name, value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("block_size", "has no value"),
        ("blok_size=32", "did you mean block_size"),
        ("port=8000", "is not an engine argument that kvplan models"),
        ("async_scheduling=yes", "neither true nor false"),
        ("usage=batch", "not one of server, offline"),
        ("dtype=", "is not a name"),
        ("block_size=\x1b[31m", "not a whole number"),
    ],
)
def test_an_engine_argument_that_cannot_be_read_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        read_pair(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("text", ["", " ", "0", "-1", "nan", "1e999", "9" * 400, "\0", "[/x]", "32", "true"])
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    for vllm in (False, True):
        message = ""
        try:
            read_argument(name, text, "--x", vllm=vllm)
        except KvplanError as error:
            message = str(error)
        assert message == "" or message.isprintable()


def test_a_command_of_unknown_flags_is_no_vllm_command() -> None:
    flags = [f"--zz{number}" for number in range(300)]
    assert len(read_command(f"vllm serve x {' '.join(flags[:200])}").unknown) == 200
    message = r"--zz200 is one of more than 200 flags .*; is it the command of a server"
    with pytest.raises(UsageError, match=message) as refused:
        read_command(f"vllm serve x {' '.join(flags)}")
    assert len(refused.value.all) == 1  # the others say no more


SCRIPT = f"vllm serve {MODEL} --max-num-seqs 64"
IMAGE = "vllm/vllm-openai:v0.11.2"


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (f"docker run --gpus all {IMAGE} bash -c '{SCRIPT}'", "vllm@0.11.2"),
        (f"docker run --gpus all {IMAGE} /bin/bash -lc 'cd /srv && {SCRIPT} > log.txt 2>&1'", "vllm@0.11.2"),
        (f"docker run --gpus all {IMAGE} sh -c 'pip install x; exec {SCRIPT}'", "vllm@0.11.2"),
        (f"docker run --entrypoint bash {IMAGE} -c '{SCRIPT}'", "vllm@0.11.2"),
        (f"docker run --entrypoint=/bin/sh {IMAGE} -c '{SCRIPT}'", "vllm@0.11.2"),
        (f"docker run --entrypoint vllm {IMAGE} serve {MODEL} --max-num-seqs 64", "vllm@0.11.2"),
        (f"docker run --entrypoint python3 {IMAGE} -m vllm.entrypoints.openai.api_server --model {MODEL} "
         "--max-num-seqs 64", "vllm@0.11.2"),
        (f"docker run {IMAGE} vllm serve {MODEL} --max-num-seqs 64", "vllm@0.11.2"),
        (f"docker run pytorch/pytorch:2.9 bash -euo pipefail -c 'pip install vllm && {SCRIPT}'", None),
        (f"srun bash -c \"bash -lc '{SCRIPT}'\"", None),
        (f"nohup bash -c '{SCRIPT}' &", None),
    ],
)  # fmt: skip
def test_a_script_that_a_shell_is_handed_is_read(text: str, engine: str | None) -> None:
    command = read_command(text)
    assert (command.model, command.args, command.engine) == (MODEL, {"max_num_seqs": 64}, engine)


def test_what_a_container_and_its_script_set_is_read_together() -> None:
    settings = "-e VLLM_USE_V1=1 -e HF_TOKEN=hf_secret --env-file .env"
    command = read_command(f"docker run {settings} {IMAGE} bash -c 'export VLLM_USE_V2_MODEL_RUNNER=0; {SCRIPT}'")
    assert command.environment == {
        "VLLM_USE_V1": "1", "HF_TOKEN": None, "--env-file": None, "VLLM_USE_V2_MODEL_RUNNER": "0",
    }  # fmt: skip


def test_a_script_starts_sglang_as_well() -> None:
    script = f"python3 -m sglang.launch_server --model-path {MODEL} --tp 2"
    command = read_command(f"docker run --gpus all lmsysorg/sglang:v0.5.9 bash -c '{script}'")
    assert (command.model, command.engine) == (MODEL, "sglang@0.5.9")
    assert command.args == {"tensor_parallel_size": 2}


@pytest.mark.parametrize("words", ["bash", "/bin/bash start.sh", "bash -c 'echo nothing'"])
def test_a_shell_without_a_server_is_no_model(words: str) -> None:
    with pytest.raises(UsageError, match=r"contains no server command|not a server"):
        read_command(f"docker run {IMAGE} {words}")


# Images whose tags somebody else counts: tags as hub.docker.com and catalog.ngc.nvidia.com list them.
TAGS = [
    ("vllm/vllm-openai:v0.11.0", "vllm@0.11.0", ""),
    ("vllm/vllm-openai:v0.19.0-cu130", "vllm@0.19.0", ""),
    ("vllm/vllm-openai:v0.11.0@sha256:" + "0" * 64, "vllm@0.11.0", ""),
    ("public.ecr.aws/deep-learning-containers/vllm:0.15.1-gpu-py312-cu129", "vllm@0.15.1", ""),
    ("rocm/vllm:rocm6.4.1_vllm_0.10.1_20250909", "vllm@0.10.1", ""),
    ("rocm/vllm:rocm7.0.0_vllm_0.11.1_20251103", "vllm@0.11.1", ""),
    ("rocm/vllm:rocm6.3.1_mi300_ubuntu22.04_py3.12_vllm_0.6.6", "vllm@0.6.6", ""),
    ("rocm/vllm:rocm7.2_preview", None, "is ROCm's"),
    ("lmcache/vllm-openai:v0.3.9", None, "is LMCache's"),
    ("docker.io/lmcache/vllm-openai:2025-09-16-v0.3.6", None, "is LMCache's"),
    ("nvcr.io/nvidia/vllm:25.09-py3", None, "is the container's own"),
]


@pytest.mark.parametrize(("image", "label", "note"), TAGS)
def test_an_image_says_the_release_of_the_server_alone_whose_tag_it_has(
    image: str, label: str | None, note: str
) -> None:
    command = read_command(f"docker run --gpus all {image} --model {MODEL}")
    assert (command.model, command.engine) == (MODEL, label)
    assert [note in remark.text for remark in command.notes] == [True] * bool(note)


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("lmsysorg/sglang:v0.5.9-cu129", "sglang@0.5.9"),
        ("lmsysorg/sglang:v0.4.6.post1-rocm630", "sglang@0.4.6"),
        ("rocm/sgl-dev:v0.5.5.post3-rocm700-mi35x-20251113", "sglang@0.5.5"),
        ("lmsysorg/sglang:latest", "sglang"),
    ],
)
def test_sglangs_images_name_its_release(image: str, label: str) -> None:
    command = read_command(f"docker run --gpus all {image} python3 -m sglang.launch_server --model-path {MODEL}")
    assert command.engine == label
