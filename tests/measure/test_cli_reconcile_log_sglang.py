"""`kvplan reconcile --log`: an SGLang server's figures beside the plan for it."""

import re

import pytest

from kvplan.core.units import GIB
from kvplan.measure.serverlog.log import parse_log
from kvplan.servers.sglang.log_pools import kv_pool
from tests.support.cli import Run, refused, run
from tests.support.server_logs import NEXT, OSS, SGLANG, Log, log, pipeline, rows_of, without

__all__ = ["log", "run"]  # fixtures

# --- pools and states -------------------------------------------------------------------------------------------------


def test_sglang_is_predicted_from_the_memory_it_found(run: Run, log: Log) -> None:
    document = run("reconcile", "--log", log(SGLANG), "--model", "meta-llama/Meta-Llama-3-8B", "--format", "json").json
    rows = rows_of(document)
    assert document["engine"] == "sglang"
    assert rows["weights"]["relative"] == pytest.approx(-0.001, abs=0.001)
    # 124.23 - 139.21 x (1 - 0.8717961) = 106.38 GiB; the log has 53.18 + 53.18.
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(106.38, abs=0.01)
    assert rows["kv_cache"]["logged"] == round(106.36 * GIB)
    assert rows["tokens"]["relative"] == pytest.approx(0, abs=0.0005)
    assert rows_of(document, "given")["tokens"]["exact"] is True
    assert "reserves" in rows["activations"]["why"]


def test_sglang_is_predicted_from_its_inputs_where_the_gpu_is_known(run: Run, log: Log) -> None:
    """The log has 106.36 GiB and 871,371 tokens; nothing of its free memory is needed."""
    text = without(SGLANG, "Load weight")
    rows = rows_of(run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json)
    assert rows["kv_cache"]["relative"] == pytest.approx(0, abs=0.002)
    assert rows["tokens"]["relative"] == pytest.approx(0, abs=0.002)
    assert rows["kv_cache"]["kind"] == "calibrated"


def test_memory_that_somebody_else_held_is_the_reason_of_a_difference(run: Run, log: Log) -> None:
    """sglang#7495: 75.02 GB were free on an H100 that has 78.7; here 20 are missing on the H200."""
    text = SGLANG.replace("139.21 GB", "119.21 GB")
    rows = rows_of(run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json)
    assert rows["kv_cache"]["why"] == "119.21 GiB were free before loading, where 139.31 were expected"


def test_a_log_of_sglang_is_no_log_of_vllm(run: Run, log: Log) -> None:
    message = refused(run("reconcile", "--log", log(SGLANG), "--engine", "vllm@0.11"))
    assert message == "--engine vllm@0.11: the log is one of sglang; remove it"


def test_dp_attention_of_a_class_that_ignores_it_is_no_prediction(run: Run, log: Log) -> None:
    text = SGLANG.replace("tp_size=1,", "tp_size=4,").replace(
        "page_size=1,", "page_size=1, dp_size=4, enable_dp_attention=True,"
    )
    document = run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json").json
    assert "still splits attention over all ranks" in rows_of(document)["kv_cache"]["why"]


def test_a_trimmed_sglang_log_says_what_it_lacks(run: Run, log: Log) -> None:
    text = "\n".join(SGLANG.splitlines()[2:])
    rows = rows_of(run("reconcile", "--log", log(text), "--model", "llama-3-8b", "--format", "json").json)
    assert rows["kv_cache"]["why"] == 'needs "Load weight begin", mem_fraction_static of the log'


