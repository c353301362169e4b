"""Step times fitted to samples: known coefficients come back, and what cannot tell them apart gives none."""

import random
from typing import Any

import pytest

from kvplan.simulate.step_fit import FEWEST, fitted

KV_TOKEN = 131_072  # bytes, Llama-3.1-8B in bfloat16


def samples(seconds: tuple[float, float, float, float], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """What an engine whose steps take exactly so long would leave behind."""
    rng = random.Random(seed)
    per_step, per_prompt, per_output, per_byte = seconds
    now = {"stage": "decode", "busy_s": 0.0, "num_steps": 0, "prompt_tokens": 0, "generation_tokens": 0,
           "num_kv_tokens": 0}  # fmt: skip
    rows = [dict(now)]
    for _ in range(count):
        steps, prompt, output = rng.randrange(1, 6), rng.choice([0, 0, 512, 2048]), rng.randrange(1, 64)
        kv = rng.randrange(1000, 90_000)
        mean_kv = (now["num_kv_tokens"] + kv) / 2  # type: ignore[operator]
        now = dict(now)
        now["num_steps"] += steps  # type: ignore[operator]
        now["prompt_tokens"] += prompt  # type: ignore[operator]
        now["generation_tokens"] += output  # type: ignore[operator]
        now["num_kv_tokens"] = kv
        now["busy_s"] += (  # type: ignore[operator]
            per_step * steps + per_prompt * prompt + per_output * output + per_byte * steps * mean_kv * KV_TOKEN
        )
        rows.append(dict(now))
    return rows


@pytest.mark.parametrize(
    "seconds",
    [
        (6e-3, 4e-5, 1e-5, 3e-13),
        (6e-3, 0.0, 1e-5, 3e-13),  # a term that costs nothing
        (0.0, 4e-5, 0.0, 0.0),
    ],
)
def test_the_coefficients_of_exact_samples_come_back(seconds: tuple[float, float, float, float]) -> None:
    fit = fitted(samples(seconds, 60), "llama", KV_TOKEN)
    assert fit is not None
    assert list(fit["seconds"].values()) == pytest.approx(seconds, rel=1e-6, abs=1e-15)
    assert fit["model"] == "llama"
    assert fit["median_error"] < 1e-6


def test_no_coefficient_is_negative_even_where_that_would_fit_better() -> None:
    rows = samples((6e-3, 4e-5, 1e-5, 3e-13), 60)
    for row in rows:  # as if more generated tokens took time away
        row["busy_s"] -= 5e-5 * row["generation_tokens"]
    fit = fitted([row for row in rows if row["busy_s"] > 0], "llama", KV_TOKEN)
    assert fit is None or min(fit["seconds"].values()) >= 0


def test_too_few_samples_give_no_step_time() -> None:
    assert fitted(samples((6e-3, 4e-5, 1e-5, 3e-13), FEWEST - 1), "llama", KV_TOKEN) is None
    assert fitted([], "llama", KV_TOKEN) is None


def test_other_stages_and_samples_without_figures_do_not_count() -> None:
    rows = samples((6e-3, 4e-5, 1e-5, 3e-13), 60)
    strange = [{"stage": "baseline", **{k: v for k, v in row.items() if k != "stage"}} for row in rows]
    assert fitted(strange, "llama", KV_TOKEN) is None
    assert fitted([{"t": 0.1, "stage": "decode", "rss": 1}] * 60, "llama", KV_TOKEN) is None
