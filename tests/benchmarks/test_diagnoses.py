"""The score of causes on a file of failed servers' texts: right, wrong or none, by what the text holds."""

import json
from pathlib import Path

import pytest

from benchmarks import diagnoses

RECORDS = [
    {
        "id": 1,
        "verbatim": ["ValueError: No available memory for the cache blocks."],
        "cause": "no_kv_memory",
        "text_kind": "log",
        "decisive_in_text": True,
    },
    {
        "id": 2,
        "verbatim": "[Bug]: OOM\nvllm does not start",
        "cause": "oom_profile_run",
        "text_kind": "words",
        "decisive_in_text": False,
    },
    {
        "id": 3,
        "verbatim": ["RuntimeError: Engine core initialization failed. See root cause above."],
        "cause": "unknown",
        "text_kind": "log",
        "decisive_in_text": True,
    },
]


@pytest.mark.parametrize(
    ("label", "cause", "verdict"),
    [
        ("no_kv_memory", "no_kv_memory", "right"),
        ("no_kv_memory", "oom_runtime", "wrong"),
        ("no_kv_memory", None, "none"),
        ("unknown", None, "right"),
        ("unknown", "oom_runtime", "wrong"),
    ],
)
def test_no_cause_is_right_only_where_there_is_none_to_be_known(label: str, cause: str | None, verdict: str) -> None:
    assert diagnoses.verdict(label, cause) == verdict


def test_a_file_is_scored_by_what_its_texts_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "failures.jsonl", tmp_path / "score.json"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    monkeypatch.setattr("sys.argv", ["diagnoses.py", str(file), "--json", str(out), "--show"])
    assert diagnoses.main() == 0
    document = json.loads(out.read_text())["failures.jsonl"]
    assert {group: counts for group, counts in document["groups"].items() if "cures" not in group} == {
        "log, decisive": {"right": 2},
        "words, not decisive": {"none": 1},
        "all": {"right": 2, "none": 1},
    }
    assert [row["cause"] for row in document["rows"]] == ["no_kv_memory", None, None]
    assert "2: words, not decisive: oom_profile_run -> None" in capsys.readouterr().out


READY = "INFO:     Application startup complete."
LOGS = [
    {"id": "a", "source": "one/repo:x.log", "state": "serving", "text": READY},
    {"id": "b", "source": "two/repo:x.log", "state": "stopped by signal", "text": f"{READY}\nINFO:     Shutting down"},
    {"id": "c", "source": "three/repo:x.log", "state": "serving", "text": f"{READY}\nEngineCore encountered an issue."},
]


def test_whole_logs_are_scored_by_their_state_and_a_healthy_log_called_dead_is_counted() -> None:
    rows = diagnoses.score_states(LOGS)
    assert [(row["verdict"], row["false_alarm"]) for row in rows] == [
        ("right", False),
        ("right", False),
        ("wrong", True),
    ]


def test_every_third_repository_is_set_apart() -> None:
    assert [record["id"] for record in diagnoses.part_of(LOGS, "held")] == ["c"]
    assert [record["id"] for record in diagnoses.part_of(LOGS, "first")] == ["a", "b"]


def test_an_action_is_a_cure_of_its_kind() -> None:
    record = {"cure": ["newer driver", "--tp 2", "use 0.8.4"], "cure_confirmed": True}
    assert diagnoses.cure_kinds(record) == ["driver", "tp"]
    assert diagnoses.cure_kinds(record | {"cure_confirmed": False}) == []
