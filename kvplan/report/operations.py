"""Operating limits as what runs them: Prometheus rules with their tests, a Grafana dashboard, KEDA's scaled objects.

Every expression names the server's own metrics (its metrics.py). Sources: Prometheus 2.42 rule files and promtool's
unit tests; the operator's PrometheusRule v1; Grafana's dashboard model, schema 39; KEDA 2's ScaledObject v1alpha1.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.table import percent
from kvplan.core.units import plural
from kvplan.policy.limits import Limits
from kvplan.policy.result import CheckResult
from kvplan.simulate.preempted import Kept

RULES_FILE: Final = "kvplan.rules.yaml"  # that the tests name
SCRAPE_S: Final = 15
AHEAD_S: Final = 120  # a fill this far ahead is told
KEPT: Final = "30m"  # an alert keeps firing so long, so that one rush hour is one alert
MAX_REPLICAS: Final = 10


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert of a target, and series on either side of its limit.

    fires, quiet  metric, or metric with labels -> its samples in promtool's notation, one every SCRAPE_S
    """

    name: str
    expr: str
    pending: str
    severity: str
    summary: str
    description: str
    fires: Mapping[str, str]
    quiet: Mapping[str, str]


def prometheus_rule(result: CheckResult) -> str:
    """Alerting rules as Prometheus and promtool read them."""
    return heading(result) + as_yaml({"groups": groups(result)})


def prometheus_operator(result: CheckResult) -> str:
    """The same rules as a PrometheusRule of Prometheus's operator."""
    return heading(result) + as_yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "kvplan"},
            "spec": {"groups": groups(result)},
        }
    )


def prometheus_test(result: CheckResult) -> str:
    """promtool's unit tests of the rules: every alert just above its limit and just below."""
    tests = [test for limits in limited(result) for alert in alerts_of(limits) for test in tests_of(limits, alert)]
    document = {"rule_files": [RULES_FILE], "evaluation_interval": f"{SCRAPE_S}s", "tests": tests}
    return f"# promtool test rules; with the rules as {RULES_FILE}\n" + as_yaml(document)


def limited(result: CheckResult) -> list[Limits]:
    """The limits of the targets that have some. Raise UsageError if none has, or if metrics do not tell two apart."""
    known = [limits for limits in result.limits.values() if not isinstance(limits, str)]
    if not known:
        reasons = "; ".join(f"{target}: {reason}" for target, reason in result.limits.items())
        raise UsageError(result.path, f"no target has operating limits ({reasons})", "mend the policy first")
    names: dict[tuple[str, str], str] = {}
    for limits in known:
        other = names.setdefault((limits.metrics.prefix, limits.model), limits.target)
        if other != limits.target:
            problem = f"both are served as {limits.model}, so their metrics cannot be told apart"
            raise UsageError(f"targets {other} and {limits.target}", problem, "give one a served_model_name")
    return known


def heading(result: CheckResult) -> str:
    lines = [f"# Operating limits of {result.path}, as kvplan derives them"]
    for target, limits in result.limits.items():
        lines.append(f"# {target}: {limits if isinstance(limits, str) else sentence(limits)}")
    return "\n".join(lines) + "\n"


def sentence(limits: Limits) -> str:
    return memory_sentence(limits) + ("" if limits.targets is None else f"; {targets_sentence(*limits.targets)}")


def targets_sentence(targets: str, largest: Kept | str) -> str:
    if isinstance(largest, str):
        return f"{targets}: {largest}"
    count = plural(int(largest.in_flight), "request")
    return f"{targets} is likely kept up to {largest.rate:.2f} requests/s, with {count} in flight"


def memory_sentence(limits: Limits) -> str:
    count = f"{plural(limits.running, 'running request')} ({limits.requests})"
    if limits.usage is not None:
        return f"{percent(limits.usage)} of the KV cache, {count}"
    why = (
        "sequences run out before the KV cache does" if limits.sequences_first else "one request may fill the KV cache"
    )
    return f"{count}; {why}"


