"""Calibration of step times to a user's own benchmark runs: factors on kernels, on links and on the host.

They minimize the error of the simulated figures against the measured ones. Each is regularized toward 1 by the known
error of what it multiplies, so that three runs are enough and thirty are not overruled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvplan.core.records import dataclass
from kvplan.planning.plan import Plan
from kvplan.servers.plans.calibration import FACTORS
from kvplan.simulate.bench_load import BenchLoad, Figures, figures
from kvplan.simulate.host import Host
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.kernels.step import kernel_step
from kvplan.simulate.steptime import attention_kinds

PULL: Final = {"device": 0.15, "link": 0.5, "host": 0.7}  # log-scale prior: assumed
WEIGHTS: Final = {"tpot": 1.0, "ttft": 0.4, "output_tokens_per_s": 0.7}
PRECISION: Final = 0.1  # log standard deviation of a run's figures, including what the model leaves out
ROUNDS: Final = 3
MOST: Final = 0.7  # a factor lies between 0.5 and 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """A benchmark run: its plan, its load and its measured (metric, statistic, value) rows, times in milliseconds.

    host  what the factors multiply; None: as shipped
    """

    plan: Plan
    load: BenchLoad
    values: tuple[tuple[str, str, float], ...]
    host: Host | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted factors by name, and the median of |predicted / measured - 1| before and after the fit."""

    factors: Mapping[str, float]
    error_before: float
    error_after: float


def predicted(measurement: Measurement, factors: Mapping[str, float]) -> Figures:
    plan = measurement.plan
    reaches = tuple(kind.reach for kind in attention_kinds(plan))
    return figures(plan, kernel_step(plan, reaches, Shares(), factors, measurement.host), measurement.load)


def log_errors(measurement: Measurement, factors: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return (log(predicted / measured), weight) of each measured figure."""
    figures = predicted(measurement, factors)
    errors = []
    for metric, statistic, value in measurement.values:
        is_rate = metric == "output_tokens_per_s"
        mine = figures.output_tokens_per_s if is_rate else figures.times.get(f"{metric}_{statistic}")
        if mine and value:
            errors.append((math.log(mine / value), WEIGHTS[metric]))
    return errors


def fitted(measurements: Sequence[Measurement], progress: Callable[[str], None] = lambda _: None) -> Fit:
    """Fit the factors to all runs; `link` stays 1 if no run uses tensor parallelism."""
    has_ranks = any(measurement.plan.request.args.tensor_parallel_size > 1 for measurement in measurements)
    free = [name for name in FACTORS if name != "link" or has_ranks]

    def factors_of(x: Sequence[float]) -> dict[str, float]:
        return dict.fromkeys(FACTORS, 1.0) | {name: math.exp(value) for name, value in zip(free, x, strict=True)}

    def residuals(x: Sequence[float]) -> list[float]:
        own = [
            weight * error / PRECISION
            for measurement in measurements
            for error, weight in log_errors(measurement, factors_of(x))
        ]
        return own + [value / PULL[name] for name, value in zip(free, x, strict=True)]

    x = [0.0] * len(free)
    errors = residuals(x)
    before = median_error(measurements, factors_of(x))
    for turn in range(ROUNDS):
        progress(f"fit {turn + 1} of {ROUNDS}, {len(measurements)} runs")
        columns = []
        for index in range(len(free)):
            moved = list(x)
            moved[index] += 0.05
            columns.append([(b - a) / 0.05 for a, b in zip(errors, residuals(moved), strict=True)])
        square = [[sum(a * b for a, b in zip(p, q, strict=True)) for q in columns] for p in columns]
        slope = [sum(a * b for a, b in zip(column, errors, strict=True)) for column in columns]
        step = solved(square, [-change for change in slope])
        for _ in range(4):
            there = [max(-MOST, min(MOST, a + b)) for a, b in zip(x, step, strict=True)]
            moved_errors = residuals(there)
            if sum(error**2 for error in moved_errors) < sum(error**2 for error in errors):
                x, errors = there, moved_errors
                break
            step = [change / 3 for change in step]
        else:
            break
    return Fit(factors_of(x), before, median_error(measurements, factors_of(x)))


def median_error(measurements: Sequence[Measurement], factors: Mapping[str, float]) -> float:
    sizes = sorted(
        abs(math.exp(error) - 1) for measurement in measurements for error, _ in log_errors(measurement, factors)
    )
    return sizes[len(sizes) // 2] if sizes else 0.0


def solved(square: list[list[float]], right: list[float]) -> list[float]:
    """Solve square x = right by Gaussian elimination; the matrix is positive definite because of the regularization."""
    rows = [[*row, value] for row, value in zip(square, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        for row in range(pivot + 1, size):
            share = rows[row][pivot] / rows[pivot][pivot]
            rows[row] = [a - share * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    x = [0.0] * size
    for row in reversed(range(size)):
        known_sum = sum(rows[row][column] * x[column] for column in range(row + 1, size))
        x[row] = (rows[row][size] - known_sum) / rows[row][row]
    return x


def without_each(measurements: Sequence[Measurement]) -> float | None:
    """Return the leave-one-out median error, or None if there is only one run."""
    if len(measurements) < 2:
        return None
    sizes = []
    for index, left_out in enumerate(measurements):
        others = [*measurements[:index], *measurements[index + 1 :]]
        factors = fitted(others).factors
        sizes += [abs(math.exp(error) - 1) for error, _ in log_errors(left_out, factors)]
    return sorted(sizes)[len(sizes) // 2] if sizes else None
