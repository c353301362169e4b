"""KVP013: a target's overrides of memory and weights do not contradict the card or the checkpoint."""

from pathlib import Path

import pytest

from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.policies import findings, policy

QWEN = "  model: qwen3-0.6b\n  gpu: l40s\n  max_model_len: 8k\n"


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("gpu_memory: 400GiB", 1),
        ("gpu_memory: 49GiB", 1),  # the card has 48 GiB, by NVIDIA's data sheet
        ("gpu_memory: 48GiB", 0),
        ("gpu_memory: 51539607553", 1),  # 48 GiB and one byte
        ("gpu_memory: 44GiB", 0),
        ("weights_bytes: 1MiB", 1),
        ("weights_bytes: 500000000", 1),  # 596,049,920 parameters in bfloat16 are 1,192,099,840 bytes
        ("weights_bytes: 700000000", 0),  # as in fp8, whose embeddings stay in 16 bits
        ("weights_bytes: 3GiB", 0),  # a larger checkpoint is the careful side
    ],
)
def test_an_override_that_contradicts_the_card_or_the_checkpoint_fails(
    override: str, code: int, run: Run, tmp_path: Path
) -> None:
    ran = run("check", policy(tmp_path, f"{QWEN}  {override}\n"), "--format", "json")
    finding = findings(ran)["plausible"]
    assert (ran.code, finding["outcome"], finding["code"]) == (code, "fail" if code else "pass", "KVP013")
    assert finding["line"] == 7, "the line of the override"


def test_a_target_without_overrides_is_not_judged_by_them(run: Run, tmp_path: Path) -> None:
    assert "plausible" not in findings(run("check", policy(tmp_path, QWEN), "--format", "json"))


def test_memory_without_a_card_contradicts_nothing(run: Run, tmp_path: Path) -> None:
    path = policy(tmp_path, "  model: qwen3-0.6b\n  max_model_len: 8k\n  gpu_memory: 400GiB\n")
    assert findings(run("check", path, "--format", "json"))["plausible"]["outcome"] == "pass"


def test_both_contradictions_are_named_and_a_waiver_turns_them_into_a_warning(run: Run, tmp_path: Path) -> None:
    waiver = "waivers: [{rule: chat/plausible, reason: a card to come, expires: 2027-01-01}]\n"
    target = f"{QWEN}  gpu_memory: 400GiB\n  weights_bytes: 1MiB\n"
    ran = run("check", policy(tmp_path, target, more=waiver), "--today", "2026-12-01")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "1 target passes, with 1 warning")
    assert "gpu_memory is 400.00 GiB, but l40s has 48.00 GiB; weights_bytes is 1 MiB, but qwen3-0.6b has" in ran.out
    assert "waived: a card to come (until 2027-01-01)" in ran.out
    assert run("check", policy(tmp_path, target), "--today", "2026-12-01").code == 1


def test_sizes_that_contradict_each_other_read_differently(run: Run, tmp_path: Path) -> None:
    ran = run("check", policy(tmp_path, f"{QWEN}  gpu_memory: 51539607553\n"))
    assert "gpu_memory is 51,539,607,553 B, but l40s has 51,539,607,552 B" in ran.out


def test_only_a_waiver_lets_a_contradiction_pass(run: Run, tmp_path: Path) -> None:
    message = "severity: plausible has none; waive the rule with the reason"
    stated, severity = f"{QWEN}  gpu_memory: 400GiB\n", "severity: {plausible: warn}\n"
    assert message in refused(run("check", policy(tmp_path, stated, more=severity)))
    assert message in refused(run("check", policy(tmp_path, f"{stated}  {severity}")))
