"""The console, CSV and Markdown carry the document's numbers, on one screen, whatever the terminal and the names."""

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvplan.core.errors import UsageError
from kvplan.core.table import Table, as_csv
from kvplan.core.units import GIB, format_gib
from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import custom_gpu, gpu
from kvplan.models import catalog
from kvplan.models.quant import scheme_name
from kvplan.models.spec import Quantization, Scheme
from kvplan.planning.plan import Load, Plan, Request, is_published, plan
from kvplan.report import console as screen
from kvplan.report.lines import Part, line, open_console, takes_blocks, write
from kvplan.report.page import page
from kvplan.report.text import plans_page, plans_table
from kvplan.servers.vllm.rules import version
from kvplan.servers.words.arguments import EngineArgs
from kvplan.workloads.lengths import parse_lengths

ROWS = {
    "weights": "weights",
    "buffers": "buffers",
    "activations": "activations",
    "cuda_graphs": "CUDA graphs",
    "non_torch": "non-torch",
    "kv_cache": "KV cache",
    "unused": "unused",
}


def planned(model: str = "llama-3.1-8b", card: str = "a100-80g", load: Load | None = None, **args: Any) -> Plan:
    return plan(
        Request(catalog.load(model), gpu(card), EngineArgs(**{"max_model_len": 32768, **args}), load=load or Load())
    )


class Utf8(io.StringIO):
    encoding = "utf-8"


class Ascii(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined,no-any-return] # a BytesIO


def screen_text(answer: Plan, **how: bool) -> str:
    return "".join(f"{row}\n" for row in lines_of(screen.plan_parts(answer, **how)))


def lines_of(parts: Iterable[Part]) -> list[str]:
    stream = Utf8()
    write(parts, stream)
    return stream.getvalue().splitlines()


def print_plan(answer: Plan, console: Any) -> None:
    write(screen.plan_parts(answer, blocks=takes_blocks(console)), console)


def plans_csv(plans: list[Plan]) -> str:
    return as_csv(plans_table(plans))


def plans_markdown(plans: list[Plan], *, explain: bool = False) -> str:
    return page(plans_page(plans, explain=explain))


# --- one screen -------------------------------------------------------------------------------------------------------


def test_the_first_case_on_one_screen(golden: Callable[[str, str], None]) -> None:
    text = screen_text(planned())
    golden("estimate_llama_8b.txt", text)
    assert len(text.splitlines()) <= 38
    assert "  per token   128 KiB" in text  # 131,072 B
    assert "  per user    4 GiB at 32,768 tokens: 2,048 blocks of 16 tokens, 2 MiB each" in text
    assert text.startswith("llama-3.1-8b on a100-80g: 14 users at 32,768 tokens each (13-14)\n")


def test_only_the_command_is_wider_than_100_columns() -> None:
    for answer in (
        planned(),
        planned("llama-3.1-70b"),
        planned("gpt-oss-20b", "h100-80g", max_model_len=131072),
        planned("qwen3-next-80b-a3b", "h100-80g", tensor_parallel_size=4),
        planned("deepseek-v3", "h200", tensor_parallel_size=8, pipeline_parallel_size=2, kv_offloading_size=64 * GIB),
    ):
        text = screen_text(answer)
        wide = [row for row in text.splitlines() if len(row) > 100 and not row.startswith("Serve")]
        assert wide == []
        assert len(text.splitlines()) <= 38


@pytest.mark.parametrize("card", ["a100-80g", "h100-80g"])
@pytest.mark.parametrize("max_loras", [0, 4])
def test_the_table_shows_the_documents_rows(card: str, max_loras: int) -> None:
    answer = planned(card=card, max_loras=max_loras)
    memory = dict[str, Any](plan_document(answer)["memory"])
    text = screen_text(answer)
    rows = {**ROWS, "lora": "LoRA", "total": "total"} if max_loras else {**ROWS, "total": "total"}
    for key, label in rows.items():
        match = re.search(rf"^  {label} +(-?[\d,.]+) GiB +(-?[\d.]+)%", text, re.MULTILINE)
        assert match is not None, label
        assert match[1] == f"{memory[key] / GIB:,.2f}"
        assert match[2] == f"{100 * memory[key] / memory['total']:.1f}"


