"""`kvplan check`: whatever a policy holds, it is judged or refused in one short line, and soon."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.core.errors import KvplanError
from kvplan.measure.check import checked
from kvplan.policy import file as policy_file
from kvplan.policy.result import CheckResult, Figures
from tests.support.parts import some
from tests.support.policies import EXAMPLE

WHOLE: dict[str, Any] = {
    "version": 1,
    "defaults": {"engine": "vllm@0.33", "gpu": "a100-80g", "rules": {"fits": True}},
    "targets": [
        {
            "id": "a", "model": "llama-3.1-8b", "max_model_len": "32k", "max_num_seqs": 128, "lengths": "const:2000",
            "rules": {"min_concurrency": 12, "min_users": {"mean": 9, "p99": 3}, "max_weights": "16GiB"},
        },
        {
            "id": "b", "command": "vllm serve qwen3-8b -tp 2 --max-model-len 8192", "gpu": "l40s",
            "workload": {"profile": "azure-2023-conv", "rate": "5.5/s", "tpot": "30ms"},
            "rules": {"min_users": 3, "min_headroom": "5%"}, "severity": {"min_headroom": "warn"},
        },
    ],
    "baseline": {"file": "b.json", "max_growth": {"weights": "1%"}, "max_drop": {"kv_tokens": "5%"}},
    "measured": {"file": "run", "max_error": "5%", "max_age": "30d"},
    "severity": {"min_concurrency": "warn"},
    "allow_changes": ["limit", "baseline"],
    "waivers": [{"rule": "a/min_users", "reason": "x", "expires": "2026-12-31"}],
}  # fmt: skip
DROP, DOUBLE = object(), object()
BAD: tuple[Any, ...] = (
    DROP, DOUBLE, None, 0, -1, 1, 2**70, 1.5, float("nan"), "", "a", "32k", "5%", "16GiB", "./nosuch", "../x.json",
    "auto", "010", "1e9", "2026-01-01", "vllm@0.1", "nobody/none", "\x1b[31m", "é" * 50, True, False, [], ["a"], {},
    {"a": 1}, [[]], {"fits": True}, "const:1", "lognormal:mean=1,p95=2", "\0", "/dev/null", "vllm serve", "*",
)  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, child in inner for path in ((*here, key), *paths(child, (*here, key)))]


def damage(top: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at a path, drop or double what is there; a path that an earlier damage removed is left alone."""
    inner = top
    for key in path[:-1]:
        try:
            inner = inner[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(inner, list):
        if not isinstance(path[-1], int) or path[-1] >= len(inner):
            return
    elif not isinstance(inner, dict):
        return
    if value is DROP:
        inner.pop(path[-1], None) if isinstance(inner, dict) else inner.pop(path[-1])
    elif value is DOUBLE:
        if isinstance(inner, list):
            inner.append(inner[path[-1]])
    else:
        inner[path[-1]] = value


def answer(path: Path) -> CheckResult | KvplanError:
    """The result or the error, checked for what both promise."""
    try:
        result: CheckResult | KvplanError = checked(policy_file.read(path), path, offline=True)
    except KvplanError as error:
        result = error
    if isinstance(result, KvplanError):
        assert str(result).isprintable()
        assert len(str(result)) < 1500
    else:
        lines = path.read_text(encoding="utf-8").count("\n") + 1
        assert all(1 <= finding.line <= lines for finding in result.findings)
        assert all(isinstance(target.figures, Figures) or target.target == "measured" for target in result.targets)
    return result


def written(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_whole_policy_is_judged(tmp_path: Path) -> None:
    result = answer(written(tmp_path, yaml.safe_dump(WHOLE)))
    assert isinstance(result, CheckResult)
    assert len(result.findings) == 2 * (1 + 2) + 4 + 2 + 2  # fits and two of the baseline each; own rules; the run


@FUZZ
@given(data=st.data())
def test_a_damaged_policy_is_judged_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    top = copy.deepcopy(WHOLE)
    places = paths(top)
    for _ in range(data.draw(st.integers(1, 3))):
        damage(top, data.draw(st.sampled_from(places)), data.draw(st.sampled_from(BAD)))
    answer(written(tmp_path, yaml.safe_dump(top, default_flow_style=data.draw(st.sampled_from([None, True, False])))))


@FUZZ
@given(data=st.data())
def test_a_policy_with_lines_changed_is_judged_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "double", "indent", "swap", "cut", "insert"])):
            case "drop" if len(lines) > 1:
                lines.pop(index)
            case "double":
                lines.insert(index, lines[index])
            case "indent":
                lines[index] = " " * data.draw(st.integers(0, 8)) + lines[index].lstrip()
            case "swap":
                other = data.draw(st.integers(0, len(lines) - 1))
                lines[index], lines[other] = lines[other], lines[index]
            case "cut":
                lines[index] = lines[index][: data.draw(st.integers(0, len(lines[index])))]
            case _:
                lines[index] += data.draw(
                    st.sampled_from([" &a", " *a", " !!str", ": x", " {", "]", "'", "\t", " # x", "%"])
                )
    answer(written(tmp_path, "\n".join(lines)))


