"""Encoders without a KV cache against vLLM 0.33's own parameters and settings, and transformers' parameter counts.

tests/facts/encoders_only.jsonl: published configs with what vLLM's code made of them on an H100 with --runner pooling
(weight bytes per rank, resolved settings, "no kv cache") and the parameters that transformers 5.19's class has.
model_max_length: that of tokenizer_config.json, which vLLM was given too. Without it vLLM takes RoBERTa's whole table,
more than a prompt can use: those rows have usable_positions.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.plan import BUDGET_ROWS
from kvplan.servers.vllm import encoder_only, overheads
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import num_params
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "encoders_only.jsonl").read_text().splitlines()]
CONFIGS = {row["model"]: row["config"] for row in ROWS}


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']} tp{row['tp']}"


def spec_of(name: str) -> ModelSpec:
    return hf_config.read_config(CONFIGS[name], "config.json", name)


def request_of(name: str, engine: str = "vllm@0.33", **args: Any) -> Request:
    return Request(spec_of(name), gpu("h100-80g"), EngineArgs(**args), parse_engine(engine))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_weights_and_settings_equal_the_servers(row: dict[str, Any]) -> None:
    answer = plan(request_of(row["model"], tensor_parallel_size=row["tp"]))
    settings = answer.settings
    assert answer.memory.weights == row["weights"]
    own = {
        name: getattr(settings, name) for name in ("dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    }
    usable = {"max_model_len": row["usable_positions"]} if "usable_positions" in row else {}
    assert own == {name: row["resolved"][name] for name in own} | usable
    assert settings.prefix_caching is row["resolved"]["enable_prefix_caching"]
    graphs = overheads.piecewise_graphs(settings.max_num_seqs, 512)
    assert (row["resolved"]["cudagraph_mode"], graphs) == ("PIECEWISE", row["resolved"]["num_cudagraph_sizes"])
    assert (row["result"], answer.memory.kv_cache, answer.bytes_per_token) == ("no kv cache", 0, 0)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_are_those_of_transformers(name: str) -> None:
    (params,) = {row["params"] for row in ROWS if row["model"] == name}
    assert sum(num_params(spec_of(name)).values()) == params


@pytest.mark.parametrize("row", [row for row in ROWS if row["model"] in catalog.model_names()], ids=name_of)
def test_encoders_of_the_catalog_weigh_what_the_server_holds(row: dict[str, Any]) -> None:
    args = EngineArgs(tensor_parallel_size=row["tp"])
    answer = plan(Request(catalog.load(row["model"]), gpu("h100-80g"), args, parse_engine("vllm@0.33")))
    assert (answer.memory.weights, answer.memory.kv_cache) == (row["weights"], 0)
    assert answer.settings.dtype == row["resolved"]["dtype"]


@pytest.mark.parametrize("row", [row for row in ROWS if "model_max_length" in row], ids=name_of)
def test_the_catalogs_longest_prompt_is_the_tokenizers(row: dict[str, Any]) -> None:
    spec = catalog.load(row["model"])
    assert (spec.max_model_len, spec.context_limit) == (row["model_max_length"],) * 2


@pytest.mark.parametrize(
    ("padding", "positions"), [(1, 512), (3, 510), (None, 512)], ids=["usual", "rinna", "transformers_default"]
)
def test_positions_begin_after_the_padding_token(padding: int | None, positions: int) -> None:
    """The longest prompt that transformers 5.23's RobertaModel computes with a table of 514: one more is an error."""
    config = {**CONFIGS["multilingual-e5-large"], "pad_token_id": padding}
    assert hf_config.read_config(config, "config.json", "x").context_limit == positions
    with pytest.raises(KvplanError, match=r"must be more than pad_token_id \+ 1 \(1\)"):
        hf_config.read_config({**config, "max_position_embeddings": 1}, "config.json", "x")


@pytest.mark.parametrize(
    ("name", "length"), [("all-minilm-l6-v2", 256), ("paraphrase-multilingual-minilm-l12-v2", 128)]
)
def test_sentence_transformers_lengths(name: str, length: int) -> None:
    """Source: sentence-transformers' table of models, docs/_static/html/models_en_sentence_embeddings.html."""
    assert catalog.load(name).context_limit == length


def test_a_folder_states_its_longest_sentence(run: Run, folder: Path) -> None:
    """vLLM 0.33 serves 256 tokens of this folder and refuses 512."""
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    assert "--max-model-len 256 " in run("estimate", folder, "--gpu", "l4").out
    assert run("estimate", folder, "--gpu", "l4", "--ctx", "512").code == 2
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert "--max-model-len 8192 " in run("estimate", folder, "--gpu", "l4").out


