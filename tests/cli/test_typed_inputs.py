"""What people type and paste: addresses, counted GPUs, Python, lists of arguments; what is missing is named at once."""

from pathlib import Path

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu, split_count
from kvplan.models import catalog
from kvplan.models.hub import ref_of_url
from tests.support.cli import Run, refused, run

__all__ = ["run"]

PLAN = ("--gpu", "l40s", "--ctx", "8k", "--format", "json")


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("8xh100", (8, "h100")),
        ("h100x8", (8, "h100")),
        ("4090x2", (2, "4090")),
        ("p4d.24xlarge", (8, "a100-40g")),
        ("H100 x 8", (8, "H100")),
        ("l40s:2", (2, "l40s")),
        ("2 x NVIDIA A100 80GB", (2, "NVIDIA A100 80GB")),
        ("mi300x", (None, "mi300x")),  # the x is the GPU's own
        ("nopex8", (None, "nopex8")),
        ("8*h100", (8, "h100")),
        ("2x RTX 4090 24GB", (2, "RTX 4090 24GB")),
    ],
)
def test_a_gpu_and_how_many(text: str, counted: tuple[int | None, str]) -> None:
    assert split_count(text) == counted


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090 24GB", "rtx-4090"),
        ("H100 SXM 80GB", "h100-80g"),
        ("NVIDIA T4 16 GB", "t4"),
        ("mi300x 192gib", "mi300x"),
        ("h200 80GB", None),  # it has 141
        ("48GB", None),
    ],
)
def test_a_gpu_with_its_memory_behind_the_name(text: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(UsageError, match="not in the catalog"):
            gpu(text)
    else:
        assert gpu(text).name == name


@pytest.mark.parametrize(
    ("url", "ref"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("http://www.huggingface.co/Qwen/Qwen3-8B?library=vllm#use", "Qwen/Qwen3-8B"),
        ("hf.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/9c925d6", "Qwen/Qwen3-8B@9c925d6"),
        ("https://huggingface.co/Qwen/Qwen3-8B/blob/9c925d6/config.json", "Qwen/Qwen3-8B@9c925d6"),
        ("https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json", "Qwen/Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B/discussions/3", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", None),
        ("https://example.com/huggingface.co/a/b", None),
    ],
)
def test_an_address_of_the_hub_names_its_model(url: str, ref: str | None) -> None:
    assert ref_of_url(url) == ref


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://huggingface.co/datasets/openai/gsm8k", "is not a model's page"),
        ("https://huggingface.co/Qwen", "is not a model's page"),
        ("https://huggingface.co/a/b/blob/main/c-Q4_K_M.gguf", "is one file of weights; write the repository, a/b"),
    ],
)
def test_an_address_of_no_model_is_refused(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ref_of_url(url)


def test_an_address_answers_as_the_id_does(run: Run) -> None:
    pasted = run("estimate", "https://huggingface.co/Qwen/Qwen3-8B/tree/main", *PLAN).json
    assert pasted == run("estimate", "Qwen/Qwen3-8B", *PLAN).json


def test_an_address_and_a_flag_with_two_revisions_are_refused(run: Run) -> None:
    ran = run("estimate", "https://huggingface.co/Qwen/Qwen3-8B/tree/abc", "--revision", "def", "--gpu", "l40s")
    assert ran.code == 2
    assert "two revisions" in ran.err


# --- a quantization that the catalog has a checkpoint of --------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "method", "name"),
    [
        ("qwen2.5-32b", "awq", "qwen2.5-32b-awq"),
        ("qwen2.5-32b-instruct", "awq_marlin", "qwen2.5-32b-awq"),
        ("qwen2.5-32b", "gptq", None),
        ("qwen3-30b-a3b", "awq", None),  # qwen3-30b-a3b-2507-... are other weights
    ],
)
def test_the_catalogs_checkpoint_of_a_method(own: str, method: str, name: str | None) -> None:
    assert catalog.quantized(own, method) == name


def test_a_quantization_takes_the_catalogs_checkpoint_with_a_note(run: Run) -> None:
    ran = run("estimate", "qwen2.5-32b", "--quantization", "awq", *PLAN)
    assert (
        "note: --quantization awq: using qwen2.5-32b-awq (Qwen/Qwen2.5-32B-Instruct-AWQ), because qwen2.5-32b is not "
        "quantized" in ran.err
    )
    plain = run("estimate", "qwen2.5-32b-awq", "--quantization", "awq", *PLAN).json
    assert ran.json == plain
    # 31.2e9 linear parameters of 4 bits and 1.6e9 of 16 (embedding, head): some 18 GiB, not the 61 of bfloat16
    assert 17 * 2**30 < plain["memory"]["weights"] < 20 * 2**30