def test_what_does_not_fit_says_what_would() -> None:
    text = screen_text(planned("llama-3.1-70b"))
    assert text.startswith("llama-3.1-70b on a100-80g does not fit at 32,768 tokens, ")
    assert "the weights alone (131.42 GiB) exceed the budget of 72.91 GiB" in text  # 70,553,706,496 x 2 B
    # 65.7 GiB of weights on each of two leave 5 GiB, half of a user's 10 GiB in 16 bits: fp8 besides, or four of them.
    # First of all comes what needs no other hardware: the catalog's checkpoint in 4 bits.
    fixes = plan_document(planned("llama-3.1-70b"))["fixes"]
    whole = [
        (fix["flag"], fix["num_gpus"]) for fix in fixes if fix["max_model_len"] == 32768 and fix["gpu"] == "a100-80g"
    ]
    assert whole == [
        ("--quantization awq", 1), ("--kv-cache-dtype fp8 --tensor-parallel-size 2", 2),
        ("--tensor-parallel-size 4", 4),
    ]  # fmt: skip
    assert fixes[0]["model"] == "llama-3.1-70b-awq"
    hub_id = "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"
    assert re.search(rf"^Serve  vllm serve {hub_id} .* --quantization awq$", text, re.MULTILINE)


def test_users_are_those_of_the_lengths_stated() -> None:
    lengths = parse_lengths("lognormal:median=1000,sigma=1.2", 32768)
    answer = planned(load=Load(mean_tokens=2048, lengths=lengths, overflow=0.01))
    text, users = screen_text(answer), plan_document(answer)["concurrency"]
    assert (
        f"  concurrent  {users['users']:>7,}  or more; lengths lognormal:median=1000,sigma=1.2, "
        "overflow at most 1%, with one prefill in flight" in text
    )
    mean = planned(load=Load(mean_tokens=2048))
    assert f"{mean.concurrency.users:,}  requests at 2,048 tokens each, with one prefill in flight" in screen_text(mean)


def test_a_plan_of_several_gpus_says_so() -> None:
    text = screen_text(planned("llama-3.1-70b", "h100-80g", tensor_parallel_size=4, data_parallel_size=2))
    assert "llama-3.1-70b on 8 x h100-80g" in text.splitlines()[0]
    assert text.splitlines()[0].endswith(", on each of 2 data-parallel ranks")
    assert "Where each GPU's memory goes" in text


def test_the_scheduler_limits_where_memory_does_not() -> None:
    assert "the scheduler runs at most 4 requests at once" in screen_text(planned(max_num_seqs=4))


def test_explain_adds_the_formulas_below_the_screen() -> None:
    answer = planned()
    text = screen_text(answer, explain=True)
    assert text.startswith(screen_text(answer))
    assert "Why this differs from the rule of thumb (memory x 0.9 - weights - activations)" in text


def test_what_is_missing_is_positive_and_named() -> None:
    answer = planned("llama-3.1-70b")
    memory, text = plan_document(answer)["memory"], screen_text(answer)
    assert memory["unused"] == memory["unused_detail"]["slack"] == 0
    # 70.55e9 parameters of two bytes are 131.4 GiB of 79.25: at least 52.1 missing, before anything but weights.
    assert 52 * GIB < memory["missing"] < 56 * GIB
    missing, over = memory["missing"] / GIB, memory["unused_detail"]["over_budget"] / GIB
    row = " ".join(text.partition("  missing")[2].partition("  total")[0].split())
    assert row.startswith(f"{missing:.2f} GiB ")
    assert row.endswith(
        f"more than the GPU has, over the budget: {over:.2f} GiB ({format_gib(answer.deficit)} with one request)"
    )
    assert not re.search(r" -\d", text)
    assert "unused" not in text
    assert f"| missing | {missing:.2f} |" in plans_markdown([answer])


def test_each_shortage_of_a_screen_says_what_is_short() -> None:
    """The headline counts the budget and one request, the row the GPU: its note names all three."""
    answer = planned("llama-3.1-405b", "h100-80g", tensor_parallel_size=4, max_model_len=8192)
    text, memory = screen_text(answer), answer.memory
    # One request: 8,192 tokens x 126 layers x 2 x 2 KV heads x 128 x 2 B, and vLLM's null block of 16 tokens.
    assert answer.deficit - memory.over_budget == (8192 + 16) * 126 * 2 * 2 * 128 * 2
    row = "".join(text.partition("  missing")[2].partition("  total")[0])
    for size in (memory.missing, memory.over_budget, answer.deficit):
        assert f"{size / GIB:,.2f} GiB" in row
    assert f"{format_gib(answer.deficit)} short on each GPU" in text


