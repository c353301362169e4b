"""Whole logs, from the first line to the last: what a server says of itself is a fact, and never refused.

tests/facts/whole_logs.jsonl: settings and figures of public logs. tests/facts/sglang_lists.jsonl and the defaults in
kvplan/servers/sglang/defaults.txt: what SGLang 0.5.23's own code answered (benchmarks/log_lists_sglang.py).
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.log import flags_of
from kvplan.core.units import GIB
from kvplan.measure.serverlog.log import parse_log
from kvplan.servers.sglang.flags import FLAGS
from kvplan.servers.sglang.log import LISTS, defaults
from kvplan.servers.words.arguments import spellings
from tests.measure.test_serverlog import rendered
from tests.oracles import read_lines
from tests.support.cli import Ran, Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.parts import some
from tests.support.server_logs import Log, rows_of
from tests.support.server_logs import log as log  # the fixture

FACTS = Path(__file__).parents[1] / "facts"
WHOLE = read_lines(FACTS / "whole_logs.jsonl")
CHOICES, *PRINTED = read_lines(FACTS / "sglang_lists.jsonl")
MODELED = spellings("sglang")
# Builds of a repository that patches SGLang log a 4-bit cache without its scales: 64 of 72 bytes a head.
WITHOUT_SCALES = 64 / 72


def listed(settings: dict[str, str], opening: str = LISTS[0]) -> str:
    """SGLang's list of arguments: every default, but for some settings."""
    values = {"model_path": "Qwen/Qwen3-8B", **defaults(), **settings}
    form = "'{}': {}" if opening.endswith("{") else "{}={}"
    pairs = (form.format(name, text if is_bare(text) else repr(text)) for name, text in values.items())
    return f"[2026-08-01 10:00:00] {opening}{', '.join(pairs)}{'}' if opening.endswith('{') else ')'}\n"


def is_bare(text: str) -> bool:
    return text in ("None", "True", "False") or re.fullmatch(r"-?[0-9.]+|\[.*\]|\{.+\}", text) is not None


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_of_every_field_of_the_servers_class() -> None:
    (fields,) = (row["fields"] for row in read_lines(FACTS / "server_arguments.jsonl") if row["server"] == "sglang")
    assert {"model_path", *defaults()} == set(fields)
    assert len(defaults()) == 545
    # As srt/arg_groups/fields declares them.
    assert defaults()["ep_num_redundant_experts"] == defaults()["hicache_size"] == "0"
    assert (defaults()["offload_group_size"], defaults()["disaggregation_mode"]) == ("-1", "null")


@pytest.mark.parametrize("opening", LISTS)
def test_a_list_of_defaults_states_nothing(opening: str) -> None:
    log = parse_log(listed({}, opening))
    assert flags_of(log) == dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), "1")
    assert log.model == "Qwen/Qwen3-8B"


VALUES = [
    (name, value)
    for name, values in CHOICES["choices"].items()
    if name in MODELED or name == "attention_backend"
    for value in values
]


@pytest.mark.parametrize("field", some(VALUES, VALUES[::9]), ids=lambda field: "=".join(field))
def test_every_value_that_a_field_takes_is_read(run: Run, log: Log, field: tuple[str, str]) -> None:
    name, value = field
    settings = {name: value, "mem_fraction_static": "0.8", "context_length": "8192"}
    ran = run("reconcile", "--log", log(listed(settings) + LOADED), "--format", "json", "--offline")
    assert ran.code == 0, ran
    assert rows_of(ran.json)["weights"]["logged"] == round(15.4 * GIB)


LOADED = """\
[2026-08-01 10:00:10] Load weight begin. avail mem=78.00 GB
[2026-08-01 10:00:20] Load weight end. elapsed=9.0 s, type=Qwen3ForCausalLM, avail mem=62.60 GB, mem usage=15.40 GB.
"""


# --- lists as 0.5.23 logs them ----------------------------------------------------------------------------------------

SAME = {"tp_size", "pp_size", "mem_fraction_static", "page_size", "max_running_requests", "disaggregation_mode"}


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: f"{row['model']}-{row['gpu']}-{'-'.join(row['argv'])}")
def test_a_list_of_the_newest_release_is_read_to_its_end(run: Run, log: Log, row: dict[str, Any]) -> None:
    text = listed({**row["logged"], "model_path": row["model"]}, LISTS[1])
    logged = parse_log(text)
    flags = flags_of(logged)
    stated = {name: value for name, value in row["logged"].items() if name in SAME}
    assert {MODELED[name]: value for name, value in stated.items()}.items() <= flags.items()
    ran = run("reconcile", "--log", log(text + LOADED), "--offline")
    assert ran.code == 0, ran
    assert "Nothing is compared" not in ran.out


def test_the_newest_list_is_longer_than_those_before() -> None:
    """0.5.23 logs 546 fields in some 19,000 characters."""
    text = listed({**PRINTED[0]["logged"], "disaggregation_mode": "decode", "json_model_override_args": "{}"}, LISTS[1])
    before, name, after = text.partition("'disaggregation_mode'")
    padded = before + "'padding': '" + "x" * (16_400 - len(before)) + "', " + name + after
    assert len(text) > 16_384
    assert flags_of(parse_log(padded))["disaggregation_mode"] == "decode"


# --- public logs ------------------------------------------------------------------------------------------------------