def test_a_hub_id_has_its_quantized_checkpoint_too_but_not_where_it_is_deployed(run: Run, tmp_path: Path) -> None:
    """`vllm serve Qwen/Qwen2.5-32B --quantization awq` does not start: for what is deployed, another model hides it."""
    ran = run("estimate", "Qwen/Qwen2.5-32B", "--quantization", "awq", *PLAN)
    assert ran.json == run("estimate", "qwen2.5-32b-awq", "--quantization", "awq", *PLAN).json
    assert "using qwen2.5-32b-awq" in ran.err
    cure = "name a quantized checkpoint, such as qwen2.5-32b-awq"
    pasted = run("estimate", "--from-command", "vllm serve Qwen/Qwen2.5-32B --quantization awq", *PLAN)
    assert (pasted.code, pasted.err.rstrip().endswith(cure)) == (2, True)
    assert "name a quantized checkpoint, such as qwen2.5-32b-awq" in refused(
        run("estimate", "qwen2.5-32b", "--quantization", "int4", *PLAN)
    )
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ntargets:\n- {id: a, model: Qwen/Qwen2.5-32B, gpu: h200, quantization: awq, rules: {fits: true}}\n"
    )
    checked = run("check", policy)
    assert (checked.code, checked.err.rstrip().endswith(cure)) == (2, True)


# --- Python ----------------------------------------------------------------------------------------------------------

SNIPPET = """\
>>> from vllm import LLM, SamplingParams
>>> MODEL = "Qwen/Qwen3-8B"
>>> llm = LLM(
...     model=MODEL,  # the chat model
...     tensor_parallel_size=2,
...     max_model_len=8 * 1024,
...     gpu_memory_utilization=0.85,
...     enforce_eager=True,
...     enable_prefix_caching=False,
...     quantization=None,
...     limit_mm_per_prompt={"image": 2},
...     trust_remote_code=True,
... )
"""
ARGS = {
    "usage": "offline", "tensor_parallel_size": 2, "max_model_len": 8192, "gpu_memory_utilization": 0.85,
    "enforce_eager": True, "enable_prefix_caching": False, "limit_mm_per_prompt": "image=2",
}  # fmt: skip


def test_a_call_of_llm_is_read_as_its_keywords() -> None:
    command = read_command(SNIPPET)
    assert (command.model, command.args) == ("Qwen/Qwen3-8B", ARGS)
    assert command.ignored == ["--trust-remote-code"]


@pytest.mark.parametrize(
    ("text", "model", "args"),
    [
        ('LLM("org/a", tensor_parallel_size=4)', "org/a", {"usage": "offline", "tensor_parallel_size": 4}),
        ('vllm.LLM(model="org/a")', "org/a", {"usage": "offline"}),
        ("python -c \"from vllm import LLM; LLM(model='org/a', max_model_len=2**13)\"", "org/a", {
            "usage": "offline", "max_model_len": 8192}),
        ('%time llm = LLM(model="org/a", enable_lora=True)', "org/a", {"usage": "offline", "max_loras": 1}),
        ('import sglang as sgl\nsgl.Engine(model_path="org/a", tp_size=2, mem_fraction_static=0.8)', "org/a", {
            "tensor_parallel_size": 2, "mem_fraction_static": 0.8}),
    ],
)  # fmt: skip
def test_engines_built_in_python_are_read(text: str, model: str, args: dict[str, object]) -> None:
    command = read_command(text)
    assert (command.model, command.args) == (model, args)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("LLM(model=path)", r"no value in the text for path \(MODEL\)"),
        ('LLM(model="a/b", tensor_parallel_size=torch.cuda.device_count())', r"device_count\(\) \(--tp\)"),
        ('LLM(model="a/b", max_model_len=9**9**9)', r"no value in the text for 9 \*\* 9 \*\* 9 \(--ctx\)"),
        ('LLM(model="a/b", max_model_len=1/0)', r"no value in the text for 1 / 0 \(--ctx\)"),
        ('LLM(model="a/b", **more)', "more is not unpacked"),
        ('LLM(model="a/b"', "no whole call"),
        ('LLM(model="a/b"); LLM(model="c/d")', "2 engines"),
        (
            'n = 1\nn = 2\nLLM(model="a/b", tensor_parallel_size=n)',
            r"no value in the text for n \(--tp\)",
        ),
        ('LLM(model="a/b", tensor_paralel_size=2)', "did you mean --tensor-parallel-size"),
        ("LLM(" + "(" * 9000, "no whole call"),
    ],
)
def test_python_that_would_have_to_run_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        read_command(text)


