"""The flags with the highest throughput, as JSON, CSV, Markdown and a table, all from one document."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, get_args

from kvplan.core.files import printable
from kvplan.core.table import Table, Value, percent
from kvplan.core.units import GIB, plural
from kvplan.documents import tune as typed
from kvplan.planning.plan import Request, plan, serve_command
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import COMMAND, Paragraph, Part, line
from kvplan.report.page import Block, bold, bullets, code
from kvplan.report.simulate_text import duration, rate_text
from kvplan.report.timed_text import limit_text, target_document, target_text
from kvplan.servers.base import flag_of, server_of
from kvplan.servers.words.arguments import ARGUMENTS, flags_of
from kvplan.simulate.ranges import coverage_remark, unseen_remark, verdict
from kvplan.simulate.settings import TURNED, is_flag_of
from kvplan.simulate.steady import Demand
from kvplan.simulate.tuned import HIGHEST_RATE
from kvplan.simulate.tuning import MARGIN, Choice, Nearest, Tuned

METHOD: Final = (
    "All settings are estimated analytically; those in the table were simulated, each at its highest load within the "
    "targets. Parentheses: the range if step times are at the slow or the fast end of their range."
)


def document(
    base: Request, num_gpus: int, load: str, demand: Demand, rate: float | None, tuned: Tuned
) -> typed.TuneDocument:
    best = None if tuned.best is None else demand.ranges(plan(tuned.best.tried.setting.request(base)))
    context = base.args.max_model_len
    assert isinstance(context, int), "the command states one"
    reasons = merged(Counter(refused.reason for refused in tuned.refused))
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
        "limits": list(limits_of(base, tuned.choices[0])) if tuned.choices and not tuned.is_light_load else [],
        "too_few_requests": tuned.is_light_load,
        "nearest": None if tuned.nearest is None else nearest_document(base, tuned.nearest),
        "failures": [{"reason": reason, "settings": count} for reason, count in reasons],
        "unseen": [] if best is None else list(best.unseen),
        "coverage": "" if best is None else best.coverage,
    }
    doc["answer"] = headline(doc)
    return doc


NUMBER: Final = re.compile(r"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)")


def merged(reasons: Counter[str]) -> list[tuple[str, int]]:
    """Return each reason with its number of settings; those that differ only in numbers are one, with their ranges."""
    groups: dict[str, Counter[str]] = {}
    for reason, count in reasons.items():
        groups.setdefault(NUMBER.sub("#", reason), Counter())[reason] += count
    texts: Counter[str] = Counter()
    for group in groups.values():
        parts = zip(*(NUMBER.split(reason) for reason in group), strict=True)
        texts["".join(span(set(alternatives)) for alternatives in parts)] += group.total()
    return texts.most_common()


def span(alternatives: set[str]) -> str:
    """Return the text, or the smallest and largest of several numbers."""
    if len(alternatives) == 1:
        return alternatives.pop()
    numbers = sorted(alternatives, key=lambda number: float(number.replace(",", "")))
    return f"{numbers[0]} to {numbers[-1]}"


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
        "data_parallel_size": base.args.data_parallel_size,
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


def nearest_document(base: Request, nearest: Nearest) -> typed.NearestSetting:
    setting = nearest.setting
    return {
        "servers": setting.replicas,
        "tensor_parallel_size": setting.tensor_parallel_size,
        "data_parallel_size": base.args.data_parallel_size,
        "requests_per_s": nearest.rate,
        "targets": [target_document(target) for target in nearest.outcomes],
        "command": shlex.join(serve_command(plan(setting.request(base)))),
    }


def limits_of(base: Request, choice: Choice) -> Sequence[str]:
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
        flag = flag_of(base.release.engine, "max_num_seqs")
        texts.append(f"{flag} {highest} reached")
    if figures.kv_usage_peak >= FULL:
        texts.append(f"KV cache up to {percent(figures.kv_usage_peak)} in use")
    if not texts and choice.tried.rate >= choice.rated.capacity:
        texts.append("compute: more requests would only wait")
    if figures.preemptions:
        texts.append(plural(figures.preemptions, "preemption"))
    return texts


CLOSE: Final = 0.85  # fraction of a limit from which it counts as what keeps a server from serving more
FULL: Final = 0.9


# --- words ------------------------------------------------------------------------------------------------------------


def flags_text(doc: typed.TuneDocument, setting: typed.TunedSetting) -> str:
    """The changed settings, as the server's own flags."""
    server, words = server_of(doc["question"]["engine"]), []
    for name, value in setting["flags"].items():
        row = flags_of(server.name)[name]
        flag = (row.names[0] if row.names else name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value == (row.on is not False) else f"--no-{flag}")
            continue
        text = str(value) if isinstance(value, str) or ARGUMENTS[name].kind != "gib" else f"{value / GIB:g}"
        words += [f"--{flag}", server.terms.own_value(name, text)]
    return " ".join(words)


