"""Results of load generators, matched with the plans of the servers under load."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvplan.asked.form import refuse_missing
from kvplan.asked.question import MODEL_CURE
from kvplan.cli import output
from kvplan.cli.options import PlanOptions, form_of, inputs_of
from kvplan.core.errors import UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.units import parse_tokens
from kvplan.measure.bench_results import BenchResult, read_results
from kvplan.planning.plan import Plan, plan
from kvplan.servers.base import abilities_of
from kvplan.simulate.bench_load import BenchLoad, listed, steady
from kvplan.simulate.setup import check

MOST_FILES = 1000


def results_of(patterns: Sequence[str]) -> list[BenchResult]:
    """Every result of the files; a pattern that the shell did not expand is expanded here."""
    paths: list[str] = []
    for pattern in patterns:
        file_names = sorted(glob.glob(pattern)) if any(sign in pattern for sign in "*?[") else [pattern]  # noqa: PTH207 -- as a shell
        if not file_names:
            raise UsageError("--bench", f"no file is like {printable(pattern, 80)}", "name the results")
        paths += file_names
    if len(paths) > MOST_FILES:
        raise UsageError("--bench", f"{len(paths):,} files are too many", f"name at most {MOST_FILES:,}")
    return [result for path in paths for result in read_results(Path(path))]


def plan_of(options: PlanOptions, result: BenchResult, verb: str) -> Plan:
    """Plan of a result's server: by the options, with the result's number of ranks if they do not give one."""
    ranks: dict[str, Any] = {"tensor_parallel_size": str(result.ranks)}
    if getattr(options, "tensor_parallel_size", None) is None and result.ranks is not None:
        options = replace(options, **ranks)
    form = form_of(options)
    refuse_missing(("MODEL", form.names_model, MODEL_CURE), ("--gpu", form.names_gpu, "name the GPU it ran on"))
    inputs = inputs_of(options)
    request = inputs.only(verb, "name one --gpu and one --ctx")
    output.say(inputs, quiet=getattr(options, "quiet", False))
    the_plan = plan(request)
    check(the_plan)
    return the_plan


def load_of(result: BenchResult, the_plan: Plan, prompt_tokens: str | None, output_tokens: str | None) -> BenchLoad:
    """The load that was sent; mean lengths come from the options if the result has none."""
    keeps_step = abilities_of(the_plan.request.release.engine).prompts_first is not None
    if len(set(result.lengths)) > 1:
        return BenchLoad(
            result.users, result.rate, result.num_prompts,
            listed(result.lengths, result.rate, is_constant=result.is_constant),
        )  # fmt: skip
    (one_prompt, one_output), *_ = result.lengths or ((None, None),)
    prompt = mean(prompt_tokens, "--prompt-tokens") or one_prompt or result.prompt
    output = mean(output_tokens, "--output-tokens") or one_output or result.output
    if not prompt or not output:
        what = "--prompt-tokens" if not prompt else "--output-tokens"
        raise UsageError(what, f"is missing, and {path_text(Path(result.source))} does not say it", "give the mean")
    requests = steady(prompt, output, result.rate, is_constant=result.is_constant, keeps_step=keeps_step)
    return BenchLoad(result.users, result.rate, result.num_prompts, requests)


def mean(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_tokens(text, flag)