# --- arguments alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "python -m vllm.entrypoints.openai.api_server --model org/a --max-model-len 8192",
        "python3 -m vllm.entrypoints.openai.api_server --model=org/a --max-model-len=8192",
        "--model org/a --max-model-len 8192",
        "args:\n  - --model\n  - org/a\n  - --max-model-len=8192\n",
        'args: ["--model", "org/a", "--max-model-len", "8192"]',
        "- --model=org/a\n- --max-model-len=8192",
        '["--model", "org/a", "--max-model-len", "8192"]',
        "name: llm\nimage: registry.example/inference:1.2\nargs: [--model, org/a, --max-model-len, '8192']",
        "command: vllm serve org/a --max-model-len 8192",
        "image:\n  repository: vllm/vllm-openai\n  tag: v0.33.0\nargs: [--model, org/a, --max-model-len, '8192']\n",
        "image:\n  repository: vllm/vllm-openai\n  command: [vllm, serve, org/a, --max-model-len, '8192']\n",
    ],
)
def test_arguments_are_read_wherever_they_stand(text: str) -> None:
    command = read_command(text)
    assert (command.model, command.args) == ("org/a", {"max_model_len": 8192})


def test_an_image_of_ones_own_is_said() -> None:
    text = "image: registry.example/inference:1.2\nargs: [--model, org/a]"
    (note,) = read_command(text).notes
    assert note.text == "registry.example/inference:1.2: its arguments are read as vLLM's"
    assert read_command(text.replace("[--model", "[vllm, serve, --model")).notes == []


def test_arguments_of_sglang_alone_are_read_as_its_own() -> None:
    command = read_command('args: ["--model-path", "org/a", "--context-length", "8192"]')
    assert (command.model, command.args, command.engine) == ("org/a", {"max_model_len": 8192}, "sglang")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("args:\n  - --model\n  - {{ .Values.model }}\n", "is a template, which is not rendered"),
        ('args: ["--model", "{{ .Values.model }}"]', r"no value in the text for .* \(MODEL\)"),
        ('args: ["--model", "$(MODEL_ID)"]', r"no value in the text for \$\(MODEL_ID\) \(MODEL\)"),
    ],
)
def test_a_template_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        read_command(text)


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (("simulate",), "MODEL, --gpu, workload: missing; name a model"),
        (("simulate", "qwen3-8b"), "--gpu, workload: missing; name the GPU to simulate; give one of --trace"),
        (("recommend",), "MODEL, --users: missing; name a model"),
        (("recommend", "qwen3-8b"), "--users: missing; add the number"),
        (("check", "--init"), "MODEL, --gpu: missing; name a model"),
    ],
)
def test_all_that_is_missing_is_named_in_one_error(run: Run, argv: tuple[str, ...], names: str) -> None:
    ran = run(*argv)
    assert ran.code == 2
    assert ran.err.startswith(f"kvplan: error: {names}")


def test_every_wrong_value_of_a_load_is_named_at_once(run: Run) -> None:
    words = "--rate 0 --prompt-tokens -5 --output-tokens x --num-requests 0 --ctx 1z --seed q"
    ran = run("simulate", "llama-3.1-8b", "--gpu", "a10g", *words.split())
    flags = {line.split()[2].strip(":") for line in ran.err.splitlines()}
    assert flags == {"--rate", "--prompt-tokens", "--output-tokens", "--num-requests", "--ctx", "--seed"}


def test_a_file_in_place_of_a_command_is_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 8192"
    path.write_text(f"#!/bin/sh\n{text}\n")
    by_file = run("estimate", "--from-command", str(path), "--gpu", "l40s")
    by_text = run("estimate", "--from-command", text, "--gpu", "l40s")
    assert by_file.code == by_text.code == 0
    assert by_file.out == by_text.out
    assert f"--from-command: what stands in {path}" in by_file.err


def test_a_file_without_a_command_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    for text in (str(path), "", "model: Qwen/Qwen3-8B\n"):
        path.write_text(text)
        assert "contains no server command" in refused(run("estimate", "--from-command", str(path), "--gpu", "l40s"))