def test_a_step_holds_whole_prompts_and_memory_does_not_limit_it() -> None:
    """8,192 tokens of a step on an H100 are 16 prompts of 512; as many are 64 at 128, and 256 seqs bound them."""
    assert plan(request_of("bge-large-en-v1.5")).concurrency.users == 16
    assert plan(request_of("bge-large-en-v1.5", max_model_len=128)).concurrency.users == 64
    assert plan(request_of("bge-large-en-v1.5", max_model_len=16, max_num_seqs=256)).concurrency.users == 256
    assert plan(request_of("bge-m3")).concurrency.users == 1  # a step of 8,192: the context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bge-m3").mkdir()
    (tmp_path / "bge-m3" / "config.json").write_text(json.dumps(CONFIGS["bge-m3"]), encoding="utf-8")
    return tmp_path / "bge-m3"


def test_the_answer_says_what_limits_it(run: Run, folder: Path) -> None:
    out = run("estimate", folder, "--gpu", "l4", "--ctx", "512").out
    assert "bge-m3 on l4: 4 requests in a step at 512 tokens each" in out.splitlines()[0]
    assert "No KV cache" in out
    assert "Limit  a step computes 2,048 tokens of whole prompts; --max-num-batched-tokens raises it" in out
    assert "4 requests in a step" in run("estimate", folder, "--gpu", "l4", "--ctx", "512", "--format", "markdown").out
    document = run("estimate", folder, "--gpu", "l4", "--ctx", "512", "--format", "json").json
    assert (document["kv"]["groups"], document["memory"]["kv_cache"], document["limits"][0]["by"]) == (
        [], 0, "max_num_batched_tokens",
    )  # fmt: skip


def test_every_view_answers(run: Run, folder: Path, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ntargets:\n"
        "- {id: a, model: ./bge-m3, gpu: l4, max_model_len: 512, rules: {fits: true, min_users: 4}}\n",
        encoding="utf-8",
    )
    for words in (
        ("estimate", folder, "--gpu", "l4", "--explain"),
        ("estimate", folder, "--gpu", "l4,h100", "--ctx", "512,8k"),
        ("sweep", folder, "--gpu", "l4", "--ctx", "512"),
        ("diff", folder, folder, "--gpu", "l4"),
        ("check", policy),
    ):
        ran = run(*words)
        assert ran.code == 0, (words, ran.err)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("estimate", "--engine", "sglang"), "layer 0 has no cache of its own"),
        (("estimate", "--engine", "vllm@0.9"), "encoders are sized from vLLM 0.10 on"),
        (("estimate", "--enable-lora"), "an encoder without a KV cache"),
        (("estimate", "--runner", "generate"), "an encoder, which generates no tokens"),
        (("estimate", "--max-num-batched-tokens", "512"), "a step must hold the whole context"),
        (("recommend", "--users", "3"), "an encoder, which serves no users at once"),
        (("simulate", "--rate", "1", "--prompt-tokens", "9", "--output-tokens", "1"), "steps are not simulated"),
    ],
)
def test_what_is_not_sized_is_refused_by_name(run: Run, folder: Path, words: tuple[str, ...], fault: str) -> None:
    gpus = () if words[0] == "recommend" else ("--gpu", "l4")
    ran = run(words[0], folder, *gpus, *words[1:])
    assert ran.code == 2
    assert fault in ran.err


def test_it_says_by_how_much_an_encoder_does_not_fit(run: Run, folder: Path) -> None:
    ran = run("estimate", folder, "--gpu-memory", "1GiB")
    assert "does not fit" in ran.out.splitlines()[0]
    with pytest.raises(KvplanError, match="'nomic_bert' is an encoder that kvplan has no reader for"):
        hf_config.read_config({**CONFIGS["bge-m3"], "model_type": "nomic_bert"}, "config.json", "x")


@pytest.mark.parametrize("model", ["bge-m3", "qwen3-embedding-0.6b", "whisper-large-v3", "ministral-3-3b"])
def test_a_model_of_any_kind_needs_its_share_free(run: Run, model: str) -> None:
    """vLLM 0.33 v1/worker/gpu_worker.py (init_device, request_memory) looks before it builds a model runner.

    0.92 of 23.58 GiB are 21.69; 15 GiB in use and a CUDA context of 0.50 leave 8.08.
    """
    words = ("estimate", model, "--gpu", "rtx-3090", "--ctx", "448", "--memory-in-use", "15GiB", "--exit-code")
    ran = run(*words)
    assert ran.code == 1
    refusal = "does not start at 448 tokens: it needs 21.69 GiB free (0.92 of 23.58 GiB) but only 8.08 GiB is free"
    assert refusal in ran.out.splitlines()[0]
    assert run(*words, "--gpu-memory-utilization", "0.34").code == 0  # 8.02 GiB
    assert run(*words, "--gpu-memory-utilization", "0.35").code == 1  # 8.25 GiB


def test_one_more_row_of_memory_is_none_of_an_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that decoders alone have stands in their `size`: nothing is added here."""
    request = request_of(ROWS[0]["model"])
    settings = plan(request).settings
    rows = encoder_only.budget_of(request, settings)
    monkeypatch.setattr(encoder_only, "BUDGET_ROWS", (*BUDGET_ROWS, "vault"))
    more = encoder_only.budget_of(request, settings)
    assert (more.estimates["vault"].high, more.available) == (0, rows.available)