def printed(row: dict[str, Any]) -> str:
    """A log with a row's settings and figures, in the words of its release."""
    prefix = f"[2026-06-08 04:17:53{' ' if 'rank' in row else ''}{row.get('rank', '')}] "
    lines = rendered("sglang 0.5", row["figures"], prefix)
    return listed({**row["settings"], "model_path": row["model"]}) + "\n".join(lines)


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: f"{row['source'].partition('/')[0]}-{row['release']}")
def test_a_whole_logs_settings_and_figures_are_read(run: Run, log: Log, row: dict[str, Any]) -> None:
    ran = run("reconcile", "--log", log(printed(row)), "--format", "json", "--offline")
    assert ran.code == 0, ran
    logged, figures = rows_of(ran.json), row["figures"]
    if "weights" in figures:
        assert logged["weights"]["logged"] == round(figures["weights"] * GIB)
    if "key_size" in figures:
        assert logged["kv_cache"]["logged"] == round((figures["key_size"] + figures["value_size"]) * GIB)
        check_given(ran, figures["pool_tokens"])


def check_given(ran: Ran, tokens: float) -> None:
    """The pool's tokens follow from its bytes, or from those with the scales that a log may leave out."""
    row_of_tokens = rows_of(ran.json, "given")["tokens"]
    assert row_of_tokens["logged"] == tokens
    assert row_of_tokens["exact"] or row_of_tokens["predicted"] / tokens == pytest.approx(WITHOUT_SCALES, abs=0.001), (
        row_of_tokens
    )


def test_the_facts_have_what_was_refused() -> None:
    settings = [row["settings"] for row in WHOLE]
    assert len(WHOLE) == 22
    assert sum(row.get("kv_cache_dtype") == "fp4_e2m1" for row in settings) == 12
    assert sum(row.get("attention_backend") == "dual_chunk_flash_attn" for row in settings) == 1
    assert any(row.get("chunked_prefill_size") == "-1" for row in settings)


CORPUS = DATA / "corpus_logs.jsonl"
LOGS = read_lines(CORPUS) if CORPUS.is_file() else []


@needs_oracle_data
@pytest.mark.parametrize("row", some(LOGS, LOGS[::6]), ids=lambda row: f"{row['id']}-{row['server']}")
def test_a_public_log_is_read_whole(run: Run, log: Log, row: dict[str, Any]) -> None:
    ran = run("reconcile", "--log", log(row["text"]), "--format", "json", "--offline")
    assert ran.code == 0, ran
    notes = ran.json["notes"]
    if all(row["predicted"] is None for row in ran.json["rows"] if row["logged"] is not None):
        assert any("add --" in note or "set it with --" in note for note in notes) or not HAS_FIGURES.search(
            row["text"]
        ), notes
    row_of_tokens = rows_of(ran.json, "given").get("tokens")
    if row["server"] == "sglang" and row_of_tokens is not None and row_of_tokens["logged"] is not None:
        check_given(ran, row_of_tokens["logged"])


HAS_FIGURES = re.compile(r"Load weight end\.|Model loading took|Available KV cache memory")


@needs_oracle_data
def test_the_corpus_has_every_whole_log_of_sglang() -> None:
    assert Counter(row["server"] for row in LOGS) == {"sglang": 22, "vllm": 75}


def test_a_config_that_the_server_filled_in_is_not_the_users(run: Run, log: Log) -> None:
    """vLLM 0.7.3 logs the sizes that it captures by default, in a form without a name of an enumeration."""
    config = '{"splitting_ops":[],"compile_sizes":[],"cudagraph_capture_sizes":[256,8,4,2,1],"max_capture_size":256}'
    text = (
        "INFO 07-18 05:07:22 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.3) with config: "
        f"model='Qwen/Qwen2.5-14B-Instruct', max_seq_len=8192, tensor_parallel_size=1, compilation_config={config}, \n"
        "INFO 07-18 05:07:34 worker.py:267] the current vLLM instance can use total_gpu_memory (39.38GiB) x "
        "gpu_memory_utilization (0.80) = 31.50GiB\n"
        "INFO 07-18 05:07:34 worker.py:267] model weights take 27.57GiB; non_torch_memory takes 0.11GiB; PyTorch "
        "activation peak memory takes 1.49GiB; the rest of the memory reserved for KV Cache is 2.33GiB.\n"
        "INFO 07-18 05:07:34 executor_base.py:111] # cuda blocks: 796, # CPU blocks: 1365\n"
    )
    ran = run("reconcile", "--log", log(text), "--format", "json")
    assert "compilation_config" not in flags_of(parse_log(text))
    assert rows_of(ran.json, "given")["blocks"]["exact"] is True  # 2.33 GiB / 196,608 B / 16 = 795.3 +- 1.7


def test_a_config_in_its_constructors_words_is_read() -> None:
    connector = "KVTransferConfig(kv_connector='NixlConnector', kv_role='kv_both', kv_rank=None, kv_parallel_size=1)"
    text = f"non-default args: {{'model': 'llama-3.1-8b', 'kv_transfer_config': {connector}}}\n"
    stated = json.loads(flags_of(parse_log(text))["kv_transfer_config"])
    assert stated == {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_parallel_size": 1}


def test_every_argument_that_sglang_lists_has_a_default() -> None:
    names = {FLAGS[name].names[0] for name in set(MODELED.values()) if FLAGS[name].printed}
    assert names <= {*defaults(), "speculative_algorithm"}
