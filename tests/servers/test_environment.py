"""Environment variables beside a server's command: what changes memory is planned, the rest is named, never shown."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.asked.log import environment_of
from kvplan.asked.pasted import read_command
from kvplan.asked.pasted import read_command as read_line
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.measure.serverlog.log import parse_log
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import assignments
from kvplan.servers.base import parse_engine
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words import environment
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Ran, Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import policy

SWITCH = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"

# --- where variables stand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{SWITCH}=0 vllm serve org/a",
        f"{SWITCH}='0' HF_TOKEN=x nohup python3 -m vllm.entrypoints.openai.api_server --model org/a",
        f"env -u CUDA_VISIBLE_DEVICES {SWITCH}=0 vllm serve org/a",
        f"export {SWITCH}=0\nvllm serve org/a",
        f"export {SWITCH}=0 && vllm serve org/a",
        f"{SWITCH}=0; export {SWITCH}; vllm serve org/a",
        f"sudo docker run --gpus all -e {SWITCH}=0 -e HF_TOKEN vllm/vllm-openai:v0.23.0 --model org/a",
        f"docker run --env {SWITCH}=0 vllm/vllm-openai --model org/a",
        f"podman run --env={SWITCH}=0 -v a=b:/c docker.io/vllm/vllm-openai:latest --model org/a",
        f"podman run -e={SWITCH}=0 vllm/vllm-openai --model org/a",
        f"docker run -e{SWITCH}=0 --entrypoint vllm vllm/vllm-openai serve org/a",
    ],
)
def test_a_variable_is_read_wherever_a_shell_takes_one(text: str) -> None:
    result = read_command(text)
    assert result.model == "org/a"
    assert result.environment[SWITCH] == "0"


@pytest.mark.parametrize(
    "text",
    [
        f"{SWITCH}=0 docker run vllm/vllm-openai --model org/a",  # of the client, not of the container
        f"{SWITCH}=0; vllm serve org/a",  # of the shell, not exported
        f"vllm serve org/a --served-model-name {SWITCH}=0",
        f"vllm serve org/a; export {SWITCH}=0",
    ],
)
def test_what_the_servers_process_does_not_find_is_not_read(text: str) -> None:
    assert SWITCH not in read_command(text).environment


COMPOSE_LIST = """
services:
  db: {image: "postgres:16"}
  llm:
    image: vllm/vllm-openai:v0.23.0
    environment:
      - HF_TOKEN=hf_private
      - VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0
    command: --model Qwen/Qwen3-8B --max-model-len 32768
"""
COMPOSE_MAPPING = """
services:
  llm:
    image: registry.example/vllm/vllm-openai:v0.23.0
    environment:
      VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS: 0
      HF_TOKEN:
    entrypoint: ["vllm", "serve"]
    command:
      - Qwen/Qwen3-8B
      - --max-model-len
      - 32768
"""
POD = """
apiVersion: v1
kind: Pod
spec:
  initContainers:
    - name: fetch
      image: busybox
      command: ["true"]
  containers:
    - name: server
      image: vllm/vllm-openai:v0.23.0
      command: ["/bin/sh", "-c"]
      args: ["exec vllm serve Qwen/Qwen3-8B --max-model-len 32768"]
      env:
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: hub, key: token}}
        - name: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
          value: "0"
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("docker run --env-file .env vllm/vllm-openai:v0.23.0 --model Qwen/Qwen3-8B", "--env-file"),
        ("docker run --env-file=.env vllm/vllm-openai:v0.23.0 --model Qwen/Qwen3-8B", "--env-file"),
        (COMPOSE_LIST.replace("    environment:", "    env_file: .env\n    environment:"), "env_file"),
        (POD.replace("      env:", "      envFrom: [{configMapRef: {name: settings}}]\n      env:"), "envFrom"),
    ],
)
def test_variables_in_a_file_are_not_passed_over_in_silence(run: Run, text: str, name: str) -> None:
    ran = run("estimate", "--gpu", "h100-80g", "--from-command", text)
    note = next(line for line in ran.err.splitlines() if "so ignored: " in line)
    assert name in note.partition("so ignored: ")[2].split(", ")


