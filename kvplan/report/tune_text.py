"""The flags that serve the most, as JSON, CSV, Markdown and a table; all from one document."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplan.core.files import printable
from kvplan.core.table import Table
from kvplan.core.units import GIB, plural
from kvplan.planning.launch import serve_command
from kvplan.planning.plan import Request, plan
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import Answer
from kvplan.report.lines import COMMAND, Paragraph, Part, line
from kvplan.report.page import Block, bold, bullets, code
from kvplan.report.simulate_text import duration, percent, rate_text
from kvplan.report.timed_text import limit_text, target_document, target_text
from kvplan.servers.arguments import ARGUMENTS
from kvplan.simulate.ranges import verdict
from kvplan.simulate.settings import TURNED

if TYPE_CHECKING:
    from kvplan.documents import tune as typed
    from kvplan.simulate.steady import Demand
    from kvplan.simulate.tuning import Choice, Tuned

METHOD: Final = (
    "Every setting is rated in closed form; those of the table were simulated, each at the largest load that keeps the "
    "targets. In brackets: on servers as slow and as fast as the range of times allows."
)


def document(
    base: Request, num_gpus: int, load: str, demand: Demand, rate: float | None, tuned: Tuned
) -> typed.TuneDocument:
    context = base.args.max_model_len
    assert isinstance(context, int), "the command states one"
    reasons = Counter(refused.reason for refused in tuned.refused)
    doc: typed.TuneDocument = {
        "schema": "kvplan/tune@1",
        "answer": "",
        "verdict": verdict_of(tuned, rate),
        "question": {
            "model": base.spec.name,
            "engine": base.release.label,
            "gpu": base.gpu.name,
            "num_gpus": num_gpus,
            "load": load,
            "targets": [
                f"{promise.name} at most {limit_text(promise.metric, promise.limit)}" for promise in demand.promises
            ],
            "max_model_len": context,
            "requests_per_s": rate,
        },
        "num_settings": tuned.num_settings,
        "num_simulated": tuned.num_simulated,
        "settings": [setting_document(base, choice, tuned) for choice in tuned.choices],
        "limits": list(limits_of(tuned.choices[0])) if tuned.choices else [],
        "failures": [{"reason": reason, "settings": count} for reason, count in reasons.most_common()],
    }
    doc["answer"] = headline(doc)
    return doc


def verdict_of(tuned: Tuned, rate: float | None) -> typed.Verdict | None:
    if tuned.best is None:
        return "broken"
    if rate is None:
        return None
    low, high = tuned.best.ends or (tuned.best.tried.rate, tuned.best.tried.rate)
    return verdict(-high, -low, -rate)


def setting_document(base: Request, choice: Choice, tuned: Tuned) -> typed.TunedSetting:
    setting, run = choice.tried.setting, choice.tried.run
    assert run is not None
    figures = run.result
    low, high = choice.ends or (None, None)
    tokens = figures.output_tokens_per_s * figures.seconds / max(1, figures.finished)
    return {
        "servers": setting.replicas,
        "tensor_parallel_size": setting.tensor_parallel_size,
        "flags": setting.changes,
        "requests_per_s": choice.tried.rate,
        "low": low,
        "high": high,
        "output_tokens_per_s": choice.tried.rate * tokens,
        "closed_form_requests_per_s": choice.rated.rate,
        "running_peak": figures.running_peak,
        "kv_usage_peak": figures.kv_usage_peak,
        "preemptions": figures.preemptions,
        "targets": [target_document(target) for target in run.targets],
        "on_front": choice.is_best,
        "is_default": tuned.usual is not None and setting == tuned.usual.tried.setting,
        "command": shlex.join(serve_command(plan(setting.request(base)))),
    }


def limits_of(choice: Choice) -> Sequence[str]:
    """What keeps a setting from serving more."""
    run = choice.tried.run
    assert run is not None
    texts = [
        f"{target.promise.name} {duration(target.value or 0)} of {duration(target.promise.limit)}"
        for target in run.targets
        if target.promise.metric is not None and (target.value or 0) > CLOSE * target.promise.limit
    ]
    figures, highest = run.result, choice.tried.setting.max_num_seqs
    if highest is not None and figures.running_peak >= highest:
        texts.append(f"all of --max-num-seqs {highest} running")
    if figures.kv_usage_peak >= FULL:
        texts.append(f"KV cache up to {percent(figures.kv_usage_peak)} in use")
    if not texts and choice.tried.rate >= choice.rated.capacity:
        texts.append("all that the server computes: more requests would only wait")
    if figures.preemptions:
        texts.append(plural(figures.preemptions, "preemption"))
    return texts


CLOSE: Final = 0.85  # of a limit, from which on it is what keeps a server from serving more
FULL: Final = 0.9


# --- words ------------------------------------------------------------------------------------------------------------


def flags_text(flags: Mapping[str, Any]) -> str:
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        text = f"{value / GIB:g}" if ARGUMENTS[name].kind == "gib" else str(value)
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", text]
    return " ".join(words)


def headline(doc: typed.TuneDocument) -> str:
    question = doc["question"]
    within = f" within {', '.join(question['targets'])}" if question["targets"] else ""
    gpus = f"{question['num_gpus']} x {question['gpu']}"
    if not doc["settings"]:
        return f"No: no setting of {question['model']} on {gpus} serves {question['load']}{within}."
    best = doc["settings"][0]
    start = {"kept": "Yes: run", "broken": "No: at most run", "too close to call": "Too close to call: run"}
    run = "Run" if doc["verdict"] is None else start[doc["verdict"]]
    sought = "" if question["requests_per_s"] is None else f" of the {rate_text(question['requests_per_s'])} sought"
    flags = flags_text(best["flags"]) or "the defaults"
    served = f"{range_text(best)} requests/s{sought}{within}{gain_text(doc)}"
    return f"{run} {servers_text(best)}with {flags}: {served}."


def servers_text(setting: typed.TunedSetting) -> str:
    if setting["servers"] == setting["tensor_parallel_size"] == 1:
        return ""
    return f"{plural(setting['servers'], 'server')} of TP {setting['tensor_parallel_size']} "


def range_text(setting: typed.TunedSetting) -> str:
    rate = rate_text(float(f"{setting['requests_per_s']:.3g}"))
    if setting["low"] is None or setting["high"] is None:
        return rate
    low, high = (rate_text(float(f"{end:.2g}")) for end in (setting["low"], setting["high"]))
    return f"{rate} ({low}-{high})"


def gain_text(doc: typed.TuneDocument) -> str:
    """How much more than what the server takes by itself; its range where both were simulated at the ends."""
    best = doc["settings"][0]
    usual = next((setting for setting in doc["settings"] if setting["is_default"]), None)
    if usual is None:
        return "; the defaults do not keep it"
    if usual is best:
        return ""
    gains = [best["requests_per_s"] / usual["requests_per_s"] - 1]
    if best["low"] and usual["low"] and best["high"] and usual["high"]:
        gains += [best["low"] / usual["low"] - 1, best["high"] / usual["high"] - 1]
    span = "" if len(gains) == 1 else f" ({min(gains):.0%} to {max(gains):.0%})"
    return f"; {gains[0]:.0%}{span} more than the defaults{defaults_text(usual, best)}"


def defaults_text(usual: typed.TunedSetting, best: typed.TunedSetting) -> str:
    if usual["tensor_parallel_size"] == best["tensor_parallel_size"]:
        return ""
    return f" on {servers_text(usual).strip() or '1 server of TP 1'}"


def chosen(doc: typed.TuneDocument) -> list[typed.TunedSetting]:
    """The settings that no other beats, and the defaults."""
    return [setting for setting in doc["settings"] if setting["on_front"] or setting["is_default"]]


def settings_table(doc: typed.TuneDocument, limit: int) -> Table:
    names = [target["promise"] for target in doc["settings"][0]["targets"]]
    rows = [
        [
            flags_text(setting["flags"]) or "(defaults)",
            f"{setting['servers']} x TP {setting['tensor_parallel_size']}",
            range_text(setting),
            rate_text(float(f"{setting['output_tokens_per_s']:.3g}")),
            *(target_text(target) for target in setting["targets"]),
            f"{setting['running_peak']:,}",
            percent(setting["kv_usage_peak"]),
        ]
        for setting in chosen(doc)[:limit]
    ]
    return Table.of(["flags", "servers", "requests/s", "tokens/s", *names, "running", "KV peak"], rows, 2)


def remarks(doc: typed.TuneDocument) -> list[str]:
    texts = []
    if doc["limits"]:
        texts.append(f"What limits it: {'; '.join(doc['limits'])}.")
    if doc["settings"]:
        front = sum(setting["on_front"] for setting in doc["settings"])
        texts.append(
            f"{doc['num_settings']:,} settings, {doc['num_simulated']:,} simulated, {front} that no other beats in "
            "every respect (requests, times, precision of the KV cache)."
        )
        if "kv_cache_dtype" in doc["settings"][0]["flags"]:
            texts.append("An fp8 KV cache is less precise; no published result says how much faster it is.")
    texts += [
        f"{plural(failure['settings'], 'setting')}: {printable(failure['reason'], 200)}" for failure in doc["failures"]
    ]
    return texts


def lines(doc: typed.TuneDocument, limit: int) -> list[Part]:
    parts: list[Part] = [Paragraph("", doc["answer"], "bold" if doc["verdict"] in (None, "kept") else "bold red")]
    if doc["settings"]:
        parts += [line(f"Load: {doc['question']['load']}"), line(), settings_table(doc, limit), line()]
    parts += [Paragraph("", text) for text in remarks(doc)]
    if doc["settings"]:
        parts += [Paragraph("", METHOD), line(), line("Serve (each server)", "bold")]
        parts.append(line(f"  {doc['settings'][0]['command']}", COMMAND))
    return parts


def page(doc: typed.TuneDocument, limit: int) -> list[Block]:
    parts: list[Block] = [bold(doc["answer"])]
    if doc["settings"]:
        parts += [f"Load: {doc['question']['load']}", settings_table(doc, limit), METHOD]
    if remarks(doc):
        parts.append(bullets(remarks(doc)))
    if doc["settings"]:
        parts += ["Serve (each server):", code(doc["settings"][0]["command"])]
    return parts


def served_bars(doc: typed.TuneDocument, limit: int) -> list[Figure]:
    """What each setting of the table serves."""
    settings = chosen(doc)
    names = [flags_text(setting["flags"]) or "(defaults)" for setting in settings]
    rates = [(setting["requests_per_s"], range_text(setting)) for setting in settings]
    rows = ((name, *rate) for name, rate in zip(names, rates, strict=True))
    return bars("Requests per second within the targets", rows, limit)


COLUMNS: Final = (
    "servers", "tensor_parallel_size", "requests_per_s", "low", "high", "output_tokens_per_s",
    "closed_form_requests_per_s", "running_peak", "kv_usage_peak", "preemptions", "on_front", "is_default", "command",
)  # fmt: skip


def rows_table(doc: typed.TuneDocument) -> Table:
    """A row for each setting that was simulated, with a column for each flag that may be turned and each target."""
    names = [target["promise"] for target in doc["settings"][0]["targets"]] if doc["settings"] else []
    rows = (
        [*(dict(setting)[name] for name in COLUMNS), *(setting["flags"].get(name) for name in TURNED),
         *(target["value"] for target in setting["targets"])]
        for setting in doc["settings"]
    )  # fmt: skip
    return Table.of((*COLUMNS, *TURNED, *names), rows)


def shapes(doc: typed.TuneDocument, limit: int) -> Answer:
    return Answer(
        lambda _: lines(doc, limit),
        lambda: doc,
        lambda: rows_table(doc),
        lambda: page(doc, limit),
        lambda: served_bars(doc, limit),
        [doc["question"]["engine"]],
    )