def headline(doc: typed.TuneDocument) -> str:
    question = doc["question"]
    within = f" within {', '.join(question['targets'])}" if question["targets"] else ""
    gpus = f"{question['num_gpus']} x {question['gpu']}"
    if not doc["settings"]:
        load = question["load"]
        if load.endswith(HIGHEST_RATE):
            load = f"any rate of {load.removesuffix(f', {HIGHEST_RATE}')}"
        return f"No: no setting of {question['model']} on {gpus} serves {load}{within}.{nearest_text(doc)}"
    best = doc["settings"][0]
    flags = flags_text(doc, best) or "the defaults"
    run = f"{servers_text(best)}with {flags}" if servers_text(best) else flags
    if doc["too_few_requests"]:
        return (
            f"Run {run}: at least {range_text(best)} requests/s{within}; the load has too few requests to choose flags "
            "by (raise --num-requests)."
        )
    if doc["verdict"] is None or question["requests_per_s"] is None:
        return f"Run {run}: {range_text(best)} requests/s{within}{gain_text(doc)}."
    start = {"kept": "Yes", "broken": "No", "too close to call": "Too close to call"}[doc["verdict"]]
    sought = f"{rate_text(question['requests_per_s'])} requests/s{within}"
    return f"{start}: {sought}. Best: {run}, {range_text(best)} requests/s{gain_text(doc)}."


def nearest_text(doc: typed.TuneDocument) -> str:
    """What comes nearest to the targets, where nothing meets them."""
    nearest = doc["nearest"]
    if nearest is None:
        return ""
    values = [
        f"{target['promise']} {target_text(target)}"
        for target in nearest["targets"]
        if target["value"] is None or target["value"] > target["limit"]
    ]
    where = servers_text(nearest).strip()
    rate = nearest["requests_per_s"]
    how = "" if rate is None else f" at {rate_text(float(f'{rate:.2g}'))} requests/s"
    return f" Nearest: {where + ' with ' if where else ''}the defaults{how}, {', '.join(values)}."


def servers_text(setting: typed.TunedSetting | typed.NearestSetting) -> str:
    if setting["servers"] == setting["tensor_parallel_size"] == setting["data_parallel_size"] == 1:
        return ""
    return f"{plural(setting['servers'], 'server')} of {split_text(setting)} "


def split_text(setting: typed.TunedSetting | typed.NearestSetting) -> str:
    """A server's ranks: "TP 2", "TP 1 x DP 2"."""
    ranks = setting["data_parallel_size"]
    return f"TP {setting['tensor_parallel_size']}" + (f" x DP {ranks}" if ranks > 1 else "")


def range_text(setting: typed.TunedSetting) -> str:
    rate = rate_text(float(f"{setting['requests_per_s']:.3g}"))
    if setting["low"] is None or setting["high"] is None:
        return rate
    low, high = (rate_text(float(f"{end:.2g}")) if end else "none" for end in (setting["low"], setting["high"]))
    return f"{rate} ({low}-{high})"


def gain_text(doc: typed.TuneDocument) -> str:
    """Gain over the server's defaults, with its range if both were simulated at the ends."""
    best = doc["settings"][0]
    usual = next((setting for setting in doc["settings"] if setting["is_default"]), None)
    if usual is None:
        return f"; the defaults do not meet the targets{more_text(doc)}"
    if usual is best:
        return more_text(doc)
    gains = [best["requests_per_s"] / usual["requests_per_s"] - 1]
    if best["low"] and usual["low"] and best["high"] and usual["high"]:
        gains += [best["low"] / usual["low"] - 1, best["high"] / usual["high"] - 1]
    ends = list(dict.fromkeys(f"{gain:.0%}" for gain in (min(gains), max(gains))))
    span = f" ({' to '.join(ends)})" if len(ends) > 1 else ""
    return f"; {gains[0]:.0%} more than the defaults{defaults_text(usual, best)}{span}{more_text(doc)}"


def more_text(doc: typed.TuneDocument) -> str:
    """The setting that serves more than the answer, if a simpler one was chosen."""
    best = doc["settings"][0]
    rates = [setting["requests_per_s"] for setting in doc["settings"]]
    gain = max(rates) / best["requests_per_s"] - 1
    if gain < MARGIN - 1:
        return ""
    fastest = doc["settings"][rates.index(max(rates))]
    return f"; {flags_text(doc, fastest) or 'the defaults'} would serve {gain:.0%} more"


def defaults_text(usual: typed.TunedSetting, best: typed.TunedSetting) -> str:
    if usual["tensor_parallel_size"] == best["tensor_parallel_size"]:
        return ""
    return f" on {servers_text(usual).strip() or '1 server of TP 1'}"


def chosen(doc: typed.TuneDocument) -> list[typed.TunedSetting]:
    """The Pareto-optimal settings and the defaults."""
    best, *others = doc["settings"]
    if doc["too_few_requests"]:
        return [best]  # the others' rates are where the search ended, too
    return [best, *(setting for setting in others if setting["on_front"] or setting["is_default"])]