def groups(result: CheckResult) -> list[dict[str, Any]]:
    return [
        {"name": f"kvplan: {limits.target}", "rules": [rule_of(limits, alert) for alert in alerts_of(limits)]}
        for limits in limited(result)
    ]


def rule_of(limits: Limits, alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.pending,
        "keep_firing_for": KEPT,
        "labels": {"severity": alert.severity, "target": limits.target},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }


# --- alerts -----------------------------------------------------------------------------------------------------------


def selector(limits: Limits) -> str:
    return f"{{model_name={json.dumps(limits.model)}}}"


def series(limits: Limits, figure: str) -> str:
    """A figure's newest metric, of this model."""
    return limits.metrics.figures[figure][0] + selector(limits)


def has(limits: Limits, *figures: str) -> bool:
    """True if the server's page has these figures."""
    return all(figure in limits.metrics.figures for figure in figures)


def alerts_of(limits: Limits) -> list[Alert]:
    makers: Sequence[Callable[[Limits], Alert | None]] = (nearly_full, nearly_all, long_queue, preempted, other_pool)
    return [alert for maker in makers if (alert := maker(limits)) is not None]


def nearly_full(limits: Limits) -> Alert | None:
    """The pool's level, or its trend from half of that level on."""
    if limits.usage is None or not has(limits, "kv_usage"):
        return None
    usage, level = series(limits, "kv_usage"), round(limits.usage, 3)
    mean = f"avg_over_time({usage}[1m])"
    trend = f"predict_linear({usage}[2m], {AHEAD_S})"
    return Alert(
        "KVCacheNearlyFull",
        f"{mean} > {level} or ({trend} > 1 and {mean} > {level / 2:.3f})",
        "0m",
        "warning",
        f"{limits.target}: the KV cache is nearly full",
        f"Above {percent(level)} of a replica's KV cache, or full in {AHEAD_S // 60} minutes at this pace. The plan "
        f"leaves the rest for chance: up to {plural(limits.running, 'running request')} ({limits.requests}). Beyond, "
        "requests are preempted; add replicas.",
        fires={usage: f"{min(1.0, level * 1.02):.4f}+0x60"},
        quiet={usage: f"{level * 0.98:.4f}+0x60"},
    )


def nearly_all(limits: Limits) -> Alert | None:
    """Sequences run out before the pool does: nothing is preempted, but requests wait."""
    if not limits.sequences_first or not has(limits, "running"):
        return None
    running = series(limits, "running")
    return Alert(
        "SequencesNearlyAtLimit",
        f"avg_over_time({running}[1m]) > {limits.running}",
        "0m",
        "warning",
        f"{limits.target}: nearly as many requests run as the server allows",
        f"With more than {limits.running:,} of {limits.sequences:,} requests running, others begin to wait by chance, "
        "while the KV cache has room. Raise the limit or add replicas.",
        fires={running: f"{limits.running + 1}+0x60"},
        quiet={running: f"{limits.running}+0x60"},
    )


def long_queue(limits: Limits) -> Alert | None:
    """As many wait as run: by Little's law a new request waits as long as one takes."""
    if not has(limits, "waiting"):
        return None
    waiting = series(limits, "waiting")
    return Alert(
        "QueueLongerThanService",
        f"min_over_time({waiting}[2m]) > {limits.running}",
        "1m",
        "critical",
        f"{limits.target}: a new request waits longer than it runs",
        f"More requests wait than the plan runs at once on a replica ({limits.running:,}). Add replicas or shed load.",
        fires={waiting: f"{limits.running + 1}+0x60"},
        quiet={waiting: f"{limits.running}+0x60"},
    )