@pytest.mark.parametrize("model", ["falcon-h1-7b", "gpt-oss-20b"])
def test_a_user_who_takes_more_during_prefill_is_shown_both_figures(model: str) -> None:
    answer = planned(model, "h100-80g", max_model_len=8192)
    charged = answer.capacity.blocks_per_request * answer.capacity.bytes_per_block
    text = " ".join(screen_text(answer).split())
    assert f"of every GPU, up to {format_gib(charged)} during its prefill" in text
    assert "it differs from the users because it charges" in text


def test_a_user_who_takes_as_much_during_prefill_is_shown_one_figure() -> None:
    assert "during its prefill" not in screen_text(planned())


def test_a_pool_larger_than_the_gpu_does_not_start_and_what_does_is_named() -> None:
    """100 GiB of pool on 79.25 GiB: the checks before it pass, and the GPU runs out of memory as it is allocated."""
    short = planned(kv_cache_memory_bytes=100 * GIB)
    assert not short.fits
    text = screen_text(short)
    assert text.startswith("llama-3.1-8b on a100-80g does not start")
    assert "the stated pool needs 100.00 GiB, but only " in text
    assert short.refusal is not None
    (room,) = short.refusal.values
    assert isinstance(room, int | float | str)
    assert planned(kv_cache_memory_bytes=int(room)).fits
    weights = 8_030_261_248 * 2  # of weights alone
    assert int(room) < short.memory.total - weights


def test_huge_numbers_do_not_run_together() -> None:
    text = screen_text(planned("llama-3.1-8b", num_gpu_blocks_override=2048 * 12_345_678))
    assert "the stated pool needs 49,382,712.00 GiB, but only " in text  # 12,345,678 x 4 GiB


@pytest.mark.parametrize(
    ("model", "card", "stored"),
    [
        ("llama-3.1-8b", "a100-80g", "8.03B params in bfloat16"),
        ("llama-3.1-8b-fp8", "h100-80g", "8.03B params in fp8"),
        ("llama-3.1-8b-w8a8", "h100-80g", "8.03B params in int8"),
        ("gpt-oss-20b", "h100-80g", "20.91B params in mxfp4 (experts)"),
        ("opt-125m", "a100-80g", "125.24M params in float16"),  # published as 0.125B
    ],
)
def test_the_weights_are_said_in_the_scheme_they_are_stored_in(model: str, card: str, stored: str) -> None:
    assert stored in screen_text(planned(model, card, max_model_len=2048))


def test_a_cure_that_only_may_start_says_so() -> None:
    answer = planned("qwen2.5-72b-awq", "rtx-4090")
    fixes = plan_document(answer)["fixes"]
    assert all(fix["users_low"] is not None and fix["users_low"] <= fix["users"] for fix in fixes)
    text = screen_text(answer)
    for fix in fixes:
        assert fix["users_low"] or re.search(rf"0 to {fix['users']} users? at {fix['max_model_len']:,} tokens", text)
    assert [row for row in text.splitlines() if len(row) > 100 and not row.startswith("Serve")] == []


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (Quantization("fp8", Scheme("fp8_block", block=(128, 128))), "fp8"),
        (Quantization("compressed-tensors", Scheme("int4", 128)), "w4a16"),
        (Quantization("modelopt", Scheme("nvfp4", 16)), "nvfp4"),
        (Quantization("mxfp4", None, patterns=((r".*\.experts(\..*)?$", Scheme("mxfp4", 32)),)), "mxfp4 (experts)"),
        (
            Quantization("modelopt", None, {"l.0.mlp.experts": Scheme("nvfp4", 16), "l.0.q": Scheme("fp8_tensor")}),
            "nvfp4 (experts) + fp8",
        ),
        (Quantization("exl2 (no reader)", None, problem="exl2 (no reader)"), "exl2 (no reader)"),
    ],
)
def test_a_quantisation_is_called_by_its_scheme(quantization: Quantization, name: str) -> None:
    assert scheme_name(quantization) == name


def test_parameters_in_their_own_unit() -> None:
    assert screen.format_params(8_030_261_248) == "8.03B"
    assert screen.format_params(124_439_808) == "124.44M"  # GPT-2's count
    assert screen.format_params(12_345) == "12,345"


