"""How many users an LLM server's GPU memory holds, and why: kvplan from Python.

    import kvplan

    answer = kvplan.estimate("llama-3.1-8b", gpu="a100-80g", max_model_len=32768)
    answer.users, answer.memory.kv_cache, answer.serve_command

Keywords are the command line's options by their long names (`tensor_parallel_size=2`, `kv_cache_dtype="fp8"`,
`mean_tokens="4k"`, `engine="vllm@0.30"`); numbers may be numbers. What the command line refuses is raised as a
`KvplanError` with the same words. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    import datetime
    from os import PathLike
    from typing import Literal, Never, Unpack

    import pandas

    from kvplan.asked.form import Form
    from kvplan.asked.keywords import EstimateKeywords, LoadKeywords, PlanKeywords, RecommendKeywords, SweepKeywords
    from kvplan.asked.question import Inputs
    from kvplan.planning.choice import Goal
    from kvplan.report.answers import Answer as Answer
    from kvplan.report.answers import Check as Check
    from kvplan.report.answers import Comparison as Comparison
    from kvplan.report.answers import Diagnosis as Diagnosis
    from kvplan.report.answers import Estimates as Estimates
    from kvplan.report.answers import Explorer as Explorer
    from kvplan.report.answers import Listing as Listing
    from kvplan.report.answers import Recommendation as Recommendation
    from kvplan.report.answers import Simulation as Simulation
    from kvplan.report.answers import TimedRecommendation as TimedRecommendation
    from kvplan.report.answers import Tuning as Tuning
    from kvplan.simulate.load import LoadWords
    from kvplan.simulate.tuned import Listener

    Model = str | PathLike[str] | Mapping[str, Any]
    Sizes = str | int

__all__ = (
    "Answer", "Check", "Comparison", "Diagnosis", "EnvironmentProblem", "Estimates", "Explorer", "InvalidInputError",
    "KvplanError", "Listing", "Recommendation", "Simulation", "TimedRecommendation", "Tuning", "UnsupportedModelError",
    "UsageError", "check", "diff", "estimate", "explore", "list_gpus", "list_models", "recommend", "simulate_load",
    "sweep", "sweep_frame", "tune", "why",
)  # fmt: skip


@overload
def estimate(
    model: Model | None = None,
    *,
    gpu: str,
    gpu_memory: Sizes | None = None,
    command: str | None = None,
    **options: Unpack[EstimateKeywords[Never]],
) -> Answer: ...
@overload
def estimate(
    model: Model | None = None,
    *,
    gpu_memory: Sizes,
    command: str | None = None,
    **options: Unpack[EstimateKeywords[Never]],
) -> Answer: ...
@overload
def estimate(
    model: Model | None = None, *, command: str, **options: Unpack[EstimateKeywords[Never]]
) -> Answer | Estimates: ...
@overload
def estimate(model: Model | None = None, **options: Unpack[EstimateKeywords[Never]]) -> Estimates: ...
def estimate(
    model: Model | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    command: str | None = None,
    **options: Any,
) -> Answer | Estimates:
    """The memory of a server and the users it holds: one model, one context, one kind of GPU, or six without one.

    model    a catalog name, a path, a Hub id, or a config.json as a dict; may be left out where `command` names one
    gpu      "a100-80g"; "8xh100-80g" splits every layer over eight
    command  a pasted command of a server, such as `vllm serve ...`, over which keywords win
    options  as on the command line: max_model_len=32768, tensor_parallel_size=2, mean_tokens="4k", ...

    Raises UsageError for what contradicts itself, UnsupportedModelError for what kvplan cannot size.
    """
    from kvplan.asked.form import read_form
    from kvplan.asked.question import requests
    from kvplan.core.units import plural
    from kvplan.planning.plan import plan, plan_tables
    from kvplan.report.answers import Answer, Estimates

    form = _form(options, model, gpu=gpu, gpu_memory=gpu_memory, from_command=command)
    inputs = requests(read_form(form))
    if len(inputs.requests) == 1:
        return Answer(plan(inputs.requests[0]), inputs.notes, inputs.warnings)
    tables = plan_tables(inputs.requests, inputs.num_gpus)
    if form.names_gpu or len(tables) > 1:
        raise UsageError("estimate", f"{plural(len(inputs.requests), 'plan')} requested", "kvplan.sweep takes several")
    return Estimates(tables[0], inputs.notes, inputs.warnings)


@overload
def recommend(
    model: Model | None = None,
    *,
    slo: str,
    users: Sizes | None = None,
    gpus: str | Iterable[str] | None = None,
    prices: str | PathLike[str] | None = None,
    spare: Sizes | None = None,
    fp8: bool = True,
    fp8_weights: bool = False,
    optimistic: bool = False,
    command: str | None = None,
    **options: Unpack[RecommendKeywords],
) -> TimedRecommendation: ...
@overload
def recommend(
    model: Model | None = None,
    *,
    users: Sizes,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    num_gpus: Sizes | None = None,
    gpus: str | Iterable[str] | None = None,
    prices: str | PathLike[str] | None = None,
    fp8: bool = True,
    fp8_weights: bool = False,
    optimistic: bool = False,
    command: str | None = None,
    **options: Unpack[EstimateKeywords[Never]],
) -> Recommendation: ...
def recommend(
    model: Model | None = None,
    *,
    users: Sizes | None = None,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    num_gpus: Sizes | None = None,
    gpus: str | Iterable[str] | None = None,
    prices: str | PathLike[str] | None = None,
    slo: str | None = None,
    spare: Sizes | None = None,
    fp8: bool = True,
    fp8_weights: bool = False,
    optimistic: bool = False,
    command: str | None = None,
    **options: Any,
) -> Recommendation | TimedRecommendation:
    """The cheapest GPUs and flags that hold so many users, or with `gpu` what that GPU needs to hold them.

    gpus         to choose from; six common ones, or those with a price
    prices       a file of dollars per GPU hour
    slo          latency targets, "ttft.p90=2s,tpot=50ms": simulates the users, or a `rate`, on each placement, with
                 prompt_tokens and output_tokens, a profile or a trace
    spare        servers in addition to those that the targets need
    fp8          allow an fp8 KV cache; fp8_weights: also weights quantized while loading
    optimistic   use the likely number of users instead of the low end of the range
    With several engines, or one whose file types are to be chosen, its placements are offers, one for each that holds.
    """
    from dataclasses import replace

    from kvplan.asked.call import KEYWORDS, TIMED, written
    from kvplan.planning import offers
    from kvplan.planning.choice import Goal, choice_of
    from kvplan.report.answers import Offers, Recommendation

    keys = KEYWORDS if slo is None else KEYWORDS | set(TIMED)
    whole = replace(_form(options, model, keys, gpu=gpu, gpu_memory=gpu_memory, from_command=command), several=False)
    count = None if num_gpus is None else written("num_gpus", num_gpus)
    names = None if gpus is None else written("gpus", gpus).split(",")
    file = None if prices is None else written("prices", prices)
    people = None if users is None else written("users", users)
    goal = Goal(people, names, count, file, fp8, fp8_weights, optimistic)
    if slo is not None:
        words = _load_words({**options, "users": users})
        return _timed(slo, words, whole, goal, None if spare is None else written("spare", spare))
    if spare is not None:
        raise UsageError("spare", "needs latency targets", 'add slo="ttft=2s,tpot=50ms"')
    if offers.compares(whole):
        from kvplan.report.offers_text import pace_of

        answer, inputs = offers.offers_of(whole, goal, pace_of)
        return Offers(answer, inputs.notes, inputs.warnings)
    choice = choice_of(whole, goal)
    return Recommendation(choice.answer(), choice.inputs.notes, choice.inputs.warnings)


def _timed(slo: str, words: LoadWords, whole: Form, goal: Goal, spare: str | None) -> TimedRecommendation:
    """The answer of `recommend` with latency targets."""
    from kvplan.asked.form import refuse_missing, stated_except
    from kvplan.asked.question import MODEL_CURE
    from kvplan.planning.choice import SOUGHT, requests_of
    from kvplan.report.answers import TimedRecommendation
    from kvplan.report.timed_text import document
    from kvplan.simulate.timed import Targets, timed

    unused = [*(["num_gpus"] if goal.num_gpus else []), *(whole.values.keys() & {"mean_tokens", "lengths", "overflow"})]
    if unused:
        raise UsageError(unused[0], "does not apply with slo", "use prompt_tokens or profile")
    refuse_missing(("MODEL", whole.names_model, MODEL_CURE))
    form, prices = whole.changed(**dict.fromkeys(whole.values.keys() & {*words.names()})), goal.read_prices()
    question = goal.question(1, stated_except(form, SOUGHT), prices)
    notes, listener = _listening()
    targets = Targets(slo, words, spare, None if prices is None else prices.source, goal.optimistic)
    answer = timed(targets, question, requests_of(form, goal, prices), form, listener, lambda text: None)
    return TimedRecommendation(document(*answer), notes["note"], notes["warning"])


def why(
    log: str | PathLike[str],
    *,
    model: Model | None = None,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    **options: Unpack[PlanKeywords[Never]],
) -> Diagnosis:
    """What happened to a server, by its log, and what to do about it.

    log      a file, gzipped or not, or the text itself, which has several lines
    options  what the log does not state
    """
    from dataclasses import replace

    from kvplan.asked.call import PLAN_KEYWORDS
    from kvplan.measure.serverlog.log import read_text
    from kvplan.measure.why import diagnose
    from kvplan.report.answers import Diagnosis

    form = replace(_form(options, model, PLAN_KEYWORDS, gpu=gpu, gpu_memory=gpu_memory), several=False)
    if log == "":
        raise UsageError("log", "is empty", "give a file's name, or its text")
    is_text = isinstance(log, str) and "\n" in log
    lines = (log if isinstance(log, str) and is_text else read_text(str(log))).splitlines()
    if not any(line.strip() for line in lines):
        raise InvalidInputError("log", "is empty", "give the server's log from its first line")
    return Diagnosis(diagnose(form, lines))


def diff(
    old: str,
    new: str | None = None,
    *,
    policy: str | None = None,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    **options: Unpack[EstimateKeywords[Never]],
) -> Comparison:
    """Two models on one GPU, two policies or two JSON answers compared; REV:PATH reads a file from git.

    policy   the policy to compare between the revisions `old` and `new`
    options  of models
    """
    from kvplan.policy.compared import compared, operands
    from kvplan.report.answers import Comparison

    form = _form(options, None, gpu=gpu, gpu_memory=gpu_memory)
    difference, inputs = compared(*operands(old, new, policy), form)
    return Comparison(difference, inputs.notes, inputs.warnings)


def check(
    policy: str | PathLike[str] = "kvplan.policy.yaml",
    *,
    gpu: str | None = None,
    base: str | None = None,
    today: datetime.date | None = None,
    offline: bool = False,
) -> Check:
    """A policy's targets planned, and its rules judged; of a Kubernetes or compose file, whether its servers start.

    gpu    of a manifest that names none
    base   a revision: also judge what is weaker than there
    today  the date that waivers and ages are judged by
    """
    import os
    from pathlib import Path

    from kvplan.measure.check import checked, policy_at
    from kvplan.report.answers import Check

    if not isinstance(policy, str | os.PathLike):
        raise UsageError("policy", f"is no path but {type(policy).__name__}", "name one file")
    path, notes = Path(policy), list[tuple[str, str]]()
    result = checked(
        policy_at(path, gpu, base), path, today=today, offline=offline, base=base,
        tell=lambda kind, text: notes.append((kind, text)),
    )  # fmt: skip
    warnings = [text for kind, text in notes if kind == "warning"]
    return Check(result, [text for kind, text in notes if kind != "warning"], [*warnings, *result.warnings])


def explore(models: str | Iterable[str], *, users: Sizes | None = None, **options: Unpack[SweepKeywords]) -> Explorer:
    """A page whose sliders select answers: `.save("explore.html")`, or the last line of a notebook's cell.

    models   one or several
    users    at once, at which the page opens
    options  the choices on the page, lists or one value; the rest have choices of their own
    """
    from kvplan.asked.call import KEYWORDS, form_of, written
    from kvplan.documents.explorer_grid import explorer_document
    from kvplan.report.answers import Explorer

    form = form_of(options, KEYWORDS | {"prices"})
    count = None if users is None else written("users", users)
    document, inputs = explorer_document(written("models", models), form, form.text("prices"), count)
    return Explorer(document, inputs.notes, inputs.warnings)


def simulate_load(
    model: Model | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    slo: str | None = None,
    baseline: Literal["contiguous"] | None = None,
    tier: str | Iterable[str] = (),
    tier_chunk: Sizes | None = None,
    efficiency: str | None = None,
    synthetic_acceptance_length: float | str | None = None,
    synthetic_acceptance_rates: str | Iterable[float] | None = None,
    command: str | None = None,
    **options: Unpack[LoadKeywords],
) -> Simulation:
    """A server under a load over time, as `kvplan simulate`: a profile, a trace, or prompt_tokens and output_tokens.

    slo         latency targets, "ttft.p90=2s,tpot=50ms"; also finds the largest load that meets them
    baseline    compare with memory reserved for the full context
    tier        host memory for KV offloading, "cpu=512GiB@25GB/s"
    efficiency  achieved shares of the GPU's peaks, "weights=0.7,kv=0.9,flops=0.6"
    synthetic_acceptance_length, synthetic_acceptance_rates  of drafts: mean tokens a step of a sequence, or for each
                draft token the share of steps that accept it and all before it

    One server, or its data-parallel ranks; fleets are the command line's.
    """
    from dataclasses import replace

    from kvplan.asked.call import PLAN_KEYWORDS
    from kvplan.report.answers import Simulation
    from kvplan.servers.plans.pool import prefix_notes
    from kvplan.simulate.drafts import Acceptance
    from kvplan.simulate.load import load_of
    from kvplan.simulate.question import Onlooker, answered, planned, setups_of
    from kvplan.simulate.slo import parse_slo

    words = _load_words(options)
    others = {name: value for name, value in options.items() if name not in words.names()}
    form = _form(others, model, PLAN_KEYWORDS, gpu=gpu, gpu_memory=gpu_memory, from_command=command)
    form, onlooker, notes, warnings = replace(form, several=False), Onlooker(), list[str](), list[str]()
    tiers = (tier,) if isinstance(tier, str) else tuple(tier)

    def say(inputs: Inputs) -> None:
        notes.extend(inputs.notes)
        warnings.extend(inputs.warnings)

    plan = planned(form, words, tiers, say)
    load = load_of(words, onlooker.tell)
    if words.shared_prefix is not None:
        notes += prefix_notes(load.source.run_len or 0, plan.settings, plan.pool)
    calibration, chunk = form.text("calibration"), None if tier_chunk is None else str(tier_chunk)
    length, rates = synthetic_acceptance_length, synthetic_acceptance_rates
    if rates is not None and not isinstance(rates, str):
        rates = ",".join(map(str, rates))
    setups = setups_of(
        plan, tier=tiers, tier_chunk=chunk, efficiency=efficiency, calibration=calibration, baseline=baseline,
        acceptance=Acceptance(None if length is None else str(length), rates),
    )  # fmt: skip
    promises = () if slo is None else parse_slo(slo)
    answer = answered(plan, setups, load, promises, onlooker, is_calibrated=calibration is not None)
    notes += [text for kind, text in onlooker.notes if kind == "note"]
    return Simulation(answer, notes, [*warnings, *(text for kind, text in onlooker.notes if kind == "warning")])


def tune(
    model: Model | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: Sizes | None = None,
    num_gpus: Sizes | None = None,
    slo: str | None = None,
    tier: str | None = None,
    fp8: bool = True,
    jobs: int = 1,
    command: str | None = None,
    **options: Unpack[LoadKeywords],
) -> Tuning:
    """The flags with the highest throughput under a load that keep latency targets, as `kvplan tune`.

    num_gpus  of all servers together
    slo       latency targets, "ttft.p90=2s,tpot=50ms"; the highest rate within them where no rate is stated
    tier      host memory for KV offloading, "cpu=64GiB@25GB/s"
    fp8       allow an fp8 KV cache
    jobs      processes; more than one only from a script that can be imported
    """
    from dataclasses import replace

    from kvplan.asked.call import PLAN_KEYWORDS, written
    from kvplan.planning.choice import counted
    from kvplan.report.answers import Tuning
    from kvplan.report.tune_text import document
    from kvplan.simulate.tuned import TuneQuestion, tuned

    words = _load_words(options)
    others = {name: value for name, value in options.items() if name not in words.names()}
    form = _form(others, model, PLAN_KEYWORDS, gpu=gpu, gpu_memory=gpu_memory, from_command=command)
    gpus, count = counted(form.texts("gpu"), None if num_gpus is None else written("num_gpus", num_gpus))
    form, (notes, listener) = replace(form.changed(gpu=gpus), several=False), _listening()
    answer = tuned(TuneQuestion(form, words, count, slo, tier, fp8), jobs, listener)
    return Tuning(document(*answer), notes["note"], notes["warning"])


def list_models(name: str | None = None, *, family: str | None = None, max_params: Sizes | None = None) -> Listing:
    """The catalog's models, as `kvplan models` lists them; `name` alone with all its data.

    family      only models whose name, id or type contains this text
    max_params  only models with at most so many parameters: "8B"
    """
    from kvplan.report.answers import Listing

    size = None if max_params is None else str(max_params)
    return Listing(("models", {"name": name, "family": family, "max_params": size})).read()


def list_gpus(name: str | None = None) -> Listing:
    """The GPUs that kvplan knows, as `kvplan gpus` lists them; `name` alone with all its data."""
    from kvplan.report.answers import Listing

    return Listing(("gpus", {"name": name})).read()


def sweep(models: str | Iterable[str], **options: Unpack[SweepKeywords]) -> list[dict[str, Any]]:
    """One row for each combination, in the order of `kvplan sweep --format csv`: `pandas.DataFrame(rows)` takes them.

    models   one or several
    options  as on the command line; a list where several are tried: gpu=["l40s", "h100-80g"]

    A combination that cannot run has a row with its `reason`. Raises what `estimate` raises where none can.
    """
    from kvplan.asked.call import KEYWORDS, form_of
    from kvplan.planning.grid import grid_of, refuse_unusable
    from kvplan.planning.sweep import SweepRow, all_rows

    form = form_of(options, KEYWORDS | {"prices"}, models=models)
    _, grid, _ = grid_of(form, form.texts("models") or [], form.text("prices"))
    refuse_unusable(grid)
    rows = (row for chunk in all_rows(grid, jobs=1) for row in chunk)
    return [dict(zip(SweepRow._fields, row, strict=True)) for row in rows]


def sweep_frame(models: str | Iterable[str], **options: Unpack[SweepKeywords]) -> pandas.DataFrame:
    """The rows of `sweep` as a pandas DataFrame: counts are whole numbers, what a row lacks is <NA>.

    Raises EnvironmentProblem where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        remedy = "pip install '.[report]' in kvplan's sources"
        raise EnvironmentProblem("sweep_frame", "pandas is not installed", remedy) from None

    return pandas.DataFrame(sweep(models, **options)).convert_dtypes()