def preempted(limits: Limits) -> Alert | None:
    counters = limits.metrics.workload
    if not has(limits, "preemptions") or isinstance(counters, str):
        return None
    events, ended = series(limits, "preemptions"), counters.counters["ended"] + selector(limits)
    share = limits.preempted
    whose = "the policy's max_preemption_rate" if limits.is_stated else "no rule of the policy says another"
    return Alert(
        "RequestsPreempted",
        f"increase({events}[5m]) > {share:g} * increase({ended}[5m])",
        "1m",
        "critical",
        f"{limits.target}: requests are preempted",
        f"More than {percent(share)} of the requests ({whose}) lose their KV cache and are computed again.",
        fires={events: f"0+{max(1, round(share * 100)) * 2}x60", ended: "0+100x60"},
        quiet={events: "0+0x60", ended: "0+100x60"},
    )


def other_pool(limits: Limits) -> Alert | None:
    """The server has another pool than planned, so every limit here is wrong."""
    metrics = limits.metrics
    if metrics.info is not None:
        running = series(limits, "running")
        label = next(label for label, fact in metrics.facts.items() if fact == "num_blocks")
        low, likely, high = limits.blocks
        expr = f'{metrics.info}{{{label}!~"{whole_numbers(low, high)}"}} and on (instance, job) {running}'
        info, unit = metrics.info, "blocks"
        fires = {f'{info}{{{label}="{high + 1}"}}': "1+0x60", running: "1+0x60"}
        quiet = {f'{info}{{{label}="{likely}"}}': "1+0x60", running: "1+0x60"}
    else:
        names = [name for name, fact in metrics.facts.items() if fact == "kv_tokens"]
        if not names:
            return None
        (low, likely, high), unit = limits.tokens, "tokens"
        name = names[0] + selector(limits)
        expr = f"{name} < {low} or {name} > {high}"
        fires, quiet = {name: f"{high + 1}+0x60"}, {name: f"{likely}+0x60"}
    return Alert(
        "PoolDiffersFromPlan",
        expr,
        "5m",
        "warning",
        f"{limits.target}: the KV cache is not the planned one",
        f"Planned are {likely:,} {unit} ({low:,}-{high:,}) of {limits.title} under {limits.server}. The limits of its "
        "other alerts are of that pool.",
        fires=fires,
        quiet=quiet,
    )


