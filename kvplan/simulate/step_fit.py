"""Step times fitted to a run's samples: seconds per step, prompt token, output token and byte of KV read.

Each pair of consecutive samples gives one equation: busy seconds from steps, tokens and KV reads. The coefficients are
the non-negative least-squares solution.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from kvplan.servers.plans.calibration import TERMS, MeasuredSteps

FEWEST = 20  # equations, for four unknowns
NEEDED = ("busy_s", "num_steps", "prompt_tokens", "generation_tokens", "num_kv_tokens")
STAGES = ("prefill", "decode")  # stages of the run itself, without its baseline


def fitted(samples: Sequence[Mapping[str, Any]], model: str, kv_token_bytes: int) -> MeasuredSteps | None:
    """Return a calibration's `step_time`: the model, the seconds of each term, the number of equations and their error.

    kv_token_bytes  bytes that a step reads per token in the pool
    Return None if the samples have too few steps, or too little variety to separate the terms.
    """
    equations = [
        ((steps, prompt, output, steps * kv * kv_token_bytes), busy)
        for busy, steps, prompt, output, kv in _intervals(samples)
    ]
    if len(equations) < FEWEST:
        return None
    seconds = _least_squares([row for row, _ in equations], [busy for _, busy in equations])
    if seconds is None:
        return None
    errors = [abs(sum(a * b for a, b in zip(seconds, row, strict=True)) - busy) / busy for row, busy in equations]
    return {
        "model": model,
        "seconds": dict(zip(TERMS, seconds, strict=True)),
        "num_intervals": len(equations),
        "median_error": median(errors),
    }


def _intervals(samples: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, int, int, float]]:
    """Return (busy seconds, steps, prompt, output, mean KV tokens) between consecutive samples with steps."""
    served = [sample for sample in samples if sample.get("stage") in STAGES and all(name in sample for name in NEEDED)]
    intervals = []
    for a, b in pairwise(served):
        busy, steps = b["busy_s"] - a["busy_s"], b["num_steps"] - a["num_steps"]
        if steps > 0 and busy > 0:
            kv = (a["num_kv_tokens"] + b["num_kv_tokens"]) / 2
            tokens = b["generation_tokens"] - a["generation_tokens"]
            intervals.append((busy, steps, b["prompt_tokens"] - a["prompt_tokens"], tokens, kv))
    return intervals


def _least_squares(rows: list[tuple[float, ...]], values: list[float]) -> list[float] | None:
    """Return the best non-negative coefficients: least squares over every subset of terms, the best without negatives,
    or None if no subset has a solution.
    """
    import numpy as np  # here, as no other command needs it at start-up

    matrix, target = np.array(rows, dtype=float), np.array(values, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    best: tuple[float, list[float]] | None = None
    for count in range(len(TERMS), 0, -1):
        for terms in combinations([i for i in range(len(TERMS)) if scale[i] > 0], count):
            part = matrix[:, terms] / scale[list(terms)]
            solution, _, rank, _ = np.linalg.lstsq(part, target, rcond=None)
            if rank < count or (solution < 0).any():
                continue
            residual = float(((part @ solution - target) ** 2).sum())
            if best is None or residual < best[0]:
                full = [0.0] * len(TERMS)
                for i, value in zip(terms, solution, strict=True):
                    full[i] = float(value / scale[i])
                best = residual, full
    return None if best is None else best[1]
