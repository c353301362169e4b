"""The seam holds a third server: every command and format answers for it, in none of another server's words."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import get_args

import pytest

from kvplan.cli import app
from kvplan.cli.check_options import CheckFormat
from kvplan.measure import server_metrics
from kvplan.measure.bench_results import read_results
from kvplan.report.formats import Format
from kvplan.servers import base
from kvplan.servers.base import Abilities
from kvplan.servers.words.arguments import ARGUMENTS
from kvplan.simulate.generator import options_of
from tests.support import third_server
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

ASKED = ("llama-3.1-8b", "--engine", "acme")
ROOMY = ("--gpu-memory", "80GiB", "--ctx", "4k")
PAGE_BYTES = 32 * (32 * 2 * 8 * 128 * 2)  # tokens of a page x (layers x K and V x heads x head dim x bf16)
# What the other servers say: names, flags, settings, lines of a log.
FOREIGN = re.compile(
    r"vllm|sglang|llama\.cpp|llama-server|mem_fraction|mem-fraction|gpu-memory-utilization|max-running-requests|context-length"
    r"|Maximum concurrency|max_total_num",
    re.IGNORECASE,
)


@pytest.fixture(autouse=True)
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.SERVERS, "acme", lambda: third_server)


def foreign(text: str) -> list[str]:
    """Lines with another server's words; kvplan's own arguments are listed by name, null where not given."""
    return [line for line in text.splitlines() if FOREIGN.search(line) and not line.endswith("null,")]


def test_its_plan_adds_up(run: Run) -> None:
    answer = run("estimate", *ASKED, *ROOMY, "--format", "json").json
    memory, kv = answer["memory"], answer["kv"]
    assert memory["budget"] == int(memory["total"] * 0.8)
    assert kv["num_blocks"] == (memory["budget"] - memory["weights"]) // PAGE_BYTES
    assert answer["concurrency"]["pool_users"] == (kv["num_blocks"] - 1) // (4096 // 32)
    assert answer["flags"]["argv"] == ["acme", "meta-llama/Llama-3.1-8B", "--ctx-size", "4096", "--slots", "100"]


@pytest.mark.parametrize("form", get_args(Format))
@pytest.mark.parametrize(
    "more",
    [
        (*ROOMY, "--batch", "8"),
        (*ROOMY, "--explain"),
        ("--gpu-memory", "24GiB", "--ctx", "64k"),  # does not fit
        ("--gpu-memory", "22GiB", "--ctx", "16k"),  # at the low end of the range it does not
    ],
)
def test_an_estimate_says_none_of_anothers_words(run: Run, form: str, more: tuple[str, ...]) -> None:
    if "--explain" in more and form not in ("table", "markdown"):
        more = ROOMY
    ran = run("estimate", *ASKED, "--format", form, *more)
    assert ran.code == 0, ran.err
    assert foreign(ran.out + ran.err) == []


def test_its_own_words_are_printed(run: Run) -> None:
    screen = run("estimate", *ASKED, "--gpu-memory", "22GiB", "--ctx", "16k").out
    for words in (
        "May be slow: ",
        "A lower --ctx-size is safer.",
        "Acme takes 17.60 GiB",
        "left to Acme",
        "acme_tokens=",
    ):
        assert words in screen


def test_an_unknown_engine_is_told_of_it(run: Run) -> None:
    assert (
        "use vllm, vllm@VERSION, sglang, llama.cpp, ollama or acme"
        in run("estimate", "llama-3.1-8b", "--engine", "tgi").err
    )


@pytest.mark.parametrize("form", get_args(Format))
def test_a_sweep_says_none_of_anothers_words(run: Run, form: str) -> None:
    ran = run("sweep", *ASKED, "--gpu", "h100-80g", "--ctx", "4k,16k", "--tp", "1,2", "--format", form)
    assert ran.code == 0, ran.err
    assert foreign(ran.out + ran.err) == []


@pytest.mark.parametrize("form", get_args(CheckFormat))
@pytest.mark.parametrize("least", [1, 100_000])
def test_a_check_says_none_of_anothers_words(run: Run, tmp_path: Path, form: str, least: int) -> None:
    policy = tmp_path / "kvplan.yaml"
    policy.write_text(
        "version: 1\ntargets:\n- {id: chat, model: llama-3.1-8b, gpu: h100-80g, engine: acme, max_model_len: 4096, "
        f"max_num_seqs: 8, rules: {{min_concurrency: {least}, min_logged_concurrency: 1, min_kv_tokens: 1}}}}\n",
        encoding="utf-8",
    )
    ran = run("check", policy, "--format", form)
    assert ran.code == (0 if least == 1 else 1), ran.err
    assert foreign(ran.out + ran.err) == []
    if form == "table" and least == 1:
        assert "limited by --slots, the pool holds" in ran.out
        assert "the log will say acme_tokens=" in ran.out


def test_its_pasted_command_is_read_by_itself(run: Run) -> None:
    line = "export X=1; acme meta-llama/Llama-3.1-8B --slots 8"
    ran = run("estimate", "--from-command", line, *ROOMY, "--format", "json")
    assert (ran.json["inputs"]["engine"], ran.json["inputs"]["args"]["max_num_seqs"]) == ("acme@1.0", 8)
    assert foreign(ran.err) == []


PAGE = """acme:busy 3
acme:tokens 4096
"""


def test_its_metrics_page_is_read_by_its_own_names(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    stats, log = server_metrics.server_stats(PAGE), server_metrics.log_of_page(PAGE)
    assert (stats.kind, stats.running, stats.kv_tokens, log.text("kv_tokens")) == ("acme", 3, None, "4096")
    pages = [tmp_path / name for name in ("first.txt", "second.txt")]
    for page in pages:
        page.write_text(PAGE, encoding="utf-8")
    ran = run("rightsize", *pages)
    assert ran.code == 2
    assert "Acme counts nothing" in ran.err
    assert foreign(ran.err) == []


LOG = """\
acme_args(model='meta-llama/Llama-3.1-8B', max_model_len=4096)
acme weights 14.96 GiB
acme_tokens=385632, acme_pool=47.08
"""


def logged(folder: Path, text: str = LOG) -> Path:
    path = folder / "acme.log"
    path.write_text(text, encoding="utf-8")
    return path


def test_its_log_is_compared_with_its_plan(run: Run, tmp_path: Path) -> None:
    answer = run(
        "reconcile", "--log", logged(tmp_path), "--model", "llama-3.1-8b", "--gpu-memory", "80GiB", "--format", "json"
    ).json
    rows = {row["name"]: row for row in answer["rows"]}
    room = int(80 * 2**30 * 0.8) - 16_060_522_496  # four fifths of the GPU, less 8,030,261,248 parameters in bf16
    assert (answer["engine"], answer["max_model_len"]) == ("acme@1.0", 4096)
    assert [row["exact"] for row in rows.values()] == [True, False, False]
    assert rows["kv_cache"]["predicted"] == room // PAGE_BYTES * PAGE_BYTES
    assert rows["tokens"]["predicted"] == room // PAGE_BYTES * 32


@pytest.mark.parametrize("form", get_args(Format))
@pytest.mark.parametrize("gpu", [(), ("--gpu-memory", "80GiB")])
def test_its_log_is_shown_in_none_of_anothers_words(run: Run, tmp_path: Path, form: str, gpu: tuple[str, ...]) -> None:
    ran = run("reconcile", "--log", logged(tmp_path), "--model", "llama-3.1-8b", *gpu, "--format", form)
    assert ran.code == 0, ran.err
    assert "weights" in ran.out
    assert "Given the logged pool" not in ran.out  # nothing follows from it here
    assert foreign(ran.out + ran.err) == []


def test_its_log_is_refused_where_it_says_nothing(run: Run, tmp_path: Path) -> None:
    ran = run("reconcile", "--log", logged(tmp_path, "nothing\n"), "--model", "llama-3.1-8b")
    refusal = "holds no line that vLLM, SGLang, llama.cpp, Acme or kvplan's engine writes at start-up"
    assert (ran.code, refusal in ran.err) == (2, True)


@pytest.mark.parametrize("form", get_args(Format))
def test_its_metrics_page_is_compared_with_its_plan(run: Run, tmp_path: Path, form: str) -> None:
    pytest.importorskip("prometheus_client")
    page = tmp_path / "page.txt"
    page.write_text(PAGE, encoding="utf-8")
    ran = run("reconcile", "--metrics", page, "--model", *ASKED, *ROOMY, "--format", form)
    assert ran.code == 0, ran.err
    assert "tokens" in ran.out
    assert foreign(ran.out + ran.err) == []


@pytest.mark.parametrize("form", ["table", "json"])
def test_its_failure_is_told_in_its_own_words(run: Run, tmp_path: Path, form: str) -> None:
    log = tmp_path / "acme.log"
    log.write_text("acme begins\nacme: nothing left for tokens\n", encoding="utf-8")
    ran = run("why", log, "--format", form)
    assert ran.code == 0, ran.err
    assert "Acme did not start: weights and activations use up its memory budget" in ran.out
    assert foreign(ran.out + ran.err) == []


def test_its_load_generator_is_read(tmp_path: Path) -> None:
    assert options_of("acme bench --num-prompts 9 --random-input-len 100") == {
        "num_requests": "9", "prompt_tokens": "100", "output_tokens": "64", "rate": "inf",
    }  # fmt: skip
    row = {"completed": 9, "max_concurrency": 2, "mean_ttft_ms": 5.0, "median_ttft_ms": 4.0, "acme": 1}
    (tmp_path / "acme.json").write_text(json.dumps(row), encoding="utf-8")
    (result,) = read_results(tmp_path / "acme.json")
    assert (result.tool, result.users, result.times["ttft_p50"]) == ("acme bench", 2, 4.0)


@pytest.mark.parametrize("form", get_args(Format))
@pytest.mark.parametrize(
    "command",
    [
        ("pack", "--gpu", "h100-80g", "--server", "llama-3.1-8b", "--server", "qwen3-0.6b", "--engine", "acme"),
        ("upgrade", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--from", "acme@1.0", "--to", "acme@1.0"),
        ("diff", "llama-3.1-8b", "llama-3.1-8b-fp8", "--gpu", "h100-80g", "--ctx", "8k", "--engine", "acme"),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_say_none_of_anothers_words(run: Run, command: tuple[str, ...], form: str) -> None:
    ran = run(*command, "--format", form)
    assert ran.code == 0, ran.err
    assert foreign(ran.out + ran.err) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            ("simulate", *ASKED, *ROOMY, "--profile", "azure-2023-conv"),
            "only vLLM and SGLang's scheduler",
        ),
        (
            ("recommend", *ASKED, "--users", "20", "--ctx", "8k", "--gpu", "l40s"),
            "without --slo, recommend supports only vLLM",
        ),
        (
            ("tune", *ASKED, "--gpu", "l40s", "--prompt-tokens", "9", "--output-tokens", "2", "--rate", "1"),
            "tune supports only vLLM and SGLang",
        ),
        (
            (
                "calibrate",
                *ASKED,
                *ROOMY,
                "--bench",
                "acme.json",
                "--prompt-tokens",
                "9",
                "--output-tokens",
                "2",
                "-o",
                "times.json",
            ),
            "only vLLM and SGLang's scheduler",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_what_is_for_some_servers_asks_which(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = {"completed": 9, "max_concurrency": 2, "mean_ttft_ms": 5.0, "median_ttft_ms": 4.0, "acme": 1}
    Path("acme.json").write_text(json.dumps(result), encoding="utf-8")
    ran = run(*command)
    assert ran.code == 2
    assert problem in ran.err
    able = replace(third_server.abilities, simulated=True, recommended=True)
    monkeypatch.setattr(third_server, "abilities", able)
    assert problem not in run(*command).err


def test_a_page_to_explore_says_none_of_anothers_words(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = run(
        "explore",
        *ASKED,
        "--gpu-memory",
        "80GiB",
        "--ctx",
        "4k",
        "--tp",
        "1",
        "--batch",
        "8",
        "--mean-tokens",
        "1k",
        "-o",
        page,
    )
    assert ran.code == 0, ran.err
    assert "acme@1.0" in page.read_text(encoding="utf-8")
    assert foreign(page.read_text(encoding="utf-8") + ran.err) == []


def test_an_atlas_of_it_says_none_of_anothers_words(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    words = ["--models", "llama-3.1-8b", "--gpus", "h100-80g", "--engine", "acme", "--jobs", "1", "-q"]
    assert run("atlas", *words, "-o", tmp_path / "site").code == 0
    page = (tmp_path / "site" / "models" / "llama-3.1-8b" / "h100-80g.html").read_text(encoding="utf-8")
    assert "acme@1.0" in page
    assert foreign(page.partition("<h2>Proof</h2>")[0]) == []  # proof names the servers that were logged


def test_a_policy_begun_for_it_says_none_of_anothers_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("check", "--init", *ASKED, *ROOMY).code == 0
    (policy,) = tmp_path.iterdir()
    assert foreign(policy.read_text(encoding="utf-8")) == []
    assert run("check", policy).code == 0


@contextmanager
def page_server() -> Iterator[str]:
    """The address of the third server's page."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_is_watched_in_none_of_anothers_words(run: Run) -> None:
    pytest.importorskip("prometheus_client")
    with page_server() as url:
        ran = run("watch", "--metrics", f"{url}/metrics", "--duration", "50ms", "--interval", "20ms")
    assert ran.code == 0, ran.err
    assert "3 running" in ran.out
    assert foreign(ran.out + ran.err) == []