def test_more_users_than_the_scheduler_runs_are_not_promised() -> None:
    answer = planned(max_model_len=1024, max_num_seqs=64)
    first, second = screen_text(answer).splitlines()[:2]
    assert first == "llama-3.1-8b on a100-80g: 64 users at 1,024 tokens each"
    assert second == f"The KV cache holds {answer.concurrency.pool.users}; at most 64 run at once (--max-num-seqs)."
    assert answer.concurrency.pool.users > 400
    assert second in plans_markdown([answer])
    assert lines_of(screen.gpu_parts([(gpu("a100-80g"), answer)]))[-1].endswith("  yes, 64 at once")
    rows = lines_of(screen.context_parts([answer, planned(max_num_seqs=64)]))
    assert rows[2].endswith("  note")
    assert rows[3].endswith("  64 at once")
    assert re.search(r" 14     14$", rows[4])  # 14 users of 64
    assert plans_markdown([answer, planned()]).splitlines()[4].endswith("| yes, 64 at once |")


def marginal(**args: Any) -> Plan:
    """Llama-3.1-8B on an RTX 4090, at the largest context that fits where the estimates are at their likely values."""
    return planned(card="rtx-4090", **{"max_model_len": "auto", **args})


def test_a_plan_that_fits_by_less_than_its_range_warns() -> None:
    fitted = marginal()
    answer = marginal(max_model_len=fitted.capacity.max_model_len)
    low = plan_document(answer)["concurrency"]["low"]
    assert answer.fits
    assert low < 1
    warning = screen_text(answer).splitlines()[1]
    assert warning.startswith(f"May not start: the low end of the range holds {low - 0.005:.2f} requests of the full ")
    assert warning.endswith("A shorter --max-model-len is safer.")
    assert lines_of(screen.gpu_parts([(gpu("rtx-4090"), answer)]))[-1].endswith("  may not start")
    assert "May not start" not in screen_text(planned())
    assert "May not start" not in screen_text(planned("llama-3.1-70b"))  # that one does not fit at all


def test_a_fitted_context_is_left_to_the_server_where_the_range_does_not_hold_it() -> None:
    text = screen_text(marginal())
    assert text.splitlines()[1].endswith("With --max-model-len auto it uses the longest context that fits.")
    assert "--max-model-len auto " in next(row for row in text.splitlines() if row.startswith("Serve"))


def test_statements_about_facts_and_rules_stand_among_the_assumptions() -> None:
    assert "model facts   sibling of meta-llama/Llama-3.1-8B" in screen_text(planned("llama-3.1-8b-awq"))
    request = Request(catalog.load("llama-3.1-8b"), gpu("a100-80g"), EngineArgs(max_model_len=8192), version((0, 11)))
    older = plan(request)
    assert "  rules         vllm@0.11 by wheels, notes, issues and logs; not compared" in screen_text(older)
    assert "| rules |  |  | vllm@0.11 by wheels, notes, issues and logs; not compared" in plans_markdown([older])
    assert len(screen_text(older).splitlines()) <= 38


# --- streams, encodings, names ----------------------------------------------------------------------------------------


def test_an_ascii_stream_gets_ascii_bars_and_nothing_raises() -> None:
    stream = Ascii()
    answer = planned()
    print_plan(answer, stream)
    assert re.search(r"KV cache .*%  #{15,}", stream.text())
    odd = replace(answer, request=replace(answer.request, spec=replace(answer.request.spec, name="modèle-1")))
    print_plan(odd, stream)
    assert "mod\\xe8le-1 on a100-80g" in stream.text()


def test_names_are_never_markup_nor_control_characters() -> None:
    answer = planned()
    odd = replace(
        answer, request=replace(answer.request, spec=replace(answer.request.spec, name="[bold]x[/bold] [/foo]\x1b[31m"))
    )
    for console in (Console(file=Utf8(), force_terminal=True, width=60), Console(file=Utf8(), force_terminal=False)):
        print_plan(odd, console)
        assert isinstance(console.file, io.StringIO)
        assert "[bold]x[/bold] [/foo]\\x1b[31m on a100-80g" in console.file.getvalue()


