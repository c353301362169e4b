"""A row of the table of arguments is all that an argument needs: every place that names one reads it there."""

from dataclasses import fields
from shlex import quote
from typing import get_args

import pytest

from kvplan.asked.form import Form, engine_args
from kvplan.asked.pasted import parse
from kvplan.cli.help import panel_of
from kvplan.cli.options import PlanOptions
from kvplan.documents.plan import engine_args as args_schema
from kvplan.documents.policy_file import ENGINE
from kvplan.measure.serverlog.log import phrases
from kvplan.policy.file import ENGINE_KEYS
from kvplan.servers.base import SERVERS, parse_engine, terms_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import (
    ARGUMENTS,
    DEFAULTS,
    OWN_NAMES,
    EngineArgs,
    Panel,
    flag_words,
    flags_of,
    lacking,
    spellings,
)
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.standings import own_names, standings

TEXTS = {"context": "8192", "tokens": "4096", "count": "8", "bytes": "17179869184", "gib": "2", "fraction": "0.5",
         "ratio": "0.5", "text": "fp8", "limits": "image=2", "names": "o_proj,q_proj",
         "json": "{}", "pattern": "3,1"}  # fmt: skip
STARTS = {
    "vllm": "vllm serve a/b --enable-lora",
    "sglang": "python -m sglang.launch_server --model-path a/b --tp 8 --enable-lora",
    "llamacpp": "llama-server --hf-repo a/b",
    "ollama": "ollama run hf.co/a/b",
}
# Read together with others: drafts, which program it is, a number of ranks.
NOT_ALONE = (
    *(name for name in ARGUMENTS if "speculative" in name),
    "usage",
    "enable_expert_parallel",
    "tensor_parallel_size",
    "lmcache_max_local_cpu_size",  # a variable
    "num_redundant_experts",
    "eplb_window_size",
    "pp_layer_partition",
)
UNSPELLED = (("llamacpp", "quantization"), ("llamacpp", "draft_quant"), ("ollama", "quantization"))  # names of files


def text_of(name: str) -> str:
    row = ARGUMENTS[name]
    return row.choices[-1] if row.choices else TEXTS[row.kind]


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_an_argument_is_known_in_every_place(name: str) -> None:
    common = frozenset(option.name for option in fields(PlanOptions))
    assert name in common
    assert panel_of(name, common) in (*get_args(Panel), *(terms_of(server).title for server in SERVERS))
    assert name in ENGINE_KEYS
    assert name in ENGINE
    assert name in args_schema({})["properties"]
    assert hasattr(EngineArgs(), name)


@pytest.mark.parametrize("name", [name for name, row in ARGUMENTS.items() if row.kind != "flag"])
def test_an_option_and_an_engine_argument_say_the_same(name: str) -> None:
    text = text_of(name)
    option = Form({name: [text] if ARGUMENTS[name].many else text})
    pair = engine_args(Form({"engine_arg": [f"{name}={text}"]}), None)
    assert getattr(pair, name) != DEFAULTS[name]
    assert ARGUMENTS[name].many or engine_args(option, None) == pair


@pytest.mark.parametrize(
    ("server", "name"),
    [
        (server, name)
        for server in SERVERS
        for name in sorted({*spellings(server).values()})
        if name not in NOT_ALONE and (server, name) not in UNSPELLED
    ],
)
def test_an_argument_is_read_from_a_command_and_printed_in_one(server: str, name: str) -> None:
    row = ARGUMENTS[name]
    flag = flags_of(server).get(name)
    assert flag is not None
    spelling = "--" + (flag.names or (name,))[0].replace("_", "-")
    words = spelling if row.kind == "flag" or flag.on is not None else f"{spelling} {quote(text_of(name))}"
    value = parse(f"{STARTS[server]} {words}").args[name]
    printed = flag_words(server, parse_engine(server), EngineArgs(**{name: value}), {})
    if value != DEFAULTS[name]:
        assert spelling in printed
    assert (flag.names or (name,))[0] in phrases().flags  # a log's list


def test_every_other_servers_own_names_are_options() -> None:
    names: dict[str, list[str]] = {}
    for server in SERVERS:
        for name, option in own_names(server).items() if server != DEFAULT else ():
            names.setdefault(name, []).append(option)
    assert {name: [*options] for name, options in OWN_NAMES.items()} == names


def test_what_a_server_lacks_is_no_name_of_its_own() -> None:
    for server in SERVERS:
        assert not {*lacking(server)} & {*spellings(server).values()}
        assert {*spellings(server)} >= {
            name for name, standing, _ in standings(server) if standing == "modeled" and name in ARGUMENTS
        } - {"attention_backend", "speculative_method"}


# SGLang 0.5.23's own words (srt/server_args.py), as its users type them.
OWN_WORDS = (
    "--context-length 8192 --tp-size 2 --max-running-requests 64 --chunked-prefill-size 4096 --page-size 1 "
    "--kv-cache-dtype fp8_e4m3 --disable-radix-cache --disable-overlap-schedule --disable-cuda-graph "
    "--mem-fraction-static 0.8"
)


def test_a_servers_own_words_are_options(run: Run) -> None:
    """The same plan as of the pasted command."""
    pasted = f"python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B {OWN_WORDS}"
    where = ("--gpu", "h100-80g", "-q", "--format", "json")
    by_options = run("estimate", "llama-3.1-8b", "--engine", "sglang", *OWN_WORDS.split(), *where).json
    by_command = run("estimate", "--from-command", pasted, *where).json
    assert by_options["flags"] == by_command["flags"]
    assert by_options["kv"] == by_command["kv"]
    assert by_options["inputs"]["settings"] == by_command["inputs"]["settings"]