@pytest.mark.parametrize("text", [COMPOSE_LIST, COMPOSE_MAPPING, POD], ids=["list", "mapping", "pod"])
def test_a_containers_command_and_variables_are_read(text: str) -> None:
    result = read_command(text)
    assert (result.model, result.args["max_model_len"]) == ("Qwen/Qwen3-8B", 32768)
    assert result.engine is not None
    assert parse_engine(result.engine).number == (0, 23)
    assert result.environment[SWITCH] == "0"
    assert "HF_TOKEN" in result.environment


def test_an_sglang_pod_is_read() -> None:
    text = POD.replace("vllm/vllm-openai:v0.23.0", "lmsysorg/sglang:v0.5.9").replace(
        "vllm serve Qwen/Qwen3-8B --max-model-len 32768", "python3 -m sglang.launch_server --model-path org/a --tp 2"
    )
    result = read_command(text)
    assert (result.model, result.args, result.engine) == ("org/a", {"tensor_parallel_size": 2}, "sglang@0.5.9")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            COMPOSE_LIST.replace("vllm/vllm-openai", "redis").replace("--model ", "--name "),
            "no container in it runs a server",
        ),
        (POD + POD.replace("apiVersion", "---\napiVersion"), "2 containers run servers"),
        ("services:\n  a:\n    image: [vllm\n    command: }\n", "is not YAML"),
    ],
)
def test_a_manifest_that_says_no_one_server_is_refused(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        read_command(text)


# --- what they change -------------------------------------------------------------------------------------------------

QWEN = "Qwen/Qwen3-8B"
GPU = ("--gpu", "h100-80g", "--format", "json")


def memory(ran: Ran) -> dict[str, int]:
    rows: dict[str, int] = ran.json["memory"]
    return rows


def test_no_estimate_of_graphs_is_taken_off_the_budget(run: Run) -> None:
    # vllm-project/vllm#45178: a server went from 245,840 to 769,888 tokens with the variable alone.
    texts = [f"{start}vllm serve {QWEN}" for start in ("", f"{SWITCH}=0 ")]
    plain, without = (memory(run("estimate", "--from-command", text, *GPU)) for text in texts)
    graphs = plain["cuda_graphs"]
    assert graphs > 0
    assert without["kv_cache"] - plain["kv_cache"] == pytest.approx(graphs, abs=2 * 2**21)  # blocks of 2.25 MiB


def test_the_rest_is_named_in_one_note_without_its_values(run: Run) -> None:
    secret = "hf_" + "q" * 20
    command = f"HF_TOKEN={secret} VLLM_USE_V1=1 NCCL_DEBUG=INFO vllm serve {QWEN}"
    ran = run("estimate", "--gpu", "h100-80g", "--from-command", command)
    notes = [line for line in ran.err.splitlines() if "environment" in line]
    assert notes == [
        f"kvplan: note: environment: not modeled for {vllm.version(vllm.NEWEST).label}, so ignored: "
        "HF_TOKEN, VLLM_USE_V1, NCCL_DEBUG"
    ]
    assert secret not in ran.out + ran.err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{SWITCH}=no vllm serve {QWEN}", "is not a whole number, as vllm requires"),
        *(
            (f"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB={size} vllm serve {QWEN}", "is not a size from 1 to 999,999 MiB")
            for size in ("0", "-5", "1000000")
        ),
        (f"{SWITCH}=$OFF vllm serve {QWEN}", "its value is not in the command"),
        (f"docker run -e {SWITCH} vllm/vllm-openai:v0.23.0 --model {QWEN}", "its value is not in the command"),
    ],
)
def test_a_value_that_cannot_be_known_is_refused(run: Run, text: str, fault: str) -> None:
    assert fault in refused(run("estimate", "--gpu", "h100-80g", "--quiet", "--from-command", text))


def test_latents_that_are_switched_off_are_refused_where_a_model_has_them(run: Run) -> None:
    command = ("estimate", "--gpu", "h200", "--quiet", "--from-command")
    fault = refused(run(*command, "VLLM_MLA_DISABLE=1 vllm serve deepseek-v3 -tp 8"))
    assert "VLLM_MLA_DISABLE: 1 keeps full keys and values" in fault
    for harmless in (f"VLLM_MLA_DISABLE=1 vllm serve {QWEN}", "VLLM_MLA_DISABLE=0 vllm serve deepseek-v3 -tp 8"):
        assert run(*command, harmless).code == 0


