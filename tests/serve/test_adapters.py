"""Adapters of a server: listed, chosen by `model`, refused where they are not there, on /metrics as vLLM has them."""

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.adapter_config import of_layer, read_config
from engine.sequence import Sequence
from kvplan.cli.app import spread
from kvplan.cli.engine_options import modules_of
from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError
from kvplan.models import catalog
from kvplan.serve.adapters import ROUTERS, check_adapter, linear_layers
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.real import cache_config
from kvplan.serve.text import stand_in
from tests.engine.test_lora import with_adapters
from tests.serve.test_server import until
from tests.support.cli import Run, refused, run
from tests.support.serving import MODEL, Gate, Serving, planned, serving, twin
from tests.support.small_adapters import saved_adapter
from tests.support.small_engines import engine_for, greedy, random_tokens

__all__ = ["run"]  # a fixture
TEXT = "/v1/completions"
(PROMPT,) = random_tokens(17)


def paths() -> dict[str, Any]:
    return {"x": saved_adapter("llama", seed=1), "y": saved_adapter("llama", rank=8, seed=2)}


def engine_with_adapters() -> Any:
    engine = with_adapters("llama", paths())
    engine.tokenizer = stand_in(256)
    return engine


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    engine = engine_with_adapters()
    adapters = {name: str(path) for name, path in paths().items()}
    with serving(engine, cache_config(engine), adapters=adapters) as running:
        yield running


def test_adapters_are_listed_as_vllm_lists_them(server: Serving) -> None:
    """vLLM 0.33 entrypoints/openai/models/serving.py: root is the path, parent the model, no length of its own."""
    base, *adapters = server.get("/v1/models")["data"]
    assert (base["id"], base["root"], base["parent"], base["max_model_len"]) == (MODEL, MODEL, None, 96)
    assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in adapters] == [
        (name, str(path), MODEL, None) for name, path in paths().items()
    ]
    assert server.get("/v1/models/y") == adapters[1]


def test_an_adapter_is_chosen_by_its_name(server: Serving) -> None:
    engine = engine_with_adapters()
    texts = []
    for model, adapter in ((MODEL, None), ("x", "x"), ("y", "y")):
        answer = server.post(TEXT, model=model, prompt=PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = engine.generate([PROMPT], greedy(12), adapter=adapter)
        assert (answer["model"], answer["choices"][0]["text"]) == (model, output.text)
        texts.append(output.text)
    assert len(set(texts)) == 3


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
def test_a_model_that_is_not_there_is_openais_404(server: Serving, path: str) -> None:
    body = {"model": "z", "prompt": PROMPT} if path == TEXT else {"model": "z", "messages": []}
    status, error = server.refusal(path, body)
    assert (status, error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert error["message"] == "The model `z` does not exist."


def test_openais_client_sees_adapters(server: Serving) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        assert [card.id for card in client.models.list()] == [MODEL, "x", "y"]
        assert client.completions.create(model="x", prompt=PROMPT, max_tokens=2).model == "x"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="z", prompt=PROMPT)


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v2", marks=pytest.mark.full)])
def test_the_layers_that_adapters_may_change_are_the_engines(family: str) -> None:
    """Known by the engine's own slots; routers' names are a family's, and all are taken."""
    engine = engine_for(family, max_loras=1, num_blocks=10)
    slots: Any = engine.runner.model.adapters
    own = {piece.name: (piece.inputs, piece.outputs) for layer in slots.layers for piece in layer.pieces}
    checked = linear_layers(engine.spec)
    assert {name: checked.get(name) for name in own} == own
    assert all(name.endswith(ROUTERS) for name in checked.keys() - own.keys())


def copied(folder: Path, **config: Any) -> Path:
    """An adapter of rank 4 with other words in its config."""
    shutil.copytree(saved_adapter("llama", seed=1), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("change", ["use_dora", "r", "peft_type", "rank", "json", "cut", "missing", "other model"])
def test_the_engine_and_the_twin_refuse_the_same_adapters_alike(tmp_path: Path, change: str, run: Run) -> None:
    """What reads only headers says what the engine says, which reads the tensors."""
    values: dict[str, Any] = {"use_dora": True} if change == "use_dora" else {"r": 5} if change == "r" else {}
    path = copied(tmp_path / "x", **values | ({"peft_type": "IA3"} if change == "peft_type" else {}))
    spec, rank = engine_with_adapters().spec, 8
    weights = path / "adapter_model.safetensors"
    match change:
        case "rank":
            rank = 1
        case "json":
            (path / "adapter_config.json").write_text("{")
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-4])
        case "missing":
            weights.unlink()
        case "other model":
            spec = catalog.load(MODEL)
    with pytest.raises(KvplanError) as by_headers:
        check_adapter(path, spec, rank)
    how = r"\(.*\)" if change == "cut" else r"$^"  # each reader has its own words for that
    if change != "other model":  # the engine has the small one
        slots: Any = engine_for("llama", max_loras=1, max_lora_rank=rank, num_blocks=10)
        with pytest.raises(KvplanError) as by_engine:
            slots.load_adapter("x", path)
        assert re.sub(how, "", str(by_engine.value)) == re.sub(how, "", str(by_headers.value))
    options = ("--ctx", "8k", "--enable-lora", "--max-lora-rank", f"{rank}", "--lora-modules", f"x={path}")
    line = refused(run("serve", MODEL, "--simulate", "h100-80g", "--port", "0", *options))
    assert line.startswith("--lora-modules x: ")
    if change == "rank":
        assert line.endswith("has rank 4, slots are for 1; raise --max-lora-rank")


