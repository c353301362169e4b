"""What guidellm, aiperf and genai-perf read from a command themselves, for whoever has them installed."""

import shlex
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

DRAWS = 20_000


def drawn(lengths: Iterator[float]) -> list[float]:
    """Shortest, mean and longest of many draws."""
    values = list(islice(lengths, DRAWS))
    return [min(values), sum(values) / DRAWS, max(values)]


def guidellm(command: str) -> dict[str, Any]:
    """`guidellm run`, 0.8.1."""
    import guidellm.entrypoints as entry
    from guidellm.cli import cli
    from guidellm.utils.random import IntegerRangeSampler

    taken: list[Any] = []

    async def take(args: Any, **_: Any) -> None:
        taken.append(args)

    entry.benchmark_generative_text = take
    cli([*shlex.split(command)[1:], "--disable-console"], standalone_mode=False)
    [spec] = taken[0].get_benchmarks()
    profile, [data] = spec.profile.model_dump(), spec.data
    sides = {
        side: drawn(iter(IntegerRangeSampler(*(getattr(data, f"{side}_tokens{end}") for end in ENDS), random_seed=1)))
        for side in ("prompt", "output")
    }
    prefix = data.prefix_buckets[0].prefix_tokens if data.prefix_buckets else 0
    rate, limit = profile.get("rate"), profile.get("streams") or [profile.get("max_concurrency")]
    kind = "constant" if profile["kind"] == "async" else profile["kind"]
    return {
        "rate": rate and rate[0], "limit": 1 if kind == "synchronous" else limit[0], "gaps": kind if rate else None,
        "ends": {end.kind: getattr(end, "count", getattr(end, "seconds", None)) for end in spec.constraints},
        "prompt": [length + prefix for length in sides["prompt"]], "output": sides["output"], "prefix": prefix,
    }  # fmt: skip


ENDS = ("", "_stdev", "_min", "_max")


def guidellm_benchmark(command: str) -> dict[str, Any]:
    """`guidellm benchmark`, 0.3.0."""
    import guidellm.__main__ as main
    from guidellm.benchmark.profile import create_profile
    from guidellm.dataset.synthetic import SyntheticDatasetConfig
    from guidellm.utils import IntegerRangeSampler

    taken: list[Any] = []

    async def take(scenario: Any, **_: Any) -> None:
        taken.append(scenario)

    main.benchmark_with_scenario = take
    main.cli(shlex.split(command)[1:], standalone_mode=False)
    [scenario] = taken
    profile = create_profile(scenario.rate_type, scenario.rate)
    strategy = profile.next_strategy()
    data = SyntheticDatasetConfig.parse_str(scenario.data)
    sides = {
        side: drawn(iter(IntegerRangeSampler(*(getattr(data, f"{side}_tokens{end}") for end in ENDS), random_seed=1)))
        for side in ("prompt", "output")
    }
    rate = getattr(strategy, "rate", None)
    limit = strategy.processing_requests_limit  # of throughput and of rates: what the tool has at once at most
    return {
        "rate": rate, "limit": None if rate else limit, "gaps": strategy.type_ if rate else None,
        "ends": {"max_requests": scenario.max_requests, "max_duration": scenario.max_seconds},
        "prompt": [length + data.prefix_tokens for length in sides["prompt"]], "output": sides["output"],
        "prefix": data.prefix_tokens,
    }  # fmt: skip


def aiperf(command: str) -> dict[str, Any]:
    """`aiperf profile`, 0.13.0."""
    from aiperf.common.random_generator import RandomGenerator
    from aiperf.config.flags import CLIConfig
    from aiperf.config.flags.resolver import resolve_config
    from cyclopts import App

    taken: list[Any] = []
    app = App(name="profile")

    @app.default  # type: ignore[untyped-decorator]
    def profile(*, cli_config: CLIConfig) -> None:
        taken.append(cli_config)

    app(shlex.split(command)[2:], exit_on_error=False, print_error=False, result_action="return_value")
    benchmark = resolve_config(taken[0], None).benchmark
    [data], [phase] = benchmark.datasets, benchmark.phases
    rng = RandomGenerator(1, _internal=True)

    def lengths(side: str) -> list[float]:
        distribution = getattr(data.prompts, side)
        return drawn(iter(lambda: distribution.sample_int(rng), None))

    prefixes = data.prefix_prompts
    prefix = 0 if prefixes is None else (prefixes.length if prefixes.pool_size else 0) or 0
    prefix += 0 if prefixes is None else prefixes.shared_system_length or 0
    rate, kind = getattr(phase, "rate", None), str(phase.type)
    return {
        "rate": rate, "limit": phase.concurrency, "entries": data.entries,
        "gaps": f"gamma:{getattr(phase, 'smoothness', None)}" if kind == "gamma" else kind if rate else None,
        "ends": {"max_requests": phase.requests, "max_duration": phase.duration},
        "prompt": [length + prefix for length in lengths("isl")], "output": lengths("osl"), "prefix": prefix,
    }  # fmt: skip


READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "guidellm 0.8.1": guidellm, "guidellm 0.3.0": guidellm_benchmark, "aiperf 0.13.0": aiperf,
}  # fmt: skip