@pytest.mark.parametrize("gone", [(), ("max_total_num_tokens",), ("max_total_num_tokens", "full_layer_tokens")])
@pytest.mark.parametrize("flags", [(), ("--gpu", "h100")])
def test_the_pools_of_a_hybrid_model_are_compared_together(
    run: Run, log: Log, gone: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    """12 layers of 8 heads x 64 keep all tokens, 12 a window: 24,576 bytes a token each, for 1,255,367 and 1,004,293
    tokens 28.73 + 22.99 GiB; logged in four figures of two digits."""
    document = run("reconcile", "--log", log(without(OSS, *gone)), *flags, "--format", "json").json
    rows = rows_of(document)
    assert rows["kv_cache"]["logged"] == round(51.72 * GIB)
    assert rows["tokens"]["logged"] == 1_255_367
    assert rows["kv_cache"]["exact"]
    assert rows["tokens"]["exact"]
    assert document["given_from"] == "51.72 GiB"
    # 0.02 GiB, half a digit of four figures, over 24,576 x 1.8 bytes are 485 tokens.
    tokens = rows_of(document, "given")["tokens"]
    assert tokens["exact"]
    assert abs(tokens["error"]) < 486 < tokens["high"] - tokens["low"] + 2


def test_one_of_two_pools_is_not_compared_with_both(run: Run, log: Log) -> None:
    text = without(OSS, "#tokens: 1004293")
    document = run("reconcile", "--log", log(text), "--gpu", "h100", "--format", "json").json
    rows = rows_of(document)
    assert (rows["kv_cache"]["logged"], rows["kv_cache"]["why"]) == (None, "the log gives one of the two pools")
    assert rows_of(document, "given")["tokens"]["why"] == "the log gives one of the two pools"
    assert rows["tokens"]["exact"]


def test_the_pools_of_a_real_hybrid_log_are_added() -> None:
    """Gemma 4 E4B on SGLang 0.5.13: 644,444 tokens of windows in 43.02 GiB, 805,556 of all in 21.52 GiB."""
    lines = (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 644444, K size: 21.51 GB, V size: 21.51 GB\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 805556, K size: 10.76 GB, V size: 10.76 GB\n"
    )
    pool = kv_pool(parse_log(lines), "", windows=None)
    assert pool is not None
    assert (pool.size, pool.tokens) == (round(64.54 * GIB), 805_556)


def test_a_drafts_pool_is_not_the_models() -> None:
    """sglang#4351: K and V of 1.61 GiB, then of 0.02 GiB for the EAGLE draft."""
    lines = (
        "[2025-03-12 15:31:01 TP0] KV Cache is allocated. K size: 1.61 GB, V size: 1.61 GB.\n"
        "[2025-03-12 15:31:29 TP0] Load weight end. type=LlamaForCausalLMEagle, avail mem=18.64 GB\n"
        "[2025-03-12 15:31:29 TP0] KV Cache is allocated. K size: 0.02 GB, V size: 0.02 GB.\n"
    )
    for windows in (False, None):
        pool = kv_pool(parse_log(lines), "TP0", windows=windows)
        assert pool is not None
        assert pool.size == round(3.22 * GIB)
    hybrid = kv_pool(parse_log(lines), "TP0", windows=True)
    assert hybrid is not None
    assert hybrid.missing


def test_states_are_taken_off_the_free_memory_as_they_were_logged(run: Run, log: Log) -> None:
    """64.30 - 138.60 x 0.17 = 40.738 GiB, of which 18.50 are states; 12 layers keep 1 head x 256: 12,288 bytes."""
    rows = rows_of(run("reconcile", "--log", log(NEXT), "--format", "json").json)
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(40.738 - 18.5, abs=0.0005)
    assert rows["tokens"]["predicted"] == pytest.approx((40.738 - 18.5) * GIB / 12_288, abs=1)
    # Half a digit of free memory after loading, 0.17 of one before it, and two of the states: 0.01585 GiB either way.
    assert rows["tokens"]["high"] - rows["tokens"]["predicted"] == pytest.approx(0.01585 * GIB / 12_288, rel=0.01)


def test_states_that_were_not_logged_take_their_share(run: Run, log: Log) -> None:
    """mamba_full_memory_ratio is 0.9: of 40.738 GiB 0.9 / 1.9 are states, to whole slots of some 20 MiB."""
    text = without(NEXT, "Mamba Cache")
    rows = rows_of(run("reconcile", "--log", log(text), "--format", "json").json)
    assert rows["kv_cache"]["predicted"] / GIB == pytest.approx(40.738 / 1.9, abs=0.04)


def test_tokens_are_as_exact_as_the_free_memory_was_logged(run: Run, log: Log) -> None:
    """sglang#6753: half a digit of 124.23 and 0.128 of 139.21 are 0.00564 GiB, 46 tokens of 131,072 bytes."""
    document = run("reconcile", "--log", log(SGLANG), "--model", "meta-llama/Meta-Llama-3-8B", "--format", "json").json
    row = rows_of(document)["tokens"]
    assert row["high"] - row["predicted"] == pytest.approx(46, abs=1)
    assert row["predicted"] - row["low"] == pytest.approx(46, abs=1)


def test_a_cap_on_tokens_holds_for_the_memory_that_was_found(run: Run, log: Log) -> None:
    text = SGLANG.replace("page_size=1,", "page_size=1, max_total_tokens=500000,")
    assert rows_of(run("reconcile", "--log", log(text), "--format", "json").json)["tokens"]["predicted"] == 500_000


@pytest.mark.parametrize(
    ("change", "flags", "fault"),
    [
        (
            ("139.21 GB", "0.10 GB"),
            ("--gpu", "rtx-4090", "--mem-fraction-static", "0.5"),
            "by the plan nothing is left",
        ),
        (("avail mem=124.23", "avail mem=1.23"), (), "by the free memory in the log nothing is left"),
    ],
)
def test_tokens_without_a_prediction_say_why(
    run: Run, log: Log, change: tuple[str, str], flags: tuple[str, ...], fault: str
) -> None:
    text = without(SGLANG.replace(*change), *(("Load weight", "KV Cache") if flags else ()))
    rows = rows_of(run("reconcile", "--log", log(text), *flags, "--format", "json").json)
    for name in ("kv_cache", "tokens", "max_running_requests"):
        assert (rows[name]["predicted"], rows[name]["why"]) == (None, fault)


# --- requests, releases, reasons --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logged", "arguments", "predicted", "exact"),
    [
        ("4097", "", 4096, True),  # sglang#6753 itself: 0.4 counts the slot that is never given out
        ("4096", "", 4096, True),
        ("48", "max_running_requests=48, ", 48, True),
        ("300", "", 4096, False),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--gpu", "h200")])
def test_the_requests_that_may_run_are_compared(
    run: Run, log: Log, logged: str, arguments: str, predicted: int, exact: bool, flags: tuple[str, ...]
) -> None:
    """512 for each context of 8,192 that 871,371 tokens hold would be 54,460; 4,096 is the most."""
    text = SGLANG.replace("4097", logged).replace("page_size=1, ", f"page_size=1, {arguments}")
    row = rows_of(run("reconcile", "--log", log(text), *flags, "--format", "json").json)["max_running_requests"]
    assert (row["predicted"], row["logged"], row["exact"]) == (predicted, int(logged), exact)


def test_requests_are_whole_numbers(run: Run, log: Log) -> None:
    assert re.search(
        r"^max_running_requests +4,096 +4,097 +as logged", run("reconcile", "--log", log(SGLANG)).out, re.M
    )


COMMAND = "+ docker run lmsysorg/sglang:{tag} python3 -m sglang.launch_server --model-path llama-3-8b --tp 1{more}\n"
DEFAULT = "the log says neither mem_fraction_static nor "


@pytest.mark.parametrize(
    ("tag", "more", "flags", "note"),
    [
        ("latest", "", (), f"{DEFAULT}its release: the fraction is that of sglang@0.5's rule"),
        ("v0.3.6", "", (), f"{DEFAULT}a release that kvplan knows (0.3.6): the fraction is that of sglang@0.5's rule"),
        ("v0.4.3", "", (), None),
        ("v0.5.9-cu129", "", (), None),
        ("latest", " --mem-fraction-static 0.8", (), None),
        ("latest", "", ("--mem-fraction-static", "0.8"), None),
        ("latest", "", ("--engine", "sglang@0.4.6"), None),
    ],
)
def test_a_default_fraction_says_whose_rule_it_is(
    run: Run, log: Log, tag: str, more: str, flags: tuple[str, ...], note: str | None
) -> None:
    text = COMMAND.format(tag=tag, more=more) + without(SGLANG, "server_args")
    ran = run("reconcile", "--log", log(text), "--gpu", "h200", *flags)
    assert ran.code == 0
    assert (DEFAULT in ran.err) == (note is not None)
    assert (note or "") in ran.err


def test_an_image_says_the_release_whose_rules_are_taken(run: Run, log: Log) -> None:
    """0.4.3 takes 0.88 for one GPU (a table by tensor parallel size): 0.88 x 139.3 - 14.98 = 107.6 GiB."""
    text = COMMAND.format(tag="v0.4.3.post2-cu124", more="") + without(SGLANG, "server_args")
    answer = run("reconcile", "--log", log(text), "--gpu", "h200", "--format", "json")
    assert answer.json["engine"] == "sglang 0.4.3.post2-cu124"
    assert rows_of(answer.json)["kv_cache"]["predicted"] / GIB == pytest.approx(0.88 * 139.3 - 14.98, abs=0.1)
    other = run("reconcile", "--log", log(text), "--gpu", "h200", "--engine", "sglang@0.5")
    assert "--engine sglang@0.5 is used, although the log says version 0.4.3.post2-cu124" in other.err
    same = run("reconcile", "--log", log(text), "--gpu", "h200", "--engine", "sglang@0.4")
    assert "is used, although the log says version" not in same.err


@pytest.mark.parametrize(
    ("usage", "more", "reason"),
    [
        ("14.98", "", None),
        ("15.18", "", "SGLang logs what free memory lost, whatever took it"),  # 0.2 GiB beside the weights
        ("15.40", "", None),  # 0.4 GiB are no kernel's
        ("29.96", "", None),
        ("10.92", "cpu_offload_gb=4, ", None),  # 14.98 less the 4.06 that SGLang's offloader moves
    ],
)
def test_only_a_small_difference_of_weights_is_put_down_to_free_memory(
    run: Run, log: Log, usage: str, more: str, reason: str | None
) -> None:
    text = SGLANG.replace("mem usage=14.98", f"mem usage={usage}").replace("page_size=1, ", f"page_size=1, {more}")
    assert rows_of(run("reconcile", "--log", log(text), "--format", "json").json)["weights"]["why"] == reason


@pytest.mark.parametrize(
    ("usage", "flags", "stage", "predicted"),
    [
        ({"PP1_TP0": "16.92", "PP1_TP1": "16.92"}, (), "pipeline stage 1", 16.92),
        ({"PP3_TP0": "16.92"}, (), "pipeline stage 3", 16.92),
        ({"TP0": "17.90", "TP1": "17.90"}, (), "pipeline stage 0", 17.90),  # whose stage no name gives
        (
            {"PP0_TP0": "17.90", "PP1_TP0": "20.00", "PP2_TP0": "16.92"},
            (),
            "pipeline stage 1, of 3 the furthest off",
            16.92,
        ),
        # Of releases before 0.5.23 no class was compared: their head is planned on the last stage alone.
        ({"PP0_TP0": "16.92"}, ("--engine", "sglang@0.5.22"), "pipeline stage 0", 16.92),
        ({"PP1_TP0": "15.94"}, ("--engine", "sglang@0.5.22"), "pipeline stage 1", 15.94),
        ({"PP3_TP0": "16.92"}, ("--engine", "sglang@0.5.22"), "pipeline stage 3", 16.92),
    ],
)
def test_each_pipeline_stage_is_compared_with_its_own_rank(
    run: Run, log: Log, usage: dict[str, str], flags: tuple[str, ...], stage: str, predicted: float
) -> None:
    """Llama's class keeps its head, 0.98 GiB a rank, on every stage (tests/facts/stages_sglang.jsonl)."""
    answer = run("reconcile", "--log", log(pipeline(**usage)), "--gpu", "h200", *flags, "--format", "json")
    row = rows_of(answer.json)["weights"]
    assert row["why"].partition(";")[0] == stage
    # Whole segments of 2 MiB: at most 20 layers x 5 tensors of them more.
    assert predicted - 0.01 <= row["predicted"] / GIB <= predicted + 0.2


def test_the_pool_of_a_pipeline_stage_is_its_own(run: Run, log: Log) -> None:
    """20 layers x 4 heads x 128 x 2 of 2 bytes: 40,960 bytes a token on every stage; 50.00 GiB are 1,310,720 tokens."""
    lines = (
        "[2025-08-21 18:18:15 PP1 TP0] KV Cache is allocated. #tokens: 1310719, K size: 25.00 GB, V size: 25.00 GB\n"
    )
    document = run("reconcile", "--log", log(pipeline(PP1_TP0="16.92") + lines), "--format", "json").json
    assert document["given_from"] == "50.00 GiB"
    assert rows_of(document, "given")["tokens"]["exact"]


def test_numbers_of_drafts_that_nobody_makes_are_left_alone(run: Run, log: Log) -> None:
    listed = "page_size=1, speculative_algorithm=None, speculative_num_steps=5, speculative_num_draft_tokens=64, "
    plain, more = log(SGLANG), log(SGLANG.replace("page_size=1, ", listed))
    first, second = (run("reconcile", "--log", path, "--format", "json").json for path in (plain, more))
    assert rows_of(first) == rows_of(second)


def test_a_draft_of_sglangs_cannot_be_sized(run: Run, log: Log) -> None:
    text = SGLANG.replace("page_size=1, ", "page_size=1, speculative_algorithm='EAGLE', ")
    ran = run("reconcile", "--log", log(text))
    assert "the server drafts tokens (EAGLE), which is not sized: " in ran.err