def test_a_terminal_gets_the_same_text_in_colors_and_never_cut() -> None:
    answer = planned()
    console = Console(file=Utf8(), force_terminal=True, width=40, color_system="standard", legacy_windows=False)
    print_plan(answer, console)
    assert isinstance(console.file, io.StringIO)
    colored = console.file.getvalue()
    assert "\x1b[" in colored
    bare = [row.rstrip() for row in re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()]
    assert bare == screen_text(answer).splitlines()


def test_a_console_is_opened_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    pipe = Utf8()
    assert open_console(pipe) is pipe
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(open_console(pipe), Console)


def test_a_pipe_loads_no_rich() -> None:
    script = (
        "import sys; from kvplan.models import catalog; from kvplan.hardware.gpu import gpu\n"
        "from kvplan.planning.plan import Request, plan\n"
        "from kvplan.report.console import plan_parts\n"
        "from kvplan.report.lines import write\n"
        "write(plan_parts(plan(Request(catalog.load('llama-3.1-8b'), gpu('a100-80g')))), sys.stdout)\n"
        "sys.exit('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_table_is_aligned() -> None:
    table = Table.of(("name", "n"), [["a", "1"], ["bcdefg", "1,000"]])
    assert lines_of([table]) == ["name        n", "a           1", "bcdefg  1,000"]
    stream = Utf8()
    write([line("x  "), line()], stream)
    assert stream.getvalue() == "x\n\n"


# --- tables -----------------------------------------------------------------------------------------------------------


def test_several_contexts_at_128_kib_per_token() -> None:
    plans = [planned(max_model_len=context) for context in (4096, 16384, 32768, 65536)]
    rows = lines_of(screen.context_parts(plans))
    assert rows[0] == "llama-3.1-8b on a100-80g: 128 KiB of KV per token"
    cells = [re.split(r" {2,}", row.strip()) for row in rows[3:7]]
    assert [row[0] for row in cells] == ["4,096", "16,384", "32,768", "65,536"]
    assert [row[1] for row in cells] == ["512 MiB", "2 GiB", "4 GiB", "8 GiB"]  # 128 KiB x the context
    assert [row[2] for row in cells] == ["256", "1,024", "2,048", "4,096"]  # blocks of 16
    assert [float(row[3]) for row in cells] == [round(answer.concurrency.max, 2) for answer in plans]


def test_a_context_that_does_not_fit_names_a_cure() -> None:
    plans = [planned(card="l4", max_model_len=context) for context in (4096, 131072)]
    rows = lines_of(screen.context_parts(plans))
    assert rows[4].endswith(" short")
    assert rows[-1].startswith("At 131,072 tokens it would fit with one of: ")


def test_one_row_per_gpu() -> None:
    pairs = [(gpu(card), planned(card=card)) for card in ("l4", "a100-80g")]
    refused = (custom_gpu(GIB), UsageError("custom: no\x1b"))
    rows = lines_of(screen.gpu_parts([*pairs, refused]))
    assert rows[0] == "llama-3.1-8b at 32,768 tokens, 128 KiB of KV per token"
    assert re.search(r" short; --[a-z]", rows[3])
    assert rows[4].endswith("  yes")
    assert f"{plan_document(pairs[1][1])['kv']['tokens']:,}" in rows[4]
    assert rows[5] == "custom: custom: no\\x1b"


def test_the_model_list_is_the_quick_reference() -> None:
    row = screen.model_row("llama-3.1-8b", catalog.load("llama-3.1-8b"))
    assert row["parameters"] == 8_030_261_248
    assert row["bf16_gb"] == 16.06
    assert row["kv_bytes_per_token"] == 131_072
    assert row["max_model_len"] == 131_072
    states = screen.model_row("qwen3-next-80b-a3b", catalog.load("qwen3-next-80b-a3b"))
    assert states["kv_bytes_per_token"] == 24_576  # 12 layers x 2 heads x (256 + 256) x 2 B
    assert states["state_bytes"] > 0
    windows = screen.model_row("gpt-oss-20b", catalog.load("gpt-oss-20b"))
    assert windows["window_bytes_per_token"] == 24_576  # 12 of 24 layers x 8 heads x (64 + 64) x 2 B
    rows = lines_of(screen.model_parts([row, states, windows]))
    assert re.split(r" {2,}", rows[1].strip()) == ["llama-3.1-8b", "8.03B", "16.06", "128", "131,072"]
    assert len(rows) == 4


def test_the_model_list_marks_facts_that_are_not_a_published_config() -> None:
    awq = screen.model_row("llama-3.1-8b-awq", catalog.load("llama-3.1-8b-awq"))
    rows = lines_of(screen.model_parts([awq, screen.model_row("llama-3.1-8b", catalog.load("llama-3.1-8b"))]))
    assert rows[1].startswith("llama-3.1-8b-awq *  awq int4 ")
    assert rows[2].startswith("llama-3.1-8b  ")
    assert rows[-1].startswith("* not a copy of the published config.json")
    assert (awq["published"], awq["scheme"]) == (False, "awq int4")


def test_only_a_published_config_counts_as_one() -> None:
    assert is_published("config.json of meta-llama/Llama-2-7b-hf, Hugging Face")
    assert is_published("/models/llama/config.json")
    for source in ("sibling of x", "sibling: config.json of x", "dims of x", "class default: x", "reconstructed: x"):
        assert not is_published(source)
    assert not is_published("config.json of x; not checked against a copy")


def test_the_gpu_list() -> None:
    row = screen.gpu_row(gpu("h100-80g"))
    assert row["compute_capability"] == "9.0"
    rows = lines_of([screen.gpu_list([row, screen.gpu_row(gpu("a100-80g"))])])
    assert rows[1].split()[0] == "h100-80g"
    assert rows[2].split()[-4:] == ["2,039", "312", "-", "8.0"]  # GB/s, bf16 TFLOP/s, no fp8: NVIDIA's A100 datasheet


# --- csv and markdown -------------------------------------------------------------------------------------------------


def test_csv_carries_the_documents_values() -> None:
    plans = [planned(), planned("llama-3.1-70b"), planned(load=Load(mean_tokens=2048))]
    rows = list(csv.DictReader(io.StringIO(plans_csv(plans))))
    assert len(rows) == 3
    for row, answer in zip(rows, plans, strict=True):
        document = plan_document(answer)
        for path in row:
            value: Any = document
            for key in path.split("."):
                value = None if value is None else value[key]  # a part that the answer lacks has empty cells
            expected = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            assert row[path] == expected, path
    assert rows[0]["kv.bytes_per_request"] == "4294967296"  # 4 GiB
    assert [row["fits"] for row in rows] == ["true", "false", "true"]


def test_csv_never_starts_a_cell_as_a_formula() -> None:
    answer = planned()
    odd = replace(answer, request=replace(answer.request, spec=replace(answer.request.spec, name='=cmd|"x",1')))
    (row,) = csv.DictReader(io.StringIO(plans_csv([odd])))
    assert row["inputs.model.name"] == '\'=cmd|"x",1'


def test_markdown_of_one_plan_carries_the_documents_rows(golden: Callable[[str, str], None]) -> None:
    answer = planned()
    memory, text = dict[str, Any](plan_document(answer)["memory"]), plans_markdown([answer])
    golden("estimate_llama_8b.md", text)
    for key, label in ROWS.items():
        assert f"| {label} | {memory[key] / GIB:,.2f} | {100 * memory[key] / memory['total']:.1f}% |" in text
    assert "| KV per user | 4 GiB at 32,768 tokens |" in text
    assert f"```\n{plan_document(answer)['flags']['command']}\n```" in text


def test_markdown_of_several_plans_is_a_table() -> None:
    text = plans_markdown([planned(), planned("llama-3.1-70b")])
    rows = text.splitlines()
    assert rows[0] == "**llama-3.1-8b, llama-3.1-70b: 1 of 2 fit: 14 users (llama-3.1-8b)**"
    rows = rows[2:]
    assert len(rows) == 4
    assert rows[2].startswith("| llama-3.1-8b | a100-80g | 32,768 | 128 KiB | 4 GiB |")
    assert rows[3].endswith(" short; `--quantization awq` |")


def test_markdown_escapes_names() -> None:
    answer = planned()
    odd = replace(
        answer, request=replace(answer.request, spec=replace(answer.request.spec, name="a|b`*<script>[x](y)"))
    )
    assert plans_markdown([odd]).startswith("**a\\|b\\`\\*\\<script\\>\\[x\\](y) on a100-80g")
    assert "a|b" not in plans_markdown([odd, answer])


def test_markdown_with_formulas_folds_them() -> None:
    text = plans_markdown([planned()], explain=True)
    assert "<details><summary>llama-3.1-8b on a100-80g" in text
    assert "- 32 x full attention: 8 KV heads" in text
