"""Small ends of the command line and the engine: each once printed, left or raised what nobody could use."""

from pathlib import Path
from typing import Any

import pytest

from engine.request import as_prompts
from kvplan.core.errors import UsageError
from kvplan.report.simulate_text import rate_text
from tests.support.cli import Run, refused, run
from tests.support.fake_nvml import no_driver

__all__ = ["no_driver", "run"]


@pytest.mark.parametrize(("rate", "text"), [(0.0, "0"), (1e-12, "0"), (0.004, "0.004"), (1e-6, "0.000001"), (5.0, "5")])
def test_a_rate_ends_with_a_digit(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def test_a_loop_of_links_is_no_profile(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert refused(run("trace", "stats", "loop")) == "loop: the symbolic links form a loop; check the path"


def test_a_fault_of_json_does_not_end_in_the_air(tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "lla\x01ma"}')
    message = refused(run("estimate", tmp_path, "--gpu", "h200"))
    assert message.endswith("config.json: line 1 column 20: not JSON, invalid control character; correct it")


def test_a_watch_that_saw_nothing_leaves_no_file(tmp_path: Path, run: Run, no_driver: None) -> None:
    log = tmp_path / "log.csv"
    refused(run("watch", "--csv", log), 3)
    assert not log.exists()


@pytest.mark.parametrize("prompts", [None, 5, 1.5, object()])
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(UsageError, match="is neither a text nor a list"):
        as_prompts(prompts)