def test_layers_dealt_by_hand_are_those_of_the_stages(run: Run) -> None:
    command = f"vllm serve {QWEN} --max-model-len 8192"
    dealt = [
        run("estimate", *GPU, "--from-command", f"VLLM_PP_LAYER_PARTITION=20,16 {command} {words}").json
        for words in ("-pp 2", "")
    ]
    usual = [run("estimate", *GPU, "--from-command", f"{command} {words}").json for words in ("-pp 2", "")]
    assert dealt[1]["memory"] == usual[1]["memory"]
    assert dealt[0]["memory"]["weights"] > usual[0]["memory"]["weights"]
    assert dealt[0]["server"]["environment"] if "environment" in dealt[0].get("server", {}) else True


def test_another_size_of_sglangs_image_cache_is_refused_where_there_are_images(run: Run) -> None:
    for size, model, code in ((0, "gemma-4-31b", 2), (100, "gemma-4-31b", 0), (0, "qwen3-8b", 0)):
        command = f"SGLANG_VLM_CACHE_SIZE_MB={size} python -m sglang.launch_server --model-path {model} --tp 2"
        assert run("estimate", "--gpu", "h100-80g", "--from-command", command).code == code


def test_sglangs_variable_is_its_flag(run: Run) -> None:
    command = "python -m sglang.launch_server --model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4"
    texts = (f"SGLANG_MAMBA_SSM_DTYPE=bfloat16 {command}", f"{command} --mamba-ssm-dtype bfloat16", command)
    plans = [run("estimate", "--from-command", text, *GPU).json for text in texts]
    assert plans[0] == plans[1]
    assert [document["inputs"]["args"].get("mamba_ssm_cache_dtype") for document in plans] == [
        "bfloat16",
        "bfloat16",
        None,
    ]


def test_a_switch_of_chunked_layers_is_refused_where_the_model_has_them() -> None:
    name, release = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", vllm.version((0, 11))
    with pytest.raises(UnsupportedModelError, match=r"layers of chunked attention.* not modeled for llama-4-scout"):
        environment.applied({name: "1"}, release, EngineArgs(), catalog.load("llama-4-scout"))
    assert environment.applied({name: "1"}, release, EngineArgs(), resolve_spec())[2] is None


# --- the printed command ----------------------------------------------------------------------------------------------


@given(st.data())
def test_a_printed_command_fed_back_is_the_same_server(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name, candidate in environment.variables().items() if candidate.sets]))
    variable = environment.variables()[name]
    known = sglang if variable.server == "sglang" else vllm
    numbers = [(0, minor) for minor in range(known.OLDEST[1], known.NEWEST[1] + 1)]
    release = known.version(
        data.draw(st.sampled_from([candidate for candidate in numbers if candidate >= variable.since]))
    )
    text = data.draw(st.sampled_from({"size": ["64", "1024"], "text": ["float32"]}.get(variable.kind, ["0", "1"])))
    spec = resolve_spec()
    version, args, note = environment.applied({name: text}, release, EngineArgs(), spec)
    assert (note is None) is variable.is_read_by(release)
    line = shlex.join([*assignments(version, args), "vllm", "serve", "org/a"])
    again, _, _ = environment.applied(read_line(line).environment, release, EngineArgs(), spec)
    assert again == version
    assert parse_engine(version.label) == version
    assert (version != release or args != EngineArgs()) <= variable.is_read_by(release)


def resolve_spec() -> ModelSpec:
    return catalog.load("qwen3-8b")


def test_what_was_said_outright_wins() -> None:
    release = parse_engine("vllm@0.9+v0")
    version, _, _ = environment.applied({"VLLM_USE_V1": "1"}, release, EngineArgs(), resolve_spec())
    assert version == release


def test_every_variable_says_what_it_does_and_who_says_so() -> None:
    for name, variable in environment.variables().items():
        own = {"llamacpp": "LLAMA_ARG_", "ollama": "OLLAMA_"}.get(variable.server, variable.server.upper())
        assert name.startswith((own, "LMCACHE_"))
        assert variable.effect
        assert variable.source.startswith(("vLLM ", "sglang ", "llama.cpp ", "Ollama ", "LMCache's documentation"))
        assert variable.until is None or variable.since < variable.until
        assert bool(variable.sets) is (variable.concerns is None)


def test_a_refused_variable_has_a_next_step() -> None:
    with pytest.raises(UnsupportedModelError, match="; remove it"):
        environment.applied(
            {"VLLM_MLA_DISABLE": "1"}, vllm.version(vllm.NEWEST), EngineArgs(), catalog.load("deepseek-v3")
        )