ROOM = 250 * 1024  # what a file may have beside WHOLE
FILLS = {
    "letters": "a" * ROOM, "words": "a " * (ROOM // 2), "digits": "9" * ROOM, "percent": "9" * ROOM + "%",
    "flags": "".join(f" --x{i}" for i in range(ROOM // 9)), "command": "vllm serve x --y" + " a" * (ROOM // 2 - 8),
    "path": "./" + "a" * ROOM, "folders": "../" * (ROOM // 3), "list": "a=1," * (ROOM // 4),
    "pattern": "a/" + "*?[a]" * (ROOM // 5), "lognormal": "lognormal:" + "mean=1," * (ROOM // 7 - 2),
}  # fmt: skip


@pytest.mark.parametrize("fill", some(FILLS, ("letters", "flags", "pattern", "lognormal")))
def test_every_field_may_be_as_long_as_a_file_and_is_refused_in_a_short_line(tmp_path: Path, fill: str) -> None:
    """`answer` checks the length of the message."""
    loose = [place for place in paths(WHOLE) if not isinstance(value_at(place), dict | list)]
    for place in loose:
        top = copy.deepcopy(WHOLE)
        damage(top, place, FILLS[fill])
        text = yaml.dump(top, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), width=10**7)
        assert 230 * 1024 < len(text) <= 256 * 1024
        assert isinstance(answer(written(tmp_path, text)), KvplanError)


def value_at(place: tuple[Any, ...]) -> Any:
    value: Any = WHOLE
    for key in place:
        value = value[key]
    return value


@pytest.mark.parametrize("fill", some(FILLS, ("digits", "command", "folders", "list")))
def test_every_field_of_a_thousand_characters_is_judged_or_refused(tmp_path: Path, fill: str) -> None:
    for place in paths(WHOLE):
        top = copy.deepcopy(WHOLE)
        damage(top, place, FILLS[fill][: 16_000 if place[-1] == "command" else 1000])
        answer(written(tmp_path, yaml.safe_dump(top)))


def test_a_file_full_of_targets_waivers_or_arguments_is_judged_or_refused(tmp_path: Path) -> None:
    many = {"version": 1, "defaults": {"model": "llama-3.1-8b", "gpu": "h200", "rules": {"fits": True}}}
    ids = [{"id": f"t{i}"} for i in range(250)]
    waivers = [{"rule": f"t{i}*x/fits", "reason": "x", "expires": "2026-12-31"} for i in range(3700)]
    arguments = {"id": "a", "engine_arg": ["max_num_seqs=8"] * 13_000}
    for more in ({"targets": ids}, {"targets": ids, "waivers": waivers}, {"targets": [arguments]}):
        text = yaml.dump({**many, **more}, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
        assert len(text) <= 256 * 1024
        answer(written(tmp_path, text))


@pytest.mark.full
def test_every_key_with_every_bad_value_is_judged_or_refused(tmp_path: Path) -> None:
    for place in paths(WHOLE):
        for value in BAD:
            top = copy.deepcopy(WHOLE)
            damage(top, place, value)
            answer(written(tmp_path, yaml.safe_dump(top)))