def _form(options: Mapping[str, Any], model: Model | None, known: Iterable[str] | None = None, **others: Any) -> Form:
    """The form of a call: a config in place of a name is read itself, a file of a server's command as if pasted."""
    from kvplan.asked.call import KEYWORDS, config_name, form_of
    from kvplan.asked.form import with_file

    keys = KEYWORDS if known is None else frozenset(known)
    if isinstance(model, Mapping):
        return form_of(options, keys, model=config_name(model), config=dict(model), **others)
    return with_file(form_of(options, keys, model=model, **others))


def _load_words(options: Mapping[str, Any]) -> LoadWords:
    """What the keywords say of a load."""
    from kvplan.asked.call import written
    from kvplan.simulate.load import LoadWords

    stated = {name: value for name, value in options.items() if name in LoadWords.names() and value is not None}
    return LoadWords(**{name: written(name, value) for name, value in stated.items()})


def _listening() -> tuple[dict[str, list[str]], Listener]:
    """Notes and warnings, and who collects them."""
    from kvplan.simulate.tuned import Listener

    notes: dict[str, list[str]] = {"note": [], "warning": []}

    def say(inputs: Inputs) -> None:
        notes["note"] += inputs.notes
        notes["warning"] += inputs.warnings

    return notes, Listener(say, lambda kind, text: notes["warning" if kind == "warning" else "note"].append(text))


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvplan.report import answers

        return getattr(answers, name)
    near = f"; did you mean list_{name}?" if f"list_{name}" in __all__ else ""
    raise AttributeError(f"module 'kvplan' has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return sorted(__all__)