def settings_table(doc: typed.TuneDocument, limit: int) -> Table:
    names = [target["promise"] for target in doc["settings"][0]["targets"]]
    rows = [
        [
            flags_text(doc, setting) or "(defaults)",
            f"{setting['servers']} x {split_text(setting)}",
            range_text(setting),
            rate_text(float(f"{setting['output_tokens_per_s']:.3g}")),
            *(target_text(target) for target in setting["targets"]),
            f"{setting['running_peak']:,}",
            percent(setting["kv_usage_peak"]),
        ]
        for setting in chosen(doc)[:limit]
    ]
    running = "running per rank" if doc["settings"][0]["data_parallel_size"] > 1 else "running"
    return Table.of(["flags", "servers", "requests/s", "tokens/s", *names, running, "KV peak"], rows, 2)


def remarks(doc: typed.TuneDocument) -> list[str]:
    texts = []
    if doc["limits"]:
        texts.append(f"What limits it: {'; '.join(doc['limits'])}.")
    if doc["settings"]:
        front = sum(setting["on_front"] for setting in doc["settings"])
        outcome = f"{front} Pareto-optimal (requests/s, latency, KV cache precision)"
        if doc["too_few_requests"]:
            outcome = "the defaults reached no limit before the requests ended"
        texts.append(f"{doc['num_settings']:,} settings, {doc['num_simulated']:,} simulated, {outcome}.")
        if any(setting["low"] == 0 for setting in chosen(doc)):
            texts.append("None at the low end: if steps are as slow as their range allows, the targets are missed.")
        if any("kv_cache_dtype" in setting["flags"] for setting in chosen(doc)):
            texts.append("An fp8 KV cache is less precise; no published result says how much faster it is.")
    if doc["unseen"]:
        texts.append(unseen_remark(doc["unseen"]))
    texts += [
        f"{plural(failure['settings'], 'setting')}: {printable(failure['reason'], 200)}" for failure in doc["failures"]
    ]
    return texts


def covered(doc: typed.TuneDocument) -> list[str]:
    return [coverage_remark(doc["coverage"])] if doc["coverage"] else []


def lines(doc: typed.TuneDocument, limit: int) -> list[Part]:
    parts: list[Part] = [Paragraph("", doc["answer"], "bold" if doc["verdict"] in (None, "kept") else "bold red")]
    parts += [Paragraph("", text) for text in covered(doc)]
    if doc["settings"]:
        parts += [line(f"Load: {doc['question']['load']}"), line(), settings_table(doc, limit), line()]
    parts += [Paragraph("", text) for text in remarks(doc)]
    if doc["settings"]:
        parts += [Paragraph("", METHOD), line(), line("Serve (each server)", "bold")]
        parts.append(line(f"  {doc['settings'][0]['command']}", COMMAND))
    return parts


def page(doc: typed.TuneDocument, limit: int) -> list[Block]:
    parts: list[Block] = [bold(doc["answer"]), *covered(doc)]
    if doc["settings"]:
        parts += [f"Load: {doc['question']['load']}", settings_table(doc, limit), METHOD]
    if remarks(doc):
        parts.append(bullets(remarks(doc)))
    if doc["settings"]:
        parts += ["Serve (each server):", code(doc["settings"][0]["command"])]
    return parts


def served_bars(doc: typed.TuneDocument, limit: int) -> list[Figure]:
    """Throughput of each setting in the table."""
    settings = chosen(doc)
    names = [flags_text(doc, setting) or "(defaults)" for setting in settings]
    rates = [(setting["requests_per_s"], range_text(setting)) for setting in settings]
    rows = ((name, *rate) for name, rate in zip(names, rates, strict=True))
    return bars("Requests per second within the targets", rows, limit)


Column = Literal[
    "servers", "tensor_parallel_size", "requests_per_s", "low", "high", "output_tokens_per_s",
    "closed_form_requests_per_s", "running_peak", "kv_usage_peak", "preemptions", "on_front", "is_default", "command",
]  # fmt: skip
COLUMNS: Final[tuple[Column, ...]] = get_args(Column)


def rows_table(doc: typed.TuneDocument) -> Table:
    """A row per simulated setting, with a column per tuned flag and per target."""
    names = [target["promise"] for target in doc["settings"][0]["targets"]] if doc["settings"] else []
    turned = [name for name in TURNED if is_flag_of(name, server_of(doc["question"]["engine"]).name)]
    rows: list[list[Value]] = [[setting[name] for name in COLUMNS] for setting in doc["settings"]]
    for row, setting in zip(rows, doc["settings"], strict=True):
        row += [setting["flags"].get(name) for name in turned]
        row += [target["value"] for target in setting["targets"]]
    return Table.of((*COLUMNS, *turned, *names), rows)


def shapes(doc: typed.TuneDocument, limit: int) -> CommandAnswer:
    return CommandAnswer(
        lambda _: lines(doc, limit),
        lambda: doc,
        lambda: rows_table(doc),
        lambda: page(doc, limit),
        lambda: served_bars(doc, limit),
        [doc["question"]["engine"]],
    )
