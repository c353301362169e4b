"""`kvplan calibrate`: a user's own benchmark runs -> factors on step times, for --calibration."""

import json

from kvplan.cli import output
from kvplan.cli.bench import load_of, plan_of, results_of
from kvplan.cli.simulate_options import CalibrateOptions
from kvplan.core.errors import UsageError
from kvplan.measure.bench_results import BenchResult
from kvplan.planning.plan import Plan
from kvplan.servers.plans.calibration import FACTORS, CalibrationDocument
from kvplan.simulate.bench_fit import Fit, Measurement, fitted, without_each

FEW = 3  # with fewer runs, a fit is mostly the shipped constants


def calibrate(options: CalibrateOptions) -> int:
    """Read the results, fit, write the file and report the fit."""
    if not options.bench:
        raise UsageError("--bench", "missing", "name result files: --bench 'results/*.json'")
    if options.output is None:
        raise UsageError("--output", "missing", "name the file to write: -o calibration.json")
    results = results_of(options.bench)
    measurements = [measurement(options, result) for result in results]
    with output.report_files([options.output], "--output", {".json": "json"}, force=options.force) as (file,):
        if len(results) < FEW and not options.quiet:
            output.tell("note", f"{len(results)} run{'' if len(results) == 1 else 's'}: use 3 to 5 for a better fit")
        fit = fitted(measurements)
        left_out = without_each(measurements)
        file.save(json.dumps(document(measurements[0].plan, results, fit, left_out), indent=2) + "\n")
    with output.standard_output():
        for text in lines(measurements[0].plan, results, fit, left_out):
            output.write(text)
    return 0


def measurement(options: CalibrateOptions, result: BenchResult) -> Measurement:
    values = [(metric, *stated) for metric in ("tpot", "ttft") if (stated := result.stated(metric)) is not None]
    if result.output_tokens_per_s and (result.users is not None or result.rate == float("inf")):
        values.append(("output_tokens_per_s", "mean", result.output_tokens_per_s))
    the_plan = plan_of(options, result, "calibrate")
    return Measurement(the_plan, load_of(result, the_plan, options.prompt_tokens, options.output_tokens), tuple(values))


def document(plan: Plan, results: list[BenchResult], fit: Fit, left_out: float | None) -> CalibrationDocument:
    """Build kvplan/calibration@1 with factors only."""
    gpu = plan.request.gpu
    return {
        "schema": "kvplan/calibration@1",
        "for": {"device": gpu.device_name},
        "device_total": gpu.total_memory,
        "measured": {},
        "model": plan.request.spec.name,
        "step_time": {
            "model": plan.request.spec.name,
            "factors": {name: round(fit.factors[name], 4) for name in FACTORS},
            "runs": len(results),
            "median_error": round(fit.error_after, 4),
            "median_error_left_out": None if left_out is None else round(left_out, 4),
        },
        "tools": sorted({result.tool for result in results}),
    }


MEANS = {
    "device": "kernels of the GPU",
    "link": "communication between GPUs",
    "host": "front end, scheduler and output",
}


def lines(plan: Plan, results: list[BenchResult], fit: Fit, left_out: float | None) -> list[str]:
    name, gpu = plan.request.spec.name, plan.request.gpu.name
    count = f"{len(results)} run{'' if len(results) == 1 else 's'}"
    text = [f"{name} on {gpu}: {count} fitted, off by {fit.error_after:.1%} (before {fit.error_before:.1%})"]
    if left_out is not None:
        text.append(f"Leave-one-out error: {left_out:.1%} (median)")
    return [*text, "", *(f"{factor:<8} x {fit.factors[factor]:.2f}  {MEANS[factor]}" for factor in FACTORS)]
