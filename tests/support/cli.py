"""Run the command line in this process and look at what came out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.main import main

# Llama-3.1-8B's published config, as far as kvplan reads it.
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """An exit code and the two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.out)
        return parsed

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("kvplan: error: ")]


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("estimate", ...)`, offline, without the user's environment."""
    for name in ("KVPLAN_DEBUG", "FORCE_COLOR", "TTY_COMPATIBLE", "_KVPLAN_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run_kvplan(*argv: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_kvplan


def refused(ran: Ran, code: int = 2) -> str:
    """The one line of a refusal: nothing on standard output but the error as JSON, no traceback, one error."""
    assert ran.code == code, ran
    (line,) = ran.errors
    if ran.out:
        assert (ran.json["schema"], ran.json["exit_code"]) == ("kvplan/error@1", code)
        assert ran.json["problem"] in line
    assert ran.err == line + "\n"
    assert line.isprintable()
    return line.removeprefix("kvplan: error: ")


def config_file(folder: Path, changes: dict[str, Any] | None = None, *, drop: tuple[str, ...] = ()) -> Path:
    """A directory with Llama-3.1-8B's config.json, changed."""
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in {**LLAMA, **(changes or {})}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
