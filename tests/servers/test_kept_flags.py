"""A printed command repeats the pasted one's flags that move no memory, and plans the same when it is pasted again."""

import json
import shlex
from pathlib import Path

import pytest

from kvplan.servers.base import SERVERS, server_of
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[1] / "facts"
PARSERS = {
    row["server"]: {*row["flags"], *row.get("frontend_flags", ())}
    for row in map(json.loads, (FACTS / "server_arguments.jsonl").read_text("utf-8").splitlines())
}
SERVED = {
    "vllm": "vllm serve Qwen/Qwen3-8B --max-model-len 8192",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --context-length 8192",
    "llamacpp": "llama-server --hf-repo Qwen/Qwen3-8B-GGUF:Q4_K_M --ctx-size 8192",
    "ollama": "ollama run qwen3:8b --num-ctx 8192",
}


def printed(run: Run, text: str) -> str:
    ran = run("estimate", "--from-command", text, "--gpu", "h100-80g", "--format", "json")
    assert ran.code == 0, ran.err
    command: str = ran.json["flags"]["command"]
    return command


@pytest.mark.parametrize("server", sorted(PARSERS.keys() & SERVERS.keys()))
def test_the_newest_release_takes_every_flag_that_is_repeated(server: str) -> None:
    _, others = server_of(server).pasted().flags
    repeated = [name for name, other in others.items() if other.is_kept and (other.usual or not other.is_refused)]
    assert len(repeated) > 100
    assert [name for name in repeated if f"--{name.replace('_', '-')}" not in PARSERS[server]] == []


@pytest.mark.parametrize(
    ("server", "flags"),
    [
        ("vllm", "--served-model-name chat chat-8b --port 8080 --enable-auto-tool-choice --tool-call-parser hermes"),
        ("vllm", "--structured-outputs-config.backend xgrammar --no-enable-log-requests --load-format auto"),
        ("vllm", """--chat-template-content-format string --generation-config 'my folder'"""),
        ("vllm", """--port 80 --attention-config '{"flash_attn_version": 3}'"""),
        ("sglang", "--served-model-name chat --port 30001 --tool-call-parser qwen25 --reasoning-parser qwen3"),
        ("llamacpp", "--alias chat --port 8081 --jinja --temp 0.6 -t 8"),
    ],
)
def test_names_ports_and_parsers_are_repeated_and_paste_back(run: Run, server: str, flags: str) -> None:
    command = printed(run, f"{SERVED[server]} {flags}")
    words = shlex.split(flags)
    assert shlex.split(command)[-len(words) :] == words
    assert printed(run, command) == command


def test_keys_of_a_speculative_config_are_repeated(run: Run) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    command = printed(run, f"{SERVED['vllm']} --speculative-config {shlex.quote(json.dumps(config))}")
    assert json.loads(shlex.split(command)[-1]) == config
    assert printed(run, command) == command


def test_secrets_variables_and_other_servers_flags_are_not_repeated(run: Run) -> None:
    assert "s3cret" not in printed(run, f"{SERVED['vllm']} --api-key s3cret --hf-token s3cret --port 80")
    assert "--port" not in printed(run, f"{SERVED['vllm']} --port $PORT")
    assert "swap" not in printed(run, f"{SERVED['vllm']} --swap-space 4")  # gone in vLLM 0.33
    words = ("estimate", "--from-command", f"{SERVED['vllm']} --port 80", "--gpu", "h100-80g", "--engine", "sglang")
    assert "--port" not in run(*words, "--format", "json").json["flags"]["command"]