def whole_numbers(low: int, high: int) -> str:
    """A regular expression of exactly the whole numbers from low, at least 1, to high."""
    low, parts = max(1, low), []
    while low <= high:
        size = 1
        while low % (10 * size) == 0 and low + 10 * size - 1 <= high:
            size *= 10
        head, digit = divmod(low // size, 10)
        last = min(9, digit + (high - low + 1) // size - 1)
        digits = str(digit) if last == digit else f"[{digit}-{last}]"
        parts.append(f"{head or ''}{digits}" + "[0-9]" * (len(str(size)) - 1))
        low += (last - digit + 1) * size
    return "|".join(parts)


def tests_of(limits: Limits, alert: Alert) -> Iterator[dict[str, Any]]:
    expected = rule_of(limits, alert)
    for inputs, fires in ((alert.fires, True), (alert.quiet, False)):
        yield {
            "name": f"{limits.target}: {alert.name} {'above' if fires else 'at'} its limit",
            "interval": f"{SCRAPE_S}s",
            "input_series": [{"series": labeled(name), "values": values} for name, values in inputs.items()],
            "alert_rule_test": [
                {
                    "eval_time": "10m",
                    "alertname": alert.name,
                    "exp_alerts": [
                        {
                            "exp_labels": {**expected["labels"], **labels_of(alert, inputs)},
                            "exp_annotations": expected["annotations"],
                        }
                    ]
                    if fires
                    else [],
                }
            ],
        }


PLACE: Final = {"instance": "pod-0:8000", "job": "server"}


def labeled(name: str) -> str:
    """A series with the labels of the place that is scraped."""
    place = ",".join(f'{key}="{value}"' for key, value in PLACE.items())
    return f"{name[:-1]},{place}}}"


def labels_of(alert: Alert, inputs: Mapping[str, str]) -> dict[str, str]:
    """Labels of the series that fires: the first one's."""
    stated = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', next(iter(inputs)))
    return {**dict(stated), **PLACE}


def as_yaml(document: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True)


# --- dashboard --------------------------------------------------------------------------------------------------------


def grafana(result: CheckResult) -> str:
    """A dashboard with a row per target: usage, requests, queue and preemptions, each with its limit as a line."""
    panels: list[dict[str, Any]] = []
    for limits in limited(result):
        y = sum(9 for panel in panels if panel["type"] == "row")
        title = f"{limits.target}: {limits.title}, {sentence(limits)}"
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        for place, (name, exprs, unit, limit) in enumerate(charts(limits)):
            panels.append(chart(name, exprs, unit, limit, x=6 * place, y=y + 1))
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    document = {
        "title": "kvplan: limits of the plan",
        "uid": "kvplan-limits",
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


Chart = tuple[str, dict[str, str], str, float | None]


def charts(limits: Limits) -> Iterator[Chart]:
    """Title, expression by legend, unit, and the plan's limit."""
    levels = [
        ("KV cache in use", "kv_usage", "percentunit", limits.usage),
        ("Running requests", "running", "short", limits.running),
        ("Waiting requests", "waiting", "short", limits.running),
    ]
    for title, figure, unit, limit in levels:
        if has(limits, figure):
            yield title, {"{{instance}}": series(limits, figure)}, unit, limit
    rates = {"preemptions": "Preemptions a second", "generation_tokens": "Output tokens a second"}
    counter = next((figure for figure in rates if has(limits, figure)), None)
    if counter is not None:
        yield rates[counter], {"{{instance}}": f"rate({series(limits, counter)}[5m])"}, "short", None


def chart(title: str, exprs: Mapping[str, str], unit: str, limit: float | None, *, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [] if limit is None else [{"color": "red", "value": round(limit, 3)}]
    drawn = {"thresholdsStyle": {"mode": "off" if limit is None else "line"}, "fillOpacity": 8}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": 6, "h": 8},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": drawn, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(65 + place), "expr": expr, "legendFormat": legend, "datasource": source}
            for place, (legend, expr) in enumerate(exprs.items())
        ],
    }


# --- scaling ----------------------------------------------------------------------------------------------------------


def keda(result: CheckResult) -> str:
    """A ScaledObject per target: replicas for as many requests in flight as one replica's limit."""
    import yaml

    documents = [scaled_object(limits) for limits in limited(result)]
    text = yaml.safe_dump_all(documents, sort_keys=False, width=10_000)
    notes = (
        "# Assumed: Deployments named like the targets, Prometheus at this address, "
        f"at most {MAX_REPLICAS} replicas.\n"
        "# threshold: requests in flight of one replica, the averageValue of a HorizontalPodAutoscaler's external "
        "metric.\n"
    )
    return heading(result) + notes + text


def scaled_object(limits: Limits) -> dict[str, Any]:
    counted = [f"sum({series(limits, figure)})" for figure in ("running", "waiting") if has(limits, figure)]
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": "http://prometheus-operated.monitoring:9090",
            "query": " + ".join(counted),
            "threshold": str(limits.in_flight),
        },
    }
    name = re.sub(r"[^a-z0-9-]+", "-", limits.target.lower()).strip("-") or "server"
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"name": name},
            "minReplicaCount": 1,
            "maxReplicaCount": MAX_REPLICAS,
            "cooldownPeriod": 300,
            "triggers": [trigger],
        },
    }


WRITERS: Final[Mapping[str, Callable[[CheckResult], str]]] = {
    "prometheus-rule": prometheus_rule,
    "prometheus-operator": prometheus_operator,
    "prometheus-test": prometheus_test,
    "grafana": grafana,
    "keda": keda,
}