def test_it_has_no_twin_to_serve(run: Run) -> None:
    ran = run("serve", *ASKED, "--simulate", "h100-80g", "--ctx", "4k")
    assert (ran.code, "only vLLM and SGLang's scheduler" in ran.err) == (2, True)


def test_what_starts_it_to_measure_it_is_named_as_it_is(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("httpx2")
    ran = run("profile", "--command", "acme meta-llama/Llama-3.1-8B", "-o", tmp_path / "run")
    assert (ran.code, "acme: No such file" in ran.err) == (3, True)
    assert foreign(ran.out + ran.err) == []


@pytest.mark.parametrize("gpu", ["h100-80g", "l40s"])
def test_a_look_before_the_start_says_none_of_anothers_words(run: Run, gpu: str) -> None:
    ran = run("preflight", "--gpu", gpu, "acme", "meta-llama/Llama-3.1-70B")
    assert (ran.code, ran.out.partition(":")[0]) == (1, "No"), ran.err
    assert foreign(ran.out + ran.err) == []


# By command: the test above that asks it of the third server.
ASKED_OF: dict[str, Callable[..., None]] = {
    "estimate": test_an_estimate_says_none_of_anothers_words,
    "check": test_a_check_says_none_of_anothers_words,
    "diff": test_other_commands_say_none_of_anothers_words,
    "upgrade": test_other_commands_say_none_of_anothers_words,
    "pack": test_other_commands_say_none_of_anothers_words,
    "sweep": test_a_sweep_says_none_of_anothers_words,
    "explore": test_a_page_to_explore_says_none_of_anothers_words,
    "atlas": test_an_atlas_of_it_says_none_of_anothers_words,
    "recommend": test_what_is_for_some_servers_asks_which,
    "tune": test_what_is_for_some_servers_asks_which,
    "simulate": test_what_is_for_some_servers_asks_which,
    "serve": test_it_has_no_twin_to_serve,
    "calibrate": test_what_is_for_some_servers_asks_which,
    "preflight": test_a_look_before_the_start_says_none_of_anothers_words,
    "profile": test_what_starts_it_to_measure_it_is_named_as_it_is,
    "reconcile": test_its_log_is_shown_in_none_of_anothers_words,
    "why": test_its_failure_is_told_in_its_own_words,
    "rightsize": test_its_metrics_page_is_read_by_its_own_names,
    "watch": test_it_is_watched_in_none_of_anothers_words,
}
# Commands that no server is asked in, by what they are about.
OF_NO_SERVER = {
    "models": "models",
    "gpus": "GPUs",
    "report": "runs of the bundled engine",
    "schema": "kvplan's own documents",
    "doctor": "the installation",
    "mcp": "other commands",
    "trace": "workloads",
}


def test_every_command_is_asked_of_it() -> None:
    """A command that is added stands in one of the two tables above."""
    assert sorted([*ASKED_OF, *OF_NO_SERVER]) == sorted([*app.COMMANDS, "trace"])


# Flags of the table that another server's texts would name; kvplan's own options are written --ctx, --batch, --tp.
OTHERS_FLAGS = re.compile("|".join(f"--{name.replace('_', '-')}\\b" for name in ARGUMENTS if "_" in name))
KVPLANS = re.compile(r"kvplan [a-z]+ .*|^  --[a-z-]+ .*")  # a command of kvplan's, and what to add to one


@pytest.fixture
def inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third server with every ability that it lacks, and a flag of its own for every argument."""
    able = Abilities(
        logs_concurrency=True, checks_start=True, simulated=True, recommended=True, needs_drafter=True,
        own_kv_dtypes=True,
    )  # fmt: skip
    own = {name: f"--acme{place}" for place, name in enumerate(ARGUMENTS)} | dict(third_server.terms.own_flags)
    monkeypatch.setattr(third_server, "abilities", able)
    monkeypatch.setattr(third_server, "terms", replace(third_server.terms, own_flags=own))


@pytest.mark.usefixtures("inverted")
@pytest.mark.parametrize(
    "command",
    [
        ("estimate", *ASKED, *ROOMY, "--explain"),
        ("estimate", *ASKED, "--gpu-memory", "22GiB", "--ctx", "16k"),  # the low end of the range holds none
        ("estimate", *ASKED, "--gpu-memory", "24GiB", "--ctx", "64k"),  # does not fit
        ("estimate", *ASKED, *ROOMY, "--batch", "4", "--max-num-batched-tokens", "2048"),
        ("estimate", *ASKED, *ROOMY, "--kv-cache-memory-bytes", "4GiB"),
        ("estimate", *ASKED, *ROOMY, "--num-gpu-blocks-override", "4000"),
        ("recommend", *ASKED, *ROOMY[:2], "--users", "400", "--ctx", "4k"),
        ("sweep", *ASKED, "--gpu-memory", "80GiB", "--ctx", "4k,16k"),
        ("simulate", *ASKED, "--gpu", "h200", "--ctx", "4k", "--prompt-tokens", "300", "--output-tokens", "20",
         "--num-requests", "10", "--rate", "2"),
        ("diff", "llama-3.1-8b", "qwen3-8b", "--engine", "acme", "--gpu", "h200", "--ctx", "4k"),
        ("pack", "--gpu", "h200", "--server", "acme llama-3.1-8b --slots 4"),
    ],
    ids=lambda command: " ".join(command[:1] + command[5:]),
)  # fmt: skip
def test_an_inverted_server_has_no_flag_of_anothers(run: Run, command: tuple[str, ...]) -> None:
    ran = run(*command)
    assert ran.code == 0, ran.err
    named = [line for line in (ran.out + ran.err).splitlines() if OTHERS_FLAGS.search(KVPLANS.sub("", line))]
    assert named == []