def test_a_config_is_read_only_from_a_file_of_a_configs_size(tmp_path: Path) -> None:
    path = copied(tmp_path / "x")
    config = path / "adapter_config.json"
    os.truncate(config, 1 << 40)
    with pytest.raises(InvalidInputError, match=r"too large \(1,099,511,627,776 bytes, at most 10,485,760\)"):
        read_config(path)
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(InvalidInputError, match="not a regular file"):
        read_config(path)
    config.unlink()
    config.write_text("[" * 10_000)
    with pytest.raises(InvalidInputError, match="nested more than 100 levels deep"):
        read_config(path)


def test_a_pattern_of_ranks_is_matched_in_linear_time() -> None:
    """Python's engine takes 2^60 steps for it."""
    assert of_layer({"(a+)+": 4}, "a" * 60 + "!", 8) == 8
    assert of_layer({r"layers\.0\..*q_proj": 4}, "model.layers.0.self_attn.q_proj", 8) == 4
    with pytest.raises(UnsupportedModelError, match="cannot be matched; name the layers without lookaheads"):
        of_layer({"(?!x)": 4}, "model.layers.0.self_attn.q_proj", 8)


# --- a twin -----------------------------------------------------------------------------------------------------------


def test_a_twin_holds_requests_back_whose_adapter_has_no_slot() -> None:
    """One slot: while an answer with x runs, y waits, and the model's own request passes it."""
    gate = Gate()
    backend = twin(planned(max_loras=1), clock=gate, adapters={"x": "/x", "y": "/y"})
    with serving(backend, adapters={"x": "/x", "y": "/y"}) as server:
        with ThreadPoolExecutor(3) as pool:
            answers = []
            for model in ("x", "y", MODEL):
                answers.append(pool.submit(server.post, TEXT, model=model, prompt=[1, 2, 3], max_tokens=4))
                until(lambda: len(server.api.worker.jobs) == len(answers))
            gate.open()
            assert [answer.result()["model"] for answer in answers] == ["x", "y", MODEL]
        labels = re.findall(r"^vllm:lora_requests_info\{(.*)\} ", server.metrics(), re.MULTILINE)
        assert labels == ['max_lora="1",running_lora_adapters="",waiting_lora_adapters=""']


# --- metrics ----------------------------------------------------------------------------------------------------------

# What vLLM 0.33's own LoRARequestStates (v1/metrics/stats.py) says after each event: of both labels the same.
EVENTS = [
    ("waiting", "1", "b", "b"), ("waiting", "2", "a", "b,a"), ("running", "1", "b", "b,a"),
    ("waiting", "3", "b", "b,a"), ("finished", "1", "b", "b,a"), ("running", "2", "a", "b,a"),
    ("finished", "3", "b", "a"), ("waiting", "4", "c", "a,c"), ("waiting", "5", "b", "a,c,b"),
    ("finished", "2", "a", "c,b"),
    ("finished", "5", "b", "c"), ("finished", "4", "c", ""),
]  # fmt: skip


def test_the_figure_of_adapters_is_vllms() -> None:
    metrics = ServerMetrics(MODEL, 8192, {"block_size": "16"}, max_loras=2)
    seqs: dict[str, Sequence] = {}
    for arrival, (event, request_id, adapter, expected) in enumerate(EVENTS):
        seq = seqs.setdefault(request_id, Sequence(request_id, [1], 1, adapter=adapter, arrival=arrival))
        seq.status = event  # type: ignore[assignment]
        queues = {name: [seq for seq in seqs.values() if seq.status == name] for name in ("running", "waiting")}
        scheduler: Any = SimpleNamespace(
            **queues, num_deferred=0, num_waiting=len(queues["waiting"]), blocks=SimpleNamespace(usage=0.0)
        )
        metrics.levels(scheduler)
        (labels,) = re.findall(r"^vllm:lora_requests_info\{(.*)\} ", metrics.page().decode(), re.MULTILINE)
        # names as in vLLM 0.33's v1/metrics/loggers.py
        assert labels == f'max_lora="2",running_lora_adapters="{expected}",waiting_lora_adapters="{expected}"'


def test_without_slots_the_figure_is_not_there() -> None:
    assert "lora_requests_info" not in ServerMetrics(MODEL, 8192, {"block_size": "16"}).page().decode()


X = '{"name": "x", "path": "/a/x", "base_model_name": "m"}'
LINES = [
    ("m", "--lora-modules", "x=/a/x", "y=/b/y", "--port", "1"),
    ("m", "--lora-modules", X, "y=/b/y"),
    ("--lora-modules", "y=/b/y", X, "--port", "1", "m"),
    ("m", "--lora-modules=y=/b/y"),
    ("m", "--port", "1"),
]


@pytest.mark.parametrize("words", LINES)
def test_several_adapters_stand_behind_one_flag(words: tuple[str, ...]) -> None:
    """As argparse takes them with nargs="+", which is how vLLM's own parser declares the flag."""
    theirs = argparse.ArgumentParser()
    theirs.add_argument("model")
    theirs.add_argument("--lora-modules", nargs="+", default=[])
    theirs.add_argument("--port")
    ours = argparse.ArgumentParser()
    ours.add_argument("model")
    ours.add_argument("--lora-modules", action="append", default=[])
    ours.add_argument("--port")
    assert ours.parse_args(spread([*words])) == theirs.parse_args(words)


def test_adapters_are_named_in_either_form() -> None:
    assert modules_of([X, "y=/b/y"], 1, ["m"]) == {"x": "/a/x", "y": "/b/y"}