# --- logs -------------------------------------------------------------------------------------------------------------

V0_LOG = """\
INFO 04-20 10:00:00 [llm_engine.py:240] Initializing a V0 LLM engine (v0.8.5) with config: model='Qwen/Qwen3-8B'
INFO 04-20 10:01:00 [worker.py:267] model weights take 15.27GiB; non_torch_memory takes 0.09GiB
INFO 04-20 10:01:01 [executor_base.py:112] # cuda blocks: 7054, # CPU blocks: 1820
"""
V1_LOG = """\
INFO 06-01 10:00:02 [core.py:69] Initializing a V1 LLM engine (v0.9.2) with config: model='Qwen/Qwen3-8B'
INFO 06-01 10:00:03 [topk_topp_sampler.py:49] {line}
INFO 06-01 10:00:09 [gpu_worker.py:232] Available KV cache memory: 50.00 GiB
"""
USED = "Using FlashInfer for top-p & top-k sampling."
MISSING = (
    "WARNING FlashInfer is not available. Falling back to the PyTorch-native implementation of top-p & top-k sampling."
)
OFF = "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA graph"
ON = "CUDA graph memory profiling is enabled (default since v0.21.0). To disable, set VLLM_MEMORY_..._CUDAGRAPHS=0."


@pytest.mark.parametrize(
    ("text", "engine", "label"),
    [
        (V0_LOG, "vllm@0.8", "vllm@0.8+v0"),
        (V0_LOG.partition("\n")[2], "vllm@0.9", "vllm@0.9+v0"),  # its wordings alone
        (V0_LOG.replace("0.8.5", "0.7.3"), "vllm@0.7", "vllm@0.7"),  # which has no other engine
        (V1_LOG.format(line=USED), "vllm@0.9", "vllm@0.9+v1+flashinfer"),
        (V1_LOG.format(line=MISSING), "vllm@0.9", "vllm@0.9+v1+no-flashinfer"),
        (V1_LOG.format(line=USED), "vllm@0.23", "vllm@0.23"),  # whose sampler is the same either way
        (V1_LOG.format(line=OFF), "vllm@0.23", "vllm@0.23+no-graph-estimate"),
        (V1_LOG.format(line=ON), "vllm@0.23", "vllm@0.23"),
        (f"$ {SWITCH}=0 HF_TOKEN=x vllm serve org/a -tp 2\n" + V1_LOG, "vllm@0.23", "vllm@0.23+no-graph-estimate"),
        (f"+ docker run -e {SWITCH}='0' i vllm serve org/a\n" + V1_LOG, "vllm@0.23", "vllm@0.23+no-graph-estimate"),
    ],
)
def test_a_logs_wording_decides(text: str, engine: str, label: str) -> None:
    release = parse_engine(engine)
    logged = environment_of(parse_log(text), release)
    version, _, note = environment.applied(logged, release, EngineArgs(), resolve_spec())
    assert version.label == label
    assert note is None


def test_reconcile_says_what_the_log_decided(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(V1_LOG.format(line=MISSING), encoding="utf-8")
    ran = run("reconcile", "--log", log, "--gpu", "h100-80g", "--ctx", "8k")
    assert "sized with VLLM_USE_V1=1 VLLM_USE_FLASHINFER_SAMPLER=0, as the log or its command says" in ran.err


# --- deployments ------------------------------------------------------------------------------------------------------


def test_a_policy_keeps_what_the_environment_decided(run: Run, tmp_path: Path) -> None:
    written = tmp_path / "kvplan.yaml"
    command = f"{SWITCH}=0 vllm serve {QWEN} --max-model-len 32768"
    assert run("check", "--init", "--gpu", "h100-80g", "-o", written, "--from-command", command).code == 0
    assert "no-graph-estimate" in written.read_text(encoding="utf-8")
    assert run("check", written).code == 0


def test_a_policys_command_has_its_environment(run: Run, tmp_path: Path) -> None:
    pools = []
    for start in ("", f"{SWITCH}=0 "):
        target = f"  gpu: h100-80g\n  command: {start}vllm serve {QWEN} --max-model-len 32768\n"
        ran = run("check", policy(tmp_path, target), "--format", "json")
        assert ran.code == 0, ran.err
        pools.append(str(ran.json["targets"]))
    assert pools[0] != pools[1]
